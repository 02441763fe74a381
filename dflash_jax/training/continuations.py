"""A target's own greedy text with the features it left on the way: what a drafter is trained on."""

from functools import partial

import jax
import jax.numpy as jnp

from dflash_jax.cache import Cache
from dflash_jax.protocols import Params, StepOut, Target
from dflash_jax.shapes import Array, Float, Int


@partial(jax.jit, static_argnames=("target", "new_tokens"))
def continue_greedily(
    target: Target, params: Params, prompts: Int[Array, "B T"], new_tokens: int
) -> tuple[Int[Array, "B S"], Float[Array, "B S A D"]]:
    """Prompts of equal length, continued by ``new_tokens`` greedy tokens: S = T + new_tokens.

    Returns the whole texts and the features of every position; those of the last position come from hearing the last
    token. Stop tokens do not end a row: the text after one is as good for training as any.
    """
    batch, length = prompts.shape
    heard = target.step(params, prompts, target.init_cache(batch, length + new_tokens, length))

    def say(out: StepOut) -> Int[Array, "B"]:
        return jnp.argmax(target.unembed(params, out.hidden[:, -1:])[:, 0], axis=-1).astype(prompts.dtype)

    def advance(carry: tuple[Cache, Int[Array, "B"]], _):
        cache, token = carry
        out = target.step(params, token[:, None], cache)
        return (out.cache, say(out)), (token, out.features[:, 0])

    _, (tokens, features) = jax.lax.scan(advance, (heard.cache, say(heard)), length=new_tokens)
    texts = jnp.concatenate([prompts, tokens.T], axis=1)
    return texts, jnp.concatenate([heard.features, jnp.moveaxis(features, 0, 1)], axis=1)
