"""Accept rules: how much of a draft stands, and which token of the target's own follows it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dflash_jax.nn import argmax
from dflash_jax.protocols import AcceptRule, Draft, Verdict
from dflash_jax.shapes import Array, Float, Int


def leading_matches(drafts: Int[Array, "B drafts"], own: Int[Array, "B P"]) -> Int[Array, "B"]:
    """How many leading drafts equal the target's own choice at their place."""
    equal = drafts == own[:, :-1]
    return jnp.cumprod(equal.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


@dataclass(frozen=True)
class Greedy:
    """Accept while the draft is the target's argmax; then the argmax itself. Equal logits: the lowest id wins."""

    lossless: bool = True

    def __call__(self, key: jax.Array, draft: Draft, logits: Float[Array, "B P V"]) -> Verdict:
        own = argmax(logits)
        accepted = leading_matches(draft.tokens, own)
        return Verdict(accepted=accepted, token=jnp.take_along_axis(own, accepted[:, None], axis=1)[:, 0])


ACCEPT: dict[str, AcceptRule] = {"greedy": Greedy()}
