"""Tree law: a token of a tree is heard as at the end of its path from the root, alone. Follow law: after the roll-back
to a part of one path, nothing can tell that it was heard as a tree."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dflash_jax import cache as caches
from dflash_jax import delta
from dflash_jax.cache import Cache
from dflash_jax.recurrence import Recurrence
from dflash_jax.tree import Tree
from models import gated_delta_net
from models.qwen3 import Qwen3
from models.qwen3_5_moe import Qwen35Moe
from models.target import FlaxTarget
from tests.support.families import QWEN3, QWEN3_5_MOE, VARIANTS, WINDOW, Family, family, randomised
from tests.support.steps import ROWS, UNDO, Heard, agree, empty, fresh_step, poisoned, step
from tests.support.trees import SHAPES, deepest, padded, parents, path_to

START = ((8, 3, 5, 0), (8, 8, 1, 0))
"""What stays of two steps: lengths 16, 11, 6 and 0. Rings have 12 slots: one row has wrapped its own, one is about to.
A row of length 0 has nothing before the root."""

PATH = 6
"""Places that are moved: less than a tree has nodes."""


def _keep(cache: Cache, start, path, length) -> Cache:
    return caches.rollback(caches.follow(cache, start, path), length)


keep = jax.jit(_keep)
rollback = jax.jit(caches.rollback)


def some_tokens(family: Family, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, family.target.config.vocab_size, (ROWS, UNDO), np.int32)


def context(family: Family, rng: np.random.Generator, stays=START) -> Cache:
    """A cache that has heard random steps and kept ``stays`` of them."""
    cache = empty(family)
    for stay in stays:
        length = cache.length + np.array(stay, np.int32)
        cache = rollback(step(family.target, family.params, some_tokens(family, rng), cache).cache, length)
    return cache


def some_parents(rng: np.random.Generator) -> np.ndarray:
    """Every row another shape."""
    return parents(UNDO, list(rng.permutation(list(SHAPES))[:ROWS]), rng)


def check_tree(family: Family, cache: Cache, parent: np.ndarray, tokens: np.ndarray, tree_step=step) -> Heard:
    """Hear a tree, and every path to a leaf of it as a chain."""
    heard = tree_step(family.target, family.params, tokens, cache, Tree(jnp.asarray(parent)))
    leaves = [sorted(set(range(UNDO)) - set(row.tolist())) for row in parent]
    for turn in range(max(map(len, leaves))):
        paths = [path_to(row, ends[turn % len(ends)]) for row, ends in zip(parent, leaves, strict=True)]
        chain = step(family.target, family.params, np.take_along_axis(tokens, padded(paths, UNDO), 1), cache)
        for row, path in enumerate(paths):
            for what in ("logits", "features"):
                in_tree, alone = (np.asarray(getattr(out, what))[row] for out in (heard, chain))
                agree(in_tree[path], alone[: len(path)], f"{what} of row {row}, nodes {path} of {parent[row]}")
    return heard


def check_follow(family: Family, cache: Cache, rounds: list[tuple[np.ndarray, list[list[int]]]], keep=keep) -> None:
    """Hear a tree a round and keep a path of it in every row, beside a cache that hears the paths as chains.

    Args:
        rounds: parents, and what is kept of each row: the path to the last token that is accepted.
    """
    rng, other = np.random.default_rng(2), cache
    for parent, paths in rounds:
        tokens, start = some_tokens(family, rng), cache.length
        length = start + np.array([len(path) for path in paths], np.int32)
        tree = Tree(jnp.asarray(parent))
        heard = step(family.target, family.params, tokens, cache, tree)
        cache = poisoned(keep(heard.cache, start, padded(paths, PATH), length), UNDO)
        said = np.take_along_axis(tokens, padded(paths, UNDO), 1)
        chain = step(family.target, family.params, said, other)
        other = rollback(chain.cache, length)
        for row, path in enumerate(paths):
            agree(heard.logits[row, np.array(path)], chain.logits[row, : len(path)], f"path {path} of row {row}")
    tokens = some_tokens(family, rng)
    for turn in range(2):
        after, want = (step(family.target, family.params, tokens, state) for state in (cache, other))
        agree(after.logits, want.logits, f"logits of step {turn} after the trees")
        agree(after.features, want.features, f"features of step {turn} after the trees")
        cache, other = (rollback(out.cache, state.length + 3) for out, state in ((after, cache), (want, other)))


def some_rounds(count: int, rng: np.random.Generator) -> list[tuple[np.ndarray, list[list[int]]]]:
    """Rows that accept different paths of different trees, up to PATH tokens."""
    made = [some_parents(rng) for _ in range(count)]
    return [(parent, [path_to(row, int(rng.integers(0, UNDO)))[:PATH] for row in parent]) for parent in made]


@pytest.mark.parametrize("name", VARIANTS)
class TestEveryVariant:
    def test_every_token_hears_its_path_alone(self, name: str) -> None:
        chosen, rng = family(name), np.random.default_rng(0)
        for case in range(3):
            cache = context(chosen, rng, START if case == 0 else rng.integers(0, UNDO + 1, (3, ROWS)))
            check_tree(chosen, cache, some_parents(rng), some_tokens(chosen, rng))

    def test_a_tree_that_is_a_chain_is_heard_as_one(self, name: str) -> None:
        chosen, rng = family(name), np.random.default_rng(1)
        cache, tokens = context(chosen, rng), some_tokens(chosen, rng)
        tree = Tree(jnp.asarray(parents(UNDO, ["chain"] * ROWS, rng)))
        in_tree = step(chosen.target, chosen.params, tokens, cache, tree)
        chain = step(chosen.target, chosen.params, tokens, cache)
        agree(in_tree.logits, chain.logits, "logits")
        agree(in_tree.features, chain.features, "features")
        assert in_tree.cache.length.tolist() == chain.cache.length.tolist()

    def test_every_count_of_a_path_that_can_stay(self, name: str) -> None:
        chosen, rng = family(name), np.random.default_rng(3)
        cache = context(chosen, rng)
        parent = parents(UNDO, ["chain", "late", "comb", "forks"], rng)
        longest = [path_to(row, deepest(row)) for row in parent]
        for count in range(1, PATH + 1):
            check_follow(chosen, cache, [(parent, [path[:count] for path in longest])])

    def test_rounds_of_trees_one_after_another(self, name: str) -> None:
        chosen, rng = family(name), np.random.default_rng(4)
        check_follow(chosen, context(chosen, rng), some_rounds(5, rng))


@pytest.mark.parametrize("name", ["qwen3-untied", "qwen3_5_moe-solve"])
def test_a_tree_that_cannot_be_rolled_back_is_refused(name: str) -> None:
    chosen = family(name)
    tree = Tree(jnp.zeros((ROWS, UNDO + 1), jnp.int32))
    tokens = jax.ShapeDtypeStruct((ROWS, UNDO + 1), jnp.int32)
    with pytest.raises(ValueError, match=r"a step of 9 tokens does not fit .*undo"):
        step.eval_shape(chosen.target, chosen.params, tokens, empty(chosen), tree)


def test_a_tree_of_another_size_than_the_step_is_refused() -> None:
    chosen, tokens = family("qwen3-untied"), jax.ShapeDtypeStruct((ROWS, UNDO), jnp.int32)
    with pytest.raises(ValueError, match=r"a tree of \(4, 3\) nodes for a step of \(4, 8\) tokens"):
        step.eval_shape(chosen.target, chosen.params, tokens, empty(chosen), Tree(jnp.zeros((ROWS, 3), jnp.int32)))


def in_step_visible(change):
    """A mutation of what the layers are told about a step, as far as their masks go."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        right = caches.step_visible
        monkeypatch.setattr(caches, "step_visible", lambda slots, places: right(slots, change(places)))

    return mutate


