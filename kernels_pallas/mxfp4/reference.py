"""MXFP4 by its definition: a table of sixteen values and a power of two. The other implementations equal this one."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.mxfp4.weight import BLOCK, Mxfp4

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def power_of_two(scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``2**(s - 127)`` of scale bytes, exact for every byte; 255 gives NaN (E8M0)."""
    return lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu).astype(dtype)


def decode(weight: Mxfp4, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The values of a packed weight, ``[..., O, I]``: exact in every dtype with three significant bits.

    XLA's CPU code flushes subnormal numbers to zero, so values below 2**-126 (scale bytes 0 and 1) decode to zero.
    """
    table = jnp.asarray(VALUES, dtype)
    codes = jnp.stack([weight.codes & 15, weight.codes >> 4], axis=-1)
    blocks = table[codes].reshape(*weight.scales.shape, BLOCK)
    blocks = blocks * power_of_two(weight.scales, dtype)[..., None]
    return blocks.reshape(*weight.codes.shape[:-1], -1)


def matmul(x: jax.Array, weight: Mxfp4) -> jax.Array:
    """``x [T, I] @ W[O, I].T -> [T, O]`` in the dtype of ``x``."""
    return jnp.einsum("ti,oi->to", x, decode(weight, x.dtype))
