"""A drafter at several block sizes or in several trees: what was measured, and what one run predicts of the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax import metrics
from experiments.report import Report, middle
from experiments.summary import warnings
from experiments.timing import StepCosts


@dataclass(frozen=True)
class Measured:
    """What a sweep reads off one run.

    Attributes:
        acceptance_length: verified_tokens / verifies.
        tok_s, speedup: median with the least and the largest of the repeats; plain_tok_s: of plain decoding in turn.
        verify_ratio: time of a verification of this width over a one-token step; round_s: time of a round.
        union: distinct experts per mixture layer that a verification reads.
    """

    verified_tokens: int
    verifies: int
    acceptance_length: float
    tok_s: tuple[float, float, float]
    plain_tok_s: float
    speedup: tuple[float, float, float]
    verify_ratio: float
    round_s: float
    union: float


def measured(report: Report) -> dict[str, Any]:
    """The fields of :class:`Measured`.

    Raises:
        ValueError: if nothing was verified.
    """
    if report.costs is None or report.speedup is None:
        raise ValueError(
            f"{report.pair.names[0]}: the first text ends with its first token, nothing is verified; take other "
            "--prompts or another --seed"
        )
    spec = report.speculative
    return dict(
        verified_tokens=int(spec.counts.sum()),
        verifies=report.verifies,
        acceptance_length=report.acceptance_length,
        tok_s=middle(spec.rates),
        plain_tok_s=middle(report.plain.rates)[0],
        speedup=report.speedup,
        verify_ratio=report.costs.ratio,
        round_s=report.round_s,
        union=spec.union,
    )


def warned(reports: Sequence[Report]) -> tuple[str, ...]:
    """What a reader of any of the reports should know, each once: the summary's words without label and line breaks, as
    a file has them."""
    lines = [" ".join(line.split()) for report in reports for line in warnings(report)]
    return tuple(dict.fromkeys(line.removeprefix("warning ") for line in lines))


@dataclass(frozen=True)
class Block(Measured):
    """One block size. What was not predicted is None: ``predicted_*`` are from the run at the trained block."""

    size: int
    predicted_length: float | None
    predicted_tok_s: float | None
    predicted_speedup: float | None


@dataclass(frozen=True)
class BlockSweep:
    """One pair.

    Attributes:
        trained: the block size that the drafter was trained at; ``conditional``, ``costs`` and ``round_s`` are of it.
        sampling: how tokens were drawn, in words.
        blocks: in increasing order.
        warnings: what a reader should know before believing the figures.
    """

    names: tuple[str, str]
    family: str
    trained: int
    prompts: int
    prompt_hash: str
    sampling: str
    conditional: tuple[float, ...]
    costs: StepCosts
    round_s: float
    blocks: tuple[Block, ...]
    warnings: tuple[str, ...]

    @property
    def predicted(self) -> Block | None:
        """The block of the largest predicted speedup, None if none was predicted."""
        some = [block for block in self.blocks if block.predicted_speedup is not None]
        return max(some, key=lambda block: block.predicted_speedup, default=None)

    @property
    def measured(self) -> Block:
        """The block of the largest measured speedup."""
        return max(self.blocks, key=lambda block: block.speedup[0])

    @property
    def loss(self) -> float | None:
        """Share of the best measured speedup that the predicted block misses."""
        return None if self.predicted is None else 1 - self.predicted.speedup[0] / self.measured.speedup[0]


def round_of(costs: StepCosts, round_s: float, size: int) -> float:
    """Predicted seconds of a round of ``size`` tokens; linear in the verification's width."""
    verify = costs.step_s + (costs.verify_s - costs.step_s) * (size - 1) / (costs.width - 1)
    return round_s - costs.verify_s + verify


def predict(report: Report, size: int) -> tuple[float, float, float] | None:
    """Tokens per verification, tok/s and speedup of another block size; None above the report's own."""
    if size > report.block_size:
        return None
    length = metrics.expected_length(report.conditional, size)
    tok_s = length / round_of(report.costs, report.round_s, size)
    return length, tok_s, tok_s * float(np.median(report.plain.round_s))


def block_of(report: Report, predicted: tuple[float, float, float] | None) -> Block:
    """What was predicted and what was measured of one block size."""
    length, tok_s, speedup = predicted or (None, None, None)
    return Block(
        **measured(report),
        size=report.block_size,
        predicted_length=length,
        predicted_tok_s=tok_s,
        predicted_speedup=speedup,
    )
