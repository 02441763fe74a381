"""The stored form of an MXFP4 weight, and the rounding that makes one."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

BLOCK = 32
"""Values that share one scale (OCP Microscaling Formats v1.0)."""

LARGEST = 6.0
"""Largest magnitude of E2M1."""


@struct.dataclass
class Mxfp4:
    """A packed weight: ``codes`` uint8 ``[..., O, I/2]``, ``scales`` uint8 ``[..., O, I/32]``."""

    codes: jax.Array
    scales: jax.Array


def pack(weight: np.ndarray) -> Mxfp4:
    """Round ``weight`` float ``[..., O, I]`` to MXFP4 (numpy arrays in the result).

    The scale of a block is the smallest power of two that brings its largest magnitude to at most 6, so nothing
    saturates; values round to the nearest representable one, ties to the even code.

    Raises:
        ValueError: if I is not a multiple of 32 or a value is not finite.
    """
    weight = np.asarray(weight, np.float32)
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 needs an inner size that is a multiple of {BLOCK}, got shape {weight.shape}")
    if not np.isfinite(weight).all():
        raise ValueError("MXFP4 cannot hold a value that is not finite")
    blocks = weight.reshape(*weight.shape[:-1], -1, BLOCK)
    exponent = scale_exponent(np.abs(blocks).max(-1))
    codes = nearest_code(np.ldexp(blocks, -exponent[..., None]))
    codes = codes.reshape(*weight.shape[:-1], -1, 2)
    packed = codes[..., 0] | (codes[..., 1] << 4)
    return Mxfp4(codes=packed.astype(np.uint8), scales=(exponent + 127).astype(np.uint8))


def scale_exponent(largest: np.ndarray) -> np.ndarray:
    """The smallest integer e with ``largest <= 6 * 2**e``, within the normal float32 range; 0 for an all-zero
    block."""
    mantissa, exponent = np.frexp(largest / LARGEST)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.clip(np.where(largest == 0, 0, exponent), -126, 127).astype(np.int32)


def nearest_code(value: np.ndarray) -> np.ndarray:
    """The E2M1 code nearest to ``value`` (|value| <= 6), ties to even, as uint8 in 0..15."""
    rounded = value.astype(jnp.float4_e2m1fn)
    return rounded.view(np.uint8) & 15
