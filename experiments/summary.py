"""The one-screen summary: the same lines in the same order every time, and only those that were measured."""

import math
from collections.abc import Iterator

import numpy as np

from dflash_jax import metrics
from experiments.agreement import Agreement
from experiments.definitions import LABEL, wrapped
from experiments.pair import Facts
from experiments.report import Report, middle
from experiments.runs import Conditions, Run, crowding

SUSPICIOUS_ACCEPTANCE = 1.2
WORTH_TRYING = 1.05
"""Predicted gain from which another block size is named."""


def lines(report: Report) -> list[str]:
    """The summary."""
    return [_line(label, text) for label, text in _rows(report)]


def warnings(report: Report) -> list[str]:
    """What a reader should know before believing the figures, a line each."""
    found = []
    if report.verifies and report.acceptance_length < SUSPICIOUS_ACCEPTANCE:
        found.append(
            f"acceptance {report.acceptance_length:.2f} is next to none; usual causes: another mask token id, taps off "
            "by one layer, a missing bias, rope or YaRN settings, the drafter's sliding window, or text unlike the "
            "drafter's training (chat template, thinking mode, language)"
        )
    if report.agreement and any(not each.tie for each in report.agreement.divergences):
        found.append("speculative and plain text differ where rounding cannot explain it: do not trust either speed")
    if report.compiled.while_timing:
        found.append(f"{report.compiled.while_timing} programs were compiled while timing: the speeds are too low")
    if words := crowding([run for run in (report.plain, report.speculative) if run], report.machine.threads):
        found.append(words)
    sampling = report.speculative.conditions.sampling
    if sampling.greedy and report.pair.lossless and (cut := filters(sampling.top_k, sampling.top_p, sampling.min_p)):
        found.append(f"{', '.join(cut)}: without effect at temperature 0; give --temperature to draw tokens")
    return [_line("warning", text) for text in found]


def _line(label: str, text: str) -> str:
    """A line, wrapped below its label; the command to repeat the run stays whole."""
    head = f"{label:<{LABEL}}"
    return head + text if label == "reproduce" else wrapped(head, text)


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    yield from _head(report)
    if report.plain:
        yield "baseline", _speed(report.plain)
    yield "speculative", _speed(report.speculative)
    yield from _speedup(report)
    yield from _acceptance(report)
    if report.agreement:
        yield from _agreement(report.agreement)
    elif report.plain:
        yield "agreement", _no_agreement(report.pair)
    yield from _time(report)
    yield from _experts(report)
    yield from _memory(report)
    if reason := why_not_faster(report):
        yield "why not faster?", reason
    yield "reproduce", report.command


def drawn(conditions: Conditions) -> str:
    """How tokens are drawn, in the words of the command line."""
    sampling = conditions.sampling
    if sampling.greedy:
        return "greedy"
    cut = filters(sampling.top_k, sampling.top_p, sampling.min_p)
    return ", ".join([f"temperature {sampling.temperature:g}", *cut])


def filters(top_k: int, top_p: float, min_p: float) -> list[str]:
    """Those that cut something, in the words of the command line."""
    return [
        *([f"top-k {top_k}"] if top_k > 0 else []),
        *([f"top-p {top_p:g}"] if top_p < 1 else []),
        *([f"min-p {min_p:g}"] if min_p > 0 else []),
    ]


def _block(pair: Facts) -> str:
    if pair.adaptive:
        return f"block 1 to {pair.block_size}, adaptive"
    tree = f" in a tree, {pair.block_size - 1} deep" if pair.width > pair.block_size or pair.rule == "tree" else ""
    return f"block {pair.block_size} ({pair.width - 1} drafts{tree})"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _head(report: Report) -> Iterator[tuple[str, str]]:
    machine, spec, compiled = report.machine, report.speculative, report.compiled
    conditions = spec.conditions
    experts = "" if conditions.expert_format in ("none", conditions.dtype) else f", experts {conditions.expert_format}"
    yield (
        "dflash-jax",
        f"{' + '.join(report.pair.names)}   {_block(report.pair)}   {conditions.dtype}{experts}",
    )
    note = ": running on CPU, speeds are not comparable with an accelerator's" if machine.is_cpu else ""
    yield "device", f"{machine.device}, {_threads(machine.threads)}, jax {machine.versions['jax']}{note}"
    lossy = "" if report.pair.lossless else ": the text is not the target's own"
    yield (
        "rule",
        f"{report.pair.rule} ({'lossless' if report.pair.lossless else 'LOSSY'}{lossy})   "
        f"{drawn(conditions)}   seed {conditions.seed}",
    )
    yield (
        "compile",
        f"{compiled.seconds:.1f} s ({compiled.programs} programs, {compiled.hits} from cache)   "
        f"prompts {len(spec.texts)} of {report.prompts_known}   tokens {spec.tokens:,}   batch {conditions.batch}   "
        f"repeats {len(spec.repeats)}",
    )


def _speed(run: Run) -> str:
    if not run.rounds:
        return f"TTFT {_milliseconds(run.ttft_s)}"
    rate, least, most = middle(run.rates)
    waits = f"TTFT {_milliseconds(run.ttft_s)}   ITL {_milliseconds(run.itl_s)}"
    return f"{rate:8.1f} tok/s ({least:.1f}-{most:.1f})   {waits}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _speedup(report: Report) -> Iterator[tuple[str, str]]:
    if report.not_comparable:
        yield "speedup", f"not printed: the runs differ in {'; '.join(report.not_comparable)}"
    elif report.speedup:
        ratio, least, most = report.speedup
        yield (
            "speedup",
            f"{ratio:8.2f}x ({least:.2f}-{most:.2f})   upper bound at this acceptance "
            f"{report.speculative.bound:.2f}x   break-even acceptance {report.break_even:.2f}",
        )


