"""``x @ W.T`` for a weight stored as FP8 (E4M3): 8-bit values and the scales of 128 columns of a row.

Released files have one scale per 128 x 128 block (``weight_scale_inv``) or one per row (``weight_scale``). In memory
both become one per row and block of columns: 3% more bytes, and matrices of any height can be joined or sliced.
Activations are not quantised: released kernels do that, and differ from this by it.
"""

from kernels_pallas.fp8.reference import decode, matmul
from kernels_pallas.fp8.rounding import pack, round_to_fp8
from kernels_pallas.fp8.weight import BLOCK, LARGEST, Fp8

__all__ = ["BLOCK", "LARGEST", "Fp8", "decode", "matmul", "pack", "round_to_fp8"]
