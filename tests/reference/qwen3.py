"""Tiny dense Qwen3 checkpoints: tied with the old rope spelling, untied with the new one."""

from dataclasses import dataclass
from pathlib import Path

import torch
from observe import Text, observe
from transformers import Qwen3ForCausalLM
from weights import (
    TOLERANCE,
    Config,
    Spec,
    check_distinct,
    draw_all,
    matrix,
    norm,
    sizes,
    write_checkpoint,
    write_golden,
)


@dataclass(frozen=True)
class Qwen3Case:
    """Everything that distinguishes one Qwen3 golden from the next."""

    about: str
    seed: int
    text: Text
    sizes: dict[str, int]
    rope: Config
    tied: bool
    loud_tokens: int = 0  # rows of the head that are three times as long, so that these tokens win most choices


QWEN3_CASES = {
    "qwen3_tied": Qwen3Case(
        about="tied embeddings (no lm_head tensor), old rope spelling",
        seed=21,
        text=Text(batch=2, length=44),
        sizes=sizes(hidden=72, inner=92, layers=4, heads=9, kv_heads=3, head_dim=14, vocab=127),
        rope={"rope_theta": 1000000, "rope_scaling": None},
        tied=True,
    ),
    "qwen3_untied": Qwen3Case(
        about="untied embeddings, new rope spelling",
        seed=22,
        text=Text(batch=3, length=47),
        sizes=sizes(hidden=68, inner=76, layers=5, heads=8, kv_heads=4, head_dim=18, vocab=109),
        rope={"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        tied=False,
    ),
}


def config_of(case: Qwen3Case) -> Config:
    """The `config.json` of a case, with the keys of the releases."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 3,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "max_window_layers": case.sizes["num_hidden_layers"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-06,
        "sliding_window": None,
        "tie_word_embeddings": case.tied,
        "use_sliding_window": False,
        **case.sizes,
        **case.rope,
    }


def dimensions(size: dict[str, int]) -> dict[str, int]:
    """The named sizes of a Qwen3-shaped network."""
    return {
        "hidden": size["hidden_size"],
        "query_width": size["num_attention_heads"] * size["head_dim"],
        "kv_width": size["num_key_value_heads"] * size["head_dim"],
        "query_heads": size["num_attention_heads"],
        "kv_heads": size["num_key_value_heads"],
        "head_dim": size["head_dim"],
        "half_head_dim": size["head_dim"] // 2,
        "intermediate": size["intermediate_size"],
        "vocab": size["vocab_size"],
    }


def layer_specs(size: dict[str, int], prefix: str, bias: bool = False) -> dict[str, Spec]:
    """The tensors of one decoder layer; the drafter has the same, sometimes with attention biases."""
    width, inner, head_dim = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    query, kv = size["num_attention_heads"] * head_dim, size["num_key_value_heads"] * head_dim
    projections = {"q": (query, width), "k": (kv, width), "v": (kv, width), "o": (width, query)}
    specs = {
        f"{prefix}.input_layernorm.weight": norm(width),
        f"{prefix}.post_attention_layernorm.weight": norm(width),
        f"{prefix}.self_attn.q_norm.weight": norm(head_dim),
        f"{prefix}.self_attn.k_norm.weight": norm(head_dim),
        f"{prefix}.mlp.gate_proj.weight": matrix(inner, width, fan_in=width),
        f"{prefix}.mlp.up_proj.weight": matrix(inner, width, fan_in=width),
        f"{prefix}.mlp.down_proj.weight": matrix(width, inner, fan_in=inner, gain=1.5),
    }
    for letter, (rows, columns) in projections.items():
        specs[f"{prefix}.self_attn.{letter}_proj.weight"] = matrix(rows, columns, fan_in=columns)
        if bias:
            specs[f"{prefix}.self_attn.{letter}_proj.bias"] = Spec((rows,), 0.3)
    return specs


def specs_of(case: Qwen3Case) -> dict[str, Spec]:
    """The whole inventory, under the released names."""
    width, vocab = case.sizes["hidden_size"], case.sizes["vocab_size"]
    # A tied embedding is also the head: its scale sets that of the logits.
    specs = {"model.embed_tokens.weight": Spec((vocab, width), 0.3 if case.tied else 1.0)}
    specs["model.norm.weight"] = norm(width)
    if not case.tied:
        specs["lm_head.weight"] = matrix(vocab, width, fan_in=width, gain=2.0)
    for layer in range(case.sizes["num_hidden_layers"]):
        specs |= layer_specs(case.sizes, f"model.layers.{layer}")
    return specs


def write_and_load(case: Qwen3Case, folder: Path) -> Qwen3ForCausalLM:
    """Write the checkpoint of a case, and read it back in float64; nothing may be missing or left over.

    Attention is `sdpa` because the `eager` one always takes its softmax in float32.
    """
    tensors = draw_all(case.seed, specs_of(case))
    if case.loud_tokens:
        tensors["lm_head.weight"][: case.loud_tokens] *= 3
    write_checkpoint(folder, config_of(case), tensors)
    model, info = Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    problems = {kind: keys for kind, keys in info.items() if keys}
    if problems:
        raise ValueError(f"{folder.name}: {problems}")
    return model.double().eval()


@torch.inference_mode()
def build(name: str, folder: Path) -> None:
    """Write one Qwen3 case."""
    case = QWEN3_CASES[name]
    dims = {
        "batch": case.text.batch,
        "length": case.text.length,
        "layers": case.sizes["num_hidden_layers"],
        **dimensions(case.sizes),
    }
    check_distinct(dims)
    model = write_and_load(case, folder)
    expected, observed = observe(model, case.text, case.seed)
    details = {"family": "qwen3", "dims": dims, "text": case.text.described(), "observed": observed}
    write_golden(folder, "target", case.about, expected, TOLERANCE, **details)
