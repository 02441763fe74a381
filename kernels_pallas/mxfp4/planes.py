"""Decode in use, by arithmetic, one nibble plane at a time.

The low nibbles of a row are its even columns and the high nibbles its odd ones, so ``x @ W.T`` is
``x_even @ LOW.T + x_odd @ HIGH.T`` and the two planes never need to be interleaved. A table look-up becomes a gather
that XLA does not vectorise on the CPU; the shift below does.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.mxfp4.reference import power_of_two
from kernels_pallas.mxfp4.weight import Mxfp4


def plane_values(nibble: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The E2M1 values of nibbles 0..15: sign * (subnormal 0, .5; else (2 + mantissa) * 2**(exponent - 1) / 2)."""
    magnitude = (nibble & 7).astype(jnp.int32)
    shifted = (2 + (magnitude & 1)) << jnp.maximum((magnitude >> 1) - 1, 0)
    doubled = jnp.where(magnitude < 2, magnitude, shifted).astype(dtype)
    return doubled * jnp.where(nibble < 8, 0.5, -0.5).astype(dtype)


def plane(nibble: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """One plane of a weight, scaled: nibbles ``[O, I/2]`` and scale bytes ``[O, I/32]`` -> ``[O, I/2]``."""
    values = plane_values(nibble, dtype).reshape(*scales.shape, -1)
    return (values * power_of_two(scales, dtype)[..., None]).reshape(nibble.shape)


def matmul(x: jax.Array, weight: Mxfp4) -> jax.Array:
    """``x [T, I] @ W[O, I].T -> [T, O]`` in the dtype of ``x``; the decoded weights are exact, the sum's order is not
    that of the reference."""
    low = plane(weight.codes & 15, weight.scales, x.dtype)
    high = plane(weight.codes >> 4, weight.scales, x.dtype)
    return jnp.einsum("ti,oi->to", x[:, 0::2], low) + jnp.einsum("ti,oi->to", x[:, 1::2], high)
