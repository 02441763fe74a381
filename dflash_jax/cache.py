"""Caches as values: what a model remembers of a row, and how it forgets.

``length`` is the only truth. A step writes at ``length .. length + T - 1`` and moves ``length`` on; a roll-back sets it
back; whatever lies past it is never visible and is overwritten by the next step. Nothing is ever erased.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.shapes import Array, Bool, Float, Int


@struct.dataclass
class Slots:
    """Keys and values of one attention layer.

    ``k``: ``[B G S H]``, ``v``: ``[B G S Hv]``. Without a window, or with one that the buffer holds whole, position p
    lives in slot p and writes past the last slot are dropped. A ring (``ring``) holds the last S positions, p in slot
    ``p % S``; it serves steps of up to ``S - window + 1`` tokens, every one of which may still be rolled back.
    """

    k: jax.Array
    v: jax.Array
    window: int | None = struct.field(pytree_node=False, default=None)
    ring: bool = struct.field(pytree_node=False, default=False)

    @property
    def longest_step(self) -> int | None:
        """Most tokens that one step may write so that all of them can be rolled back; None: no bound."""
        return self.k.shape[2] - self.window + 1 if self.ring else None


@struct.dataclass
class Cache:
    """``length`` int32 ``[B]``: tokens heard per row; ``layers``: one state per layer that keeps any."""

    length: jax.Array
    layers: tuple[Any, ...]


def init_slots(
    batch: int, heads: int, head_dim: int, *, capacity: int, undo: int, window: int | None, dtype: jnp.dtype
) -> Slots:
    """Empty slots for ``capacity`` positions.

    Args:
        undo: the longest step (block or prefill chunk) that will be written, in tokens; a ring keeps
            ``window + undo - 1`` slots, the least with which such a step can be rolled back.
        window: visible keys per query, itself included (config key ``sliding_window``); None: all.
    """
    ring = window is not None and window + undo - 1 < capacity
    size = window + undo - 1 if ring else capacity
    shape = (batch, heads, size, head_dim)
    return Slots(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), window=window, ring=ring)


def step_positions(cache: Cache, tokens: int) -> Int[Array, "B T"]:
    """Absolute positions of the next ``tokens`` tokens of every row."""
    return cache.length[:, None] + jnp.arange(tokens, dtype=cache.length.dtype)


def write(slots: Slots, k: Float[Array, "B T G H"], v: Float[Array, "B T G Hv"], positions: Int[Array, "B T"]) -> Slots:
    """Put keys and values at their positions.

    Raises:
        ValueError: while tracing, if the step is longer than a ring can roll back.
    """
    longest = slots.longest_step
    if longest is not None and positions.shape[1] > longest:
        raise ValueError(
            f"a step of {positions.shape[1]} tokens does not fit a ring of {slots.k.shape[2]} slots with window "
            f"{slots.window}: at most {longest}; build the cache with undo >= {positions.shape[1]}"
        )
    slot = positions % slots.k.shape[2] if slots.ring else positions
    if slot.size == 1:  # XLA turns a scatter of one index into an update-slice and copies the cache: add a dropped one
        slot = jnp.pad(slot, ((0, 0), (0, 1)), constant_values=slots.k.shape[2])
        k, v = (jnp.pad(part, ((0, 0), (0, 1), (0, 0), (0, 0))) for part in (k, v))
    rows = jnp.arange(positions.shape[0])[:, None]
    return slots.replace(
        k=slots.k.at[rows, :, slot].set(k.astype(slots.k.dtype), mode="drop"),
        v=slots.v.at[rows, :, slot].set(v.astype(slots.v.dtype), mode="drop"),
    )


def slot_positions(slots: Slots, end: Int[Array, "B"]) -> Int[Array, "B S"]:
    """The position that each slot holds once all positions below ``end`` are written; negative: none yet.

    In a ring this is the newest position of the slot's residue class below ``end``. A rejected token from past ``end``
    may lie there instead; ``undo`` slots of slack guarantee that the position it replaced is out of every window.
    """
    size = slots.k.shape[2]
    index = jnp.arange(size, dtype=end.dtype)
    if not slots.ring:
        return jnp.broadcast_to(index, (end.shape[0], size))
    last = end[:, None] - 1
    return last - (last - index) % size


def visible(
    slots: Slots, query: Int[Array, "B T"], before: Int[Array, "B T"], end: Int[Array, "B"]
) -> Bool[Array, "B T S"]:
    """Which slots each query may see: positions ``< before`` that are inside the window of ``query``.

    ``before`` is ``query + 1`` for a causal network, the anchor's position for a drafter's block. ``end``: the number
    of positions written so far.
    """
    key = slot_positions(slots, end)[:, None, :]
    seen = (key >= 0) & (key < before[:, :, None])
    return seen if slots.window is None else seen & (key > query[:, :, None] - slots.window)


def rollback(cache: Cache, length: Int[Array, "B"]) -> Cache:
    """Forget everything at positions ``>= length`` (absolute, per row). Idempotent; the same for every kind of state.

    Below 0 is 0, and what was never heard cannot be kept: a cache does not grow by being rolled back.
    """
    return cache.replace(length=jnp.clip(length, 0, cache.length).astype(cache.length.dtype))
