"""Plain and speculative decoding beside the alternatives: one paired benchmark on this machine's CPU.

    python -m experiments.bench --quick                          # a look, 3 minutes on two idle cores
    python -m experiments.bench --json results/bench.json        # about 25 minutes
    python -m experiments.bench --llama-cpp build/bin --llama-target t.gguf --llama-draft d.gguf

Every contestant decodes the same held-out prompts with the same weights in float32: batch 1, greedy, the same number of
new tokens, stop ids off. A rate is (N - 1) tokens / (time of N tokens - time of 1 token): the prompt is out for all
alike, and so is compilation. Each contestant runs at every thread setting, in a process of its own that is pinned to as
many CPUs, and at its own fastest variant (form of the experts, attention, block size). Ratios are medians over pairs of
neighbouring runs on one prompt, A B and then B A. A CPU share well below 1 at one thread says that others had the CPU
meanwhile: do not quote such a run.

The peers are in tests/reference/peers.py and need the PyTorch environment of `make reference`.
"""

import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from dflash_jax.generate import LARGEST_BLOCK
from experiments import prompts as prompt_files
from experiments.arguments import Split
from experiments.benchmark.contest import PLAIN, RATIOS, SPEC, Contest, Entry, closing, entry, median_rate, opening
from experiments.benchmark.pipe import Refused, ask_all
from experiments.benchmark.report import Result, spread, write_json
from experiments.benchmark.stage import LLAMA, PEERS, Stage, start_llama, start_ours, start_peers
from experiments.benchmark.tables import show
from experiments.pair import PAIRS, load_tokenizer, locate
from experiments.progress import Waiting
from experiments.threads import available_cpus

PROBE_TOKENS = 120
"""Tokens of the runs that are probed: with a prompt of 96 they stay within the smallest capacity."""

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Args:
    """What to compare; the defaults are the shipped pair on its held-out prompts."""

    target: Path = PAIRS / "tiny-gpt-oss"
    """Hugging Face folder of the target, with tokenizer.json"""
    draft: Path = PAIRS / "tiny-gpt-oss-dflash"
    """Hugging Face folder of its DFlash drafter"""
    prompts: Path | None = None
    """JSON lines with "text" and "split"; default: prompts.jsonl of the target"""
    split: Split | None = None
    """only rows of this split; default: modeling, and of a file of --prompts all rows, from its splits in turn"""
    samples: int = 12
    """most prompts to take"""
    new_tokens: int = 128
    """tokens per prompt"""
    blocks: tuple[int, ...] = (2, 4, 6, 8)
    """block sizes of speculative decoding"""
    threads: tuple[int, ...] = ()
    """thread settings; default: 1 and 2, as far as there are CPUs"""
    minutes: float = 25.0
    """no new cycle of runs is begun that would end after this"""
    quick: Switch = False
    """3 prompts, 64 tokens, blocks 5 and 8, 3 minutes: a look, not a figure to quote"""
    json: Path | None = None
    """write every figure and what it depends on"""
    reference_python: Path = Path(".venv-reference/bin/python")
    """interpreter with PyTorch, transformers and dflash"""
    llama_cpp: Path | None = None
    """folder with llama-server"""
    llama_target: Path | None = None
    """the target as GGUF"""
    llama_draft: Path | None = None
    """the drafter as GGUF"""
    quiet: Switch = False
    """no progress on stderr"""


def settled(args: Args) -> Args:
    """With thread settings, and with the short figures of ``--quick`` if it was given."""
    threads = args.threads or tuple(count for count in (1, 2) if count <= len(available_cpus()))
    args = replace(args, threads=threads)
    return replace(args, samples=3, new_tokens=64, blocks=(5, 8), minutes=2.2) if args.quick else args