def every_earlier_token(places):
    size = places.written.shape[1]
    return jnp.broadcast_to(jnp.tri(size, dtype=bool), (ROWS, size, size))


def positions_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    right = caches.step_places
    by_index = lambda *args: (lambda places: places.replace(positions=places.written))(right(*args))  # noqa: E731
    monkeypatch.setattr(caches, "step_places", by_index)


def the_window_before_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    right = delta.causal_convolution
    monkeypatch.setattr(delta, "causal_convolution", lambda window, rows, kernel, _: right(window, rows, kernel))


def no_window_before_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gated_delta_net.lineage
    monkeypatch.setattr(gated_delta_net, "lineage", lambda *args: jnp.maximum(right(*args), 0))


def a_sibling_decays_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    right = delta._solved
    running = lambda tokens: jnp.moveaxis(jnp.cumsum(tokens.g, axis=1), 1, -1)  # noqa: E731
    solved = lambda state, tokens, total, seen: right(state, tokens, running(tokens), seen)  # noqa: E731
    monkeypatch.setattr(delta, "_solved", solved)


def a_sibling_writes_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    right = delta._solved
    solved = lambda state, tokens, total, seen: right(state, tokens, total, jnp.tril(jnp.ones_like(seen)))  # noqa: E731
    monkeypatch.setattr(delta, "_solved", solved)


