"""Which block size is fastest: predicted from one run at the trained block, then measured, block by block.

Examples:

    python -m experiments.sweep_block                                   # shipped pair, blocks 2 to the trained one
    python -m experiments.sweep_block --quick                           # every shipped pair, a first look
    python -m experiments.sweep_block --pair all --max-samples 16 --json sweep.json --plots plots
    python -m experiments.sweep_block --block-sizes 4 8 16 --temperature 1 --rule block

The blocks are 2, 3, ... up to the one the drafter was trained at (--quick: 2, 4, ...), unless --block-sizes names
others.

Prediction: a run at the trained block P gives P(draft i stands | all before it stood) and the parts of a round. A block
of b tokens then delivers 1 + sum of products of the first b - 1 rates, and a round of it costs

    round(b) = round(P) - verify(P) + step + (verify(P) - step) (b - 1) / (P - 1)

with step the time of one token: the verification linear in its width, the draft and the rest unchanged. Larger blocks
than P are measured and not predicted, because nothing is known of their last drafts. The prediction knows no stop and
no budget, which cut a text's last round. Speeds are medians; a speedup is against plain decoding in the same process,
in turn (see experiments.run_spec).
"""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from experiments import machine, run_spec
from experiments.arguments import Args, command, plain_rule_of, rule_of, sampling_of
from experiments.compilation import use_compilation_cache
from experiments.definitions import LABEL, wrapped
from experiments.laboratory.arguments import SweepArgs, conditions, for_one_block, settled
from experiments.laboratory.plan import forget_programs, load, pairs_of, prepare_pair, trained_block
from experiments.laboratory.screen import close, head, ratio
from experiments.laboratory.sweep import Block, BlockSweep, block_of, predict, warned
from experiments.laboratory.tables import number
from experiments.pair import Pair
from experiments.plan import Plan
from experiments.progress import Waiting
from experiments.refusals import refusals
from experiments.report import Report, finite
from experiments.summary import drawn
from experiments.threads import pinned

WIDTH = 120
COLUMNS = ("block", "tok/verify", "predicted", "verified", "tok/s", "predicted", "plain", "speedup", "predicted")
COLUMNS += ("verify", "union")
SMALLEST = 2
NOTE = (
    "predicted: from the run at the trained block; tok/s, speedup: median of the repeats, compile time excluded; "
    "plain:\ntok/s of plain decoding in turn; verify: time of a verification / of a one-token step; union: experts "
    "per layer\nthat a verification reads"
)


def prepare(args: SweepArgs) -> list[list[Plan]]:
    """For every pair the plan at the trained block size, then those of the other sizes.

    Args:
        args: settled.

    Raises:
        ValueError: saying what is wrong and what to do.
    """
    if rule_of(_at_block(args, args.pair, None)).budget:
        raise ValueError("--rule tree is as wide as its budget, whatever the block: use experiments.sweep_tree")
    found = []
    for pair in pairs_of(args):
        trained = trained_block(args, pair, args.temperature)
        others = args.block_sizes or range(SMALLEST, trained, 2 if args.quick else 1)
        found.append(prepare_pair(args, pair, [trained, *sorted(others)], args.temperature))
    return found


def _at_block(args: SweepArgs, pair: str | None, size: int | None) -> Args:
    """run_spec's arguments for one block size."""
    return replace(for_one_block(args, pair, size, args.temperature), rule=args.rule, json=None, plots=None)


def sweep(args: SweepArgs, plans: list[Plan], waiting: Waiting) -> BlockSweep:
    """Measure one pair at every size, the trained one first."""
    first, one = plans[0], _at_block(args, args.pair, None)
    pair = load(args, first, waiting, rule=rule_of(one), plain_rule=plain_rule_of(sampling_of(one)))
    reports = [_measure(args, plan, pair, waiting) for plan in plans]
    forget_programs()
    trained = reports[0]
    with refusals():
        blocks = [block_of(report, predict(trained, report.block_size)) for report in reports]
    return BlockSweep(
        names=pair.names,
        family=pair.family,
        trained=trained.block_size,
        prompts=len(first.rows),
        prompt_hash=trained.speculative.conditions.prompts,
        sampling=drawn(trained.speculative.conditions),
        conditional=tuple(trained.conditional.tolist()),
        costs=trained.costs,
        round_s=trained.round_s,
        blocks=tuple(sorted(blocks, key=lambda block: block.size)),
        warnings=warned(reports),
    )


