"""From float matrices to FP8 with a scale per block of 128 x 128: for files, and for training with what they hold."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.fp8.weight import BLOCK, LARGEST

SMALLEST = float(np.finfo(np.float32).tiny) * LARGEST
"""A block whose largest value is below has a scale that float32 flushes to zero."""


def pack(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes (float8_e4m3fn ``[R, C]``) and scales (float32 ``[ceil(R/128), ceil(C/128)]``) of a matrix: the largest
    value of a block becomes 448, the others round to the nearest code. A block of zeros, or of
    values too small for a scale, has scale 1.
    """
    codes, scales = _quantise(jnp.asarray(matrix, jnp.float32))
    return np.asarray(codes), np.asarray(scales)


def round_to_fp8(matrix: jax.Array, parts: int = 1) -> jax.Array:
    """The values that :func:`pack` keeps of a matrix ``[I, O]``, whose columns are ``parts`` matrices side by side."""
    pieces = [_value(*_quantise(piece.astype(jnp.float32))) for piece in jnp.split(matrix, parts, axis=-1)]
    return jnp.concatenate(pieces, axis=-1).astype(matrix.dtype)


def _quantise(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, columns = (-(-size // BLOCK) for size in matrix.shape)
    filled = [(0, blocks * BLOCK - size) for blocks, size in zip((rows, columns), matrix.shape, strict=True)]
    blocks = jnp.pad(jnp.abs(matrix), filled).reshape(rows, BLOCK, columns, BLOCK)
    largest = blocks.max(axis=(1, 3))
    scales = jnp.where(largest < SMALLEST, 1.0, largest / LARGEST)
    scaled = jnp.clip(matrix / _repeat(scales, matrix.shape), -LARGEST, LARGEST)
    return scaled.astype(jnp.float8_e4m3fn), scales


def _value(codes: jax.Array, scales: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32) * _repeat(scales, codes.shape)


def _repeat(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.repeat(jnp.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)[: shape[0], : shape[1]]
