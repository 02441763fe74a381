"""A second, independent reading of the golden files: mlx-lm's own implementations of the same networks.

Outside the tests, in an environment of its own (Python 3.11):

    python3.11 -m venv .venv-mlx && .venv-mlx/bin/pip install "mlx[cpu]==0.32.4" mlx-lm==0.32.2 safetensors
    .venv-mlx/bin/python tests/reference/second_opinion.py --json experiments/results/second_opinion.json

Every golden checkpoint is loaded by mlx-lm in float32, which also computes its norms and softmaxes in float32, and its
logits are held against those that transformers gave in float64. What must be changed so that both mean the same network
is written next to each golden, and in the result. (Left out: gpt-oss, whose YaRN ramp mlx-lm rounds whatever the
config says, and shared indexers, which it does not have.)
"""

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from safetensors.numpy import load_file

GOLDENS = Path(__file__).parents[1] / "goldens"
Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class Case:
    """A golden, and how it is put so that mlx-lm reads the same network.

    Attributes:
        keys: added to its config.
        tensors: ``(tensors, config) -> tensors``.
        why: all of it in words.
    """

    keys: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[Tensors, dict], Tensors] = lambda tensors, config: tensors
    why: str = ""


def fuse(tensors: Tensors, config: dict) -> Tensors:
    """Single experts as fused ones."""
    sizes, kept = config["text_config"], {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    for layer in range(sizes["num_hidden_layers"]):
        stem = f"model.language_model.layers.{layer}.mlp.experts."
        each = [
            {part: tensors[f"{stem}{e}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for e in range(sizes["num_experts"])
        ]
        kept[stem + "gate_up_proj"] = mx.stack([mx.concatenate([one["gate"], one["up"]]) for one in each])
        kept[stem + "down_proj"] = mx.stack([one["down"] for one in each])
    return kept


CASES = {
    "qwen3_untied": Case(),
    "qwen3_5_moe_fused": Case(),
    "qwen3_5_moe_single": Case(tensors=fuse, why="experts fused: it reads single ones in no form"),
    "glm4_moe": Case(),
    "glm4_moe_air": Case(
        keys={"rope_theta": 1000000, "rope_scaling": None, "partial_rotary_factor": 0.5},
        why="rope_parameters spelled as GLM-4.5 spells them",
    ),
    "glm4_moe_lite": Case(),
    "glm_moe_dsa_full": Case(
        keys={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
        why="keys of the router spelled out",
    ),
}
"""Golden -> its case."""


def prepare(golden: str, case: Case, folder: Path) -> None:
    """Write the golden's checkpoint with float32 tensors, which keeps mlx-lm from rounding."""
    source = GOLDENS / golden
    shards = [mx.load(str(shard)) for shard in sorted(source.glob("model*.safetensors"))]
    tensors = {name: value.astype(mx.float32) for shard in shards for name, value in shard.items()}
    config = json.loads((source / "config.json").read_text()) | case.keys
    mx.save_safetensors(str(folder / "model.safetensors"), case.tensors(tensors, config))
    (folder / "config.json").write_text(json.dumps(config))


def compare(golden: str) -> dict:
    """The largest difference of the logits, their spread, and how often the largest logit is the same."""
    case, expected = CASES[golden], load_file(str(GOLDENS / golden / "expected.safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        prepare(golden, case, Path(folder))
        model, _ = load_model(Path(folder))
        logits = model(mx.array(expected["input_ids"].astype(np.int32)))
    logits, wanted = np.asarray(logits.astype(mx.float32), np.float64), expected["logits"]
    return {
        "max_abs": float(np.abs(logits - wanted).max()),
        "std": float(wanted.std()),
        "argmax_equal": float((logits.argmax(-1) == wanted.argmax(-1)).mean()),
        "tokens": int(wanted[..., 0].size),
        "changed": case.why,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    found = {}
    for golden in args.only:
        found[golden] = row = compare(golden)
        print(
            f"{golden:20} max |difference| {row['max_abs']:.1e} of std {row['std']:.2f}, "
            f"argmax equal {row['argmax_equal']:.4f} of {row['tokens']} tokens {row['changed']}"
        )
    if args.json:
        versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "numpy")}
        versions["python"] = platform.python_version()
        args.json.write_text(
            json.dumps({"command": shlex.join(["python", *sys.argv]), "versions": versions, "goldens": found}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
