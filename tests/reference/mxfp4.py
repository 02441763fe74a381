"""Every MXFP4 byte under scales from the smallest to the largest, decoded."""

import itertools
from pathlib import Path

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from weights import stream, write_golden

SEED = 61
SCALES = (0, 1, 100, 120, 126, 127, 128, 140, 200, 254)
EXPERTS, ROWS, GROUPS, BYTES = 5, 8, 4, 16  # 5 * 8 * 4 groups hold 10 scales times 256 bytes exactly once


def build(_name: str, folder: Path) -> None:
    """Write the blocks and scales in checkpoint layout, and the dense [E in out] float32 tensor."""
    pairs = list(itertools.product(SCALES, range(256 // BYTES)))
    order = stream(SEED, "order").permutation(len(pairs))
    scales = torch.tensor([pairs[index][0] for index in order], dtype=torch.uint8)
    first = torch.tensor([pairs[index][1] * BYTES for index in order])
    blocks = (first[:, None] + torch.arange(BYTES)).to(torch.uint8)
    blocks, scales = blocks.reshape(EXPERTS, ROWS, GROUPS, BYTES), scales.reshape(EXPERTS, ROWS, GROUPS)
    dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    dims = {"experts": EXPERTS, "rows": ROWS, "groups": GROUPS, "bytes": BYTES, "columns": GROUPS * BYTES * 2}
    observed = {
        "infinite": int(dense.isinf().sum()),
        "subnormal": int(((dense != 0) & (dense.abs() < torch.finfo(torch.float32).tiny)).sum()),
    }
    about = "all 256 code bytes under ten scale bytes, shuffled; subnormal and infinite results included"
    expected = {"blocks": blocks, "scales": scales, "dense": dense}
    write_golden(folder, "format", about, expected, 0.0, dims=dims, observed=observed)
