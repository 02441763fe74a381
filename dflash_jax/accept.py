"""Accept rules: what to propose of a drafter's distributions, how much of it stands, and which token of the target's
own follows.

A rule holds both ends, so that the distribution it divides by is the one it drew from. Every lossless rule is proved
by exact enumeration (``tests/laws/test_exact.py``); the lossy ones are in :mod:`dflash_jax.relaxed`.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from dflash_jax.nn import argmax
from dflash_jax.protocols import Draft, Verdict
from dflash_jax.sampling import Dice, Sampling, distribution
from dflash_jax.shapes import Array, Bool, Float, Int


def argmax_draft(logits: Float[Array, "B drafts V"]) -> Draft:
    """The likeliest token of each position."""
    return Draft(tokens=argmax(logits))


class Chain:
    """One token is proposed for each place of the block."""

    budget: ClassVar[int] = 0

    def width(self, block_size: int) -> int:
        return block_size


class ArgmaxDrafts(Chain):
    """Proposes the likeliest token of each position."""

    def choose(self, dice: Dice, logits: Float[Array, "B drafts V"], sampling: Sampling) -> Draft:
        return argmax_draft(logits)


class DrawnDrafts(Chain):
    """Proposes a draw from each position's distribution, under the row's own temperature and filters."""

    def choose(self, dice: Dice, logits: Float[Array, "B drafts V"], sampling: Sampling) -> Draft:
        q = distribution(logits, sampling)
        return Draft(tokens=dice.drafts(q), q=q)


@dataclass(frozen=True)
class Greedy(ArgmaxDrafts):
    """Accept while the draft is the target's argmax; then the argmax itself. Equal logits: the lowest id wins.

    Draws nothing, at any temperature.
    """

    name: ClassVar[str] = "greedy"
    lossless: ClassVar[bool] = True
    pathwise: ClassVar[bool] = True
    samples: ClassVar[bool] = False

    def __call__(self, dice: Dice, draft: Draft, logits: Float[Array, "B P V"], sampling: Sampling) -> Verdict:
        return accept_matches(draft, argmax(logits))


@dataclass(frozen=True)
class Match(ArgmaxDrafts):
    """The target draws its own token at every position; accept while the draft is that token.

    Lossless whatever is proposed: every token said is a draw of the target's. For one seed it says what plain decoding
    says (z-lab's ``dflash`` 0.1.0 samples so).
    """

    name: ClassVar[str] = "match"
    lossless: ClassVar[bool] = True
    pathwise: ClassVar[bool] = True
    samples: ClassVar[bool] = True

    def __call__(self, dice: Dice, draft: Draft, logits: Float[Array, "B P V"], sampling: Sampling) -> Verdict:
        return accept_matches(draft, dice.tokens(distribution(logits, sampling)))


@dataclass(frozen=True)
class Rejection(DrawnDrafts):
    """Accept a draft with probability ``min(1, p/q)``; at the first rejection draw from ``(p - q)+``, else from p.

    Source: arXiv 2211.17192 and 2302.01318. q is what the draft was drawn from; a draft that nobody drew is certain.
    """

    name: ClassVar[str] = "rejection"
    lossless: ClassVar[bool] = True
    pathwise: ClassVar[bool] = False
    samples: ClassVar[bool] = True

    def __call__(self, dice: Dice, draft: Draft, logits: Float[Array, "B P V"], sampling: Sampling) -> Verdict:
        p, (tokens, q) = distribution(logits, sampling), drawn_from(draft, logits)
        coins = dice.coins(tokens.shape[1], p.dtype)
        # A coin lies in [0, 1): with "<" a draft of p = 0 falls even to a coin of 0.
        stands = coins * at_tokens(q[:, :-1], tokens) < at_tokens(p[:, :-1], tokens)
        accepted = leading(stands)
        rest = residual(at_place(p, accepted), at_place(q, accepted))
        return Verdict(accepted=accepted, token=dice.token(rest, accepted))


@dataclass(frozen=True)
class OneHot(ArgmaxDrafts, Rejection):
    """Rejection of argmax drafts, whose q is certainty: accept with probability p, else draw any other token."""

    name: ClassVar[str] = "one_hot"


@dataclass(frozen=True)
class Block(DrawnDrafts):
    """Block verification: accepts whole prefixes with one coin each, never fewer tokens in the mean than rejection.

    Source: arXiv 2403.10444, algorithm 2. With ``w[0] = 1`` and ``w[j] = min(1, w[j-1] p/q)`` of draft j, prefix j
    stands with probability ``h[j] = R / (R + 1 - w[j])``, R the mass of ``(w[j] p - q)+`` at the next position, the
    whole block with ``w``; the longest that stands counts, and the next token is drawn from that residual.
    """

    name: ClassVar[str] = "block"
    lossless: ClassVar[bool] = True
    pathwise: ClassVar[bool] = False
    samples: ClassVar[bool] = True

    def __call__(self, dice: Dice, draft: Draft, logits: Float[Array, "B P V"], sampling: Sampling) -> Verdict:
        p, (tokens, q) = distribution(logits, sampling), drawn_from(draft, logits)
        p_of, q_of = at_tokens(p[:, :-1], tokens), at_tokens(q[:, :-1], tokens)
        ratios = jnp.where(q_of > 0, p_of / jnp.where(q_of > 0, q_of, 1), jnp.where(p_of > 0, jnp.inf, 0))
        weights = _running_weights(ratios)
        mass = excess(weights[:, :, None] * p, q).sum(-1)
        prefix = jnp.where(weights >= 1, 1, mass / jnp.maximum(mass + 1 - weights, jnp.finfo(p.dtype).tiny))
        chance = jnp.concatenate([prefix[:, 1:-1], weights[:, -1:]], axis=1)[:, : tokens.shape[1]]
        stands = dice.coins(tokens.shape[1], p.dtype) < chance
        accepted = jnp.max(jnp.where(stands, jnp.arange(1, tokens.shape[1] + 1), 0), axis=1, initial=0)
        weight = jnp.take_along_axis(weights, accepted[:, None], axis=1)
        rest = residual(weight * at_place(p, accepted), at_place(q, accepted))
        return Verdict(accepted=accepted.astype(jnp.int32), token=dice.token(rest, accepted))


def _running_weights(ratios: Float[Array, "B drafts"]) -> Float[Array, "B P"]:
    """``w[0] = 1, w[j] = min(1, w[j-1] ratio[j])``; 0 stays 0 whatever the ratio."""

    def step(weight: jax.Array, ratio: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = jnp.where(weight > 0, jnp.minimum(weight * ratio, 1), 0)
        return weight, weight

    first = jnp.ones((ratios.shape[0], 1), ratios.dtype)
    _, later = jax.lax.scan(step, first[:, 0], ratios.T)
    return jnp.concatenate([first, later.T], axis=1)


def leading(stands: Bool[Array, "B drafts"]) -> Int[Array, "B"]:
    """How many leading drafts stand."""
    return jnp.cumprod(stands.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def accept_matches(draft: Draft, own: Int[Array, "B P"]) -> Verdict:
    """Accept leading drafts that are the target's own token at their place; then the own token that follows."""
    accepted = leading(draft.tokens == own[:, :-1])
    return Verdict(accepted=accepted, token=jnp.take_along_axis(own, accepted[:, None], axis=1)[:, 0])


def drawn_from(draft: Draft, logits: Float[Array, "B P V"]) -> tuple[Int[Array, "B drafts"], Float[Array, "B P V"]]:
    """The drafts and what each was drawn from; certainty for one that nobody drew, zeros where nothing is proposed
    (whatever q is there), and in the last place, which has no draft. A draft of a broken distribution (NaN) proposes
    nothing."""
    tokens, q = draft.tokens, draft.q
    if q is None:
        q = (jnp.arange(logits.shape[-1]) == tokens[..., None]).astype(jnp.promote_types(logits.dtype, jnp.float32))
    else:
        tokens = jnp.where(jnp.isnan(q).any(-1), -1, tokens)
        q = jnp.where((tokens >= 0)[..., None], q, 0)
    return tokens, jnp.pad(q, ((0, 0), (0, 1), (0, 0)))


def at_tokens(p: Float[Array, "B drafts V"], tokens: Int[Array, "B drafts"]) -> Float[Array, "B drafts"]:
    """The probability of each draft; 0 where nothing is proposed."""
    found = jnp.take_along_axis(p, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(tokens >= 0, found, 0)


def at_place(p: Float[Array, "B P V"], place: Int[Array, "B"]) -> Float[Array, "B V"]:
    """One position's distribution of each row."""
    return jnp.take_along_axis(p, place[:, None, None], axis=1)[:, 0]


def excess(p: Float[Array, "*batch V"], q: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
    """``(p - q)+``."""
    return jnp.where(p > q, p - q, 0)


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """``(p - q)+``, normalised; p itself where rounding leaves no mass: there p and q are equal and nothing is
    rejected."""
    left = excess(p, q)
    mass = left.sum(-1, keepdims=True)
    return jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1), p)
