"""A row of the accept-rule laboratory, and how its figures come out of runs and opinions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_jax import metrics
from dflash_jax.settings import SamplingParams
from experiments.laboratory.judge import Straying
from experiments.report import middle
from experiments.runs import Run, speedups

PLAIN = "plain"
PROOF = "tests/laws/test_exact.py"


@dataclass(frozen=True)
class Row:
    """One rule at one temperature, or plain decoding. Errors are standard errors over prompts, the texts of one prompt
    counted together; nan: not defined.

    Attributes:
        rule: its name, or :data:`PLAIN`.
        tokens: delivered, of all texts; ``verified_tokens``: those of rounds, over ``verifies`` rounds; both also by
            prompt.
        acceptance_length: their quotient.
        tok_s: median of the repeats, with the least and the largest.
        ratio: tok_s over plain decoding's in the same repeat, median with the least and the largest.
        verify_ratio: time of a verification of this block over a one-token step.
        union: distinct experts per mixture layer and round.
        proof: of a lossless rule, where it is proved that total variation and divergence are 0.
        total_variation, kl: of a lossy rule at temperatures above 0, mean over delivered tokens.
        not_argmax: of a lossy rule at temperature 0, share of delivered tokens that are not the target's argmax.
        perplexity: of the text to the target at temperature 1; ``perplexity_change``: over plain decoding's, minus 1.
    """

    pair: str
    family: str
    block_size: int
    temperature: float
    rule: str
    lossless: bool
    texts: int
    tokens: int
    verified_tokens: int
    verifies: int
    verified_tokens_by_prompt: list[int]
    verifies_by_prompt: list[int]
    acceptance_length: float
    acceptance_length_error: float
    tok_s: float
    tok_s_least: float
    tok_s_most: float
    ratio: float
    ratio_least: float
    ratio_most: float
    verify_ratio: float
    union: float
    proof: str | None
    total_variation: float | None
    kl: float | None
    not_argmax: float | None
    perplexity: float
    perplexity_change: float
    perplexity_change_error: float

    @property
    def plain(self) -> bool:
        return self.rule == PLAIN

    @property
    def label(self) -> str:
        """``lossless`` or ``LOSSY``; plain decoding is the measure itself."""
        return "-" if self.plain else "lossless" if self.lossless else "LOSSY"

    @property
    def kl_infinite(self) -> bool:
        """Whether an accepted draft lies outside the filters."""
        return self.kl is not None and math.isinf(self.kl)


@dataclass(frozen=True)
class Trial:
    """One decoder's repeats at one temperature, and what the target thinks of its texts.

    Attributes:
        runs: one per repeat, each of one repeat.
        surprise: per text, the sum over its tokens of their surprise.
        straying: per text; of lossless rules empty.
    """

    runs: tuple[Run, ...]
    surprise: tuple[float, ...]
    straying: tuple[Straying, ...]

    @property
    def different(self) -> tuple[Run, ...]:
        """The runs that say something new."""
        return different(self.runs)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every text."""
        return np.array([len(text) for run in self.different for text in run.texts])

    def by_prompt(self, values: Sequence[float]) -> np.ndarray:
        """One value per text, summed over the texts of a prompt, which are not independent of each other."""
        return np.array(values, float).reshape(len(self.different), -1).sum(axis=0)


def different(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Of a greedy run the first repeat, because the others say the same; else all, because each has its own seeds."""
    return tuple(runs[:1]) if runs[0].conditions.sampling.greedy else tuple(runs)


def row_of(
    trial: Trial,
    plain: Trial,
    *,
    pair: str,
    family: str,
    block_size: int,
    sampling: SamplingParams,
    rule: str,
    lossless: bool,
    verify_ratio: float,
) -> Row:
    """All figures of one decoder at one temperature; ``trial`` may be ``plain`` itself."""
    generations = [one for run in trial.different for repeat in run.repeats for one in repeat]
    tokens = trial.by_prompt([one.counts.sum() for one in generations])
    verifies = trial.by_prompt([metrics.verifies(one.counts) for one in generations])
    length, length_error = quotient(tokens, verifies)
    change, change_error = perplexity_change(trial, plain)
    said, greedy = int(trial.lengths.sum()), sampling.greedy
    variation = sum(one.total_variation for one in trial.straying) / said if trial.straying else None
    return Row(
        pair=pair,
        family=family,
        block_size=block_size,
        temperature=sampling.temperature,
        rule=rule,
        lossless=lossless,
        texts=len(trial.lengths),
        tokens=said,
        verified_tokens=int(tokens.sum()),
        verifies=int(verifies.sum()),
        verified_tokens_by_prompt=tokens.astype(int).tolist(),
        verifies_by_prompt=verifies.astype(int).tolist(),
        acceptance_length=length,
        acceptance_length_error=length_error,
        **_spread("tok_s", [rate for run in trial.runs for rate in run.rates]),
        **_spread("ratio", [each for both in zip(plain.runs, trial.runs, strict=True) for each in speedups(*both)]),
        verify_ratio=1.0 if rule == PLAIN else verify_ratio,
        union=float(np.mean([run.union for run in trial.different])),
        proof=PROOF if lossless and rule != PLAIN else None,
        total_variation=None if greedy else variation,
        kl=sum(one.kl for one in trial.straying) / said if trial.straying and not greedy else None,
        not_argmax=variation if greedy else None,
        perplexity=math.exp(sum(trial.surprise) / said),
        perplexity_change=change,
        perplexity_change_error=change_error,
    )


def quotient(tops: np.ndarray, bottoms: np.ndarray) -> tuple[float, float]:
    """Sum over sum, and its standard error if the pairs are independent (linearised); nan without a bottom."""
    if not bottoms.sum():
        return math.nan, math.nan
    value = tops.sum() / bottoms.sum()
    return float(value), standard_error(deviations(tops, bottoms))


def perplexity_change(trial: Trial, plain: Trial) -> tuple[float, float]:
    """Perplexity over that of plain decoding, minus 1, and its standard error; texts of one prompt are pairs, so that
    equal texts leave no error."""
    mine, theirs = ((one.by_prompt(one.surprise), one.by_prompt(one.lengths)) for one in (trial, plain))
    factor = math.exp(mine[0].sum() / mine[1].sum() - theirs[0].sum() / theirs[1].sum())
    return factor - 1, factor * standard_error(deviations(*mine) - deviations(*theirs))


def deviations(tops: np.ndarray, bottoms: np.ndarray) -> np.ndarray:
    """What each pair adds to the quotient's deviation."""
    return (tops - tops.sum() / bottoms.sum() * bottoms) / bottoms.sum()


def standard_error(deviations: np.ndarray) -> float:
    """Of a quotient, from what each pair adds to it; nan for one pair."""
    count = len(deviations)
    return float(np.sqrt(count / (count - 1) * (deviations**2).sum())) if count > 1 else math.nan


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_least", f"{name}_most"), middle(values), strict=True))
