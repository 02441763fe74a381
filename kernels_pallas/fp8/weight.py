"""The packed form of a matrix."""

import jax
from flax import struct

BLOCK = 128
"""Rows and columns that share one scale in the released block layout."""

LARGEST = 448.0
"""Largest value of E4M3 (OCP 8-bit Floating Point Specification, section 5)."""


@struct.dataclass
class Fp8:
    """A matrix ``[..., O, I]``: a value is its code times its scale.

    Attributes:
        codes: float8_e4m3fn ``[..., O, I]``.
        scales: float32 ``[..., O, ceil(I / 128)]``.
    """

    codes: jax.Array
    scales: jax.Array
