"""The drafter's context: absorbed in pieces or at once, with garbage behind it, or clipped, it is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import cache as caches
from models import dflash
from tests.support.context import CONTEXT, ROWS, UNDO, Programs, programs
from tests.support.drafters import WINDOW
from tests.support.steps import agree

DRAFTERS = ("full", "mixed", "sliding", "wide_sliding")


def check_pieces(run: Programs, garbage: float = 1.0, seed: int = 0, expected: np.ndarray | None = None) -> None:
    """Absorb ``UNDO`` rows at a time of which some count, per row; compare a block with the whole context's."""
    rng, length, cache = np.random.default_rng(seed), np.zeros(ROWS, int), run.empty()
    while (length < CONTEXT).any():
        count = np.minimum(rng.integers(0, UNDO + 1, ROWS), CONTEXT - length)
        piece = garbage * rng.standard_normal((ROWS, UNDO, *run.features.shape[2:]))
        for row in range(ROWS):
            piece[row, : count[row]] = run.features[row, length[row] : length[row] + count[row]]
        cache, length = run.absorb(cache, piece, count), length + count
        assert cache.length.tolist() == length.tolist()
    agree(run.block(cache), run.block(run.at_once()) if expected is None else expected, "block after pieces")


@pytest.mark.parametrize("layers", DRAFTERS)
class TestEveryDrafter:
    def test_pieces_are_the_whole(self, layers: str) -> None:
        for seed in range(3):
            check_pieces(programs(layers), seed=seed)

    def test_garbage_behind_the_count_does_not_matter(self, layers: str) -> None:
        check_pieces(programs(layers), garbage=1e9)

    def test_proposing_writes_nothing(self, layers: str) -> None:
        run = programs(layers)
        cache = run.at_once()
        first = run.block(cache)
        run.block(cache, run.tokens[:, ::-1])
        np.testing.assert_array_equal(run.block(cache), first)

    def test_slots_past_the_length_are_never_read(self, layers: str) -> None:
        run = programs(layers)
        cache = run.at_once(length=11)
        hole = jnp.arange(CONTEXT + 1) >= 11
        spoilt = jax.tree.map(lambda leaf: jnp.where(hole[:, None], 1e9, leaf), cache.layers)
        np.testing.assert_array_equal(run.block(cache), run.block(cache.replace(layers=spoilt)))


def test_rings_are_real() -> None:
    for layers in DRAFTERS[1:]:
        slots = [s for s in programs(layers).empty().layers if s.window is not None]
        assert slots and all(s.ring and s.k.shape[2] == s.window + UNDO - 1 < CONTEXT for s in slots)


def test_B51_clipped_context_is_the_window() -> None:
    """Only the last 16 features, at their true positions, when no layer sees further."""
    run = programs("wide_sliding")
    start = CONTEXT - 16
    clipped = run.empty().replace(length=jnp.full(ROWS, start, jnp.int32))
    for at in (start, start + 8):
        clipped = run.absorb(clipped, run.features[:, at : at + 8], 8)
    agree(run.block(clipped), run.block(run.at_once()), "clipped")


def context_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "write", lambda slots, *args: slots)


def garbage_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    right = caches.rollback
    monkeypatch.setattr(caches, "rollback", lambda cache, length: right(cache, length + 1))


def ring_one_slot_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    init = caches.init_slots
    monkeypatch.setattr(caches, "init_slots", lambda *args, undo, **rest: init(*args, undo=undo - WINDOW, **rest))
    monkeypatch.setattr(caches.Slots, "longest_step", None)


def block_sees_its_own_place_in_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = caches.visible
    monkeypatch.setattr(caches, "visible", lambda slots, query, before, end: visible(slots, query, before + 1, end))


MUTATIONS = (context_is_dropped, garbage_counts, ring_one_slot_too_small, block_sees_its_own_place_in_the_context)


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_the_law_can_fail(mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    run = programs("mixed")
    expected = run.block(run.at_once())
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_pieces(Programs("mixed", anew=True), expected=expected)


def test_B51_only_differences_of_positions_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every angle moved on by 5000 positions changes nothing; the block's alone changes the block."""
    context = programs("full").at_once()
    expected, angles = programs("full").block(context), dflash.rope_angles
    monkeypatch.setattr(dflash, "rope_angles", lambda rope, at, dtype: angles(rope, at + 5000, dtype))
    run = Programs("full", anew=True)
    agree(run.block(run.at_once()), expected, "all shifted", tolerance=1e-9)
    moved = np.abs(run.block(context) - expected).max()
    assert moved > 1e-3, "a shift of the block alone went unnoticed"
