"""Which lossless rule accepts most. Chains only: a tree accepts more, but its verification is wider."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_jax.rules import ACCEPT
from dflash_jax.settings import SamplingParams
from experiments.laboratory.rows import Row, deviations, standard_error

TITLE = "The lossless chain rule that accepts most:"


@dataclass(frozen=True)
class Best:
    """The lossless chain rule that accepts most of one pair, block size and temperature.

    Attributes:
        second: the next one, None if there is no other.
        clear: whether the lead is more than two standard errors of the difference, prompt by prompt.
    """

    pair: str
    block_size: int
    temperature: float
    rule: str
    acceptance_length: float
    second: str | None
    second_acceptance_length: float | None
    clear: bool

    @property
    def words(self) -> str:
        """One line."""
        where = f"{self.pair}, block {self.block_size}, temperature {self.temperature:g}"
        lead = f"{self.rule} {self.acceptance_length:.2f} tokens/verify"
        if self.second is None:
            return f"{where}: {lead} (no other has a row)"
        doubt = "" if self.clear else ", within two standard errors"
        return f"{where}: {lead} (next: {self.second} {self.second_acceptance_length:.2f}{doubt})"


@dataclass(frozen=True)
class Pooled:
    """One rule over all pairs and block sizes at temperatures above 0."""

    rule: str
    verified_tokens: int
    verifies: int
    acceptance_length: float


def best_lossless(rows: Sequence[Row]) -> list[Best]:
    """Per pair, block size and temperature, in the order of the rows."""
    groups: dict[tuple[str, int, float], list[Row]] = {}
    for row in _chains(rows):
        groups.setdefault((row.pair, row.block_size, row.temperature), []).append(row)
    return [_best(group) for group in groups.values()]


def pooled_lossless(rows: Sequence[Row]) -> list[Pooled]:
    """What drawn text shows of every rule in all, the best first."""
    found: dict[str, list[Row]] = {}
    for row in _chains(rows):
        if not SamplingParams(row.temperature).greedy:
            found.setdefault(row.rule, []).append(row)
    sums = {rule: (sum(r.verified_tokens for r in some), sum(r.verifies for r in some)) for rule, some in found.items()}
    every = [Pooled(rule, tokens, verifies, tokens / verifies) for rule, (tokens, verifies) in sums.items()]
    return sorted(every, key=lambda pooled: -pooled.acceptance_length)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Both in words."""
    yield from (best.words for best in best_lossless(rows))
    if pooled := pooled_lossless(rows):
        each = (f"{one.rule} {one.acceptance_length:.3f} ({one.verified_tokens:,}/{one.verifies:,})" for one in pooled)
        yield f"all drawn text together: {', '.join(each)}"


def _chains(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.lossless and not row.plain and row.verifies and not ACCEPT[row.rule].budget]


def _best(rows: list[Row]) -> Best:
    first, *others = sorted(rows, key=lambda row: -row.acceptance_length)
    second = others[0] if others else None
    return Best(
        pair=first.pair,
        block_size=first.block_size,
        temperature=first.temperature,
        rule=first.rule,
        acceptance_length=first.acceptance_length,
        second=second and second.rule,
        second_acceptance_length=second and second.acceptance_length,
        clear=second is None or _ahead(first, second),
    )


def _ahead(first: Row, second: Row) -> bool:
    """Whether the difference of two acceptance lengths is more than two of its standard errors."""
    sides = [np.array([row.verified_tokens_by_prompt, row.verifies_by_prompt], float) for row in (first, second)]
    one, other = (deviations(*side) for side in sides)
    return bool(first.acceptance_length - second.acceptance_length > 2 * standard_error(one - other))
