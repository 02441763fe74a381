"""Train the DFlash drafter of a target on the target's own greedy text.

    python -m experiments.train_drafter --target checkpoints/pairs/tiny-gpt-oss --out runs/drafter
    python -m experiments.train_drafter --target checkpoints/pairs/tiny-gpt-oss --out runs/drafter   # resumes

Two stages, each resumable. First the target continues prompts from the train split greedily and the features that it
leaves on the way are kept on disk (float16). Then blocks at random anchors of the continuations are drafted, and the
drafter learns to say what the target said. The log tells the same of continuations of held-out prompts, which are never
trained on. Writes orbax checkpoints, ``log.jsonl`` and ``curve.png`` under ``--out``,
and the drafter in Hugging Face layout under ``--out/drafter`` at the end.
"""

import json
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

from checkpoints.dflash import hf_config
from checkpoints.export import export_drafter
from checkpoints.load import load_target
from dflash_jax.nn import plain_rope
from dflash_jax.training.continuations import continue_greedily
from dflash_jax.training.drafter import (
    WEIGHTS,
    make_lengths,
    make_objective,
    make_update,
    replayed_tokens_per_round,
)
from dflash_jax.training.optimize import cosine_schedule, init_state, muon
from experiments import corpus
from experiments.curve import plot_curve
from models.dflash import DFlash, DFlashConfig, DFlashDrafter


@dataclass(frozen=True)
class Args:
    """Train a DFlash drafter on the target's own greedy continuations."""

    target: Path
    """the target, a folder in Hugging Face layout"""
    out: Path
    """folder of the run: continuations, checkpoints, log, curve, drafter"""
    texts: int = 8192
    """continuations to train on"""
    prompt_tokens: int = 64
    """tokens of real text that each continuation follows"""
    new_tokens: int = 192
    """greedy tokens per continuation"""
    generate_batch: int = 64
    """prompts continued side by side"""
    taps: tuple[int, ...] = (2, 6, 10)
    """target layers whose outputs the drafter sees (0-based)"""
    layers: int = 2
    intermediate_size: int = 384
    block_size: int = 8
    """anchor and drafts"""
    updates: int = 3000
    """optimiser updates in all"""
    batch: int = 8
    """texts per update"""
    anchors: int = 64
    """blocks per text"""
    loss: Literal["decay", "dpace"] = "dpace"
    """weights of a block's rows: exponential decay (gamma 4), or D-PACE"""
    learning_rate: float = 1e-2
    """peak; the RMS of an update of a matrix is 0.2 of it"""
    save_every: int = 250
    """updates between checkpoints and log lines"""
    seed: int = 0


CURVES = {
    "loss": "loss (nats per unit of weight)",
    "held_out_loss": "the same after held-out prompts",
    "acceptance": "random blocks of training texts: tokens per round",
    "held_out_acceptance": "the same after held-out prompts",
    "held_out_replayed": "held-out prompts decoded: tokens per round",
}
HELD_OUT = "modeling"
ROPE_THETA = 10_000.0
MASK = 1
"""``<|mask|>`` in the pair's tokenizer."""


def tiny_drafter(hidden_size: int, args: Args) -> DFlashDrafter:
    config = DFlashConfig(
        hidden_size=hidden_size,
        target_hidden_size=hidden_size,
        layers=args.layers,
        heads=hidden_size // 64,
        kv_heads=2,
        head_dim=64,
        intermediate_size=args.intermediate_size,
        windows=(None,) * args.layers,
        causal=(False,) * args.layers,
        rope=plain_rope(ROPE_THETA, 64),
        taps=args.taps,
        mask_token_id=MASK,
        block_size=args.block_size,
    )
    return DFlashDrafter(DFlash(config), config.block_size)


def draw_prompts(tokens: np.ndarray, args: Args, batch_index: int) -> np.ndarray:
    """Windows of a split, a pure function of seed and batch."""
    starts = np.random.default_rng((args.seed, 1, batch_index)).integers(
        0, len(tokens) - args.prompt_tokens, args.generate_batch
    )
    return np.stack([tokens[start : start + args.prompt_tokens] for start in starts]).astype(np.int32)


@dataclass(frozen=True)
class Continuations:
    """Texts uint16 ``[n S]`` and features float16 ``[n S A D]``, memory-mapped."""

    texts: np.ndarray
    features: np.ndarray

    def __getitem__(self, rows) -> tuple[jax.Array, jax.Array]:
        """Rows as the update wants them."""
        return jnp.asarray(self.texts[rows].astype(np.int32)), jnp.asarray(self.features[rows].astype(np.float32))