def small(module: nn.Module) -> Family:
    target = FlaxTarget(module)
    return Family(type(module).__name__, target, randomised(target.abstract_params(), seed=0))


@pytest.fixture(scope="module")
def attention() -> Family:
    """A layer of full attention and one with a window."""
    return small(Qwen3(replace(QWEN3, layers=2, windows=(None, WINDOW)), taps=(0,), dtype=jnp.dtype("float64")))


@pytest.fixture(scope="module")
def recurrent() -> Family:
    """One GatedDeltaNet layer."""
    config = replace(QWEN3_5_MOE, layers=1, linear=(True,), experts=2, experts_per_token=1)
    return small(Qwen35Moe(config, taps=(0,), layout="stacked", dtype=jnp.dtype("float64")))


ATTENTION = {
    "siblings are seen": in_step_visible(lambda places: places.replace(ancestors=every_earlier_token(places))),
    "the window is counted in places": in_step_visible(lambda places: places.replace(positions=places.written)),
    "positions are places": positions_by_index,
}
RECURRENT = {
    "the convolution takes the tokens before": the_window_before_by_index,
    "the convolution forgets the context": no_window_before_the_root,
    "a sibling decays the state": a_sibling_decays_the_state,
    "a sibling writes to the state": a_sibling_writes_the_state,
}


class TestTheTreeLawCanFail:
    @pytest.mark.parametrize("mutation", ATTENTION)
    def test_in_attention(self, mutation: str, attention: Family, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(attention, ATTENTION[mutation], monkeypatch)

    @pytest.mark.parametrize("mutation", RECURRENT)
    def test_in_a_recurrent_layer(self, mutation: str, recurrent: Family, monkeypatch: pytest.MonkeyPatch) -> None:
        self.check(recurrent, RECURRENT[mutation], monkeypatch)

    def check(self, chosen: Family, mutate, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(0)
        cache, tokens, parent = context(chosen, rng), some_tokens(chosen, rng), parents(UNDO, ["comb"] * ROWS, rng)
        step(chosen.target, chosen.params, tokens, cache)  # traced while all is right
        mutate(monkeypatch)
        with pytest.raises(AssertionError):
            check_tree(chosen, cache, parent, tokens, tree_step=fresh_step())


def no_path(cache, start, path, length):
    return rollback(cache, length)


def another_path(cache, start, path, length):
    return keep(cache, start, np.roll(path, 1, axis=0), length)


def one_place_late(cache, start, path, length):
    return keep(cache, start + 1, path, length)


def without(part: str):
    """The whole path but for one part of a recurrent memory."""

    def wrong(cache, start, path, length):
        kept = keep(cache, start, path, length)
        layers = [
            new.replace(**{part: getattr(old, part)}) if isinstance(new, Recurrence) else new
            for old, new in zip(cache.layers, kept.layers, strict=True)
        ]
        return kept.replace(layers=tuple(layers))

    return wrong


class TestTheFollowLawCanFail:
    @pytest.mark.parametrize("wrong", [no_path, another_path, one_place_late])
    def test_in_attention(self, wrong, attention: Family) -> None:
        self.check(attention, wrong)

    @pytest.mark.parametrize("part", ["rows", "journal"])
    def test_in_a_recurrent_layer(self, part: str, recurrent: Family) -> None:
        self.check(recurrent, without(part))

    def check(self, chosen: Family, wrong) -> None:
        rng = np.random.default_rng(5)
        cache, rounds = context(chosen, rng), some_rounds(1, rng)
        check_follow(chosen, cache, rounds)
        with pytest.raises(AssertionError):
            check_follow(chosen, cache, rounds, keep=wrong)
