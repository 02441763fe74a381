"""The sampling filters of transformers, in the order in which its ``generate`` applies them."""

import itertools
from pathlib import Path

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from weights import TOLERANCE, stream, write_golden

SEED, VOCABULARY, POSITIONS, PADDING = 71, 43, 5, 3
# Exact in binary: what float32 settings hold is what the reference computes with.
TEMPERATURES, TOP_KS, TOP_PS, MIN_PS = (0.5, 1.0, 2.25), (0, 1, 7, 43), (0.375, 0.90625, 1.0), (0.0, 0.09375, 1.0)
MARGIN = 1e-4


def warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    """Those that ``generate`` would put together: none that asks for nothing."""
    chosen = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    chosen += [TopKLogitsWarper(top_k)] if top_k else []
    chosen += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    chosen += [MinPLogitsWarper(min_p)] if min_p else []
    return LogitsProcessorList(chosen)


def check_margins(logits: torch.Tensor, row: tuple[float, int, float, float], kept: torch.Tensor) -> None:
    """Raise if any limit moved by the margin would keep other tokens."""
    temperature, top_k, top_p, min_p = row
    for p, m in itertools.product((-MARGIN, 0, MARGIN), repeat=2):
        moved = (top_p + p if top_p < 1 else top_p, min_p * (1 + m) if min_p < 1 else min_p)
        if not torch.equal(warpers(temperature, top_k, *moved)(None, logits).isfinite(), kept):
            raise ValueError(f"{row}: a token within {MARGIN} of a limit; take another seed")


def build(_name: str, folder: Path) -> None:
    """Logits without ties, the last ones of two positions at -inf, and their distribution under every setting."""
    finite = torch.from_numpy(3 * stream(SEED, "logits").standard_normal((POSITIONS, VOCABULARY))).float().double()
    padding = torch.tensor([0] * (POSITIONS - 2) + [PADDING] * 2)
    logits = torch.where(torch.arange(VOCABULARY) < VOCABULARY - padding[:, None], finite, -torch.inf)
    rows = list(itertools.product(TEMPERATURES, TOP_KS, TOP_PS, MIN_PS))
    found = []
    for row in rows:
        scores = warpers(*row)(None, logits)
        check_margins(logits, row, scores.isfinite())
        found.append(scores.softmax(-1))
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    p = torch.stack(found)
    dims = {"settings": len(rows), "positions": POSITIONS, "vocabulary": VOCABULARY}
    observed = {"tokens_left": sorted(set((p > 0).sum(-1).flatten().tolist()))}
    about = "temperature, top-k, top-p and min-p in every combination, as transformers' generate orders them"
    expected = {"logits": finite, "padding": padding, "p": p, **settings}
    write_golden(folder, "sampling", about, expected, TOLERANCE, dims=dims, observed=observed)
