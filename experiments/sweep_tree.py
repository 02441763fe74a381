"""Do draft trees pay, and with how many nodes? A chain against trees of several budgets, pair by pair.

Examples:

    python -m experiments.sweep_tree                                     # shipped pair, budgets 4, 8, 16 and 32
    python -m experiments.sweep_tree --quick                             # every shipped pair, a first look
    python -m experiments.sweep_tree --pair all --budgets 8 16 --temperature 1 --json tree.json

A tree of N nodes is verified in one step of N + 1 tokens (DDTree, arXiv 2604.12989): it accepts more than a chain, and
the step costs more, in a mixture of experts above all because more tokens choose more experts. The chain is the rule
match (at temperature 0 greedy) at the same block size, so both say the very same text. Speeds are medians; a speedup is
against plain decoding in the same process, in turn (see experiments.run_spec).
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from checkpoints.safetensors_file import write_text
from dflash_jax.draft_tree import TreeMatch
from dflash_jax.generate import LARGEST_BLOCK
from dflash_jax.rules import ACCEPT
from experiments import machine, run_spec
from experiments.arguments import command, sampling_of
from experiments.compilation import use_compilation_cache
from experiments.definitions import LABEL, wrapped
from experiments.laboratory.arguments import Common, for_one_block, settled
from experiments.laboratory.plan import check_outputs, pairs_of, prepare_pair
from experiments.laboratory.tables import number
from experiments.pair import load_pair
from experiments.plan import Plan
from experiments.progress import Waiting
from experiments.refusals import refusals
from experiments.report import Report, finite, middle
from experiments.summary import drawn
from experiments.threads import pinned

COLUMNS = ("drafts", "tok/verify", "verified", "tok/s", "plain", "speedup", "round", "verify", "union")
PAYS = 1.02
"""Gain over the chain from which a tree is said to pay."""


@dataclass(frozen=True)
class Args(Common):
    """Which budgets, and at which temperature."""

    budgets: Annotated[tuple[int, ...], tyro.conf.arg(metavar="NODES [NODES ...]")] = (4, 8, 16, 32)
    """nodes of the draft trees, the anchor not counted"""
    temperature: float = 0.0
    """0: greedy; above: tokens are drawn from softmax(logits / temperature)"""


@dataclass(frozen=True)
class Arm:
    """A chain (``budget`` None) or a tree. ``round_steps``: time of a round in plain steps; ``verify_ratio``: time of a
    verification of this width over a one-token step."""

    budget: int | None
    width: int
    verified_tokens: int
    verifies: int
    length: float
    tok_s: tuple[float, float, float]
    plain_tok_s: float
    speedup: tuple[float, float, float]
    round_steps: float
    verify_ratio: float
    union: float
    union_one_token: float


@dataclass(frozen=True)
class Sweep:
    """One pair at one block size; the chain first."""

    names: tuple[str, str]
    block_size: int
    experts: int
    prompts: int
    sampling: str
    arms: tuple[Arm, ...]

    @property
    def best(self) -> Arm:
        """The tree of the largest speedup."""
        return max(self.arms[1:], key=lambda arm: arm.speedup[0])


def prepare(args: Args) -> list[Plan]:
    """A plan per pair and block size.

    Raises:
        ValueError: saying what is wrong and what to do.
    """
    check_outputs([args.json])
    if not args.budgets or min(args.budgets) < 1 or max(args.budgets) >= LARGEST_BLOCK:
        raise ValueError(f"--budgets {' '.join(map(str, args.budgets))}: at least one, each 1 to {LARGEST_BLOCK - 1}")
    sizes = args.block_sizes or (None,)
    return [plan for pair in pairs_of(args) for plan in prepare_pair(args, pair, sizes, args.temperature)]


def sweep(args: Args, plan: Plan, waiting: Waiting) -> Sweep:
    """Measure one pair: the chain, then every tree."""
    one = replace(for_one_block(args, args.pair, plan.folders.block_size, args.temperature), json=None, plots=None)
    with waiting.on(f"loading {' + '.join(plan.folders.names)}"):
        chain = ACCEPT["greedy" if sampling_of(one).greedy else "match"]
        options = dict(dtype=args.dtype, experts=args.experts, plain_rule=chain)
        pair = load_pair(plan.folders, plan.tokenizer, **options)
    arms = []
    for budget in (None, *sorted(set(args.budgets))):
        waiting.console.print(f"{pair.names[0]}, {'chain' if budget is None else f'tree of {budget} nodes'}:")
        ruled = replace(pair, rule=chain if budget is None else TreeMatch(budget))
        arms.append(_arm(budget, run_spec.measure(one, plan, ruled, waiting)))
    return Sweep(
        names=pair.names,
        block_size=plan.folders.block_size,
        experts=pair.target.experts,
        prompts=len(plan.rows),
        sampling="greedy" if sampling_of(one).greedy else f"temperature {args.temperature:g}",
        arms=tuple(arms),
    )


def _arm(budget: int | None, report: Report) -> Arm:
    """What was measured of one chain or tree.

    Raises:
        ValueError: if nothing was verified, or a text is not the plain one.
    """
    if report.costs is None or report.speedup is None:
        raise ValueError("the text ends with its first token, nothing is verified; take other prompts")
    if any(not each.tie for each in report.agreement.divergences):
        raise ValueError(f"texts differ from plain decoding's ({drawn(report.speculative.conditions)}): a defect")
    spec = report.speculative
    return Arm(
        budget=budget,
        width=report.pair.width,
        verified_tokens=int(spec.counts.sum()),
        verifies=report.verifies,
        length=report.acceptance_length,
        tok_s=middle(spec.rates),
        plain_tok_s=middle(report.plain.rates)[0],
        speedup=report.speedup,
        round_steps=report.break_even,
        verify_ratio=report.costs.ratio,
        union=spec.union,
        union_one_token=report.plain.union,
    )


def verdict(found: Sweep) -> str:
    """Whether a tree pays, and why not."""
    chain, best = found.arms[0], found.best
    gain = best.speedup[0] / chain.speedup[0]
    more, dearer = best.length / chain.length, best.round_steps / chain.round_steps
    text = (
        f"the best tree ({best.budget} nodes) delivers {more:.2f}x the chain's tokens a round, and its round costs "
        f"{dearer:.2f}x: {best.speedup[0]:.2f}x plain decoding against the chain's {chain.speedup[0]:.2f}x"
    )
    if gain >= PAYS:
        return f"a tree pays: {text}"
    experts = (
        f"; a verification reads {best.union:.2f} of {found.experts} experts per layer, the chain's "
        f"{chain.union:.2f}, one token's {chain.union_one_token:.2f}"
        if found.experts
        else ""
    )
    return f"no tree pays: {text}{experts}"


def show(found: Sweep, args: Args, console: Console) -> None:
    """A line per chain and tree, and the verdict."""
    title = (
        f"{' + '.join(found.names)}, block {found.block_size}, {found.sampling}, {found.prompts} prompts of at most "
        f"{args.max_new_tokens} tokens"
    )
    table = Table(title=title, box=None, title_justify="left", padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for arm in found.arms:
        table.add_row(
            f"chain {arm.width - 1}" if arm.budget is None else f"tree {arm.budget}",
            number(arm.length, ".2f"),
            f"{arm.verified_tokens}/{arm.verifies}",
            number(arm.tok_s[0], ".0f"),
            number(arm.plain_tok_s, ".0f"),
            f"{arm.speedup[0]:.2f}x ({arm.speedup[1]:.2f}-{arm.speedup[2]:.2f})",
            f"{arm.round_steps:.2f}",
            f"{arm.verify_ratio:.2f}x",
            number(arm.union, ".2f"),
        )
    console.print(table)
    console.print(wrapped(f"{'verdict':<{LABEL}}", verdict(found)), markup=False)


def payload(sweeps: list[Sweep], args: Args, line: str) -> dict[str, Any]:
    """The sweeps as JSON values."""
    same = ("max_new_tokens", "repeats", "temperature", "top_k", "top_p", "min_p", "seed", "dtype", "quick")
    return finite(
        {
            "command": line,
            **{name: getattr(args, name) for name in same},
            "machine": asdict(machine.describe()),
            "pairs": [asdict(found) | {"verdict": verdict(found)} for found in sweeps],
        }
    )


def write_json(found: dict[str, Any], path: Path) -> None:
    """Write under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found, indent=2) + "\n")


