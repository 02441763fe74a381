"""Train a tiny gpt-oss on source code: the target of the shipped pair.

    python -m experiments.train_target --out runs/target     # 41 minutes on two cores
    python -m experiments.train_target --out runs/target     # the same line again resumes

Text: the train split of :mod:`experiments.corpus`. The last part of the run trains through MXFP4-rounded experts, so
that the packed checkpoint is the network that was trained. Writes orbax checkpoints, ``log.jsonl`` and
``loss.png`` under ``--out``, and the network in Hugging Face layout, experts in MXFP4, under ``--out/target``.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tyro
from rich.progress import track

from checkpoints.export import export_target
from checkpoints.gpt_oss import hf_config
from dflash_jax.nn import yarn_rope
from dflash_jax.training.language_model import cross_entropy, make_update, round_experts_to_mxfp4
from dflash_jax.training.optimize import TrainState, cosine_schedule, init_state, muon
from experiments import corpus
from experiments.curve import plot_curve
from models.gpt_oss import GptOss, GptOssConfig
from models.target import FlaxTarget


@dataclass(frozen=True)
class Args:
    """Train a tiny gpt-oss target."""

    out: Path
    """folder of the run: checkpoints, log, curve"""
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
    """share of the run after which experts are rounded to MXFP4 in the forward pass"""
    save_every: int = 100
    """updates between checkpoints and held-out losses"""
    seed: int = 0


HELD_OUT = ("modeling", "library", "stdlib")
ROPE_THETA = 150_000.0
ROPE_SCALING = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
    "truncate": False,
}


def tiny_gpt_oss() -> GptOssConfig:
    """The shipped shape: four experts, two per token, and many narrow layers, beside which a drafter of two is cheap
    (docs/slower.md)."""
    rope = yarn_rope(ROPE_THETA, 64, factor=4.0, original_max_position=512, truncate=False)
    return GptOssConfig(
        vocab_size=1024,
        hidden_size=256,
        layers=12,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate_size=128,
        experts=4,
        experts_per_token=2,
        windows=(128, None) * 6,
        rope=rope,
    )


def windows_of(tokens: np.ndarray, args: Args, step: int) -> np.ndarray:
    """The batch of an update: random windows, a pure function of seed and step, so that a resumed run is the same."""
    starts = np.random.default_rng((args.seed, step)).integers(0, len(tokens) - args.tokens - 1, args.batch)
    return np.stack([tokens[s : s + args.tokens + 1] for s in starts]).astype(np.int32)


def held_out_loss(evaluate, params, tokens: np.ndarray, args: Args, batches: int = 4) -> float:
    """Nats per token over fixed windows of a split."""
    losses = [evaluate(params, windows_of(tokens, args, 10_000_000 + i)) for i in range(batches)]
    return float(np.mean([np.asarray(loss) for loss in losses]))


def main(args: Args) -> None:
    splits = load_splits(args)
    target = FlaxTarget(GptOss(tiny_gpt_oss()))
    config = target.config

    def forward(params, tokens):
        cache = target.init_cache(*tokens.shape, undo=tokens.shape[1])
        logits, seen = target.module.apply({"params": params}, tokens, cache, mutable=["router"])
        return logits, jax.tree.leaves(seen["router"])

    optimizer = muon(cosine_schedule(args.updates, args.learning_rate, warmup=60), args.weight_decay)
    update = {
        quantized: make_update(forward, optimizer, experts_per_token=config.experts_per_token, quantized=quantized)
        for quantized in (False, True)
    }

    @jax.jit
    def evaluate(params, batch):
        return cross_entropy(forward(round_experts_to_mxfp4(params), batch[:, :-1])[0], batch[:, 1:]).mean()

    args.out.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    saved = ocp.CheckpointManager(args.out.absolute() / "checkpoints", options=options)
    state = init_state(target.init(jax.random.key(args.seed)), optimizer)
    if saved.latest_step() is not None:
        state = saved.restore(saved.latest_step(), args=ocp.args.StandardRestore(state))
        print(f"resumed at update {int(state.step)}")
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(f"target {size / 1e6:.1f} M parameters, train split {len(splits['train']) / 1e6:.2f} M tokens")
    state = run(args, state, update, evaluate, splits, saved)
    more = {"max_position_embeddings": 2048, "eos_token_id": 0, "pad_token_id": 2}
    written = hf_config(config, rope_theta=ROPE_THETA, rope_scaling=ROPE_SCALING, **more)
    export_target(state.params, written, args.out / "target", overwrite=True)
    print(f"wrote {args.out / 'target'}")


def run(args, state: TrainState, update, evaluate, splits, saved) -> TrainState:
    """The loop: updates, and every ``save_every`` of them a held-out loss, a log line and a checkpoint."""
    log, recent, started = args.out / "log.jsonl", [], time.time()
    first = int(state.step)
    for step in track(range(first, args.updates), description="training"):
        quantized = step >= args.quantize_from * args.updates
        state, report = update[quantized](state, jnp.asarray(windows_of(splits["train"], args, step)))
        recent.append(float(report["loss"]))
        if (step + 1) % args.save_every and step + 1 != args.updates:
            continue
        row = {
            "update": step + 1,
            "tokens": (step + 1) * args.batch * args.tokens,
            "train_loss": float(np.mean(recent)),
            "balance": float(report["balance"]),
            "quantized": bool(quantized),
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
