"""The command lines of the laboratory."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dflash_jax.rules import ACCEPT
from experiments import arguments
from experiments.arguments import SAMPLED_RULE, SHIPPED, Format, Rule, Split, Switch
from experiments.pair import ALL_PAIRS

ARG = tyro.conf.arg
Plots = Annotated[Path | None, ARG(metavar="DIR", help_behavior_hint="(default: none)")]
RULES = f"lossless: {', '.join(name for name in ACCEPT if ACCEPT[name].lossless)}; lossy: " + ", ".join(
    name for name in ACCEPT if not ACCEPT[name].lossless
)
USUAL = dict(pair=SHIPPED, max_samples=8, max_new_tokens=128, repeats=3)
QUICK = dict(pair=ALL_PAIRS, max_samples=2, max_new_tokens=48, repeats=3)
"""What is not given with ``--quick``."""


@dataclass(frozen=True)
class Common:
    """The pairs, the prompts and the conditions."""

    target: Annotated[Path | None, ARG(metavar="DIR", help_behavior_hint="(default: of --pair)")] = None
    """Hugging Face folder of a target of any known family; with --draft"""
    draft: Annotated[Path | None, ARG(metavar="DIR", help_behavior_hint="(default: of --pair)")] = None
    """Hugging Face folder of the DFlash drafter trained for it"""
    pair: Annotated[str | None, ARG(metavar="NAME", help_behavior_hint=f"(default: {SHIPPED}; --quick: all)")] = None
    """a shipped pair, in place of the two folders; "all": every one of them"""
    prompts: Annotated[Path | None, ARG(metavar="FILE.jsonl", help_behavior_hint="(default: the shipped ones)")] = None
    """JSON lines: objects with "text" and, if they like, a "split" to choose by"""
    split: Annotated[
        Split | None, ARG(metavar="{modeling,library,stdlib}", help_behavior_hint="(default: modeling)")
    ] = None
    """only rows of this split"""
    max_samples: Annotated[int | None, ARG(metavar="N", help_behavior_hint="(default: 8; --quick: 2)")] = None
    """most prompts to take, from the top"""
    max_new_tokens: Annotated[int | None, ARG(metavar="N", help_behavior_hint="(default: 128; --quick: 48)")] = None
    """most tokens per prompt"""
    repeats: Annotated[int | None, ARG(metavar="N", help_behavior_hint="(default: 3)")] = None
    """timed repeats, at least 3"""
    block_sizes: Annotated[tuple[int, ...], ARG(metavar="P [P ...]", help_behavior_hint="(default: see top)")] = ()
    """tokens per verification: the anchor and P-1 drafts"""
    top_k: int = 0
    """draw among this many likeliest tokens; 0 or -1: all"""
    top_p: float = 1.0
    """draw among the likeliest tokens of this mass"""
    min_p: float = 0.0
    """draw among tokens at least this share of the likeliest one's probability"""
    seed: int = 0
    """of drawn tokens; every prompt has a seed made of this one, in ablate_accept another in each repeat"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of weights and caches"""
    experts: Annotated[
        Format | None, ARG(metavar="{packed,bfloat16,float32}", help_behavior_hint="(default: decoded if small)")
    ] = None
    """how routed experts are held; packed keeps MXFP4 or FP8"""
    threads: Annotated[int | None, ARG(metavar="N", help_behavior_hint="(default: all; of shipped pairs 1)")] = None
    """CPU threads to compute on, for all sides"""
    quick: Switch = False
    """a first look: every shipped pair, two prompts of 48 tokens each, unless told otherwise"""
    json: Annotated[Path | None, ARG(metavar="PATH", help_behavior_hint="(default: none)")] = None
    """write every figure and what it depends on"""
    quiet: Switch = False
    """no progress on stderr"""


@dataclass(frozen=True)
class Args(Common):
    """Which rules, and at which temperatures."""

    rules: Annotated[
        tuple[Rule, ...],
        ARG(
            metavar="RULE [RULE ...]",
            help=f"accept rules to compare; {RULES}; tree has 16 nodes",
            help_behavior_hint="(default: all)",
        ),
    ] = ()
    temperatures: Annotated[tuple[float, ...], ARG(metavar="T [T ...]")] = (0.0, 0.7, 1.0)
    """0: greedy; above: tokens are drawn from softmax(logits / temperature)"""
    csv: Annotated[Path | None, ARG(metavar="PATH", help_behavior_hint="(default: none)")] = None
    """write the rows as comma-separated values"""
    plots: Plots = None
    """write pictures"""


@dataclass(frozen=True)
class SweepArgs(Common):
    """Which rule, and at which temperature."""

    temperature: float = 0.0
    """0: greedy; above: tokens are drawn from softmax(logits / temperature)"""
    rule: Annotated[
        Rule | None,
        ARG(
            metavar="RULE",
            help=f"accept rule; {RULES}",
            help_behavior_hint=f"(default: greedy; at --temperature > 0 {SAMPLED_RULE})",
        ),
    ] = None
    plots: Plots = None
    """write pictures"""


def settled(args: Common) -> Common:
    """The arguments with every default that ``--quick`` changes filled in."""
    usual = QUICK if args.quick else USUAL
    if args.target or args.draft:
        usual = usual | dict(pair=None)
    return replace(args, **{name: value for name, value in usual.items() if getattr(args, name) is None})


def conditions(args: Common) -> dict[str, object]:
    """What a sweep's figures depend on besides the pair and the machine, by name."""
    same = ("max_new_tokens", "repeats", "temperature", "top_k", "top_p", "min_p", "seed", "dtype", "quick")
    return {name: getattr(args, name) for name in same}


def for_one_block(args: Common, pair: str | None, block_size: int | None, temperature: float) -> arguments.Args:
    """The same conditions as run_spec's arguments.

    Args:
        args: settled.
    """
    same = ("target", "draft", "prompts", "split", "max_samples", "max_new_tokens", "repeats", "top_k", "top_p")
    same += ("min_p", "seed", "dtype", "experts", "threads", "json", "plots", "quiet")
    return arguments.Args(
        **{name: getattr(args, name) for name in same if hasattr(args, name)},
        pair=pair,
        block_size=block_size,
        temperature=temperature,
    )
