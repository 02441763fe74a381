"""Recurrent memory that can be rolled back: a state at a known length, and a journal of the newest writes.

A recurrent state cannot forget its tail. So the state that is kept is an old one, of the first ``base`` tokens, and
what the newest step wrote waits in a journal. The next step learns from the cache's ``length`` how many of those tokens
were kept, absorbs exactly them, and masks the rest. Rolling back is then the same line as for keys and values:
``length`` moves, nothing else. It cannot go back past the newest step: what is in ``state`` stays.

Three journals, one protocol, the same states up to rounding:

* ``solve`` keeps keys and solved writes u: the commit is one masked einsum (TreeWY, arXiv 2608.20961).
* ``replay`` keeps keys, values, decays and strengths: the commit runs the recurrence again over the kept tokens.
* ``states`` keeps the state after every token: the commit picks one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax import delta
from dflash_jax.shapes import Array, Bool, Float, Int

STRIDE = 16
"""Journalled tokens that one turn of a commit's loop absorbs: a block's worth."""


@struct.dataclass
class Recurrence:
    """Memory of one recurrent layer.

    Attributes:
        state: ``[B G R K V]`` after ``base`` tokens, float32 or wider.
        base: int32 ``[B]``.
        rows: ``[B taps-1+U W]`` inputs of the short convolution from ``base - (taps-1)`` on.
        journal: what the tokens from ``base`` on wrote, by the layer's ``method``.
        taps: of the short convolution.
        method: a key of :data:`JOURNALS`.
    """

    state: jax.Array
    base: jax.Array
    rows: jax.Array
    journal: dict[str, jax.Array]
    taps: int = struct.field(pytree_node=False)
    method: str = struct.field(pytree_node=False)

    def follow(self, start: Int[Array, "B"], path: Int[Array, "B P"]) -> "Recurrence":
        """See :func:`dflash_jax.cache.follow`. ``start`` is ``base``: the journal holds the newest step and no other.

        What a token of a tree wrote depends on its ancestors alone, so a path's entries are those of a chain.
        """
        return self.replace(
            rows=_moved(self.rows, path, self.taps - 1),
            journal={name: _moved(leaf, path, 0) for name, leaf in self.journal.items()},
        )


def _moved(leaf: jax.Array, path: Int[Array, "B P"], first: int) -> jax.Array:
    """``leaf`` ``[B U ...]`` with entry ``first + path[j]`` at ``first + j``."""
    picked = leaf.at[jnp.arange(path.shape[0])[:, None], first + path].get(mode="clip")
    return jax.lax.dynamic_update_slice_in_dim(leaf, picked, first, axis=1)


@dataclass(frozen=True)
class Sizes:
    """G key heads of width K; R value heads of width V for each; ``taps`` of the convolution over W channels."""

    key_heads: int
    repeat: int
    key_dim: int
    value_dim: int
    taps: int
    channels: int

    @property
    def state(self) -> tuple[int, ...]:
        return (self.key_heads, self.repeat, self.key_dim, self.value_dim)


@dataclass(frozen=True)
class Journal:
    """One way to remember writes.

    Attributes:
        shapes: sizes -> name -> shape of what one token leaves.
        entries: ``(tokens, read) -> name -> [B T ...]``.
        commit: ``(state, journal, kept [B]) -> state`` after the first ``kept`` journalled tokens of each row.
    """

    shapes: Callable[[Sizes], dict[str, tuple[int, ...]]]
    entries: Callable[[delta.Tokens, delta.Read], dict[str, jax.Array]]
    commit: Callable[[jax.Array, dict[str, jax.Array], jax.Array], jax.Array]
    hear: Callable[[jax.Array, delta.Tokens], delta.Read] = delta.gated_delta
    """``(state, tokens) -> read`` with what ``entries`` wants of it."""
    hear_tree: Callable[[jax.Array, delta.Tokens, jax.Array], delta.Read] = delta.branched
    """``(state, tokens, ancestors) -> read``, likewise."""


def _solve_commit(state: jax.Array, journal: dict[str, jax.Array], kept: Int[Array, "B"]) -> jax.Array:
    """Strides of the journal, oldest first, until every row's kept tokens are absorbed."""

    def absorb(turn: jax.Array, state: jax.Array) -> jax.Array:
        part = {name: _stride(leaf, turn) for name, leaf in journal.items()}
        place = turn * STRIDE + jnp.arange(part["g"].shape[1])
        part = _only(place < kept[:, None], part)
        return delta.absorb(state, part["k"], part["written"], part["g"])

    return jax.lax.fori_loop(0, -(-kept.max() // STRIDE), absorb, state)


def _stride(leaf: jax.Array, turn: jax.Array) -> jax.Array:
    size = min(STRIDE, leaf.shape[1])
    return jax.lax.dynamic_slice_in_dim(leaf, turn * STRIDE, size, axis=1)


def _only(mask: jax.Array, entries: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Zeros where the mask is false: such a token neither decays the state nor writes, whatever it holds."""
    return {
        name: jnp.where(mask.reshape(*mask.shape, *(1,) * (leaf.ndim - mask.ndim)), leaf, 0)
        for name, leaf in entries.items()
    }


def _replay_commit(state: jax.Array, journal: dict[str, jax.Array], kept: Int[Array, "B"]) -> jax.Array:
    """The recurrence over the kept tokens; for a row that keeps fewer than others, the rest are no-ops (g, beta 0)."""

    def hear(place: jax.Array, state: jax.Array) -> jax.Array:
        token = {name: jax.lax.dynamic_index_in_dim(leaf, place, 1, keepdims=False) for name, leaf in journal.items()}
        token = _only(place < kept, token)
        return delta.hear_one(state, delta.Tokens(q=token["k"], **token)).state

    return jax.lax.fori_loop(0, kept.max(), hear, state)


def _states_commit(state: jax.Array, journal: dict[str, jax.Array], kept: Int[Array, "B"]) -> jax.Array:
    rows = jnp.arange(kept.shape[0])
    picked = journal["states"][rows, jnp.maximum(kept - 1, 0)]
    return jnp.where((kept > 0)[:, None, None, None, None], picked, state)


JOURNALS: dict[str, Journal] = {
    "solve": Journal(
        shapes=lambda s: {
            "k": (s.key_heads, s.key_dim),
            "written": (s.key_heads, s.repeat, s.value_dim),
            "g": (s.key_heads, s.repeat),
        },
        entries=lambda tokens, read: {"k": tokens.k, "written": read.written, "g": tokens.g},
        commit=_solve_commit,
    ),
    "replay": Journal(
        shapes=lambda s: {
            "k": (s.key_heads, s.key_dim),
            "v": (s.key_heads, s.repeat, s.value_dim),
            "g": (s.key_heads, s.repeat),
            "beta": (s.key_heads, s.repeat),
        },
        entries=lambda tokens, read: {name: getattr(tokens, name) for name in ("k", "v", "g", "beta")},
        commit=_replay_commit,
    ),
    "states": Journal(
        shapes=lambda s: {"states": s.state},
        entries=lambda tokens, read: {"states": read.states},
        commit=_states_commit,
        hear=partial(delta.recurrent, keep_states=True),
        hear_tree=partial(delta.branched, keep_states=True),
    ),
}
"""method -> how it remembers."""


def init_recurrence(
    batch: int, sizes: Sizes, *, undo: int, dtype: jnp.dtype, wide: jnp.dtype, method: str = "solve"
) -> Recurrence:
    """Empty memory.

    Args:
        undo: the longest step, in tokens; all of it can be rolled back.
        dtype: of the convolution's rows.
        wide: of state and journal.

    Raises:
        ValueError: unknown method.
    """
    if method not in JOURNALS:
        raise ValueError(f"unknown rollback method {method!r}; known: {', '.join(JOURNALS)}")
    length = undo if undo <= STRIDE else -(-undo // STRIDE) * STRIDE
    shapes = JOURNALS[method].shapes(sizes)
    return Recurrence(
        state=jnp.zeros((batch, *sizes.state), wide),
        base=jnp.zeros(batch, jnp.int32),
        rows=jnp.zeros((batch, sizes.taps - 1 + undo, sizes.channels), dtype),
        journal={name: jnp.zeros((batch, length, *shape), wide) for name, shape in shapes.items()},
        taps=sizes.taps,
        method=method,
    )


def resume(memory: Recurrence, length: Int[Array, "B"]) -> tuple[Float[Array, "B G R K V"], Float[Array, "B before W"]]:
    """State and convolution window after the first ``length`` tokens: of the journal, what was kept is absorbed."""
    kept = length - memory.base
    state = JOURNALS[memory.method].commit(memory.state, memory.journal, kept)
    place = kept[:, None] + jnp.arange(memory.taps - 1)
    return state, jnp.take_along_axis(memory.rows, place[..., None], axis=1)


def hear(
    memory: Recurrence,
    state: Float[Array, "B G R K V"],
    tokens: delta.Tokens,
    ancestors: Bool[Array, "B T T"] | None = None,
) -> delta.Read:
    """Hear T tokens from a resumed state, in the form that the memory's journal needs; ``ancestors`` of a tree."""
    journal = JOURNALS[memory.method]
    return journal.hear(state, tokens) if ancestors is None else journal.hear_tree(state, tokens, ancestors)


def record(
    memory: Recurrence,
    length: Int[Array, "B"],
    state: Float[Array, "B G R K V"],
    window: Float[Array, "B before W"],
    rows: Float[Array, "B T W"],
    tokens: delta.Tokens,
    read: delta.Read,
) -> Recurrence:
    """Memory after a step: ``state`` and ``window`` as :func:`resume` gave them at ``length``, and the step's writes.

    Raises:
        ValueError: while tracing, if the step is longer than the journal.
    """
    undo = memory.rows.shape[1] - (memory.taps - 1)
    if rows.shape[1] > undo:
        raise ValueError(f"a step of {rows.shape[1]} tokens does not fit a journal of {undo}; build it with more undo")
    entries = JOURNALS[memory.method].entries(tokens, read)
    put = jax.lax.dynamic_update_slice_in_dim
    return memory.replace(
        state=state,
        base=length,
        rows=put(memory.rows, jnp.concatenate([window, rows], axis=1), 0, axis=1),
        journal={name: put(leaf, entries[name], 0, axis=1) for name, leaf in memory.journal.items()},
    )