def check(args: Args) -> list[list[int]]:
    """The prompts, after every check that needs no process.

    Raises:
        ValueError: saying what is wrong and what to do.
    """
    locate(None, args.target, args.draft)
    count = len(available_cpus())
    if min(args.threads) < 1 or max(args.threads) > count:
        raise ValueError(f"--threads {' '.join(map(str, args.threads))}: from 1 to {count}, the CPUs there are")
    if not args.blocks or min(args.blocks) < 2 or max(args.blocks) > LARGEST_BLOCK:
        raise ValueError(f"--blocks {' '.join(map(str, args.blocks))}: the anchor and drafts, 2 to {LARGEST_BLOCK}")
    if args.new_tokens < 2 or args.samples < 1:
        raise ValueError(f"--new-tokens {args.new_tokens} --samples {args.samples}: at least 2 tokens of 1 prompt")
    llama = [args.llama_cpp, args.llama_target, args.llama_draft]
    if any(llama) and not all(llama):
        raise ValueError("llama.cpp needs all of --llama-cpp DIR, --llama-target GGUF and --llama-draft GGUF")
    if args.json is not None and args.json.is_dir():
        raise ValueError(f"--json {args.json} is a folder; expected a file")
    rows = prompt_files.read_rows(args.prompts or args.target / "prompts.jsonl")
    if split := args.split or (None if args.prompts else "modeling"):
        rows = prompt_files.of_split(rows, split)
    return prompt_files.encode(in_turn(rows, args.samples), load_tokenizer(args.target), None)


def in_turn(rows: Sequence[prompt_files.Row], count: int) -> list[prompt_files.Row]:
    """The first rows of every split, one of each split after the other."""
    splits: dict[str | None, list[prompt_files.Row]] = {}
    for row in rows:
        splits.setdefault(row.split, []).append(row)
    longest = max(map(len, splits.values()))
    return [split[turn] for turn in range(longest) for split in splits.values() if turn < len(split)][:count]


def measure(args: Args, prompts: list[list[int]], stage: Stage, waiting: Waiting) -> Result:
    """Warm up, calibrate, run the duels, probe."""
    began = time.monotonic()
    deadline = began + 60 * args.minutes
    result = Result(Contest(stage.players, prompts, args.new_tokens), args.threads, {}, {}, reasons=stage.reasons)
    with waiting.on("compiling"):
        for method, variants in variants_of_ours(args, stage).items():
            request = dict(method=method, prompt=prompts[0], tokens=args.new_tokens, variants=variants)
            _must(ask_all(list(stage.ours.values()), "warm", **request))
        for block in args.blocks:
            request = dict(block=block, prompt=prompts[0], tokens=PROBE_TOKENS)
            _must(ask_all(list(stage.ours.values()), "prepare_probe", **request))
    with waiting.on("choosing each contestant's fastest variant"):
        calibrate(args, stage, result, until=(began + deadline) / 2)
    with waiting.on("probing our loop"):
        probe(args, prompts[0], stage, result)
    spec = {t: [entry(SPEC, t, {"block": block}) for block in args.blocks] for t in args.threads}
    first = opening(result.chosen, spec)
    with waiting.through("duels", args.samples * (len(first) + 3 * len(RATIOS))) as step:
        middle = (time.monotonic() + deadline) / 2
        cycles = [result.contest.run(first, middle, args.samples, step)]
        choose_best(args, result, spec)
        rest = [duel for duel in closing(result.chosen, result.better) if duel not in result.contest.ratios]
        cycles.append(result.contest.run(rest, deadline, args.samples, step))
    settle(args, stage, result)
    for who, words in result.contest.failures.items():
        if who.contestant not in (PLAIN, SPEC):
            stage.leave_out(who.contestant, words)
    result.about |= {"cycles": cycles, "seconds": time.monotonic() - began}
    return result


def variants_of_ours(args: Args, stage: Stage) -> dict[str, list[dict[str, Any]]]:
    """Everything of our own that is decoded, and so compiled first."""
    forms = stage.options[PLAIN]["form"]
    return {PLAIN: [{"form": form} for form in forms], SPEC: [{"block": block} for block in args.blocks]}


def calibrate(args: Args, stage: Stage, result: Result, until: float) -> None:
    """Find the fastest variant of plain decoding and of every peer, at every thread setting."""
    tokens = 16 if args.quick else 32
    for name in (PLAIN, *PEERS, LLAMA):
        options = {**stage.options.get(name, {})}
        if "block" in options:
            options["block"] = args.blocks
        for threads in args.threads:
            if (name, threads) not in stage.players:
                continue
            try:
                short = dict(tokens=tokens, runs=1 if args.quick else 2, until=until)
                best, seen = result.contest.calibrate(name, threads, options, **short)
            except Refused as refusal:
                stage.leave_out(name, str(refusal))
                continue
            result.chosen[name, threads] = best
            result.calibration |= seen


