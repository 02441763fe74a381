"""What of a round's tokens is handed out: cut at stop tokens and budgets, with log-probabilities if asked."""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.nn import accumulation_dtype
from dflash_jax.shapes import Array, Bool, Float, Int, Shaped


@struct.dataclass
class Ends:
    """What ends a row: ``budget`` int32 ``[B]`` tokens delivered, or one of ``stop`` int32 ``[B Z]`` (-1 padded)."""

    budget: jax.Array
    stop: jax.Array


@struct.dataclass
class LogProbs:
    """Log-probabilities of delivered tokens: the target's log-softmax, before temperature and filters.

    Attributes:
        said: float ``[B O]`` of the delivered token.
        ids: int32 ``[B O n]`` the n likeliest tokens at its position, best first.
        values: float ``[B O n]`` theirs.
    """

    said: jax.Array
    ids: jax.Array
    values: jax.Array


def cut(
    said: Int[Array, "B P"], count: Int[Array, "B"], ends: Ends, delivered: Int[Array, "B"]
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """How many of the ``count`` tokens said are delivered, and whether the row ends: right after its first stop id,
    or at its budget. Only tokens that were really said are searched."""
    place = jnp.arange(said.shape[1])
    is_stop = (said[:, :, None] == ends.stop[:, None, :]).any(-1) & (place < count[:, None])
    first = jnp.where(is_stop.any(1), jnp.argmax(is_stop, axis=1).astype(jnp.int32) + 1, said.shape[1] + 1)
    room = ends.budget - delivered
    kept = jnp.minimum(jnp.minimum(count, first), room)
    return kept, (first <= kept) | (kept >= room)


def deliver(
    kept: Shaped[Array, "B O *each"],
    said: Shaped[Array, "B P *each"],
    count: Int[Array, "B"],
    delivered: Int[Array, "B"],
) -> Shaped[Array, "B O *each"]:
    """Append the first ``count`` entries of a round to each row's output."""
    place = jnp.arange(said.shape[1])
    slot = jnp.where(place < count[:, None], delivered[:, None] + place, kept.shape[1])
    return kept.at[jnp.arange(said.shape[0])[:, None], slot].set(said, mode="drop")


def sound(logits: Float[Array, "B P V"]) -> Int[Array, "B"]:
    """How many places come before the first whose largest logit is not finite, NaN or infinite: no token can be said
    there."""
    sick = ~jnp.isfinite(jnp.max(logits, axis=-1))
    return jnp.where(sick.any(1), jnp.argmax(sick, axis=1), logits.shape[1]).astype(jnp.int32)


def no_logprobs(batch: int, room: int, alternatives: int, dtype: jnp.dtype) -> LogProbs:
    """Empty log-probabilities with n ``alternatives`` of logits of this dtype."""
    wide = accumulation_dtype(dtype)
    return LogProbs(
        said=jnp.zeros((batch, room), wide),
        ids=jnp.zeros((batch, room, alternatives), jnp.int32),
        values=jnp.zeros((batch, room, alternatives), wide),
    )


def extend(
    kept: LogProbs | None,
    logits: Float[Array, "B P V"],
    said: Int[Array, "B P"],
    count: Int[Array, "B"],
    delivered: Int[Array, "B"],
) -> LogProbs | None:
    """Append those of the first ``count`` tokens said; nothing where none are kept."""
    if kept is None:
        return None
    every = jax.nn.log_softmax(logits.astype(kept.said.dtype), axis=-1)
    values, ids = jax.lax.top_k(every, kept.ids.shape[-1])
    own = jnp.take_along_axis(every, jnp.maximum(said, 0)[..., None], axis=-1)[..., 0]
    found = LogProbs(said=own, ids=ids.astype(jnp.int32), values=values)
    return jax.tree.map(lambda old, new: deliver(old, new, count, delivered), kept, found)