def _measure(args: SweepArgs, plan: Plan, pair: Pair, waiting: Waiting) -> Report:
    size = plan.folders.block_size
    sized = replace(pair, drafter=replace(pair.drafter, block_size=size))
    waiting.console.print(f"{pair.names[0]}, block {size}:")
    return run_spec.measure(_at_block(args, args.pair, size), plan, sized, waiting)


def rule_label(args: SweepArgs) -> str:
    """The rule's name, and what it does to the text if that is not nothing."""
    rule = rule_of(_at_block(args, None, None))
    return rule.name if rule.lossless else f"{rule.name} (LOSSY)"


def show(found: BlockSweep, args: SweepArgs, console: Console) -> None:
    """A line per block size, and which one is fastest."""
    console.print(
        f"{' + '.join(found.names)}, trained at block {found.trained}, {found.sampling}, rule "
        f"{rule_label(args)}, {found.prompts} prompts",
        markup=False,
    )
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for block in found.blocks:
        table.add_row(*cells(block))
    console.print(table)
    console.print(wrapped(f"{'fastest':<{LABEL}}", verdict(found)), markup=False)
    for words in found.warnings:
        console.print(wrapped(f"{'warning':<{LABEL}}", words), markup=False)


def cells(block: Block) -> list[str]:
    """A block's columns."""
    return [
        str(block.size),
        number(block.acceptance_length, ".2f"),
        number(block.predicted_length, ".2f"),
        f"{block.verified_tokens}/{block.verifies}",
        number(block.tok_s[0], ".0f"),
        number(block.predicted_tok_s, ".0f"),
        number(block.plain_tok_s, ".0f"),
        ratio(block.speedup),
        number(block.predicted_speedup, ".2f", "x"),
        f"{block.verify_ratio:.2f}x",
        number(block.union, ".2f"),
    ]


def verdict(found: BlockSweep) -> str:
    """Predicted against measured, in words."""
    best, guess = found.measured, found.predicted
    text = f"measured block {best.size} ({best.speedup[0]:.2f}x)"
    if guess is None:
        return f"{text}; none was predicted"
    lost = "the same" if guess.size == best.size else f"it measures {guess.speedup[0]:.2f}x, {found.loss:.0%} less"
    return f"{text}, predicted block {guess.size} ({guess.predicted_speedup:.2f}x): {lost}"


def payload(sweeps: list[BlockSweep], args: SweepArgs, line: str, here: machine.Machine) -> dict[str, Any]:
    """The sweeps as JSON values; what is not defined is null."""
    rule = rule_of(_at_block(args, None, None))
    return finite(
        {
            "command": line,
            "rule": rule.name,
            "lossless": rule.lossless,
            **conditions(args),
            "machine": asdict(here),
            "pairs": [
                asdict(found)
                | dict(measured_best=found.measured.size, predicted_best=found.predicted and found.predicted.size)
                | dict(loss=found.loss, verdict=verdict(found))
                for found in sweeps
            ],
        }
    )


def main(given: SweepArgs) -> list[BlockSweep]:
    """Parse -> prepare -> load -> measure -> publish."""
    use_compilation_cache()
    args, waiting, line = settled(given), Waiting(given.quiet), command(given, "experiments.sweep_block")
    with refusals():
        plans = prepare(args)
    with pinned(plans[0][0].cpus):
        here = machine.describe()
        sweeps = [sweep(args, each, waiting) for each in plans]
    found = payload(sweeps, args, line, here)
    console = Console(width=WIDTH, highlight=False)
    console.print("\n".join(head("block sizes", args, here)) + "\n", markup=False)
    for one in sweeps:
        show(one, args, console)
        console.print()
    draw = None
    if args.plots is not None:
        from experiments.laboratory.sweep_plot import plot_sweeps  # matplotlib takes a second to import

        caption = f"{args.dtype}, batch 1, {sweeps[0].sampling}, rule {rule_label(args)}, {sweeps[0].prompts} prompts"
        draw = partial(plot_sweeps, sweeps, f"{caption}, {args.repeats} repeats, {here.device}", args.plots)
    close(console, NOTE, found, args.json, draw)
    return sweeps


if __name__ == "__main__":
    main(tyro.cli(SweepArgs, prog="python -m experiments.sweep_block", description=__doc__))
