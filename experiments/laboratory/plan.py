"""From arguments to a study with which nothing is wrong, before any weight is read."""

from collections.abc import Sequence

import jax

from dflash_jax.protocols import AcceptRule
from dflash_jax.rules import ACCEPT
from dflash_jax.settings import SamplingParams
from experiments.arguments import sampling_of
from experiments.laboratory.arguments import Args, Common, for_one_block
from experiments.outputs import check_outputs
from experiments.pair import ALL_PAIRS, Pair, check_target, inspect, known_pairs, load_pair
from experiments.plan import Plan, prepare
from experiments.progress import Waiting
from experiments.refusals import refusals
from experiments.threads import pinned

GREEDY_AT_ZERO = ("match", "one_hot", "rejection", "block")
"""Rules that accept exactly what greedy accepts where both distributions are a certainty; greedy stands for them."""

FEWEST_TOKENS = 2


def rules_at(names: Sequence[str], temperature: float) -> list[str]:
    """The rules that are worth a row at this temperature, in the order of the registry.

    Raises:
        ValueError: if none of them is.
    """
    if SamplingParams(temperature).greedy:
        chosen = {"greedy" if name in GREEDY_AT_ZERO else name for name in names}
    else:
        chosen = {name for name in names if ACCEPT[name].samples}
    if not chosen:
        able = ", ".join(name for name, rule in ACCEPT.items() if rule.samples)
        raise ValueError(f"--rules {' '.join(names)}: none honours --temperatures {temperature:g}; add one of {able}")
    return [name for name in ACCEPT if name in chosen]


def left_out(names: Sequence[str], temperatures: Sequence[float]) -> list[str]:
    """Which rules have no row of their own at some temperature, and why."""
    found = []
    greedy = [SamplingParams(temperature).greedy for temperature in temperatures]
    same = [name for name in names if name in GREEDY_AT_ZERO]
    if any(greedy) and same:
        found.append(
            f"at temperature 0 {', '.join(same)} accept and say what greedy does: the row greedy stands for them"
        )
    unable = [name for name in names if not ACCEPT[name].samples]
    if not all(greedy) and unable:
        found.append(f"{', '.join(unable)} knows only the argmax and has no row at temperatures above 0")
    return found


def names_of(args: Args) -> list[str]:
    """The rules asked for, each once."""
    return list(dict.fromkeys(args.rules or ACCEPT))


def temperatures_of(args: Args) -> list[float]:
    """The temperatures asked for, each once."""
    return list(dict.fromkeys(args.temperatures))


def prepare_rules(args: Args) -> list[list[Plan]]:
    """For every pair its plans, one per block size.

    Args:
        args: settled.

    Raises:
        ValueError: saying what is wrong and what to do.
    """
    if not args.temperatures:
        raise ValueError("--temperatures needs at least one number")
    check_outputs({"--json": args.json, "--csv": args.csv, "--plots": args.plots})
    for temperature in temperatures_of(args):
        sampling_of(for_one_block(args, args.pair, None, temperature))
        rules_at(names_of(args), temperature)
    return [prepare_pair(args, name, args.block_sizes or (None,), temperatures_of(args)[0]) for name in pairs_of(args)]


def pairs_of(args: Common) -> list[str | None]:
    """The pairs asked for; None stands for the two folders."""
    return known_pairs() if args.pair == ALL_PAIRS and not (args.target or args.draft) else [args.pair]


def prepare_pair(args: Common, pair: str | None, sizes: Sequence[int | None], temperature: float) -> list[Plan]:
    """A plan per block size.

    Raises:
        ValueError: whatever run_spec or the target's loader would refuse.
    """
    if args.max_new_tokens < FEWEST_TOKENS:
        raise ValueError(
            f"--max-new-tokens {args.max_new_tokens}: at least {FEWEST_TOKENS}, because the first token needs no draft"
        )
    plans = [prepare(for_one_block(args, pair, size, temperature)) for size in dict.fromkeys(sizes)]
    with pinned(plans[0].cpus):  # starts jax, which counts its threads then
        check_target(plans[0].folders, dtype=args.dtype, experts=args.experts)
    return plans


def trained_block(args: Common, pair: str | None, temperature: float) -> int:
    """The block size that a pair's drafter was trained at.

    Raises:
        ValueError: as :func:`prepare_pair`.
    """
    (plan,) = prepare_pair(args, pair, [None], temperature)
    return inspect(plan.folders.target, plan.folders.draft, None).block_size


def load(args: Common, plan: Plan, waiting: Waiting, **rules: AcceptRule) -> Pair:
    """The plan's pair.

    Raises:
        SystemExit: whatever the loader refuses, as one line.
    """
    with refusals(), waiting.on(f"loading {' + '.join(plan.folders.names)}"):
        return load_pair(plan.folders, plan.tokenizer, dtype=args.dtype, experts=args.experts, **rules)


def forget_programs() -> None:
    """Between two pairs: a process that keeps every pair's programs runs out of memory maps (``vm.max_map_count``)."""
    jax.clear_caches()
