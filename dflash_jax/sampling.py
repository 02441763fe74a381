"""From logits to a token: the one distribution that baseline, target, drafter and residuals share, and the dice.

The distribution of a position is ``softmax(logits / temperature)``, cut to the ``top_k`` likeliest tokens, of those to
the likeliest whose mass reaches ``top_p``, and of those to the ones at least ``min_p`` times as likely as the best
(the order of transformers' logits processors; of tokens that tie for the last place the lower ids are kept, where
transformers' top-k keeps all). Temperature 0 is the argmax, as a distribution: one token has it all.
Every row of a batch has settings and a seed of its own; they are values, so none of them compiles anything.
"""

from enum import IntEnum

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.nn import accumulation_dtype, argmax
from dflash_jax.shapes import Array, Bool, Float, Int, Key, UInt

GREEDY_BELOW = 1e-6
"""Temperatures up to here are 0: scores divided by less leave no second token in float32."""


@struct.dataclass
class Sampling:
    """Settings per row.

    Attributes:
        temperature: float32 ``[B]``; at most ``GREEDY_BELOW``: the argmax, and the filters do not matter.
        top_k: int32 ``[B]``; below 1, or the vocabulary and more: all tokens.
        top_p: float32 ``[B]`` in 0..1; 1: all tokens, 0: the best one.
        min_p: float32 ``[B]`` in 0..1; 0: all tokens.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @property
    def greedy(self) -> Bool[Array, "B"]:
        return self.temperature <= GREEDY_BELOW


def distribution(logits: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """The distribution that every token at these positions is drawn from, in float32 or wider.

    A row of logits with a NaN, or with nothing but -inf, gives NaN.
    """
    wide = logits.astype(accumulation_dtype(logits.dtype))
    greedy = sampling.greedy[:, None, None]
    temperature = jnp.where(greedy, 1, sampling.temperature[:, None, None]).astype(wide.dtype)
    scaled = (wide - jnp.max(wide, axis=-1, keepdims=True)) / temperature
    sampled = jax.nn.softmax(jnp.where(_kept(scaled, sampling), scaled, -jnp.inf), axis=-1)
    best = jnp.arange(wide.shape[-1]) == argmax(wide)[..., None]
    return jnp.where(greedy, jnp.where(jnp.isnan(scaled), scaled, best), sampled)


def _kept(scaled: Float[Array, "B T V"], sampling: Sampling) -> Bool[Array, "B T V"]:
    """Which tokens the filters leave, ``scaled`` being logits / temperature with a largest of 0.

    Without a filter in the whole batch its passes are skipped; a row without one keeps all its tokens either way.
    """
    vocabulary, every = scaled.shape[-1], jnp.ones(scaled.shape, bool)
    cuts_k, cuts_p = (sampling.top_k >= 1) & (sampling.top_k < vocabulary), sampling.top_p < 1

    def by_k() -> Bool[Array, "B T V"]:
        k = jnp.where(cuts_k, sampling.top_k, vocabulary)
        return heaviest(scaled, jnp.ones_like(scaled), k[:, None].astype(scaled.dtype))

    def by_p() -> Bool[Array, "B T V"]:
        mass = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf), axis=-1)
        wanted = jnp.where(cuts_p, jnp.maximum(sampling.top_p, jnp.finfo(scaled.dtype).tiny), jnp.inf)
        return heaviest(scaled, mass, wanted[:, None].astype(scaled.dtype))

    kept = jax.lax.cond((cuts_k & ~sampling.greedy).any(), by_k, lambda: every)
    kept = kept & jax.lax.cond((cuts_p & ~sampling.greedy).any(), by_p, lambda: every)
    return kept & (scaled >= jnp.log(sampling.min_p)[:, None, None])


def heaviest(
    scores: Float[Array, "B T V"], weights: Float[Array, "B T V"], wanted: Float[Array, "B 1"]
) -> Bool[Array, "B T V"]:
    """The fewest entries of highest score whose weights reach ``wanted``; of equal scores the lower ids come first.

    An entry is in if those before it weigh less than ``wanted``. The score where the line falls is found bit by bit,
    in as many passes over V as a score has bits: a CPU sorts far slower.
    """
    keys = _ordered(scores)
    bits = jnp.iinfo(keys.dtype).bits

    def try_bit(turn: jax.Array, line: jax.Array) -> jax.Array:
        raised = line | (jnp.ones((), keys.dtype) << (bits - 1 - turn).astype(keys.dtype))
        reached = jnp.where(keys >= raised[..., None], weights, 0).sum(-1) >= wanted
        return jnp.where(reached, raised, line)

    line = jax.lax.fori_loop(0, bits, try_bit, jnp.zeros(scores.shape[:2], keys.dtype))[..., None]
    above, level = keys > line, keys == line
    at_line = jnp.where(level, weights, 0)
    before = jnp.where(above, weights, 0).sum(-1, keepdims=True) + jnp.cumsum(at_line, axis=-1) - at_line
    return above | (level & (before < wanted[..., None]))


def _ordered(scores: Float[Array, "*batch V"]) -> UInt[Array, "*batch V"]:
    """Unsigned integers in the order of the scores; -0 and 0 are one number."""
    unsigned = jnp.dtype(f"uint{jnp.finfo(scores.dtype).bits}")
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), unsigned)  # XLA takes "+ 0.0" for nothing
    top = jnp.ones((), unsigned) << (jnp.iinfo(unsigned).bits - 1)
    return jnp.where(bits & top, ~bits, bits | top)


class Stream(IntEnum):
    """What a random number is for. Streams of one row are independent of each other."""

    TOKEN = 0
    DRAFT = 1
    COIN = 2


@struct.dataclass
class Dice:
    """The random numbers of one round, each row's own.

    A target's own token is keyed by the row's seed and the token's position in the text, whichever round says it: a
    rule that only draws such tokens writes, for a seed, the very text of plain decoding. Drafts and coins are keyed by
    the round's position and their place in the block, because a rule may have looked at those of rejected places.

    Attributes:
        key: ``[B]`` one key per row, made of its seed alone.
        position: int32 ``[B]`` absolute position of the first token that this round says.
    """

    key: jax.Array
    position: jax.Array

    def scores(self, p: Float[Array, "B P V"], place: Int[Array, "B P"] | None = None) -> Float[Array, "B P V"]:
        """``log p`` and each position's noise: the largest is the target's own token."""
        place = jnp.arange(p.shape[1]) if place is None else place
        return _scores(p, self._keys(Stream.TOKEN, self.position[:, None] + place))

    def tokens(self, p: Float[Array, "B P V"], place: Int[Array, "B P"] | None = None) -> Int[Array, "B P"]:
        """The target's own token at every position of the block; ``place``: how far each is from its beginning, where
        that is not 0, 1, 2, ..."""
        return argmax(self.scores(p, place))

    def token(self, p: Float[Array, "B V"], place: Int[Array, "B"]) -> Int[Array, "B"]:
        """The target's own token at one place of the block."""
        return argmax(_scores(p[:, None], self._keys(Stream.TOKEN, (self.position + place)[:, None])))[:, 0]

    def drafts(self, q: Float[Array, "B drafts V"]) -> Int[Array, "B drafts"]:
        """A draft from each distribution, independent of one another."""
        return argmax(_scores(q, self._in_round(Stream.DRAFT, q.shape[1])))

    def coins(self, count: int, dtype: jnp.dtype) -> Float[Array, "B coins"]:
        """Uniform numbers in [0, 1)."""
        return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), dtype)))(self._in_round(Stream.COIN, count))

    def _in_round(self, stream: Stream, count: int) -> Key[Array, "B count"]:
        rounds = self._keys(stream, self.position[:, None])
        return jax.vmap(lambda key: jax.vmap(lambda place: jax.random.fold_in(key[0], place))(jnp.arange(count)))(
            rounds
        )

    def _keys(self, stream: Stream, positions: Int[Array, "B n"]) -> Key[Array, "B n"]:
        fold = jax.random.fold_in
        return jax.vmap(lambda key, row: jax.vmap(lambda at: fold(fold(key, stream), at))(row))(self.key, positions)


def _scores(p: Float[Array, "B n V"], keys: Key[Array, "B n"]) -> Float[Array, "B n V"]:
    """Gumbel-max: the argmax is a draw from p, and never a token of mass 0."""
    noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, p.shape[-1:], p.dtype, mode="high")))(keys)
    return jnp.log(p) + noise


def seed_keys(seeds: UInt[Array, "B 2"]) -> Key[Array, "B"]:
    """One key per row from the high and low half of its 64-bit seed: distinct seeds are distinct keys.

    ``jax.random.key`` would keep 32 bits of them where 64-bit integers are off.
    """
    return jax.random.wrap_key_data(seeds, impl="threefry2x32")
