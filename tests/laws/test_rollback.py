"""Rollback law: after a rejected tail nothing can tell that it was ever heard; ``length`` is the only truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import cache as caches
from tests.support.families import VARIANTS, WINDOW, Family, family, fresh
from tests.support.steps import ROWS, UNDO, WIDTH, agree, empty, fresh_step, poisoned, step, whole_text

Rounds = list[tuple[int, tuple[int, ...]]]
"""Steps: their length, and how many of their tokens stay in each row."""

START: Rounds = [(UNDO, (8, 3, 5, 0)), (UNDO, (8, 8, 1, 4))]
"""Brings the rows to lengths 16, 11, 6 and 4; the first two have wrapped their rings or are about to."""

rollback = jax.jit(caches.rollback)


def check_rollback(family: Family, rounds: Rounds, *, step=step, rollback=rollback, spoil: bool = False) -> None:
    """Hear steps whose tails are garbage, roll the tails back, and compare every token that stays with the text."""
    text, cache, rows = whole_text(family.name), empty(family), np.arange(ROWS)[:, None]
    rng, length = np.random.default_rng(1), np.zeros(ROWS, np.int32)
    for size, stay in [*rounds, (1, (1, 1, 1, 1)), (4, (4, 4, 4, 4))]:
        place = np.arange(size)
        true = text.tokens[rows, length[:, None] + place]
        stays = place < np.array(stay)[:, None]
        block = np.where(stays, true, rng.integers(0, family.target.config.vocab_size, true.shape, np.int32))
        heard = step(family.target, family.params, block, cache)
        where = (rows.repeat(size, 1)[stays], (length[:, None] + place)[stays])
        agree(np.asarray(heard.logits)[stays], text.logits[where], f"logits after {length}, step of {size}")
        agree(np.asarray(heard.features)[stays], text.features[where], f"features after {length}, step of {size}")
        length = length + np.array(stay, np.int32)
        cache = rollback(heard.cache, length)
        cache = poisoned(cache, UNDO) if spoil else cache


@pytest.mark.parametrize("name", VARIANTS)
class TestEveryVariant:
    @pytest.mark.parametrize("size", [1, 4, UNDO])
    def test_every_count_that_can_stay(self, name: str, size: int) -> None:
        for stay in range(size + 1):
            check_rollback(family(name), [*START, (size, (stay,) * ROWS)])

    def test_every_row_keeps_another_count(self, name: str) -> None:
        assert UNDO > WINDOW
        for turn in range(ROWS):
            check_rollback(family(name), [*START, (UNDO, tuple(np.roll((0, 8, 3, 6), turn)))])

    @settings(max_examples=4, deadline=None, derandomize=True, database=None)
    @given(stays=st.lists(st.tuples(*[st.integers(0, UNDO)] * ROWS), min_size=4, max_size=12))
    def test_many_rounds(self, name: str, stays: list[tuple[int, ...]]) -> None:
        total, rounds = np.zeros(ROWS, int), []
        for stay in stays:
            if (total + stay).max() + UNDO + 5 <= WIDTH:
                total, rounds = total + stay, [*rounds, (UNDO, stay)]
        check_rollback(family(name), rounds)

    def test_garbage_past_the_length_changes_nothing(self, name: str) -> None:
        check_rollback(family(name), [*START, (UNDO, (0, 8, 3, 6))], spoil=True)

    def test_garbage_past_the_length_changes_no_bit(self, name: str) -> None:
        chosen, text = family(name), whole_text(name)
        heard = step(chosen.target, chosen.params, text.tokens[:, :UNDO], empty(chosen))
        cache = rollback(heard.cache, jnp.array([8, 3, 5, 0], jnp.int32))
        clean = step(chosen.target, chosen.params, text.tokens[:, :4], cache)
        spoilt = step(chosen.target, chosen.params, text.tokens[:, :4], poisoned(cache, UNDO))
        np.testing.assert_array_equal(clean.logits, spoilt.logits)
        np.testing.assert_array_equal(clean.features, spoilt.features)

    def test_a_row_that_keeps_nothing_is_the_row_it_was(self, name: str) -> None:
        chosen, text = family(name), whole_text(name)
        heard = step(chosen.target, chosen.params, text.tokens[:, :UNDO], empty(chosen)).cache
        before = step(chosen.target, chosen.params, text.tokens[:, UNDO : UNDO + 4], heard)
        cache = heard
        for _ in range(3):
            rejected = step(chosen.target, chosen.params, text.tokens[:, -UNDO:], cache).cache
            cache = rollback(rejected, heard.length)
        after = step(chosen.target, chosen.params, text.tokens[:, UNDO : UNDO + 4], cache)
        np.testing.assert_array_equal(before.logits, after.logits)


class TestB19LengthsAreAbsolute:
    """Removing 0, all but one, all, or more than there is; again on the result; only ``length`` moves."""

    @pytest.mark.parametrize(("length", "left"), [(13, 13), (12, 12), (1, 1), (0, 0), (-5, 0), (18, 13)])
    def test_B19_length_after_rollback(self, length: int, left: int) -> None:
        chosen, text = family("gpt_oss-split"), whole_text("gpt_oss-split")
        cache = empty(chosen)
        for here in (slice(0, 8), slice(8, 12), slice(12, 13)):
            cache = step(chosen.target, chosen.params, text.tokens[:, here], cache).cache
        rolled = rollback(cache, jnp.full(ROWS, length, jnp.int32))
        assert rolled.length.tolist() == [left] * ROWS
        assert rollback(rolled, jnp.full(ROWS, length, jnp.int32)).length.tolist() == [left] * ROWS
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), rolled.layers, cache.layers))

    def test_B19_a_drafter_cache_forgets_by_the_same_line(self) -> None:
        cache = family("qwen3-tied").target.init_cache(2, 16, 4).replace(length=jnp.array([7, 3], jnp.int32))
        assert rollback(cache, jnp.array([7, 0], jnp.int32)).length.tolist() == [7, 0]


def keeps_one_more(cache, length):
    return cache.replace(length=length + 1)


def keeps_one_less(cache, length):
    return cache.replace(length=length - 1)


def keeps_everything(cache, length):
    return cache


def keeps_the_longest_row(cache, length):
    return cache.replace(length=jnp.full_like(length, length.max()))


@pytest.mark.parametrize("wrong", [keeps_one_more, keeps_one_less, keeps_everything, keeps_the_longest_row])
def test_the_law_can_fail(wrong) -> None:
    with pytest.raises(AssertionError):
        check_rollback(family("qwen3-untied"), START, rollback=wrong)


def test_the_law_can_fail_by_a_ring_one_slot_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, init = family("qwen3-untied"), caches.init_slots
    whole_text(chosen.name)
    monkeypatch.setattr(caches, "init_slots", lambda *args, undo, **rest: init(*args, undo=undo - 1, **rest))
    monkeypatch.setattr(caches.Slots, "longest_step", None)
    with pytest.raises(AssertionError):
        check_rollback(
            chosen, [*START, (UNDO, (1,) * ROWS)], step=fresh_step(), rollback=jax.jit(fresh(caches.rollback))
        )


def test_the_poison_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, visible = family("qwen3-untied"), caches.visible
    whole_text(chosen.name)
    monkeypatch.setattr(caches, "visible", lambda slots, query, before, end: visible(slots, query, before + 1, end))
    with pytest.raises(AssertionError):
        check_rollback(chosen, [*START, (1, (1,) * ROWS)], step=fresh_step(), spoil=True)