def choose_best(args: Args, result: Result, spec: dict[int, list[Entry]]) -> None:
    """Our best block at each setting, and every contestant's better setting."""
    samples = result.contest.samples
    for threads in args.threads:
        medians = {who: median_rate(samples.get(who, [])) for who in spec[threads]}
        result.chosen[SPEC, threads] = max(medians, key=lambda who: np.nan_to_num(medians[who]))
    rates = {key: result.calibration.get(who, 0.0) for key, who in result.chosen.items()}
    rates |= {key: np.nan_to_num(median_rate(samples[who])) for key, who in result.chosen.items() if who in samples}
    for name in dict.fromkeys(name for name, _ in rates):
        result.better[name] = max((t for who, t in rates if who == name), key=lambda t: rates[name, t])


def probe(args: Args, prompt: list[int], stage: Stage, result: Result) -> None:
    """What only our own children can see, at every thread setting."""
    turns = 3 if args.quick else 9
    forms = {threads: dict(result.chosen[PLAIN, threads].variant)["form"] for threads in args.threads}
    for threads, child in stage.ours.items():
        result.blocks[threads] = {block: child.ask("probe", block=block, turns=turns) for block in args.blocks}
        request = dict(form=forms[threads], prompt=prompt, tokens=PROBE_TOKENS)
        flat = child.ask("flatness", repeats=turns, **request)
        copies = child.ask("cache_copies", blocks=list(args.blocks), **request)
        result.probes[threads] = {
            "flatness": {"value": flat["flatness"], **flat},
            "cache_copies": {"value": max(copies.values()), "programs": copies},
        }


def settle(args: Args, stage: Stage, result: Result) -> None:
    """Probes that need the duels' figures: the share of the bandwidth, and the loop's overhead at the best block."""
    for threads in args.threads:
        probes, plain = result.probes[threads], result.chosen[PLAIN, threads]
        samples = result.contest.samples.get(plain, [])
        union = spread([sample.union for sample in samples if sample.union is not None])["median"]
        share = stage.ours[threads].ask("bandwidth", form=dict(plain.variant)["form"], union=union)
        share["value"] = share["token_bytes"] * median_rate(samples) / share["bytes_per_s"]
        probes["bandwidth_share"] = share
        block = dict(result.chosen[SPEC, threads].variant)["block"]
        parts = result.blocks[threads][block]
        probes["loop_overhead"] = {"value": parts["overhead"], "block": block, "spread": parts["overhead_spread"]}


def about(args: Args, prompts: list[list[int]], stage: Stage, load: tuple[float, ...]) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "command": shlex.join(["python", "-m", "experiments.bench", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **stage.versions},
        "cpu": cpu_name(),
        "cpus": len(available_cpus()),
        "load_average": {"before": load, "after": os.getloadavg()},
        "pair": [args.target.resolve().name, args.draft.resolve().name],
        "layout": stage.options["about ours"]["layout"],
        "trained_block": stage.options["about ours"]["trained_block"],
        "prompts": len(prompts),
        "prompt_hash": prompt_files.fingerprint(prompts),
        "new_tokens": args.new_tokens,
        "dtype": "float32",
    }


def cpu_name() -> str:
    """The processor's name as Linux tells it, else as Python does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _must(answers: list[dict[str, Any] | Refused]) -> None:
    for answer in answers:
        if isinstance(answer, Refused):
            raise answer


def main(args: Args) -> Result:
    """Parse -> check -> start -> measure -> publish."""
    args = settled(args)
    prompts, load, waiting = check(args), os.getloadavg(), Waiting(args.quiet)
    with Stage() as stage:
        with waiting.on("loading every contestant"):
            start_ours(stage, args.target, args.draft, args.threads)
            start_peers(stage, args.reference_python, args.target, args.draft, args.threads)
            block = stage.options["about ours"]["trained_block"]
            start_llama(stage, args.llama_cpp, args.llama_target, args.llama_draft, block, args.threads)
        result = measure(args, prompts, stage, waiting)
        result.about |= about(args, prompts, stage, load)
    show(result)
    if args.json is not None:
        write_json(result, args.json)
        print(f"written {args.json}")
    return result


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (ValueError, Refused) as error:
        sys.exit(f"error: {error}")
