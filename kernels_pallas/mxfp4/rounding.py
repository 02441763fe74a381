"""Rounding to the values MXFP4 can hold, inside jit, for training with the weights a packed checkpoint will have."""

import jax
import jax.numpy as jnp

from kernels_pallas.mxfp4.weight import BLOCK, LARGEST


def round_to_mxfp4(weight: jax.Array, axis: int) -> jax.Array:
    """``decode(pack(weight))`` with blocks along ``axis``, in float32 and without leaving the device.

    Equal to :func:`~kernels_pallas.mxfp4.weight.pack` bit for bit: the grid of E2M1 has step 0.5 below 2, 1 below 4,
    2 up to 6, and rounding half to even on a step is rounding to the even code.
    """
    moved = jnp.moveaxis(weight.astype(jnp.float32), axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    mantissa, exponent = jnp.frexp(largest / LARGEST)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    scale = jnp.where(largest == 0, 1.0, jnp.ldexp(1.0, jnp.clip(exponent, -126, 127)))
    value = blocks / scale
    magnitude = jnp.abs(value)
    step = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
    rounded = jnp.round(value / step) * step * scale
    return jnp.moveaxis(rounded.reshape(moved.shape), -1, axis).astype(weight.dtype)