def continuations(args: Args, target, params, split: str, count: int) -> Continuations:
    """``count`` continuations of prompts from a split; written batch by batch, once.

    Raises:
        ValueError: if the folder holds another number of them.
    """
    folder = args.out / "continuations" / split
    folder.mkdir(parents=True, exist_ok=True)
    length, width = args.prompt_tokens + args.new_tokens, target.config.hidden_size
    shapes = {"texts": ((count, length), np.uint16), "features": ((count, length, len(args.taps), width), np.float16)}
    arrays = {}
    for name, (shape, dtype) in shapes.items():
        path = folder / f"{name}.npy"
        mode = "r+" if path.exists() else "w+"
        arrays[name] = np.lib.format.open_memmap(path, mode, dtype=dtype, shape=shape)
        if arrays[name].shape != shape:
            raise ValueError(f"{path} has shape {arrays[name].shape}, this run wants {shape}; give another --out")
    progress = folder / "done.json"
    first = json.loads(progress.read_text())["batches"] if progress.exists() else 0
    tokens = corpus.encode(split, corpus.load_tokenizer(args.target))
    for index in track(range(first, count // args.generate_batch), description=f"continuing {split} prompts"):
        texts, features = continue_greedily(target, params, draw_prompts(tokens, args, index), args.new_tokens)
        rows = slice(index * args.generate_batch, (index + 1) * args.generate_batch)
        arrays["texts"][rows] = np.asarray(texts)
        arrays["features"][rows] = np.asarray(features.astype(jnp.float16))
        progress.write_text(json.dumps({"batches": index + 1}))
    return Continuations(**arrays)


def check(args: Args) -> None:
    """Raises ValueError for sizes that would leave texts empty or break off after the first ``save_every`` updates."""
    if args.texts % args.generate_batch or not args.texts:
        raise ValueError(f"--texts {args.texts}: a multiple of --generate-batch {args.generate_batch}, at least one")
    if args.generate_batch % args.batch:
        raise ValueError(
            f"--batch {args.batch}: must divide --generate-batch {args.generate_batch}, the held-out texts"
        )


def main(args: Args) -> None:
    check(args)
    target, params = load_target(args.target, experts="float32", taps=args.taps)
    heard = {"train": continuations(args, target, params, "train", args.texts)}
    heard["held out"] = continuations(args, target, params, HELD_OUT, args.generate_batch)
    drafter = tiny_drafter(target.config.hidden_size, args)
    optimizer = muon(
        cosine_schedule(args.updates, args.learning_rate, warmup=min(80, args.updates // 10)), weight_decay=0.0
    )
    weigh = WEIGHTS[args.loss]()
    update = make_update(drafter, target, optimizer, weigh, args.anchors)
    evaluate = jax.jit(make_objective(drafter, target, weigh, args.anchors))
    lengths = jax.jit(make_lengths(drafter, target, args.prompt_tokens))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    saved = ocp.CheckpointManager(args.out.absolute() / "checkpoints", options=options)
    state = init_state(drafter.init(jax.random.key(args.seed)), optimizer)
    if saved.latest_step() is not None:
        state = saved.restore(saved.latest_step(), args=ocp.args.StandardRestore(state))
        print(f"resumed at update {int(state.step)}")
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(f"drafter {size / 1e6:.1f} M parameters, {args.texts} continuations of {args.new_tokens} tokens")
    state = run(args, state, update, evaluate, lengths, params, heard, saved)
    written = hf_config(
        drafter.config,
        rope_theta=ROPE_THETA,
        vocab_size=target.config.vocab_size,
        target_layers=target.config.layers,
    )
    export_drafter(state.params, written, args.out / "drafter", overwrite=True)
    print(f"wrote {args.out / 'drafter'}")


def run(args: Args, state, update, evaluate, lengths, target_params, heard: dict[str, Continuations], saved):
    """The loop: updates, and every ``save_every`` of them a log line and a checkpoint."""
    length = args.prompt_tokens + args.new_tokens
    supervised = jnp.broadcast_to(jnp.arange(length) >= args.prompt_tokens, (args.batch, length))
    recent, started = [], time.time()
    key = jax.random.key(args.seed + 1)
    for step in track(range(int(state.step), args.updates), description="training"):
        rows = np.sort(np.random.default_rng((args.seed, 2, step)).choice(args.texts, args.batch, replace=False))
        batch = (*heard["train"][rows], supervised, jax.random.fold_in(key, step))
        state, report = update(state, target_params, *batch)
        recent.append(report)
        if (step + 1) % args.save_every and step + 1 != args.updates:
            continue
        row = {"update": step + 1, "blocks": (step + 1) * args.batch * args.anchors}
        row |= {name: float(np.mean([each[name] for each in recent])) for name in report}
        texts = [heard["held out"][at : at + args.batch] for at in range(0, args.generate_batch, args.batch)]
        tests = [evaluate(state.params, target_params, *text, supervised, key)[1] for text in texts]
        row |= {f"held_out_{name}": float(np.mean([each[name] for each in tests])) for name in tests[0]}
        decoded = jnp.concatenate([lengths(state.params, target_params, *text) for text in texts])
        row["held_out_replayed"] = float(replayed_tokens_per_round(decoded))
        row["seconds"] = time.time() - started
        recent = []
        with (args.out / "log.jsonl").open("a") as handle:
            handle.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        saved.save(step + 1, args=ocp.args.StandardSave(state))
    saved.wait_until_finished()
    plot_curve(args.out / "log.jsonl", args.out / "curve.png", x="blocks", lines=CURVES)
    return state


if __name__ == "__main__":
    main(tyro.cli(Args))
