"""How a tensor in a file becomes a parameter, and back. Every transform is reversible and has a name.

``forward`` and ``inverse`` map numpy arrays to views where they can. Shapes are stated in the file's terms: from the
shape of a parameter follows the shape that each of its tensors must have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import mxfp4
from kernels_pallas.fp8 import BLOCK as FP8_BLOCK
from kernels_pallas.mxfp4.planes import plane

Shape = tuple[int, ...]
Arrays = tuple[np.ndarray, ...]

FLOATS = ("BF16", "F16", "F32", "F64")
BYTES = ("U8",)
FLOAT8 = ("F8_E4M3",)


@dataclass(frozen=True)
class Transform:
    """A reversible map between the tensors of a file and one parameter.

    Attributes:
        file_shapes: parameter shape -> the shape of each tensor in the file.
        forward: ``(tensors, parameter's shape, its dtype) -> parameter``; the dtype is wished for, not promised.
        inverse: parameter -> tensors.
        codes: dtypes the tensors may be stored in.
        check: tensors -> what is wrong with their values, or None.
    """

    name: str
    file_shapes: Callable[[Shape], tuple[Shape, ...]]
    forward: Callable[[Arrays, Shape, jnp.dtype], np.ndarray | jax.Array]
    inverse: Callable[[np.ndarray], Arrays]
    codes: tuple[str, ...] = FLOATS
    check: Callable[[Arrays], str | None] = lambda arrays: None


def _swap(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _nan_scales(arrays: Arrays) -> str | None:
    """MXFP4 scales are the last tensor of those that have them."""
    count = int((arrays[-1] == 255).sum())
    return f"{count} scale bytes are 255, which is NaN in OCP MX; the file is damaged" if count else None


def nan_codes(arrays: Arrays) -> str | None:
    """What is wrong with FP8 tensors: E4M3 has a NaN, which no writer means."""
    bad = sum(int(np.isnan(array.astype(np.float32)).sum()) for array in arrays if array.dtype.itemsize == 1)
    return f"{bad} FP8 codes are NaN; the file is damaged" if bad else None


IDENTITY = Transform("identity", lambda s: (s,), lambda a, s, dtype: a[0], lambda p: (p,))

TRANSPOSE = Transform(
    "transpose",
    lambda s: (_swap(s),),
    lambda a, s, dtype: np.swapaxes(a[0], -1, -2),
    lambda p: (np.swapaxes(p, -1, -2),),
)

TAPS = Transform(
    "split taps",
    lambda s: ((s[2], s[0] * s[1]),),
    lambda a, s, dtype: a[0].T.reshape(s),
    lambda p: (p.reshape(-1, p.shape[-1]).T,),
)
"""``fc.weight [D, A * D_target]`` <-> ``[A, D_target, D]``."""

JOIN = Transform(
    "join gate and up",
    lambda s: ((s[-1] // 2, s[-2]),) * 2,
    lambda a, s, dtype: np.concatenate(a).T,
    lambda p: tuple(np.split(p.T, 2)),
)
"""``gate_proj``, ``up_proj`` ``[F, D]`` <-> ``[D, 2F]``, gate first."""

ROWS = Transform(
    "side by side",
    lambda s: ((s[-2] // 2, s[-1]),) * 2,
    lambda a, s, dtype: np.concatenate(a),
    lambda p: tuple(np.split(p, 2)),
    codes=FLOAT8,
    check=nan_codes,
)
"""FP8 ``gate_proj``, ``up_proj`` ``[F, D]`` <-> ``[2F, D]``, gate first."""

CODE = Transform("codes", lambda s: (s,), lambda a, s, dtype: a[0], lambda p: (p,), codes=FLOAT8, check=nan_codes)
"""FP8 ``[O, I]``, unchanged."""


def repeated_scales(parts: int, per_row: bool) -> Transform:
    """Scales of ``parts`` FP8 matrices, ``[ceil(R/128), C]`` per block or ``[R, 1]`` per row, <-> one
    ``[parts * R, C]``: for every row those of its blocks of columns. Those that differ within a block cannot go back to
    one per block."""

    def stored(shape: Shape) -> Shape:
        rows = shape[-2] // parts
        return (rows, 1) if per_row else (-(-rows // FP8_BLOCK), shape[-1])

    def repeat(scales: np.ndarray, shape: Shape) -> np.ndarray:
        wide = scales.astype(np.float32)
        if per_row:
            return np.repeat(wide, shape[-1], axis=1)
        return np.repeat(wide, FP8_BLOCK, axis=0)[: shape[-2] // parts]

    def inverse(parameter: np.ndarray) -> Arrays:
        each = np.split(parameter, parts)
        found = tuple(part[:, :1] if per_row else part[::FP8_BLOCK] for part in each)
        if any((repeat(scales, parameter.shape) != part).any() for scales, part in zip(found, each, strict=True)):
            raise ValueError("FP8 scales differ within a block of 128 x 128: decode the experts before they are stored")
        return found

    def forward(arrays: Arrays, shape: Shape, dtype: jnp.dtype) -> np.ndarray:
        return np.concatenate([repeat(scales, shape) for scales in arrays])

    return Transform("repeat for rows", lambda s: (stored(s),) * parts, forward, inverse)


CONVOLUTION = Transform(
    "taps first",
    lambda s: ((s[1], 1, s[0]),),
    lambda a, s, dtype: a[0][:, 0].T,
    lambda p: (p.T[:, None],),
)
"""Depthwise ``conv1d.weight [W, 1, taps]`` <-> ``[taps, W]``."""

CODES = Transform(
    "join blocks",
    lambda s: ((*s[:-1], s[-1] // 16, 16),),
    lambda a, s, dtype: a[0].reshape(s),
    lambda p: (p.reshape(*p.shape[:-1], -1, 16),),
    codes=BYTES,
)
"""MXFP4 ``*_blocks [E, O, I/32, 16]`` <-> ``codes [E, O, I/2]``."""

SCALES = Transform("scales", lambda s: (s,), lambda a, s, dtype: a[0], lambda p: (p,), codes=BYTES, check=_nan_scales)
"""MXFP4 ``*_scales [E, O, I/32]``, unchanged; a NaN scale is refused."""


@partial(jax.jit, static_argnames="dtype")
def _decode(blocks: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Blocks ``[O, I/32, 16]`` -> values ``[I, O]``, both nibble planes in the dtype of the result."""
    codes = blocks.reshape(blocks.shape[0], -1)
    planes = [plane(nibble, scales, dtype) for nibble in (codes & 15, codes >> 4)]
    return jnp.stack(planes, axis=-1).reshape(codes.shape[0], -1).T


@partial(jax.jit, static_argnames="dtype", donate_argnums=0)
def _decode_into(stack: jax.Array, index: int, blocks: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, _decode(blocks, scales, dtype), index, 0)


def decode(blocks: np.ndarray, scales: np.ndarray, shape: Shape, dtype: jnp.dtype) -> jax.Array:
    """One expert's matrix ``[I, O]``, or a layer's ``[E, I, O]`` expert by expert into one buffer.

    Exact in bfloat16 and wider; nothing wider than ``dtype`` is ever held.
    """
    dtype = jnp.dtype(dtype)
    if len(shape) == 2:
        return _decode(blocks, scales, dtype)
    stack = jnp.zeros(shape, dtype)
    for index in range(shape[0]):
        stack = _decode_into(stack, index, blocks[index], scales[index], dtype)
    return stack


def _pack_transposed(parameter: np.ndarray) -> Arrays:
    packed = mxfp4.pack(np.swapaxes(np.asarray(parameter, np.float32), -1, -2))
    return (*CODES.inverse(packed.codes), packed.scales)


DECODE = Transform(
    "decode MXFP4",
    lambda s: ((*s[:-2], s[-1], s[-2] // 32, 16), (*s[:-2], s[-1], s[-2] // 32)),
    lambda a, s, dtype: decode(a[0], a[1], s, dtype),
    _pack_transposed,
    codes=BYTES,
    check=_nan_scales,
)
"""MXFP4 blocks and scales <-> matrices ``[..., I, O]``. Reversible on values that MXFP4 can hold."""
