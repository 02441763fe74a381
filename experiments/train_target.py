"""Train a tiny target on source code: the larger half of a shipped pair.

    python -m experiments.train_target --out runs/target     # tiny-gpt-oss, 41 minutes on two cores
    python -m experiments.train_target --out runs/target     # the same line again resumes
    python -m experiments.train_target --out runs/qwen --pair tiny-qwen3.5-moe --updates 500

Text: the train split of :mod:`experiments.corpus`. The last part of the run trains through what the file can hold
(MXFP4 experts, FP8 matrices), so that the stored checkpoint is the network that was trained. Writes orbax checkpoints,
``log.jsonl`` and ``loss.png`` under ``--out``, and the network in Hugging Face layout under ``--out/target``.
"""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tyro
from rich.progress import track

from checkpoints.export import export_target
from dflash_jax.training.language_model import cross_entropy, make_update
from dflash_jax.training.optimize import TrainState, cosine_schedule, init_state, muon
from experiments import corpus
from experiments.curve import plot_curve
from experiments.recipes import RECIPES


@dataclass(frozen=True)
class Args:
    """Train a tiny target."""

    out: Path
    """folder of the run: checkpoints, log, curve"""
    pair: Literal[tuple(RECIPES)] = "tiny-gpt-oss"
    """the shipped pair whose target it is"""
    updates: int = 800
    """optimiser updates in all"""
    batch: int = 16
    """sequences per update"""
    tokens: int = 256
    """tokens per sequence"""
    learning_rate: float = 5e-3
    """peak; the RMS of an update of a matrix is 0.2 of it"""
    weight_decay: float = 0.05
    quantize_from: float = 0.75
    """share of the run after which weights are rounded in the forward pass to what the file can hold"""
    save_every: int = 100
    """updates between checkpoints and held-out losses"""
    seed: int = 0


HELD_OUT = ("modeling", "library", "stdlib")


def windows_of(tokens: np.ndarray, args: Args, step: int) -> np.ndarray:
    """The batch of an update: random windows, a pure function of seed and step, so that a resumed run is the same."""
    starts = np.random.default_rng((args.seed, step)).integers(0, len(tokens) - args.tokens - 1, args.batch)
    return np.stack([tokens[s : s + args.tokens + 1] for s in starts]).astype(np.int32)


def held_out_loss(evaluate, params, tokens: np.ndarray, args: Args, batches: int = 4) -> float:
    """Nats per token over fixed windows of a split."""
    losses = [evaluate(params, windows_of(tokens, args, 10_000_000 + i)) for i in range(batches)]
    return float(np.mean([np.asarray(loss) for loss in losses]))


def main(args: Args) -> None:
    splits, recipe = load_splits(args), RECIPES[args.pair]
    target, rounding = recipe.build(), recipe.rounding

    def forward(params, tokens):
        cache = target.init_cache(*tokens.shape, undo=tokens.shape[1])
        logits, seen = target.module.apply({"params": params}, tokens, cache, mutable=["router"])
        return logits, jax.tree.leaves(seen["router"])

    optimizer = muon(
        cosine_schedule(args.updates, args.learning_rate, warmup=min(60, args.updates // 10)), args.weight_decay
    )
    update = {
        each: make_update(forward, optimizer, experts_per_token=target.config.experts_per_token, rounding=each)
        for each in (None, rounding)
    }

    @jax.jit
    def evaluate(params, batch):
        used = rounding(params) if rounding else params
        return cross_entropy(forward(used, batch[:, :-1])[0], batch[:, 1:]).mean()

    args.out.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    saved = ocp.CheckpointManager(args.out.absolute() / "checkpoints", options=options)
    state = init_state(target.init(jax.random.key(args.seed)), optimizer)
    if saved.latest_step() is not None:
        state = saved.restore(saved.latest_step(), args=ocp.args.StandardRestore(state))
        print(f"resumed at update {int(state.step)}")
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(f"{args.pair}: {size / 1e6:.1f} M parameters, train split {len(splits['train']) / 1e6:.2f} M tokens")
    state = run(args, state, update, evaluate, splits, saved)
    export_target(state.params, recipe.config, args.out / "target", recipe.stored, overwrite=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(corpus.PAIR / name, args.out / "target" / name)
    print(f"wrote {args.out / 'target'}")


def run(args, state: TrainState, update, evaluate, splits, saved) -> TrainState:
    """The loop: updates, and every ``save_every`` of them a held-out loss, a log line and a checkpoint."""
    log, recent, started = args.out / "log.jsonl", [], time.time()
    first = int(state.step)
    for step in track(range(first, args.updates), description="training"):
        rounding = RECIPES[args.pair].rounding if step >= args.quantize_from * args.updates else None
        state, report = update[rounding](state, jnp.asarray(windows_of(splits["train"], args, step)))
        recent.append(float(report["loss"]))
        if (step + 1) % args.save_every and step + 1 != args.updates:
            continue
        row = {
            "update": step + 1,
            "tokens": (step + 1) * args.batch * args.tokens,
            "train_loss": float(np.mean(recent)),
            "balance": float(report["balance"]),
            "rounded": rounding is not None,
            "seconds": time.time() - started,
            **{f"{name}_loss": held_out_loss(evaluate, state.params, splits[name], args) for name in HELD_OUT},
        }
        recent = []
        with log.open("a") as handle:
            handle.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        saved.save(step + 1, args=ocp.args.StandardSave(state))
    saved.wait_until_finished()
    losses = {f"{name}_loss": f"{name}: nats per token" for name in ("train", *HELD_OUT)}
    plot_curve(args.out / "log.jsonl", args.out / "loss.png", x="tokens", lines=losses)
    return state


def load_splits(args: Args) -> dict[str, np.ndarray]:
    """Token arrays of every split, encoded by the pair's own tokenizer."""
    tokenizer = corpus.load_tokenizer()
    return {name: corpus.encode(name, tokenizer) for name in corpus.SPLITS}


if __name__ == "__main__":
    main(tyro.cli(Args))
