"""Decode in use: the product in float32, as released loaders compute it, rounded once to the activations' dtype."""

import jax
import jax.numpy as jnp

from kernels_pallas.fp8.weight import BLOCK, Fp8


def decode(weight: Fp8, dtype: jnp.dtype) -> jax.Array:
    """Values ``[..., O, I]`` in ``dtype``."""
    scales = jnp.repeat(weight.scales, BLOCK, axis=-1)[..., : weight.codes.shape[-1]]
    return (weight.codes.astype(jnp.float32) * scales).astype(dtype)


def matmul(x: jax.Array, weight: Fp8) -> jax.Array:
    """``x @ W.T``: ``[T, I]`` times ``[O, I]``, in the dtype of ``x``."""
    return x @ decode(weight, x.dtype).T