def _acceptance(report: Report) -> Iterator[tuple[str, str]]:
    if not report.verifies:
        return
    spec = report.speculative
    yield (
        "acceptance",
        f"{report.acceptance_length:8.2f} tokens/verify ({int(spec.counts.sum()):,}/{report.verifies:,})   "
        f"drafts accepted {report.acceptance_ratio:.0%}",
    )
    if sizes := report.rounds_by_block_size:
        yield "  block sizes", " ".join(f"{size}:{count / report.verifies:.0%}" for size, count in sizes.items())
    shares = report.histogram / report.verifies
    yield "  histogram", " ".join(f"{place + 1}:{share:.0%}" for place, share in enumerate(shares) if share)
    rates = ["-" if math.isnan(rate) else f"{rate:.2f}".replace("0.", ".", 1) for rate in report.conditional]
    yield "  conditional", " ".join(rates)


def _agreement(agreement: Agreement) -> Iterator[tuple[str, str]]:
    same = agreement.prompts - len(agreement.divergences)
    yield "agreement", f"{agreement.share:8.3f} ({same} of {agreement.prompts} prompts: speculative ids = plain ids)"
    for each in agreement.divergences[:3]:
        kind = "tie" if each.tie else "REAL"
        yield "", f"prompt {each.prompt} parts at token {each.place}: top-2 logit margin {each.margin:.3g} ({kind})"
    if len(agreement.divergences) > 3:
        yield "", f"and {len(agreement.divergences) - 3} more (--json lists all)"


def _no_agreement(pair: Facts) -> str:
    if pair.lossless:
        return f"none token by token: {pair.rule} draws other tokens of the same law (tests/laws/test_exact.py)"
    return f"none: {pair.rule} is lossy; python -m experiments.ablate_accept measures how far the text strays"


def _time(report: Report) -> Iterator[tuple[str, str]]:
    costs = report.costs
    if costs is None:
        return
    draft, verify = (seconds / _whole(report) for seconds in (costs.draft_s, costs.verify_s))
    yield (
        "where time goes",
        f"draft {draft:.0%}   verify {verify:.0%}   accept and rest {_rest(1 - draft - verify, '.0%')}   of a round "
        f"of {_milliseconds(report.round_s)}",
    )
    yield (
        "verify",
        f"width {costs.width} costs {costs.ratio:.2f}x width 1   ({_milliseconds(costs.verify_s)} and "
        f"{_milliseconds(costs.step_s)} at {costs.length} tokens)",
    )


def _whole(report: Report) -> float:
    """Seconds of a round, or of its parts: timed apart they may cost more than inside it, and are then shares of their
    own sum."""
    return max(report.round_s, report.costs.draft_s + report.costs.verify_s)


def _rest(value: float, form: str) -> str:
    """What the parts leave of a round."""
    return format(value, form) if value > 1e-9 else "below noise"


def _experts(report: Report) -> Iterator[tuple[str, str]]:
    union = report.speculative.union
    if math.isnan(union):
        return
    one = report.plain.union if report.plain else math.nan
    against = "" if math.isnan(one) else f" ({union / one:.2f}x the {one:.2f} of a plain step)"
    estimate = f"   uniform estimate {report.uniform_union:.2f}" if report.pair.experts_per_token else ""
    yield "experts", f"verify union {union:.2f}/{report.pair.experts} per layer{against}{estimate}"


def _memory(report: Report) -> Iterator[tuple[str, str]]:
    memory = report.memory
    device = "" if memory.device_peak is None else f"device peak {_size(memory.device_peak)}   "
    experts = f" (experts {_size(memory.experts)})" if memory.experts else ""
    yield (
        "memory",
        f"{device}process peak {_size(memory.peak)}   target {_size(memory.target)}{experts}   "
        f"drafter {_size(memory.drafter)}   caches {_size(memory.caches)}",
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def why_not_faster(report: Report) -> str | None:
    """What a round costs in plain steps against what it delivers, and what another block size would do."""
    if report.speedup is None or report.costs is None:
        return None
    total, costs = report.break_even, report.costs
    verify, draft = (total * seconds / _whole(report) for seconds in (costs.verify_s, costs.draft_s))
    text = (
        f"a round costs {total:.2f} plain steps (verify {verify:.2f}, draft {draft:.2f}, rest "
        f"{_rest(total - verify - draft, '.2f')}) and delivers {report.speculative.bound:.2f} tokens"
    )
    size, gain = best_block_size(report.conditional, total, verify, costs.ratio)
    predicted = report.speedup[0] * gain
    if predicted < 1:
        return f"{text}; no block size is predicted to reach 1x"
    if gain < WORTH_TRYING:
        return text
    return f"{text}; try --block-size {size} (predicted {predicted:.2f}x)"


def best_block_size(conditional: np.ndarray, total: float, verify: float, ratio: float) -> tuple[int, float]:
    """The block size, up to the present one, with the largest predicted speedup, and its gain over the present one.

    Args:
        conditional: rates at the present block size P, ``[P-1]``.
        total, verify: time of a round and of its verification, in plain steps.
        ratio: time of a target step of width P over width 1; other widths lie on the line between.
    """
    present = len(conditional) + 1

    def speed(size: int) -> float:
        relative = (1 + (ratio - 1) * (size - 1) / (present - 1)) / ratio
        return metrics.expected_length(conditional, size) / (total - verify + verify * relative)

    best = max(range(2, present + 1), key=speed)
    return best, speed(best) / speed(present)
