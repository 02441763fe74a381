"""What does choosing the block size bring, and what does it save where the drafter is useless?

Examples:

    python -m experiments.ablate_adaptive                                   # shipped pair, greedy
    python -m experiments.ablate_adaptive --pair all --json adaptive.json
    python -m experiments.ablate_adaptive --temperature 1 --max-samples 16

Plain decoding, a fixed block (the trained one unless --block-sizes names others) and adaptive decoding, which picks
among 1 (plain), 2, 3, 4, 6 and that block, take turns prompt by prompt; speeds are ratios of summed decode time against
plain decoding, with the least and the largest of the repeats. Each with the trained drafter, and with one that is
almost always wrong: its weights are all alike, so that it proposes the same token everywhere. The rule is greedy, or at
temperatures above 0 match: texts are the plain ones, up to rounding. What a round of
each block size costs is measured for each drafter before the timing, and is not in it. Every repeat begins with these
costs and with which drafts stood meanwhile; what is learnt of both is kept from text to text.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from dflash_jax import metrics
from dflash_jax.adaptive import AdaptiveDecoder
from experiments import machine, run_spec, runs
from experiments.agreement import Agreement
from experiments.arguments import command, plain_rule_of, sampling_of
from experiments.compilation import CompileWatch, use_compilation_cache
from experiments.definitions import LABEL, wrapped
from experiments.laboratory.arguments import Common, conditions, for_one_block, settled
from experiments.laboratory.plan import forget_programs, load, pairs_of, prepare_pair, trained_block
from experiments.laboratory.screen import close, head, ratio
from experiments.pair import Pair
from experiments.plan import Plan
from experiments.progress import Waiting
from experiments.refusals import refusals
from experiments.report import finite, middle
from experiments.summary import drawn
from experiments.threads import pinned

WRONG = 0.01
"""The value of every weight of the useless drafter."""

NOTE = (
    "fixed block, adaptive: speed over plain decoding's; tok/round: of adaptive decoding, plain rounds counted; call:\n"
    "what a change of width costs besides its rounds, in plain steps.\n"
    "Where the drafter is useless, it is still tried now and then: what is missing to 1.00x is the price."
)


@dataclass(frozen=True)
class Args(Common):
    """At which temperature."""

    temperature: float = 0.0
    """0: greedy; above: tokens are drawn from softmax(logits / temperature)"""


@dataclass(frozen=True)
class Outcome:
    """One pair with one drafter.

    Attributes:
        fixed, adaptive: speed against plain decoding: median, least and largest of the repeats.
        acceptance_length: verified_tokens / verifies, of the adaptive rounds of all repeats, plain ones counted.
        rounds: the adaptive rounds by block size.
        call: plain steps that a change of width costs besides its rounds, as the warm-up measured it.
        agreement: share of the adaptive texts that are the plain ones; ``ties``: how many part where rounding
            explains it.
    """

    pair: str
    drafter: str
    block_size: int
    prompts: int
    sampling: str
    plain_tok_s: tuple[float, float, float]
    fixed: tuple[float, float, float]
    adaptive: tuple[float, float, float]
    verified_tokens: int
    verifies: int
    acceptance_length: float
    rounds: dict[str, int]
    call: float
    agreement: float
    ties: int
    warnings: tuple[str, ...]


def prepare(args: Args) -> list[Plan]:
    """A plan per pair at its trained block size, or at those asked for.

    Raises:
        ValueError: saying what is wrong and what to do.
    """
    plans = []
    for pair in pairs_of(args):
        sizes = args.block_sizes or [trained_block(args, pair, args.temperature)]
        plans += prepare_pair(args, pair, sizes, args.temperature)
    return plans


def measure(args: Args, plan: Plan, waiting: Waiting) -> list[Outcome]:
    """One pair, with its drafter and with the useless one."""
    one = for_one_block(args, args.pair, plan.folders.block_size, args.temperature)
    rule = plain_rule_of(sampling_of(one))
    pair = load(args, plan, waiting, rule=rule, plain_rule=rule)
    wrong = replace(pair, draft_params=jax.tree.map(lambda leaf: leaf * 0 + WRONG, pair.draft_params))
    found = [_outcome(args, plan, each, name, waiting) for name, each in (("trained", pair), ("wrong", wrong))]
    forget_programs()
    return found


def _outcome(args: Args, plan: Plan, pair: Pair, name: str, waiting: Waiting) -> Outcome:
    """Compile, then time in turn, then hold every text against the plain one."""
    sampling = sampling_of(for_one_block(args, args.pair, None, args.temperature))
    decoders = {"plain": pair.plain, "fixed": pair.speculative, "adaptive": AdaptiveDecoder(pair.speculative)}
    with refusals(), waiting.on(f"compiling ({pair.names[0]}, {name} drafter)"):
        for decoder in decoders.values():
            runs.warm_up(decoder, plan.batches, args.max_new_tokens, pair.stop, sampling)
    total = args.repeats * len(decoders) * len(plan.batches)
    with CompileWatch() as timed, waiting.through(f"timing {pair.names[0]}, {name} drafter", total) as step:
        found = runs.run_interleaved(
            decoders,
            plan.batches,
            runs.conditions_of(pair, plan.batches, args.max_new_tokens, sampling),
            repeats=args.repeats,
            after_each=lambda name, _: step(name),
            before_repeat=decoders["adaptive"].forget,
        )
    plain, adaptive = found["plain"], found["adaptive"]
    with waiting.on("comparing texts"):
        settings = runs.settings_of(sampling, plan.batches)
        agreed = {each: run_spec.agree(plan, pair, settings, plain, found[each]) for each in ("fixed", "adaptive")}
    busy = runs.crowding([*found.values()], len(plan.cpus))
    counts, sizes = adaptive.counts, [int(size) for each in adaptive.different for size in each.widths]
    return Outcome(
        pair=pair.names[0],
        drafter=name,
        block_size=pair.drafter.block_size,
        prompts=len(plan.rows),
        sampling=drawn(plain.conditions),
        plain_tok_s=middle(plain.rates),
        fixed=middle(runs.speedups(plain, found["fixed"])),
        adaptive=middle(runs.speedups(plain, adaptive)),
        verified_tokens=int(counts.sum()),
        verifies=metrics.verifies(counts),
        acceptance_length=metrics.acceptance_length(counts),
        rounds={str(size): sizes.count(size) for size in sorted(set(sizes))},
        call=decoders["adaptive"].measured[1].call,
        agreement=agreed["adaptive"].share,
        ties=sum(each.tie for each in agreed["adaptive"].divergences),
        warnings=tuple(what_is_wrong(f"{pair.names[0]}, {name} drafter", agreed, timed.programs, busy)),
    )


def what_is_wrong(where: str, agreed: dict[str, Agreement], programs: int, crowding: str | None) -> list[str]:
    """What a reader should know before believing a line.

    Args:
        agreed: decoder -> its texts against the plain ones.
        programs: compiled while timing.
        crowding: see :func:`experiments.runs.crowding`.
    """
    found = [
        f"{where}, {which}, prompt {each.prompt}, token {each.place}: {each.speculative} where plain decoding says "
        f"{each.plain}, by a margin of {each.margin:.2g} that rounding cannot explain: do not trust this line"
        for which, agreement in agreed.items()
        for each in agreement.divergences
        if not each.tie
    ]
    if programs:
        found.append(f"{where}: {programs} programs were compiled while timing: the speeds are too low")
    if crowding:
        found.append(f"{where}: {crowding}")
    return found


def show(found: list[Outcome], console: Console) -> None:
    """A line per pair and drafter."""
    title = f"{found[0].sampling}, {found[0].prompts} prompts"
    table = Table(title=title, box=None, title_justify="left", padding=(0, 2, 0, 0))
    for name in (
        "pair",
        "drafter",
        "plain tok/s",
        "fixed block",
        "adaptive",
        "tok/round",
        "call",
        "adaptive rounds by block",
    ):
        table.add_column(name, no_wrap=True)
    for each in found:
        every = sum(each.rounds.values())
        table.add_row(
            each.pair,
            each.drafter,
            f"{each.plain_tok_s[0]:.0f}",
            f"{each.block_size}: {ratio(each.fixed)}",
            ratio(each.adaptive),
            f"{each.acceptance_length:.2f}",
            f"{each.call:.1f}",
            " ".join(f"{size}:{count / every:.0%}" for size, count in each.rounds.items()),
        )
    console.print(table)
    same, ties = sum(round(each.agreement * each.prompts) for each in found), sum(each.ties for each in found)
    every = sum(each.prompts for each in found)
    console.print(f"{'agreement':<{LABEL}}{same}/{every} adaptive texts are the plain ones, {ties} part at ties")
    for words in (words for each in found for words in each.warnings):
        console.print(wrapped(f"{'warning':<{LABEL}}", words), markup=False)


def payload(found: list[Outcome], args: Args, line: str, here: machine.Machine) -> dict[str, Any]:
    """The outcomes as JSON values."""
    return finite(
        {
            "command": line,
            **conditions(args),
            "machine": asdict(here),
            "outcomes": [asdict(each) for each in found],
        }
    )


def main(given: Args) -> list[Outcome]:
    """Parse -> prepare -> load -> measure -> publish."""
    use_compilation_cache()
    args, waiting, line = settled(given), Waiting(given.quiet), command(given, "experiments.ablate_adaptive")
    with refusals():
        plans = prepare(args)
    with pinned(plans[0].cpus):
        here = machine.describe()
        found = [each for plan in plans for each in measure(args, plan, waiting)]
    written = payload(found, args, line, here)
    console = Console(width=130, highlight=False)
    console.print("\n".join(head("adaptive", args, here)) + "\n", markup=False)
    show(found, console)
    close(console, NOTE, written, args.json)
    return found


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m experiments.ablate_adaptive", description=__doc__))
