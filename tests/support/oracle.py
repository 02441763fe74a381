"""Scripted drafters: they know the target's true greedy text and are right exactly as often as a script says."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.protocols import Draft

ALL = 127
"""An entry of a script that no block is long enough to reach: every draft is right."""

MOST_TOKENS, MOST_ROUNDS = 96, 16


@struct.dataclass
class Script:
    """What a scripted drafter knows; its "parameters", so that one compiled loop serves every script.

    Attributes:
        truth: int32 ``[B MOST_TOKENS]`` the target's greedy text of each row.
        prompt: int32 ``[B]`` prompt lengths.
        accept: int32 ``[B MOST_ROUNDS]`` how many leading drafts are right in each round; the next one is
            ``lie`` (the id above the true one, where ``lie`` is the truth) and all later ones are true again, so that
            a rule that goes on after a mismatch is caught.
        period: int32 ``[B]`` rounds after which a row's script repeats.
        lie: int32 ``[]``.
    """

    truth: jax.Array
    prompt: jax.Array
    accept: jax.Array
    period: jax.Array
    lie: jax.Array


@struct.dataclass
class Place:
    """Its cache: tokens heard and rounds absorbed, per row."""

    length: jax.Array
    round: jax.Array


@dataclass(frozen=True)
class ScriptedDrafter:
    """Proposes the truth, with one lie per round."""

    block_size: int
    vocab: int

    def init_cache(self, batch: int, capacity: int, undo: int) -> Place:
        return Place(length=jnp.zeros(batch, jnp.int32), round=jnp.zeros(batch, jnp.int32))

    def absorb(self, params: Script, features: jax.Array, count: jax.Array, cache: Place) -> Place:
        in_round = (count > 0) & (cache.length >= params.prompt)
        return Place(length=cache.length + count.astype(jnp.int32), round=cache.round + in_round)

    def propose(self, params: Script, target, target_params, anchor: jax.Array, cache: Place, choose) -> Draft:
        place = jnp.arange(self.block_size - 1)
        said = (cache.length - params.prompt)[:, None] + 1 + place
        true = jnp.take_along_axis(params.truth, jnp.minimum(said, params.truth.shape[1] - 1), axis=1)
        right = jnp.take_along_axis(params.accept, (cache.round % params.period)[:, None], axis=1)
        lie = jnp.where(true == params.lie, (true + 1) % self.vocab, params.lie)
        return Draft(tokens=jnp.where(place == right, lie, true).astype(jnp.int32))


@dataclass(frozen=True)
class MaliciousDrafter:
    """Proposes what could do harm: stop ids, the mask id, nothing at all, the anchor again; its ``params`` are such
    ids, int32 ``[Z]``, dealt out anew in every round."""

    block_size: int

    def init_cache(self, batch: int, capacity: int, undo: int) -> jax.Array:
        return jnp.zeros(batch, jnp.int32)

    def absorb(self, params: jax.Array, features: jax.Array, count: jax.Array, cache: jax.Array) -> jax.Array:
        return cache + count.astype(jnp.int32)

    def propose(self, params: jax.Array, target, target_params, anchor, cache, choose) -> Draft:
        mixed = (anchor * 31 + cache * 17)[:, None] + 7 * jnp.arange(self.block_size - 1)
        dealt = params[mixed % params.shape[0]]
        return Draft(tokens=jnp.where(dealt == -2, anchor[:, None], dealt).astype(jnp.int32))


def script(
    truth: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], accept: Sequence[Sequence[int]], lie: int = -1
) -> Script:
    """A script; ``accept`` has one list per row, or one for all of them. The default lie proposes nothing."""
    rows = list(accept) * (len(prompts) if len(accept) == 1 else 1)

    def padded(lists, width: int) -> jax.Array:
        return jnp.asarray([[*row, *[0] * (width - len(row))] for row in lists], jnp.int32)

    return Script(
        truth=padded(truth, MOST_TOKENS),
        prompt=jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
        accept=padded(rows, MOST_ROUNDS),
        period=jnp.asarray([len(row) for row in rows], jnp.int32),
        lie=jnp.asarray(lie, jnp.int32),
    )
