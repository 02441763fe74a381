"""Timed runs that may be compared: the same prompts under the same conditions, decoders in turn, repeated."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import jax
import numpy as np

from dflash_jax import metrics
from dflash_jax.generate import Decoder
from dflash_jax.generation import Generation
from dflash_jax.settings import GREEDY, SamplingParams, derived_seed
from experiments.pair import Pair
from experiments.prompts import fingerprint

STRAY_CPUS = 0.25
"""CPUs that may be busy besides those computed on: Python's own threads, the system's on its behalf."""


class NotComparable(ValueError):
    """Two runs whose ratio would mean nothing. ``reasons``: what differs."""

    def __init__(self, reasons: Sequence[str]):
        self.reasons = tuple(reasons)
        super().__init__("; ".join(reasons))


@dataclass(frozen=True)
class Conditions:
    """What must be equal before one run's speed is divided by another's.

    Attributes:
        dtype: of weights and caches; ``expert_format``: how the routed experts are held.
        batch: rows decoded together.
        prompts: fingerprint of their token ids, in order.
        stop: ids that end a row; ``stop_strings``: strings that do.
        temperature, top_k, top_p, min_p, seed: how tokens are drawn; prompt i has a seed made of the seed and i.
    """

    dtype: str
    expert_format: str
    batch: int
    prompts: str
    max_new_tokens: int
    stop: tuple[int, ...]
    device: str
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = 0
    stop_strings: tuple[str, ...] = ()

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)


@dataclass(frozen=True)
class Run:
    """One decoder's repeats.

    Attributes:
        repeats: ``repeats[i]`` holds a :class:`Generation` per batch of prompts.
        cpus_busy: CPU seconds of the whole process per second of generating, prompts included, each repeat.
    """

    name: str
    conditions: Conditions
    repeats: tuple[tuple[Generation, ...], ...]
    cpus_busy: tuple[float, ...] = ()

    @property
    def texts(self) -> list[list[int]]:
        """Delivered ids per prompt, of the first repeat."""
        return self.texts_of_repeats[0]

    @cached_property
    def texts_of_repeats(self) -> list[list[list[int]]]:
        """Delivered ids per repeat and prompt."""
        return [[row for generation in repeat for row in generation.tokens] for repeat in self.repeats]

    @property
    def different(self) -> list[Generation]:
        """Generations that tell something new of rounds: those of the first repeat, or where the block size follows
        acceptance and the clock, of all."""
        adaptive = any(generation.widths is not None for generation in self.repeats[0])
        return [each for repeat in (self.repeats if adaptive else self.repeats[:1]) for each in repeat]

    @property
    def tokens(self) -> int:
        """Delivered tokens of one repeat, all prompts."""
        return sum(map(len, self.texts))

    @property
    def rounds(self) -> int:
        """Rounds of the loop in one repeat; rows of a batch share them."""
        return self._rounds(self.repeats[0])

    @property
    def rates(self) -> list[float]:
        """Tokens per second, each repeat: those after each row's first / seconds of the rounds; nan without a round."""
        return [
            sum(int(each.counts.sum()) for each in repeat) / self._seconds(repeat) if self._rounds(repeat) else math.nan
            for repeat in self.repeats
        ]

    @property
    def end_to_end_rates(self) -> list[float]:
        """Tokens per second of each repeat, prompts included."""
        return [
            sum(len(row) for each in repeat for row in each.tokens)
            / (self._seconds(repeat) + sum(each.ttft_s for each in repeat))
            for repeat in self.repeats
        ]

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token of a batch, median."""
        return float(np.median([each.ttft_s for repeat in self.repeats for each in repeat]))

    @property
    def itl_s(self) -> float:
        """Seconds between two tokens of the longest row, mean of a generation, median over all; nan without any."""
        gaps = [each.decode_s / (max(map(len, each.tokens)) - 1) for each in self._decoding()]
        return float(np.median(gaps)) if gaps else float("nan")

    @property
    def round_s(self) -> list[float]:
        """Seconds per round of each repeat; nan without a round."""
        return [
            self._seconds(repeat) / self._rounds(repeat) if self._rounds(repeat) else math.nan
            for repeat in self.repeats
        ]

    @property
    def counts(self) -> np.ndarray:
        return metrics.join([generation.counts for generation in self.different])

    @property
    def accepted(self) -> np.ndarray:
        return metrics.join([generation.accepted for generation in self.different])

    @property
    def widths(self) -> np.ndarray | None:
        """Block size of every entry of ``counts``, where they differ."""
        if any(generation.widths is None for generation in self.different):
            return None
        return metrics.join([np.broadcast_to(each.widths, each.counts.shape) for each in self.different])

    @property
    def union(self) -> float:
        """Distinct experts that a round's tokens chose, mean over rounds and mixture layers; nan for dense networks."""
        some = [each for each in self.different if each.rounds and each.union.size]
        if not some:
            return float("nan")
        return float(np.average([each.union.mean() for each in some], weights=[each.rounds for each in some]))

    @property
    def bound(self) -> float:
        """See :func:`dflash_jax.metrics.speedup_bound`."""
        return metrics.speedup_bound([generation.counts for generation in self.different])

    def _decoding(self) -> list[Generation]:
        return [each for repeat in self.repeats for each in repeat if each.rounds]

    @staticmethod
    def _rounds(repeat: Sequence[Generation]) -> int:
        return sum(generation.rounds for generation in repeat)

    @staticmethod
    def _seconds(repeat: Sequence[Generation]) -> float:
        return sum(generation.decode_s for generation in repeat)


