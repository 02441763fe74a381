"""The command line of run_spec."""

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dflash_jax.draft_tree import TreeMatch
from dflash_jax.generate import LARGEST_BLOCK
from dflash_jax.protocols import AcceptRule
from dflash_jax.rules import ACCEPT
from dflash_jax.settings import SamplingParams

SHIPPED = "tiny-gpt-oss"
Split = Literal["modeling", "library", "stdlib"]
Format = Literal["packed", "bfloat16", "float32"]
Rule = Literal[tuple(ACCEPT)]
SAMPLED_RULE = "block"
"""The default rule at temperatures above 0: of the lossless rules as wide as a block, none accepts more in the mean by
theory (arXiv 2403.10444), nor clearly more on the shipped pairs (docs/accept_rules.md)."""


def _option(metavar: str, default: str, *aliases: str) -> object:
    """How --help shows an option whose default is worked out later."""
    return tyro.conf.arg(metavar=metavar, aliases=list(aliases), help_behavior_hint=f"({default})")


Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Args:
    """What to run; the defaults are the shipped pair on held-out prompts."""

    target: Annotated[Path | None, _option("DIR", "default: of --pair", "--model")] = None
    """Hugging Face folder of a target of any known family; with --draft"""
    draft: Annotated[Path | None, _option("DIR", "default: of --pair", "--draft-model")] = None
    """Hugging Face folder of the DFlash drafter trained for it"""
    pair: Annotated[str | None, _option("NAME", f"default: {SHIPPED}")] = None
    """a shipped pair, in place of the two folders; "all": every one of them, a row each"""
    prompt: Annotated[str | None, _option("TEXT", "default: --prompts")] = None
    """one prompt"""
    prompts: Annotated[Path | None, _option("FILE.jsonl", "default: the shipped ones")] = None
    """JSON lines: objects with "text" and, if they like, a "split" to choose by"""
    split: Annotated[Split | None, _option("{modeling,library,stdlib}", "default: modeling")] = None
    """only rows of this split; of the shipped held-out prompts, modeling is the easiest and stdlib the least alike"""
    max_samples: int = 8
    """most prompts to take, from the top"""
    block_size: Annotated[int | None, _option("P", "default: as trained; of tiny-gpt-oss 5")] = None
    """tokens per verification: the anchor and P-1 drafts"""
    num_speculative_tokens: Annotated[int | None, _option("P-1", "default: as trained")] = None
    """the same, counted in drafts"""
    max_new_tokens: int = 128
    """most tokens per prompt"""
    batch: int = 1
    """prompts decoded together"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of weights and caches"""
    experts: Annotated[Format | None, _option("{packed,bfloat16,float32}", "default: decoded if small")] = None
    """how routed experts are held; packed keeps MXFP4 or FP8"""
    threads: Annotated[int | None, _option("N", "default: all; of shipped pairs 1")] = None
    """CPU threads to compute on, for both sides"""
    stream: Switch = False
    """first show the text as it comes: accepted drafts green, the target's own tokens plain"""
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT")] = ()
    """end every text before the first of these strings"""
    baseline: bool = True
    """also decode without the drafter; speedup and agreement need it"""
    repeats: int = 3
    """timed repeats of each, at least 3"""
    temperature: float = 0.0
    """0: greedy; above: tokens are drawn from softmax(logits / temperature)"""
    top_k: int = 0
    """draw among this many likeliest tokens; 0 or -1: all"""
    top_p: float = 1.0
    """draw among the likeliest tokens of this mass"""
    min_p: float = 0.0
    """draw among tokens at least this share of the likeliest one's probability"""
    rule: Annotated[Rule | None, _option("RULE", f"default: greedy; at --temperature > 0 {SAMPLED_RULE}")] = None
    """lossless: greedy, match, one_hot, rejection, block, tree; lossy: typical, threshold, top_k_relaxed"""
    tree_budget: Annotated[int | None, _option("NODES", "default: 16")] = None
    """nodes of a draft tree besides the anchor; with --rule tree"""
    adaptive: Switch = False
    """choose the block size as the text comes, by acceptance and the clock, from 1 (plain decoding) to --block-size"""
    seed: int = 0
    """of drawn tokens, 0 to 2**64 - 1; every prompt has a seed made of this one; greedy decoding draws nothing"""
    json: Annotated[Path | None, _option("PATH", "default: none")] = None
    """write every figure and what it depends on"""
    plots: Annotated[Path | None, _option("DIR", "default: none")] = None
    """write pictures"""
    explain: Switch = False
    """define every line after the summary"""
    quiet: Switch = False
    """no progress on stderr"""


def sampling_of(args: Args) -> SamplingParams:
    """How tokens are drawn.

    Raises:
        ValueError: naming what is out of range.
    """
    return SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)


def rule_of(args: Args) -> AcceptRule:
    """The accept rule asked for, or the default at this temperature.

    Raises:
        ValueError: for a rule that does not honour the temperature, or a tree budget without a tree.
    """
    name = args.rule or ("greedy" if sampling_of(args).greedy else SAMPLED_RULE)
    if not ACCEPT[name].samples and not sampling_of(args).greedy:
        able = ", ".join(name for name, rule in ACCEPT.items() if rule.samples)
        raise ValueError(f"--rule {name} knows only the argmax, and --temperature is {args.temperature:g}; use {able}")
    if args.tree_budget is None:
        return ACCEPT[name]
    if name != "tree":
        raise ValueError(f"--tree-budget {args.tree_budget} is for --rule tree, and the rule is {name}")
    if not 1 <= args.tree_budget < LARGEST_BLOCK:
        raise ValueError(f"--tree-budget {args.tree_budget}: 1 to {LARGEST_BLOCK - 1} nodes")
    return TreeMatch(args.tree_budget)


def plain_rule_of(sampling: SamplingParams) -> AcceptRule:
    """How plain decoding says a token: the argmax, or the draw of its seed and position. A chain can say the same."""
    return ACCEPT["greedy" if sampling.greedy else "match"]


def command(args: object, program: str = "experiments.run_spec") -> str:
    """The line that repeats a run of ``program``: every argument that is not its default."""
    words = ["python", "-m", program]
    for field in fields(args):
        value, flag = getattr(args, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return shlex.join(words)
