"""Plain decoding, as the absence of a drafter in the same loop."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from dflash_jax.protocols import Choose, Draft, Params, Target
from dflash_jax.shapes import Array, Float, Int


@dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing. ``block_size`` 1 is one-token decoding.

    A larger ``block_size`` decodes one token a round at the compiled width of a verification: every matmul has the
    shape it has there, so the logits are those of speculative decoding bit for bit, in any dtype.
    """

    block_size: int = 1

    def init_cache(self, batch: int, capacity: int, undo: int) -> tuple:
        return ()

    def absorb(self, params: Params, features: Float[Array, "B T A D"], count: Int[Array, "B"], cache: tuple) -> tuple:
        return cache

    def propose(
        self,
        params: Params,
        target: Target,
        target_params: Params,
        anchor: Int[Array, "B"],
        cache: Any,
        choose: Choose,
    ) -> Draft:
        return Draft(tokens=jnp.full((anchor.shape[0], self.block_size - 1), -1, jnp.int32))
