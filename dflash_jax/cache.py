"""Caches as values: what a model remembers of a row, and how it forgets.

``length`` is the only truth. A step writes at ``length .. length + T - 1`` and moves ``length`` on; a roll-back sets it
back; whatever lies past it is never visible and is overwritten by the next step. Nothing is ever erased.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.shapes import Array, Bool, Float, Int
from dflash_jax.tree import Tree


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

    def follow(self, start: Int[Array, "B"], path: Int[Array, "B P"]) -> "Slots":
        """See :func:`follow`. A row's P slots are all different: no step has more tokens than a ring has slots."""
        source = self.slot(start[:, None] + path)
        goal = self.slot(start[:, None] + jnp.arange(path.shape[1], dtype=start.dtype))
        rows = jnp.arange(path.shape[0])[:, None]
        k, v = (part.at[rows, :, source].get(mode="clip") for part in (self.k, self.v))
        return _put(self, k, v, goal)

    def slot(self, places: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """The slot of each place."""
        return places % self.k.shape[2] if self.ring else places


@struct.dataclass
class Places:
    """Where the T tokens of a step stand; made once per step, the same for all layers.

    Attributes:
        start: int32 ``[B]``, tokens heard before.
        written: int32 ``[B T]``, where each is put: ``start`` and on.
        positions: int32 ``[B T]``, how far each is from the beginning of its text: as ``written`` in a chain, ``start +
            depth`` in a tree.
        tree: what follows what; None: a chain.
        ancestors: bool ``[B T T]`` of a tree: which of the step's tokens each may see.
    """

    start: jax.Array
    written: jax.Array
    positions: jax.Array
    tree: Tree | None = None
    ancestors: jax.Array | None = None


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


def step_places(cache: Cache, tokens: int, tree: Tree | None = None) -> Places:
    """Where the next ``tokens`` tokens of every row stand.

    Raises:
        ValueError: while tracing, if the tree has another number of nodes or rows.
    """
    written = step_positions(cache, tokens)
    if tree is None:
        return Places(start=cache.length, written=written, positions=written)
    if tree.parent.shape != written.shape:
        raise ValueError(f"a tree of {tree.parent.shape} nodes for a step of {written.shape} tokens [rows, nodes]")
    positions = cache.length[:, None] + tree.depth.astype(written.dtype)
    return Places(start=cache.length, written=written, positions=positions, tree=tree, ancestors=tree.ancestors)


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
    return _put(slots, k, v, slots.slot(positions))


def _put(slots: Slots, k: Float[Array, "B T G H"], v: Float[Array, "B T G Hv"], slot: Int[Array, "B T"]) -> Slots:
    """Keys and values into slots; those past the last slot are dropped."""
    if slot.size == 1:  # XLA turns a scatter of one index into an update-slice and copies the cache: add a dropped one
        slot = jnp.pad(slot, ((0, 0), (0, 1)), constant_values=slots.k.shape[2])
        k, v = (jnp.pad(part, ((0, 0), (0, 1), (0, 0), (0, 0))) for part in (k, v))
    rows = jnp.arange(slot.shape[0])[:, None]
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


def step_visible(slots: Slots, places: Places) -> Bool[Array, "B T S"]:
    """Which slots each of a step's tokens may see once all of them are written: in a chain all before and its own; in
    a tree the context and its ancestors, the window counted in positions."""
    query = places.positions
    if places.tree is None:
        return visible(slots, query, query + 1, query[:, -1] + 1)
    before = jnp.broadcast_to(places.start[:, None], query.shape)
    context = visible(slots, query, before, places.written[:, -1] + 1)
    own = places.ancestors
    if slots.window is not None:
        own = own & (query[:, None, :] > query[:, :, None] - slots.window)
    rows = jnp.arange(query.shape[0])[:, None]
    return context.at[rows, :, slots.slot(places.written)].set(own.swapaxes(1, 2), mode="drop")


def follow(cache: Cache, start: Int[Array, "B"], path: Int[Array, "B P"]) -> Cache:
    """Keep one path of the newest step, which heard a tree: what its j-th token wrote becomes the step's j-th.

    Rolled back to ``start + accepted + 1`` the cache is then that of a row which heard the first ``accepted + 1``
    tokens of the path as a chain. P rows of every layer are moved, and in place if the path was chosen by the step's
    logits: the move then waits for all layers that read the cache, and XLA needs no copy of it.

    Args:
        start: tokens heard before the step.
        path: places within the step from the root (0) on, each before the next; past the accepted ones any places.
    """
    layers = jax.tree.map(
        lambda memory: memory.follow(start, path), cache.layers, is_leaf=lambda memory: hasattr(memory, "follow")
    )
    return cache.replace(layers=layers)


def rollback(cache: Cache, length: Int[Array, "B"]) -> Cache:
    """Forget everything at positions ``>= length`` (absolute, per row). Idempotent; the same for every kind of state.

    Below 0 is 0, and what was never heard cannot be kept: a cache does not grow by being rolled back.
    """
    return cache.replace(length=jnp.clip(length, 0, cache.length).astype(cache.length.dtype))
