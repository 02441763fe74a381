"""The benchmark's figures as one JSON object and as tables."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.safetensors_file import write_text
from experiments.benchmark.contest import PLAIN, RATIOS, SPEC, Chosen, Contest, Duel, Entry, first_divergence
from experiments.report import finite

PROBES = {
    "loop_overhead": "a round of the loop over draft and verify jitted and called apart; reach 1.05",
    "bandwidth_share": "weights one plain token reads, over token time x copy bandwidth",
    "flatness": "slowest over fastest time per token over length, one capacity; reach 1.10",
    "cache_copies": "cache-shaped copies in the loop's program; reach 0",
}
KEYS = (*RATIOS, *PROBES)

UNDISTURBED = 0.95
"""Least CPU share of an entry at one thread that had its CPU to itself."""


@dataclass
class Result:
    """Everything that the tables and the JSON say.

    Attributes:
        chosen: best variant of each contestant at each thread setting.
        better: contestant -> its faster thread setting.
        probes: thread setting -> name of :data:`PROBES` -> value and whatever explains it.
        blocks: thread setting -> block size -> parts of a round (see ``probes.RoundProbe``).
        reasons: key -> why it is null.
        about: what the figures depend on (command, versions, cpu, prompts, ...).
    """

    contest: Contest
    threads: Sequence[int]
    chosen: Chosen
    better: Mapping[str, int]
    probes: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    blocks: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    calibration: dict[Entry, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def ratio(self, name: str, first_threads: int | None, second_threads: int | None) -> list[float]:
        """The ratios of neighbouring runs, both contestants at the settings given."""
        first, second = RATIOS[name]
        keys = (first, first_threads), (second, second_threads)
        if not all(key in self.chosen for key in keys):
            return []
        return self.contest.ratios.get(Duel(name, self.chosen[keys[0]], self.chosen[keys[1]]), [])

    def at(self, threads: int) -> dict[str, float | None]:
        """Every key at one thread setting."""
        found = {name: spread(self.ratio(name, threads, threads))["median"] for name in RATIOS}
        return found | {name: self.probes.get(threads, {}).get(name, {}).get("value") for name in PROBES}

    def headline(self) -> dict[str, float | None]:
        """Every key with each contestant at its better setting; of the copies, the most."""
        found = {
            name: spread(self.ratio(name, self.better.get(first), self.better.get(second)))["median"]
            for name, (first, second) in RATIOS.items()
        }
        owners = {"loop_overhead": SPEC, "bandwidth_share": PLAIN, "flatness": PLAIN}
        found |= {name: self.at(self.better[who])[name] for name, who in owners.items() if who in self.better}
        copies = [self.at(threads)["cache_copies"] for threads in self.threads]
        known = [each for each in copies if each is not None]
        return found | {"cache_copies": max(known) if known else None}

    @property
    def disturbed(self) -> list[Entry]:
        """Entries at one thread that did not have their CPU to themselves; their figures should not be quoted."""
        shares = {who: spread([each.cpu_share for each in seen]) for who, seen in self.contest.samples.items()}
        return [who for who, share in shares.items() if who.threads == 1 and (share["median"] or 1.0) < UNDISTURBED]


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Median, least, largest and number; nulls without a value."""
    valid = [value for value in values if math.isfinite(value)]
    if not valid:
        return {"median": None, "min": None, "max": None, "runs": 0}
    return {"median": statistics.median(valid), "min": min(valid), "max": max(valid), "runs": len(valid)}


def payload(result: Result) -> dict[str, Any]:
    """JSON values; null is never silent: ``why_null`` says why."""
    headline = {name: result.headline().get(name) for name in KEYS}
    missing = {name: result.reasons.get(name, "not measured") for name, value in headline.items() if value is None}
    return {
        **headline,
        "why_null": missing,
        "headline_threads": dict(result.better),
        "headline_variants": {who: result.chosen[who, t].label for who, t in result.better.items()},
        "threads": {
            str(threads): {
                **result.at(threads),
                "variants": {who: each.label for (who, t), each in result.chosen.items() if t == threads},
                "probes": result.probes.get(threads, {}),
                "blocks": {str(block): block_row(result, threads, block) for block in result.blocks.get(threads, {})},
            }
            for threads in result.threads
        },
        "ratios": [
            {
                "ratio": duel.ratio,
                "first": name_of(duel.first),
                "second": name_of(duel.second),
                **spread(values),
                "pairs": values,
            }
            for duel, values in result.contest.ratios.items()
        ],
        "contestants": [contestant(result, who) for who in result.contest.samples],
        "calibration": {name_of(who): rate for who, rate in result.calibration.items()},
        "failures": {name_of(who): words for who, words in result.contest.failures.items()},
        "disturbed": [name_of(who) for who in result.disturbed],
        **result.about,
    }


def name_of(who: Entry) -> str:
    """One line that names an entry."""
    return f"{who.contestant} [{who.label}] threads {who.threads}".replace(" []", "")


def contestant(result: Result, who: Entry) -> dict[str, Any]:
    """What one entry did, and whether its token ids are those of our plain decoding."""
    samples = result.contest.samples[who]
    references = reference_texts(result)
    differing = {}
    for sample in samples:
        if (place := first_divergence(sample.tokens, references.get(sample.prompt, sample.tokens))) is not None:
            differing[sample.prompt] = place
    tried = {sample.prompt for sample in samples}
    return {
        "contestant": who.contestant,
        "threads": who.threads,
        "variant": dict(who.variant),
        "tok_s": spread([sample.rate for sample in samples]),
        "tokens_per_round": spread([sample.tokens_per_round for sample in samples])["median"],
        "first_token_s": spread([sample.first_s for sample in samples])["median"],
        "cpu_share": spread([sample.cpu_share for sample in samples])["median"],
        "prompts": len(tried),
        "prompts_equal": len(tried) - len(differing),
        "first_divergence": {str(prompt): place for prompt, place in sorted(differing.items())},
    }


def reference_texts(result: Result) -> dict[int, tuple[int, ...]]:
    """Prompt -> token ids of our plain decoding, at the first setting that decoded it."""
    found: dict[int, tuple[int, ...]] = {}
    for who, samples in result.contest.samples.items():
        if who.contestant == PLAIN:
            for sample in samples:
                found.setdefault(sample.prompt, sample.tokens)
    return found


def block_row(result: Result, threads: int, block: int) -> dict[str, Any]:
    """Why a block size wins or loses: tokens per round against what a round costs, in plain steps."""
    plain = result.chosen[PLAIN, threads]
    entries = [who for who in result.contest.samples if who.contestant == SPEC and who.threads == threads]
    who = next((who for who in entries if dict(who.variant)["block"] == block), None)
    ratio = spread(result.contest.ratios.get(Duel("spec_over_plain", who, plain), [])) if who else spread([])
    samples = result.contest.samples[who] if who else []
    parts = result.blocks[threads][block]
    step = parts.get("plain_step_s")
    return {
        "spec_over_plain": ratio,
        "tokens_per_round": spread([sample.tokens_per_round for sample in samples])["median"],
        "union": spread([sample.union for sample in samples if sample.union is not None])["median"],
        "round_in_plain_steps": parts["round_s"] / step if step else None,
        "draft_in_plain_steps": parts["draft_s"] / step if step else None,
        **parts,
    }


def write_json(result: Result, path: Path) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(finite(payload(result)), indent=2) + "\n")
