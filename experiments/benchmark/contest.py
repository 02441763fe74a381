"""Who runs against whom, in which order: every ratio comes from neighbouring runs on the same prompt."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from experiments.benchmark.pipe import Refused

PLAIN, SPEC = "plain", "spec"
RATIOS = {
    "plain_over_transformers": (PLAIN, "transformers"),
    "spec_over_plain": (SPEC, PLAIN),
    "spec_over_transformers_dflash": (SPEC, "transformers_dflash"),
    "spec_over_zlab_dflash": (SPEC, "zlab_dflash"),
    "spec_over_llamacpp": (SPEC, "llamacpp"),
}
"""Name of a ratio of tokens per second -> its two contestants."""


class Player(Protocol):
    """What can be asked to decode: a :class:`~experiments.benchmark.pipe.Child`, or a stand-in."""

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Entry:
    """A contestant in one of its variants at one thread setting. ``variant``: sorted ``(option, value)`` pairs."""

    contestant: str
    threads: int
    variant: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        return ", ".join(f"block {value}" if name == "block" else str(value) for name, value in self.variant)


def entry(contestant: str, threads: int, variant: Mapping[str, Any]) -> Entry:
    return Entry(contestant, threads, tuple(sorted(variant.items())))


@dataclass(frozen=True)
class Sample:
    """One decoding of one prompt.

    Attributes:
        rate: tokens per second after the first: ``(N - 1) / (time of N tokens - time of 1 token)``; nan if noise made
            that difference vanish.
        tokens_per_round: ``(N - 1) / rounds``, nan if the contestant does not count its rounds.
        cpu_share: CPU seconds / (wall seconds x threads): below 1, others had the CPUs or threads waited.
        first_s: time of 1 token, the prompt's.
        union: mean distinct experts per layer and round, if known.
    """

    prompt: int
    rate: float
    tokens_per_round: float
    cpu_share: float
    first_s: float
    tokens: tuple[int, ...]
    union: float | None = None


@dataclass(frozen=True)
class Duel:
    """Two entries whose ratio, first over second, is wanted; ``ratio`` is a name of :data:`RATIOS`."""

    ratio: str
    first: Entry
    second: Entry


@dataclass
class Contest:
    """The players, and everything that was measured.

    Attributes:
        players: (contestant, threads) -> who decodes it.
        prompts: token ids.
        new_tokens: N, for every contestant alike.
        seconds: what the last run of an entry took in all.
        failures: entries that could not decode, and their words.
    """

    players: Mapping[tuple[str, int], Player]
    prompts: Sequence[list[int]]
    new_tokens: int
    samples: dict[Entry, list[Sample]] = field(default_factory=dict)
    seconds: dict[Entry, float] = field(default_factory=dict)
    ratios: dict[Duel, list[float]] = field(default_factory=dict)
    failures: dict[Entry, str] = field(default_factory=dict)

    def play(self, who: Entry, prompt: int, tokens: int | None = None) -> Sample:
        """Decode one prompt: 1 token, then N."""
        player, count = self.players[who.contestant, who.threads], tokens or self.new_tokens
        request = dict(method=who.contestant, prompt=self.prompts[prompt], **dict(who.variant))
        started = time.monotonic()
        one = player.ask("generate", tokens=1, **request)
        many = player.ask("generate", tokens=count, **request)
        self.seconds[who] = time.monotonic() - started
        return sample_of(prompt, one, many, who.threads)

    def calibrate(
        self,
        contestant: str,
        threads: int,
        options: Mapping[str, Sequence[Any]],
        *,
        tokens: int,
        runs: int,
        until: float = math.inf,
    ) -> tuple[Entry, dict[Entry, float]]:
        """The fastest variant, each option in turn over all its values while the others stay; and every rate seen.

        Args:
            until: of :func:`time.monotonic`; past it no further value is tried.

        Raises:
            Refused: if the contestant cannot decode at all.
        """
        chosen = {name: values[0] for name, values in options.items() if values}
        seen: dict[Entry, float] = {}
        for name, values in options.items():
            for value in values:
                who = entry(contestant, threads, {**chosen, name: value})
                if who not in seen and not (seen and time.monotonic() > until):
                    rates = [self.play(who, 0, tokens).rate for _ in range(runs + 1)][1:]  # the first warms up
                    seen[who] = statistics.median(_finite(rates) or [0.0])
            if values:
                chosen = dict(max(seen, key=lambda who: seen[who]).variant)
        best = entry(contestant, threads, chosen)
        if not seen:
            self.play(best, 0, tokens)
            seen[best] = self.play(best, 0, tokens).rate
        return best, seen

    def run(self, duels: Sequence[Duel], deadline: float, cycles: int, note: Callable[[str], None]) -> int:
        """Every duel once per cycle, one prompt a cycle, who goes first alternating; returns the cycles begun.

        A duel that would pass the ``deadline`` (of :func:`time.monotonic`) is left out, except its first.
        """
        for cycle in range(cycles):
            played = 0
            for duel in self.open(duels):
                cost = self.seconds.get(duel.first, 0.0) + self.seconds.get(duel.second, 0.0)
                if duel in self.ratios and time.monotonic() + cost > deadline:
                    continue
                note(f"{duel.ratio}, threads {duel.first.threads} and {duel.second.threads}")
                self._fight(duel, cycle % len(self.prompts), reverse=cycle % 2 == 1)
                played += 1
            if not played:
                return cycle
        return cycles

    def open(self, duels: Sequence[Duel]) -> Iterator[Duel]:
        """The duels neither of whose entries has failed."""
        return (duel for duel in duels if not {duel.first, duel.second} & set(self.failures))

    def _fight(self, duel: Duel, prompt: int, reverse: bool) -> None:
        order = (duel.second, duel.first) if reverse else (duel.first, duel.second)
        rates = {}
        for who in order:
            try:
                sample = self.play(who, prompt)
            except Refused as refusal:
                self.failures[who] = str(refusal)
                return
            self.samples.setdefault(who, []).append(sample)
            rates[who] = sample.rate
        ratio = rates[duel.first] / rates[duel.second]
        if math.isfinite(ratio):
            self.ratios.setdefault(duel, []).append(ratio)


def sample_of(prompt: int, one: Mapping[str, Any], many: Mapping[str, Any], threads: int) -> Sample:
    """From the answers for 1 token and for N."""
    more, seconds = len(many["tokens"]) - 1, many["seconds"] - one["seconds"]
    cpu = many.get("cpu_seconds")
    return Sample(
        prompt=prompt,
        rate=more / seconds if seconds > 0 and more > 0 else math.nan,
        tokens_per_round=more / many["rounds"] if many.get("rounds") else math.nan,
        cpu_share=math.nan if cpu is None else cpu / (many["seconds"] * threads),
        first_s=one["seconds"],
        tokens=tuple(many["tokens"]),
        union=many.get("union"),
    )


Chosen = Mapping[tuple[str, int], Entry]
"""(contestant, threads) -> its best variant at that setting."""


def opening(chosen: Chosen, blocks: Mapping[int, Sequence[Entry]]) -> list[Duel]:
    """What settles our own best block and setting: every block against plain decoding, and plain against transformers.

    Args:
        blocks: per thread setting, our speculative decoding at every block size.
    """
    duels = []
    for threads, entries in blocks.items():
        duels += [Duel("spec_over_plain", each, chosen[PLAIN, threads]) for each in entries]
        if ("transformers", threads) in chosen:
            pair = chosen[PLAIN, threads], chosen["transformers", threads]
            duels.append(Duel("plain_over_transformers", *pair))
    return duels


def closing(chosen: Chosen, better: Mapping[str, int]) -> list[Duel]:
    """The rest: our best block against every peer at every setting, and every ratio with both at their better setting.

    Args:
        better: contestant -> the thread setting at which it was faster.
    """
    duels = []
    for ratio, (first, second) in RATIOS.items():
        settings = [(t, t) for t in sorted({threads for _, threads in chosen})]
        if first in better and second in better:
            settings.append((better[first], better[second]))
        pairs = [((first, a), (second, b)) for a, b in settings]
        duels += [Duel(ratio, chosen[a], chosen[b]) for a, b in pairs if a in chosen and b in chosen]
    return list(dict.fromkeys(duels))


def median_rate(samples: Sequence[Sample]) -> float:
    """Median tokens per second; nan without a valid sample."""
    return statistics.median(_finite([sample.rate for sample in samples]) or [math.nan])


def first_divergence(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs; None if all are equal."""
    if list(tokens) == list(reference):
        return None
    pairs = enumerate(zip(tokens, reference, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(tokens), len(reference)))


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