def main(given: Args) -> list[Sweep]:
    """Parse -> prepare -> load -> measure -> publish."""
    use_compilation_cache()
    args, waiting, line = settled(given), Waiting(given.quiet), command(given, "experiments.sweep_tree")
    with refusals():
        plans = prepare(args)
    with pinned(plans[0].cpus), refusals():
        sweeps = [sweep(args, plan, waiting) for plan in plans]
        found = payload(sweeps, args, line)
    console = Console(width=120, highlight=False)
    for one in sweeps:
        show(one, args, console)
        console.print()
    console.print(
        "round: its time in plain steps; verify: time of a verification / of a one-token step; union: experts per "
        "layer\nthat a verification reads",
        markup=False,
    )
    console.print(f"{'reproduce':<{LABEL}}{line}", markup=False, soft_wrap=True)
    if args.json is not None:
        write_json(found, args.json)
        print(f"{'written':<{LABEL}}{args.json}")
    if args.plots is not None:
        from experiments.laboratory.tree_plot import plot_trees  # matplotlib takes a second to import

        caption = f"{args.dtype}, batch 1, {sweeps[0].sampling}, {sweeps[0].prompts} prompts, {args.repeats} repeats"
        print(f"{'written':<{LABEL}}{plot_trees(sweeps, caption, args.plots)}")
    return sweeps


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m experiments.sweep_tree", description=__doc__))
