"""Do draft trees pay, and with how many nodes? A chain against trees of several budgets, pair by pair.

Examples:

    python -m experiments.sweep_tree                                     # shipped pair, budgets 4, 8, 16 and 32
    python -m experiments.sweep_tree --quick                             # every shipped pair, a first look
    python -m experiments.sweep_tree --pair all --budgets 8 16 --temperature 1 --json tree.json

A tree of N nodes is verified in one step of N + 1 tokens (DDTree, arXiv 2604.12989): it accepts more than a chain, and
the step costs more, in a mixture of experts above all because more tokens choose more experts. The chain has the rule
match (greedy at temperature 0) and the same block size, so chain and trees say the same text. The size is the trained
one unless --block-sizes names others. Speeds are medians; a speedup is against plain decoding in the same process, in
turn (see experiments.run_spec).
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from dflash_jax.draft_tree import TreeMatch
from dflash_jax.generate import LARGEST_BLOCK
from experiments import machine, run_spec
from experiments.arguments import command, plain_rule_of, sampling_of
from experiments.compilation import use_compilation_cache
from experiments.definitions import LABEL, wrapped
from experiments.laboratory.arguments import Common, Plots, conditions, for_one_block, settled
from experiments.laboratory.plan import forget_programs, load, pairs_of, prepare_pair, trained_block
from experiments.laboratory.screen import close, head, ratio
from experiments.laboratory.sweep import Measured, measured, warned
from experiments.laboratory.tables import number
from experiments.plan import Plan
from experiments.progress import Waiting
from experiments.refusals import refusals
from experiments.report import Report, finite
from experiments.summary import drawn
from experiments.threads import pinned

COLUMNS = ("drafts", "tok/verify", "verified", "tok/s", "plain", "speedup", "round", "verify", "union")
NOTE = (
    "round: its time in plain steps; verify: time of a verification / of a one-token step; union: experts per "
    "layer\nthat a verification reads; a tree pays from 1.02x the chain's speed on"
)
PAYS = 1.02
"""Gain over the chain from which a tree is said to pay."""


@dataclass(frozen=True)
class Args(Common):
    """Which budgets, and at which temperature."""

    budgets: Annotated[tuple[int, ...], tyro.conf.arg(metavar="NODES [NODES ...]")] = (4, 8, 16, 32)
    """nodes of the draft trees, the anchor not counted"""
    temperature: float = 0.0
    """0: greedy; above: tokens are drawn from softmax(logits / temperature)"""
    plots: Plots = None
    """write pictures"""


@dataclass(frozen=True)
class Arm(Measured):
    """A chain (``budget`` None) or a tree.

    Attributes:
        break_even: time of a round in plain steps.
        parts: of it, in plain steps too: the verification, the draft (its block, and taking in features), and the
            rest: growing the tree, accepting, moving the path.
    """

    budget: int | None
    width: int
    break_even: float
    parts: dict[str, float]
    union_one_token: float


@dataclass(frozen=True)
class TreeSweep:
    """One pair at one block size; the chain first."""

    names: tuple[str, str]
    block_size: int
    experts: int
    prompts: int
    prompt_hash: str
    sampling: str
    arms: tuple[Arm, ...]
    warnings: tuple[str, ...] = ()


def prepare(args: Args) -> list[Plan]:
    """A plan per pair and block size.

    Raises:
        ValueError: saying what is wrong and what to do.
    """
    if not args.budgets or min(args.budgets) < 1 or max(args.budgets) >= LARGEST_BLOCK:
        raise ValueError(f"--budgets {' '.join(map(str, args.budgets))}: at least one, each 1 to {LARGEST_BLOCK - 1}")
    return [plan for pair in pairs_of(args) for plan in _plans(args, pair)]


def _plans(args: Args, pair: str | None) -> list[Plan]:
    """One per block size: those asked for, or the one that the drafter was trained at, as deep as its trees can be."""
    sizes = args.block_sizes or [trained_block(args, pair, args.temperature)]
    return prepare_pair(args, pair, sizes, args.temperature)


def sweep(args: Args, plan: Plan, waiting: Waiting) -> TreeSweep:
    """Measure one pair: the chain, then every tree."""
    size = plan.folders.block_size
    one = replace(for_one_block(args, args.pair, size, args.temperature), json=None, plots=None)
    chain = plain_rule_of(sampling_of(one))
    pair, arms, reports = load(args, plan, waiting, plain_rule=chain), [], []
    for budget in (None, *sorted(set(args.budgets))):
        what = "chain" if budget is None else f"tree of {budget} nodes"
        waiting.console.print(f"{pair.names[0]}, block {size}, {what}:")
        ruled = replace(pair, rule=chain if budget is None else TreeMatch(budget))
        report = run_spec.measure(one, plan, ruled, waiting)
        reports.append(report)
        with refusals():
            arms.append(_arm(budget, report))
    forget_programs()
    return TreeSweep(
        names=pair.names,
        block_size=plan.folders.block_size,
        experts=pair.target.experts,
        prompts=len(plan.rows),
        prompt_hash=report.speculative.conditions.prompts,
        sampling=drawn(report.speculative.conditions),
        arms=tuple(arms),
        warnings=warned(reports),
    )


def _arm(budget: int | None, report: Report) -> Arm:
    """What was measured of one chain or tree.

    Raises:
        ValueError: if nothing was verified.
    """
    return Arm(
        **measured(report),
        budget=budget,
        width=report.pair.width,
        break_even=report.break_even,
        parts=_parts(report),
        union_one_token=report.plain.union,
    )


def _parts(report: Report) -> dict[str, float]:
    """See :class:`Arm`."""
    step_s = report.round_s / report.break_even
    verification, draft = report.costs.verify_s / step_s, report.costs.draft_s / step_s
    return {"verification": verification, "draft": draft, "rest": report.break_even - verification - draft}


def verdicts(found: TreeSweep) -> list[str]:
    """Of every tree whether it pays, and why."""
    return [_verdict(found, found.arms[0], tree) for tree in found.arms[1:]]


def _verdict(found: TreeSweep, chain: Arm, tree: Arm) -> str:
    more, dearer = tree.acceptance_length / chain.acceptance_length, tree.break_even / chain.break_even
    pays = tree.speedup[0] >= PAYS * chain.speedup[0]
    text = (
        f"{tree.budget} nodes {'pay' if pays else 'do not pay'}: {tree.speedup[0]:.2f}x plain decoding, the chain "
        f"{chain.speedup[0]:.2f}x; {more:.2f}x its tokens a round, in {dearer:.2f}x its time"
    )
    if dearer <= 1:
        return text
    extra = {name: tree.parts[name] - chain.parts[name] for name in tree.parts}
    name = max(extra, key=extra.get)
    text += f", of {tree.break_even - chain.break_even:.2f} plain steps more {extra[name]:.2f} for the {name}"
    if name != "verification" or not found.experts:
        return text
    return (
        f"{text}, which reads {tree.union:.2f} of {found.experts} experts per layer (the chain's {chain.union:.2f}, "
        f"one token {chain.union_one_token:.2f})"
    )


def show(found: TreeSweep, console: Console) -> None:
    """A line per chain and tree, and the verdict."""
    title = f"{' + '.join(found.names)}, block {found.block_size}, {found.sampling}, {found.prompts} prompts"
    table = Table(title=title, box=None, title_justify="left", padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for arm in found.arms:
        table.add_row(
            f"chain {arm.width - 1}" if arm.budget is None else f"tree {arm.budget}",
            number(arm.acceptance_length, ".2f"),
            f"{arm.verified_tokens}/{arm.verifies}",
            number(arm.tok_s[0], ".0f"),
            number(arm.plain_tok_s, ".0f"),
            ratio(arm.speedup),
            f"{arm.break_even:.2f}",
            f"{arm.verify_ratio:.2f}x",
            number(arm.union, ".2f"),
        )
    console.print(table)
    for words in verdicts(found):
        console.print(wrapped(f"{'verdict':<{LABEL}}", words), markup=False)
    for words in found.warnings:
        console.print(wrapped(f"{'warning':<{LABEL}}", words), markup=False)


def payload(sweeps: list[TreeSweep], args: Args, line: str, here: machine.Machine) -> dict[str, Any]:
    """The sweeps as JSON values."""
    return finite(
        {
            "command": line,
            **conditions(args),
            "machine": asdict(here),
            "pairs": [asdict(found) | {"verdicts": verdicts(found)} for found in sweeps],
        }
    )


def main(given: Args) -> list[TreeSweep]:
    """Parse -> prepare -> load -> measure -> publish."""
    use_compilation_cache()
    args, waiting, line = settled(given), Waiting(given.quiet), command(given, "experiments.sweep_tree")
    with refusals():
        plans = prepare(args)
    with pinned(plans[0].cpus):
        here = machine.describe()
        sweeps = [sweep(args, plan, waiting) for plan in plans]
    found = payload(sweeps, args, line, here)
    console = Console(width=120, highlight=False)
    console.print("\n".join(head("draft trees", args, here)) + "\n", markup=False)
    for one in sweeps:
        show(one, console)
        console.print()
    draw = None
    if args.plots is not None:
        from experiments.laboratory.tree_plot import plot_trees  # matplotlib takes a second to import

        caption = f"{args.dtype}, batch 1, {sweeps[0].sampling}, {sweeps[0].prompts} prompts, {args.repeats} repeats"
        draw = partial(plot_trees, sweeps, f"{caption}, {here.device}", args.plots)
    close(console, NOTE, found, args.json, draw)
    return sweeps


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m experiments.sweep_tree", description=__doc__))
