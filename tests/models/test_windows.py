"""Sliding windows through the cache: write, see and attend in pieces equal a mask over the whole text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import cache as caches
from dflash_jax.attention import attend
from dflash_jax.cache import Slots

ROWS, HEADS, GROUPS, WIDTH = 2, 6, 3, 4


@functools.partial(jax.jit, static_argnames="scale")
def layer(slots: Slots, q, k, v, start, sinks, scale: float = 0.5):
    """One attention layer's use of its cache, as the networks do it."""
    positions = start[:, None] + jnp.arange(q.shape[1], dtype=start.dtype)
    slots = caches.write(slots, k, v, positions)
    seen = caches.visible(slots, positions, positions + 1, positions[:, -1] + 1)
    return attend(q, [(slots.k, slots.v, seen)], scale=scale, sinks=sinks), slots


def masked_attention(q, k, v, window: int, sinks=None, scale: float = 0.5) -> np.ndarray:
    """Every query over keys ``(i - window, i]`` of the whole text, in numpy."""
    length = q.shape[1]
    place = np.arange(length)
    mask = (place <= place[:, None]) & (place > place[:, None] - window)
    repeated = [part.repeat(HEADS // GROUPS, axis=2) for part in (k, v)]
    scores = np.where(mask, np.einsum("btnh,bsnh->bnts", q, repeated[0]) * scale, -np.inf)
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[None, :, None, None])
    return np.einsum("bnts,bsnh->btnh", weights / total, repeated[1])


def random_text(length: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((ROWS, length, heads, WIDTH)) for heads in (HEADS, GROUPS, GROUPS)]


def in_pieces(slots: Slots, q, k, v, pieces: list[int], sinks=None) -> tuple[np.ndarray, Slots]:
    outs, at = [], 0
    for size in pieces:
        here = slice(at, at + size)
        out, slots = layer(slots, q[:, here], k[:, here], v[:, here], jnp.full(ROWS, at, jnp.int32), sinks)
        outs.append(out)
        at += size
    return np.concatenate(outs, axis=1), slots


def new_slots(window: int | None, undo: int, capacity: int = 256) -> Slots:
    size = dict(capacity=capacity, undo=undo, dtype=jnp.dtype("float64"))
    return caches.init_slots(ROWS, GROUPS, WIDTH, window=window, **size)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_B20_several_tokens_at_once_and_no_more_slots_than_window_and_undo(with_sinks: bool) -> None:
    """W = 8, block 8: 5, then 4, 4, 4, 1 and 8 tokens."""
    sinks = np.random.default_rng(1).standard_normal(HEADS) if with_sinks else None
    q, k, v = random_text(26)
    slots = new_slots(8, undo=8)
    found, after = in_pieces(slots, q, k, v, [5, 4, 4, 4, 1, 8], None if sinks is None else jnp.asarray(sinks))
    np.testing.assert_allclose(found, masked_attention(q, k, v, 8, sinks), rtol=1e-12, atol=1e-12)
    assert slots.ring and slots.k.shape == after.k.shape == (ROWS, GROUPS, 8 + 8 - 1, WIDTH)
    assert slots.longest_step == 8


@pytest.mark.parametrize("pieces", [[201], [200, 1], [193, 8]], ids=["prefill", "decode", "verify"])
@pytest.mark.parametrize("undo", [256, 201], ids=["whole", "ring"])
def test_B22_a_window_of_128_keys_counts_the_query_itself(pieces: list[int], undo: int) -> None:
    """Query 200 sees keys 73..200: a spike in the value of 72 changes nothing, of 73 it does."""
    q, k, v = random_text(201, seed=2)
    capacity = 256 if undo == 256 else 512
    slots = new_slots(128, undo=undo, capacity=capacity)
    assert slots.ring == (undo == 201)
    plain, _ = in_pieces(slots, q, k, v, pieces)
    for key, changes in ((72, False), (73, True), (200, True)):
        spiked = v.copy()
        spiked[:, key] = 1e4
        found, _ = in_pieces(slots, q, k, spiked, pieces)
        assert (found[:, 200] != plain[:, 200]).any() == changes, key


def test_a_window_that_the_buffer_holds_whole_is_no_ring() -> None:
    assert not new_slots(8, undo=8, capacity=15).ring
    assert new_slots(8, undo=8, capacity=16).ring
    assert not new_slots(None, undo=8).ring and new_slots(None, undo=8).longest_step is None


def test_writes_past_the_last_slot_are_dropped() -> None:
    """The end of a buffer must not be pushed back onto committed slots, as a clamped slice update would do."""
    _, k, v = random_text(4)
    slots = new_slots(None, undo=4, capacity=6)
    write = jax.jit(caches.write)
    full = write(slots, k, v, jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (ROWS, 4)))
    late = write(full, -k, -v, jnp.broadcast_to(jnp.arange(4, 8, dtype=jnp.int32), (ROWS, 4)))
    np.testing.assert_array_equal(late.k[:, :, :4], full.k[:, :, :4])
    np.testing.assert_array_equal(late.k[:, :, 4:], -k.swapaxes(1, 2)[:, :, :2])


@pytest.mark.parametrize("ring", [False, True])
def test_a_query_sees_the_positions_that_a_simulation_says(ring: bool) -> None:
    """Blocks of 4 of which some tokens are rolled back, window 3: ``visible`` against a dictionary of slots."""
    window, undo, rng = 3, 4, np.random.default_rng(3)
    slots = new_slots(window, undo=undo, capacity=64 if ring else window + undo - 1)
    if not ring:
        slots = slots.replace(k=jnp.zeros((ROWS, GROUPS, 64, WIDTH)), v=jnp.zeros((ROWS, GROUPS, 64, WIDTH)))
    size, held, length = slots.k.shape[2], {}, 0
    assert (slots.ring, size) == ((True, window + undo - 1) if ring else (False, 64))
    see = jax.jit(caches.visible)
    while length < 30:
        for position in range(length, length + undo):
            held[position % size if slots.ring else position] = position
        query = np.broadcast_to(np.arange(length, length + undo, dtype=np.int32), (ROWS, undo))
        seen = np.asarray(see(slots, query, query + 1, np.full(ROWS, length + undo, np.int32)))[0]
        for row in range(undo):
            found = sorted(held[slot] for slot in np.flatnonzero(seen[row]))
            here = length + row
            assert found == list(range(max(0, here - window + 1), here + 1))
        length += int(rng.integers(0, undo + 1))
