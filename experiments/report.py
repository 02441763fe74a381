"""All that a run measured, the figures that follow from it, and its machine-readable twin."""

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.safetensors_file import write_text
from dflash_jax import metrics
from experiments.agreement import Agreement
from experiments.machine import Machine, Memory
from experiments.pair import Facts
from experiments.runs import NotComparable, Run, speedups
from experiments.timing import StepCosts


@dataclass(frozen=True)
class Compiled:
    """Compilation, apart from every other figure.

    Attributes:
        seconds, programs, hits: of what decodes; ``hits`` programs came from the persistent cache.
        measuring_s: seconds for the programs that only measure.
        while_timing: programs built during the timed repeats; anything but 0 spoils them.
    """

    seconds: float
    programs: int
    hits: int
    measuring_s: float
    while_timing: int


@dataclass(frozen=True)
class Report:
    """One run. What is None was not measured.

    Attributes:
        command: the line that repeats it.
        prompts_known: how many prompts there were to choose from.
    """

    command: str
    pair: Facts
    prompts_known: int
    machine: Machine
    compiled: Compiled
    memory: Memory
    speculative: Run
    plain: Run | None = None
    costs: StepCosts | None = None
    agreement: Agreement | None = None

    @property
    def block_size(self) -> int:
        return self.pair.block_size

    @property
    def acceptance_length(self) -> float:
        return metrics.acceptance_length(self.speculative.counts)

    @property
    def conditional(self) -> np.ndarray:
        spec = self.speculative
        return metrics.conditional_rates(spec.counts, spec.accepted, self.block_size, spec.widths)

    @property
    def acceptance_ratio(self) -> float:
        spec = self.speculative
        widths = self.pair.width if spec.widths is None else spec.widths
        return metrics.acceptance_ratio(spec.counts, spec.accepted, widths)

    @property
    def rounds_by_block_size(self) -> dict[str, int] | None:
        """Verifications of each block size, where they differ."""
        widths = self.speculative.widths
        if widths is None:
            return None
        sizes, numbers = np.unique(widths[self.speculative.counts > 0], return_counts=True)
        return {str(size): int(number) for size, number in zip(sizes, numbers, strict=True)}

    @property
    def histogram(self) -> np.ndarray:
        return metrics.histogram(self.speculative.counts, self.block_size)

    @property
    def verifies(self) -> int:
        return metrics.verifies(self.speculative.counts)

    @cached_property
    def not_comparable(self) -> tuple[str, ...]:
        """Why there is no speedup although both runs were made."""
        if self.plain is None:
            return ()
        try:
            speedups(self.plain, self.speculative)
        except NotComparable as error:
            return error.reasons
        return ()

    @property
    def speedup(self) -> tuple[float, float, float] | None:
        """Median, least and largest ratio of neighbouring repeats; None without rounds or a comparable baseline."""
        if self.plain is None or self.not_comparable or not (self.plain.rounds and self.speculative.rounds):
            return None
        return middle(speedups(self.plain, self.speculative))

    @property
    def break_even(self) -> float | None:
        """Median over neighbouring repeats of a round's time over a plain step's."""
        if self.speedup is None:
            return None
        pairs = zip(self.speculative.round_s, self.plain.round_s, strict=True)
        return float(np.median([metrics.break_even(round_s, step_s) for round_s, step_s in pairs]))

    @property
    def round_s(self) -> float:
        return float(np.median(self.speculative.round_s))

    @property
    def uniform_union(self) -> float:
        batch = self.speculative.conditions.batch
        return metrics.uniform_union(self.pair.experts, self.pair.experts_per_token, self.pair.width * batch)


def middle(values: list[float]) -> tuple[float, float, float]:
    """Median, least and largest."""
    return float(np.median(values)), float(min(values)), float(max(values))


def payload(report: Report) -> dict[str, Any]:
    """The report as JSON values; what was not measured is null."""
    spec, plain, costs = report.speculative, report.plain, report.costs
    found = {
        **asdict(report.pair),
        "agreement": report.agreement and report.agreement.share,
        "divergences": report.agreement and [asdict(each) for each in report.agreement.divergences],
        "acceptance_length": report.acceptance_length,
        "acceptance_histogram": report.histogram.tolist(),
        "acceptance_ratio": report.acceptance_ratio,
        "rounds_by_block_size": report.rounds_by_block_size,
        "position_rates": metrics.position_rates(spec.counts, spec.accepted, report.block_size).tolist(),
        "conditional_rates": report.conditional.tolist(),
        "verifies": report.verifies,
        "verified_tokens": int(spec.counts.sum()),
        "rounds": spec.rounds,
        "tokens": spec.tokens,
        "spec": _speed(spec),
        "plain": plain and _speed(plain),
        "spec_tok_s": middle(spec.rates)[0],
        "plain_tok_s": plain and middle(plain.rates)[0],
        "speedup": report.speedup and report.speedup[0],
        "speedup_spread": report.speedup and list(report.speedup[1:]),
        "not_comparable": list(report.not_comparable),
        "speedup_bound": spec.bound,
        "break_even": report.break_even,
        "ttft_s": spec.ttft_s,
        "round_s": report.round_s,
        "verify_ratio": costs and costs.ratio,
        "step_costs": costs and asdict(costs),
        "union_mean": spec.union,
        "union_one_token": plain and plain.union,
        "union_uniform": None if report.pair.adaptive else report.uniform_union or None,
        "compile_s": report.compiled.seconds,
        "compilations": report.compiled.programs,
        "compilations_from_cache": report.compiled.hits,
        "compilations_while_timing": report.compiled.while_timing,
        "compile_measuring_s": report.compiled.measuring_s,
        "memory_bytes": asdict(report.memory),
        **asdict(spec.conditions),
        "prompts": len(spec.texts),
        "prompt_hash": spec.conditions.prompts,
        "repeats": len(spec.repeats),
        "device": report.machine.device,
        "platform": report.machine.platform,
        "threads": report.machine.threads,
        "versions": report.machine.versions,
        "commit": report.machine.commit,
        "command": report.command,
    }
    return finite(found)


def _speed(run: Run) -> dict[str, Any]:
    return {
        "tok_s": run.rates,
        "end_to_end_tok_s": run.end_to_end_rates,
        "ttft_s": run.ttft_s,
        "itl_s": run.itl_s,
        "round_s": run.round_s,
        "cpus_busy": run.cpus_busy,
        "rounds": run.rounds,
        "tokens": run.tokens,
    }


def finite(value: Any) -> Any:
    """JSON has no nan and no infinity: what could not be computed is null."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(report: Report, path: Path) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(payload(report), indent=2) + "\n")
