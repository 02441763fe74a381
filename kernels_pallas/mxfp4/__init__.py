"""``x @ W.T`` for a weight stored as MXFP4: 4-bit values in blocks of 32 that share one power-of-two scale.

Layout, as the released gpt-oss checkpoints have it (OCP Microscaling Formats v1.0; transformers
``integrations/mxfp4.py``): output-major; byte j of a row holds value 2j in its low nibble and value 2j+1 in its
high nibble; a nibble is sign, two exponent bits, one mantissa bit (E2M1); a scale byte s means ``2**(s - 127)``.
The byte 255 is NaN in the standard; it is decoded as such here and refused when a checkpoint is loaded.
"""

from collections.abc import Callable

from kernels_pallas.mxfp4 import planes, reference
from kernels_pallas.mxfp4.weight import BLOCK, Mxfp4, pack

IMPLEMENTATIONS: dict[str, Callable] = {
    "reference": reference.matmul,
    "planes": planes.matmul,
}

decode = reference.decode
matmul = planes.matmul

__all__ = ["BLOCK", "IMPLEMENTATIONS", "Mxfp4", "decode", "matmul", "pack"]
