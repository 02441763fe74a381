"""Chunk law: however a text is cut into steps, no logit and no feature changes; rows may be at different lengths."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import cache as caches
from tests.support.families import VARIANTS, Family, family
from tests.support.steps import UNDO, WIDTH, agree, empty, fresh_step, slots_of, step, whole_text

SIZES = (1, 4, UNDO)


def check_chunk(family: Family, pieces: list[int], step=step) -> None:
    """Hear the text piece by piece and compare every token with the text heard at once."""
    text, cache, at = whole_text(family.name), empty(family), 0
    for size in pieces:
        here = slice(at, at + size)
        heard = step(family.target, family.params, text.tokens[:, here], cache)
        agree(heard.logits, text.logits[:, here], f"logits at {here}")
        agree(heard.features, text.features[:, here], f"features at {here}")
        cache, at = heard.cache, at + size
        assert (cache.length == at).all()


def cuts(sizes: list[int]) -> list[int]:
    """The leading sizes that fit the text, and single tokens for the rest."""
    pieces: list[int] = []
    for size in sizes:
        if sum(pieces) + size <= WIDTH:
            pieces.append(size)
    return pieces + [1] * (WIDTH - sum(pieces))


@pytest.mark.parametrize("name", VARIANTS)
class TestEveryVariant:
    def test_windowed_layers_are_rings_that_wrap(self, name: str) -> None:
        slots = [slots for slots in slots_of(empty(family(name))) if slots.window is not None]
        assert all(s.ring and s.k.shape[2] == s.window + UNDO - 1 < WIDTH // 3 for s in slots)

    def test_one_token_at_a_time(self, name: str) -> None:
        check_chunk(family(name), [1] * WIDTH)

    def test_steps_of_the_longest_length(self, name: str) -> None:
        check_chunk(family(name), [UNDO] * (WIDTH // UNDO))

    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(sizes=st.lists(st.sampled_from(SIZES), min_size=5, max_size=20))
    def test_random_cuts(self, name: str, sizes: list[int]) -> None:
        check_chunk(family(name), cuts(sizes))


def test_a_step_that_the_ring_cannot_roll_back_is_refused() -> None:
    chosen = family("qwen3-untied")
    with pytest.raises(ValueError, match="build the cache with undo >= 9"):
        step(chosen.target, chosen.params, np.zeros((4, UNDO + 1), np.int32), empty(chosen))


def one_slot_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    init = caches.init_slots
    monkeypatch.setattr(caches, "init_slots", lambda *args, undo, **rest: init(*args, undo=undo - 1, **rest))
    monkeypatch.setattr(caches.Slots, "longest_step", None)


def sees_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = caches.visible
    monkeypatch.setattr(caches, "visible", lambda slots, query, before, end: visible(slots, query, before + 1, end))


def window_of_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = caches.visible
    wider = lambda slots: slots if slots.window is None else slots.replace(window=slots.window + 1)  # noqa: E731
    monkeypatch.setattr(
        caches, "visible", lambda slots, *places: visible(wider(slots) if slots.ring else slots, *places)
    )


def positions_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    restart = lambda cache, tokens: jnp.broadcast_to(jnp.arange(tokens), (cache.length.shape[0], tokens))  # noqa: E731
    monkeypatch.setattr(caches, "step_positions", restart)


def slots_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    right = caches.slot_positions
    monkeypatch.setattr(caches, "slot_positions", lambda slots, end: jnp.roll(right(slots, end), 1, axis=1))


MUTATIONS = (one_slot_too_small, sees_the_next_token, window_of_one_more, positions_restart, slots_in_the_wrong_order)


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_the_law_can_fail(mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = family("qwen3-untied")
    whole_text(chosen.name)
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_chunk(chosen, [UNDO] * (WIDTH // UNDO), step=fresh_step())
