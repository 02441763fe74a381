"""What does choosing the block size bring, and what does it save where the drafter is useless?

Examples:

    python -m experiments.ablate_adaptive                                   # shipped pair, greedy
    python -m experiments.ablate_adaptive --pair all --json adaptive.json
    python -m experiments.ablate_adaptive --temperature 1 --max-samples 16

Plain decoding, the fixed block of the drafter and adaptive decoding take turns prompt by prompt; speeds are ratios of
summed decode time against plain decoding, with the least and the largest of the repeats. Each with the trained drafter,
and with one that is always wrong: its weights are all alike, so that it proposes the same token everywhere. The rule is
greedy, or at temperatures above 0 match: every text must be the plain one. What adaptive decoding knows of costs and
acceptance is kept from text to text; it is measured anew for each drafter, before the timing.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from dflash_jax.adaptive import AdaptiveDecoder
from dflash_jax.rules import ACCEPT
from experiments import machine, runs
from experiments.arguments import command, sampling_of
from experiments.compilation import use_compilation_cache
from experiments.definitions import LABEL
from experiments.laboratory.arguments import Common, for_one_block, settled
from experiments.laboratory.plan import check_outputs, pairs_of, prepare_pair
from experiments.laboratory.study import write_json
from experiments.pair import Pair, inspect, load_pair
from experiments.plan import Plan
from experiments.progress import Waiting
from experiments.refusals import refusals
from experiments.report import finite, middle
from experiments.threads import pinned

WRONG = 0.01
"""The value of every weight of the useless drafter."""


@dataclass(frozen=True)
class Args(Common):
    """At which temperature."""

    temperature: float = 0.0
    """0: greedy; above: tokens are drawn from softmax(logits / temperature)"""


@dataclass(frozen=True)
class Outcome:
    """One pair with one drafter. ``fixed`` and ``adaptive``: speed against plain decoding; ``rounds``: of adaptive
    decoding, by block size."""

    pair: str
    drafter: str
    block_size: int
    prompts: int
    plain_tok_s: tuple[float, float, float]
    fixed: tuple[float, float, float]
    adaptive: tuple[float, float, float]
    length: float
    rounds: dict[str, int]


def prepare(args: Args) -> list[Plan]:
    """A plan per pair at its trained block size, or at those asked for.

    Raises:
        ValueError: saying what is wrong and what to do.
    """
    check_outputs([args.json])
    if args.plots is not None:
        raise ValueError(f"--plots {args.plots}: this experiment draws no picture; leave it out")
    plans = []
    for pair in pairs_of(args):
        (first,) = prepare_pair(args, pair, [None], args.temperature)
        trained = inspect(first.folders.target, first.folders.draft, None).block_size
        plans += prepare_pair(args, pair, args.block_sizes or [trained], args.temperature)
    return plans


def measure(args: Args, plan: Plan, waiting: Waiting) -> list[Outcome]:
    """One pair, with its drafter and with the useless one."""
    one = for_one_block(args, args.pair, plan.folders.block_size, args.temperature)
    rule = ACCEPT["greedy" if sampling_of(one).greedy else "match"]
    with refusals(), waiting.on(f"loading {' + '.join(plan.folders.names)}"):
        options = dict(dtype=args.dtype, experts=args.experts, rule=rule, plain_rule=rule)
        pair = load_pair(plan.folders, plan.tokenizer, **options)
    wrong = replace(pair, draft_params=jax.tree.map(lambda leaf: leaf * 0 + WRONG, pair.draft_params))
    found = [_outcome(args, plan, each, name, waiting) for name, each in (("trained", pair), ("wrong", wrong))]
    jax.clear_caches()  # a process that keeps every pair's programs runs out of memory maps (vm.max_map_count)
    return found


def _outcome(args: Args, plan: Plan, pair: Pair, name: str, waiting: Waiting) -> Outcome:
    """Compile, then time in turn.

    Raises:
        RuntimeError: if a text is not the plain one.
    """
    sampling = sampling_of(for_one_block(args, args.pair, None, args.temperature))
    decoders = {"plain": pair.plain, "fixed": pair.speculative, "adaptive": AdaptiveDecoder(pair.speculative)}
    with waiting.on(f"compiling ({pair.names[0]}, {name} drafter)"):
        for decoder in decoders.values():
            runs.warm_up(decoder, plan.batches, args.max_new_tokens, pair.stop, sampling)
    total = args.repeats * len(decoders) * len(plan.batches)
    with waiting.through(f"timing {pair.names[0]}, {name} drafter", total) as step:
        conditions = runs.conditions_of(pair, plan.batches, args.max_new_tokens, sampling)
        found = runs.run_interleaved(
            decoders, plan.batches, conditions, repeats=args.repeats, after_each=lambda name, _: step(name)
        )
    plain, adaptive = found["plain"], found["adaptive"]
    if not plain.texts == found["fixed"].texts == adaptive.texts:
        raise RuntimeError(f"{pair.names[0]}, {name} drafter: a text is not plain decoding's")
    sizes = [int(size) for repeat in adaptive.repeats for each in repeat for size in each.widths]
    return Outcome(
        pair=pair.names[0],
        drafter=name,
        block_size=pair.drafter.block_size,
        prompts=len(plan.rows),
        plain_tok_s=middle(plain.rates),
        fixed=middle(runs.speedups(plain, found["fixed"])),
        adaptive=middle(runs.speedups(plain, adaptive)),
        length=float(adaptive.counts.sum() / max((adaptive.counts > 0).sum(), 1)),
        rounds={str(size): sizes.count(size) for size in sorted(set(sizes))},
    )


def show(found: list[Outcome], args: Args, console: Console) -> None:
    """A line per pair and drafter."""
    how = "greedy" if args.temperature == 0 else f"temperature {args.temperature:g}"
    title = f"{how}, {found[0].prompts} prompts of at most {args.max_new_tokens} tokens, {args.repeats} repeats"
    table = Table(title=title, box=None, title_justify="left", padding=(0, 2, 0, 0))
    for name in ("pair", "drafter", "plain tok/s", "fixed block", "adaptive", "tok/round", "adaptive rounds by block"):
        table.add_column(name, no_wrap=True)
    for each in found:
        every = sum(each.rounds.values())
        table.add_row(
            each.pair,
            each.drafter,
            f"{each.plain_tok_s[0]:.0f}",
            f"{each.block_size}: {_ratio(each.fixed)}",
            _ratio(each.adaptive),
            f"{each.length:.2f}",
            " ".join(f"{size}:{count / every:.0%}" for size, count in each.rounds.items()),
        )
    console.print(table)


def _ratio(value: tuple[float, float, float]) -> str:
    return f"{value[0]:.2f}x ({value[1]:.2f}-{value[2]:.2f})"


def payload(found: list[Outcome], args: Args, line: str) -> dict[str, Any]:
    """The outcomes as JSON values."""
    same = ("max_new_tokens", "repeats", "temperature", "seed", "dtype")
    return finite(
        {
            "command": line,
            **{name: getattr(args, name) for name in same},
            "machine": asdict(machine.describe()),
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
        found = [each for plan in plans for each in measure(args, plan, waiting)]
        written = payload(found, args, line)
    show(found, args, Console(width=130, highlight=False))
    print(f"{'reproduce':<{LABEL}}{line}")
    if args.json is not None:
        write_json(written, args.json)
        print(f"{'written':<{LABEL}}{args.json}")
    return found


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m experiments.ablate_adaptive", description=__doc__))