def crowding(found: Sequence[Run], threads: int) -> str | None:
    """What to say if the process kept more CPUs busy than it says it computes on, by threads that are not jax's; None
    if not. Threads that take turns with jax's on the same CPU are not seen so.

    Args:
        threads: that jax computes on.
    """
    most = max((busy for run in found for busy in run.cpus_busy), default=0.0)
    if most <= threads + STRAY_CPUS:
        return None
    return f"{most:.1f} CPUs were busy while {threads} should compute: do not trust the speeds"


def differences(one: Run, other: Run) -> list[str]:
    """What differs between the conditions of two runs, and the number of repeats; empty if they may be compared."""
    mine, theirs = (asdict(run.conditions) | {"repeats": len(run.repeats)} for run in (one, other))
    return [
        f"{name.replace('_', ' ')}: {mine[name]} ({one.name}) and {theirs[name]} ({other.name})"
        for name in mine
        if mine[name] != theirs[name]
    ]


def speedups(plain: Run, speculative: Run) -> list[float]:
    """Ratio of tokens per second of every two neighbouring repeats.

    Raises:
        NotComparable: if the two ran under different conditions.
    """
    if reasons := differences(plain, speculative):
        raise NotComparable(reasons)
    return [fast / slow for slow, fast in zip(plain.rates, speculative.rates, strict=True)]


def conditions_of(
    pair: Pair,
    batches: Sequence[Sequence[list[int]]],
    max_new_tokens: int,
    sampling: SamplingParams = GREEDY,
    stop_strings: tuple[str, ...] = (),
) -> Conditions:
    """The conditions of a run on the default device."""
    return Conditions(
        dtype=pair.dtype,
        expert_format=pair.expert_format,
        batch=len(batches[0]),
        prompts=fingerprint([prompt for batch in batches for prompt in batch]),
        max_new_tokens=max_new_tokens,
        stop=pair.stop,
        device=jax.devices()[0].device_kind,
        stop_strings=stop_strings,
        **asdict(sampling),
    )


def settings_of(sampling: SamplingParams, batches: Sequence[Sequence[list[int]]]) -> list[list[SamplingParams]]:
    """Per batch and row: the same settings, and a seed of each prompt's own."""
    first = np.cumsum([0, *map(len, batches)]).tolist()
    return [
        [replace(sampling, seed=derived_seed(sampling.seed, start + row)) for row in range(len(batch))]
        for start, batch in zip(first, batches, strict=False)
    ]


def warm_up(
    decoder: Decoder,
    batches: Sequence[Sequence[list[int]]],
    max_new_tokens: int,
    stop: Sequence[int],
    sampling: SamplingParams = GREEDY,
) -> Generation:
    """Compile all that a run will need. Returns what the first batch says."""
    for batch in batches:
        decoder.warm_up(batch, max_new_tokens, stop, sampling)
    return decoder.generate(batches[0], max_new_tokens, stop, settings_of(sampling, batches)[0])


def run_interleaved(
    decoders: Mapping[str, Decoder],
    batches: Sequence[Sequence[list[int]]],
    conditions: Conditions,
    *,
    repeats: int,
    after_each: Callable[[str, Generation], None] = lambda name, generation: None,
    between: Callable[[], None] = lambda: None,
    before_repeat: Callable[[], None] = lambda: None,
) -> dict[str, Run]:
    """A B A B ...: every batch is decoded with each decoder in turn, so that a machine that grows slower or faster does
    so for all of them.

    Args:
        after_each: called with the decoder's name and what came out, after every generation.
        between: called after each turn of all decoders; ``before_repeat``: before the first turn of each repeat.
    """
    found: dict[str, list[tuple[Generation, ...]]] = {name: [] for name in decoders}
    busy: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(repeats):
        before_repeat()
        repeat: dict[str, list[Generation]] = {name: [] for name in decoders}
        clocks = {name: np.zeros(2) for name in decoders}
        for batch, sampling in zip(batches, settings_of(conditions.sampling, batches), strict=True):
            for name, decoder in decoders.items():
                started = _clocks()
                generation = decoder.generate(batch, conditions.max_new_tokens, conditions.stop, sampling)
                clocks[name] += _clocks() - started
                repeat[name].append(generation)
                after_each(name, generation)
            between()
        for name, generations in repeat.items():
            found[name].append(tuple(generations))
            cpu_s, wall_s = clocks[name]
            busy[name].append(float(cpu_s / wall_s))
    return {name: Run(name, conditions, tuple(found[name]), tuple(busy[name])) for name in decoders}


def _clocks() -> np.ndarray:
    """CPU seconds of the process, all its threads together, and seconds."""
    return np.array([time.process_time(), time.perf_counter()])
