"""FP8 files: matrices in float8 (E4M3) with scales beside them. Whatever a family's rules want of a matrix, they get of
its values: the scales are found by name, and the rule's own transform runs on what was decoded.

Two layouts are released. ``weight_scale_inv [ceil(R/128), ceil(C/128)]`` (DeepSeek, Qwen3.5-FP8, GLM-5-FP8) has one
scale per block of 128 x 128; the last blocks may be ragged. ``weight_scale [R, 1]`` (compressed-tensors, GLM-4.x-FP8)
has one per output row. A value is code times scale, in spite of the name. Activations are not quantised here.
"""

from collections.abc import Mapping

import numpy as np

from checkpoints.safetensors_file import Entry
from checkpoints.transforms import FLOAT8, FLOATS, Arrays, Shape, Transform, nan_codes
from kernels_pallas.fp8 import BLOCK, pack

__all__ = ["BLOCK", "SUFFIXES", "block_shape", "channel_shape", "decode", "pack", "scale_of", "scaled"]

SUFFIXES = ("_scale_inv", "_scale")
"""Of the tensor with scales per block, and of the one with scales per row."""


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values of a matrix ``[R, C]`` in float32, scales per row if they are ``[R, 1]``, else per block.

    Row r and column c belong to block ``(r // 128, c // 128)``, so that a ragged last block is scaled like the rest.
    (A matrix of one row and at most 128 columns has one scale in either layout.)
    """
    wide, scales = codes.astype(np.float32), scales.astype(np.float32)
    if scales.shape == channel_shape(codes.shape):
        return wide * scales
    rows, columns = (np.arange(size) // BLOCK for size in codes.shape)
    return wide * scales[rows][:, columns]


def block_shape(shape: Shape) -> Shape:
    """Scales of a matrix, by blocks."""
    return tuple(-(-size // BLOCK) for size in shape)


def channel_shape(shape: Shape) -> Shape:
    """Scales of a matrix, by rows."""
    return (shape[0], 1)


def scale_of(name: str, found: Mapping[str, Entry]) -> str | None:
    """The tensor that holds the scales of a tensor, if that is stored in FP8."""
    entry = found.get(name)
    if entry is None or entry.code not in FLOAT8:
        return None
    return next((name + suffix for suffix in SUFFIXES if name + suffix in found), None)


def scaled(transform: Transform, scales: tuple[str | None, ...]) -> Transform:
    """``transform`` on decoded matrices.

    Args:
        scales: for each of its tensors the name of its scales, which follow it in the file's list; None: it has none.
    """

    def file_shapes(shape: Shape) -> tuple[Shape, ...]:
        shapes: list[Shape] = []
        for own, scale in zip(transform.file_shapes(shape), scales, strict=True):
            shapes.append(own)
            if scale:
                shapes.append(block_shape(own) if scale.endswith(SUFFIXES[0]) else channel_shape(own))
        return tuple(shapes)

    def forward(arrays: Arrays, shape: Shape, dtype: np.dtype) -> np.ndarray:
        left = iter(arrays)
        values = tuple(decode(next(left), next(left)) if scale else next(left) for scale in scales)
        return transform.forward(values, shape, dtype)

    def check(arrays: Arrays) -> str | None:
        return nan_codes(arrays) or transform.check(arrays)

    return Transform(
        f"{transform.name}, decoded from FP8",
        file_shapes,
        forward,
        transform.inverse,
        codes=(*FLOATS, *FLOAT8),
        check=check,
    )
