"""Draft trees: the best-first tree as a heap builds it, and texts that do not depend on any tree."""

import heapq
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.draft_tree import TreeMatch, best_first
from dflash_jax.generate import Decoder
from dflash_jax.rules import ACCEPT
from dflash_jax.settings import SamplingParams
from tests.support.drafters import tiny_drafter
from tests.support.families import STEPS, family
from tests.support.oracle import script
from tests.support.texts import greedy, random_prompts, scripted

build = jax.jit(best_first, static_argnums=1)


def heap_tree(log_q: np.ndarray, budget: int) -> set[tuple[int, ...]]:
    """The ``budget`` best paths: a heap of the best unexpanded ones, as arXiv 2604.12989 grows its tree."""
    levels, vocabulary = log_q.shape
    found, heap = set(), [(-log_q[0, token], (token,)) for token in range(vocabulary)]
    heapq.heapify(heap)
    while heap and len(found) < budget:
        cost, path = heapq.heappop(heap)
        if not np.isfinite(cost):
            break
        found.add(path)
        if len(path) < levels:
            for token in range(vocabulary):
                heapq.heappush(heap, (cost - log_q[len(path), token], (*path, token)))
    return found


def paths_of(tokens: np.ndarray, parent: np.ndarray) -> list[tuple[int, ...]]:
    """Every node's tokens from the root on."""
    paths: list[tuple[int, ...]] = [()]
    for place, above in enumerate(parent[1:], start=1):
        assert 0 <= above < place, "a parent comes before its children"
        paths.append((*paths[above], int(tokens[place - 1])))
    return [path for path, token in zip(paths[1:], tokens, strict=True) if token >= 0]


def random_log_q(rows: int, levels: int, vocabulary: int, seed: int, sharp: float = 2.0) -> np.ndarray:
    logits = sharp * np.random.default_rng(seed).standard_normal((rows, levels, vocabulary))
    return np.array(jax.nn.log_softmax(logits))


class TestBestFirst:
    @pytest.mark.parametrize(
        ("levels", "vocabulary", "budget"), [(4, 7, 12), (7, 30, 48), (3, 3, 20), (1, 5, 4), (7, 2, 1)]
    )
    def test_it_is_the_tree_of_the_heap(self, levels: int, vocabulary: int, budget: int) -> None:
        log_q = random_log_q(12, levels, vocabulary, seed=budget)
        tokens, tree = build(log_q, budget)
        for row in range(len(log_q)):
            found = paths_of(np.asarray(tokens)[row], np.asarray(tree.parent)[row])
            assert len(found) == len(set(found))
            assert set(found) == heap_tree(log_q[row], budget)

    def test_it_has_no_more_nodes_than_there_are_paths(self) -> None:
        tokens, tree = build(random_log_q(1, 2, 3, seed=0), 20)
        assert (np.asarray(tokens) >= 0).sum() == 3 + 9
        assert np.asarray(tree.parent)[0, 13:].tolist() == [0] * 8

    def test_equal_scores_leave_no_child_without_its_parent(self) -> None:
        """A certain drafter: every level's only token has log-probability 0."""
        log_q = np.full((1, 5, 4), -np.inf)
        log_q[0, np.arange(5), [2, 0, 3, 1, 1]] = 0.0
        tokens, tree = build(log_q, 8)
        assert paths_of(np.asarray(tokens)[0], np.asarray(tree.parent)[0]) == [(2, 0, 3, 1, 1)[:n] for n in range(1, 6)]
        flat = np.zeros((1, 3, 4))
        tokens, tree = build(flat, 10)
        assert len(paths_of(np.asarray(tokens)[0], np.asarray(tree.parent)[0])) == 10

    def test_impossible_tokens_are_not_proposed(self) -> None:
        log_q = random_log_q(1, 3, 6, seed=1)
        log_q[:, :, 2:] = -np.inf
        tokens, tree = build(log_q, 16)
        assert np.asarray(tokens).max() < 2 and len(paths_of(np.asarray(tokens)[0], np.asarray(tree.parent)[0])) == 14


LENGTHS, TOKENS = (5, 29, 17, 1), 24
SETTINGS = [
    SamplingParams(0.0),
    SamplingParams(1.3, seed=5),
    SamplingParams(0.8, top_k=9, seed=6),
    SamplingParams(1.0, top_p=0.9, seed=2**63 + 7),
]


def texts(name: str, rule, block: int = 6):
    chosen = family(name)
    drafter, params = tiny_drafter("mixed", name, block_size=block)
    decoder = Decoder(chosen.target, chosen.params, drafter, params, rule=rule)
    return decoder.generate(random_prompts(chosen, LENGTHS), TOKENS, sampling=SETTINGS)


def plain(name: str):
    chosen = family(name)
    decoder = Decoder(chosen.target, chosen.params, rule=ACCEPT["match"])
    return decoder.generate(random_prompts(chosen, LENGTHS), TOKENS, sampling=SETTINGS)


@pytest.mark.parametrize("name", STEPS)
def test_the_text_of_a_tree_is_the_plain_one(name: str) -> None:
    """Rows greedy and drawn, each its own path: for its seed every row says what plain decoding says."""
    found = texts(name, TreeMatch(12))
    assert found.tokens == plain(name).tokens
    assert (found.accepted > 0).any()


def test_a_larger_tree_accepts_more_and_says_the_same() -> None:
    small, large = (texts("qwen3-untied", TreeMatch(budget)) for budget in (3, 40))
    assert small.tokens == large.tokens
    assert large.rounds < small.rounds


def test_a_scripted_chain_goes_through_the_tree_rule() -> None:
    chosen = family("gpt_oss-split")
    prompts = random_prompts(chosen, LENGTHS)
    truth = greedy(chosen, prompts, TOKENS + 8)
    knows = script(truth, prompts, [[7, 0, 3]])
    out = Decoder(chosen.target, chosen.params, scripted(chosen, 8), knows, rule=TreeMatch()).generate(prompts, TOKENS)
    assert out.tokens == [row[:TOKENS] for row in truth]
    assert out.accepted[0, :3].tolist() == [7, 0, 3]


@dataclass(frozen=True)
class Mutant(TreeMatch):
    """A tree rule with one thing wrong."""

    fault: str = ""

    def __call__(self, dice, draft, logits, sampling):
        verdict = super().__call__(dice, draft, logits, sampling)
        if self.fault == "the path is not followed":
            return verdict.replace(path=jnp.broadcast_to(jnp.arange(verdict.path.shape[1]), verdict.path.shape))
        if self.fault == "one node too far":
            return verdict.replace(accepted=jnp.minimum(verdict.accepted + 1, 2))
        return verdict


@pytest.mark.parametrize("fault", ["the path is not followed", "one node too far"])
def test_the_law_can_fail(fault: str) -> None:
    with pytest.raises(AssertionError):
        assert texts("qwen3-untied", Mutant(12, fault=fault)).tokens == plain("qwen3-untied").tokens


def test_a_step_is_as_wide_as_its_tree() -> None:
    assert (TreeMatch(9).width(8), TreeMatch(9).width(1), ACCEPT["match"].width(8)) == (10, 1, 8)


def test_a_tree_too_wide_for_the_ledger_is_refused() -> None:
    chosen = family("qwen3-untied")
    drafter, params = tiny_drafter("mixed", "qwen3-untied")
    with pytest.raises(ValueError, match="128 nodes"):
        Decoder(chosen.target, chosen.params, drafter, params, rule=replace(TreeMatch(), budget=128))
