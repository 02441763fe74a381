"""Tiny gpt-oss checkpoints: released MXFP4 layout, bf16 export, tied embeddings, a tight clamp."""

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from observe import Text, observe
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from weights import (
    TOLERANCE,
    Config,
    Spec,
    Tensors,
    check_distinct,
    draw_all,
    matrix,
    norm,
    sizes,
    stream,
    write_checkpoint,
    write_golden,
)

GROUP = 32  # values that share one MXFP4 scale
OLD_ROPE = {
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
NEW_ROPE = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


@dataclass(frozen=True)
class GptOssCase:
    """Everything that distinguishes one gpt-oss golden from the next."""

    about: str
    seed: int
    text: Text
    sizes: dict[str, int]
    rope: Config
    packed: bool = False
    tied: bool = False
    swiglu_limit: float = 7.0
    loud_tokens: int = 0  # rows of the head that are three times as long, so that these tokens win most choices


BIG = sizes(hidden=96, inner=64, layers=6, heads=12, kv_heads=4, head_dim=18, vocab=131)
BIG |= {"num_local_experts": 7, "num_experts_per_tok": 5}
SMALL = sizes(hidden=80, inner=44, layers=4, heads=10, kv_heads=5, head_dim=14, vocab=113)
SMALL |= {"num_local_experts": 6, "num_experts_per_tok": 2}

GPT_OSS_CASES = {
    "gpt_oss_mxfp4": GptOssCase(
        about="released MXFP4 layout in two shards, old rope spelling, YaRN with truncate false",
        seed=11,
        text=Text(batch=2, length=50),
        sizes=BIG,
        rope=OLD_ROPE,
        packed=True,
    ),
    "gpt_oss_bf16": GptOssCase(
        about="bf16 export layout, new rope spelling, YaRN whose truncate key is absent (so true)",
        seed=15,
        text=Text(batch=3, length=46),
        sizes=SMALL,
        rope=NEW_ROPE,
    ),
    "gpt_oss_tied": GptOssCase(
        about="bf16 export layout, tied embeddings: there is no lm_head tensor",
        seed=13,
        text=Text(batch=3, length=42),
        sizes=SMALL,
        rope=OLD_ROPE,
        tied=True,
    ),
    "gpt_oss_clamp": GptOssCase(
        about="both swiglu clamps bite, at a limit (1) that is not the released one (7)",
        seed=14,
        text=Text(batch=3, length=43),
        sizes=SMALL,
        rope=NEW_ROPE,
        swiglu_limit=1.0,
    ),
}


def config_of(case: GptOssCase) -> Config:
    """The `config.json` of a case, with the keys and the order of the releases."""
    layers = case.sizes["num_hidden_layers"]
    config = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": 3,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "experts_per_token": case.sizes["num_experts_per_tok"],
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "rms_norm_eps": 1e-05,
        "sliding_window": case.text.window,
        "swiglu_limit": case.swiglu_limit,
        "tie_word_embeddings": case.tied,
        **case.sizes,
        **case.rope,
    }
    if case.packed:
        skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"modules_to_not_convert": skipped, "quant_method": "mxfp4"}
    return config


def dimensions(case: GptOssCase) -> dict[str, int]:
    """The named sizes that must differ pairwise."""
    c = case.sizes
    return {
        "batch": case.text.batch,
        "length": case.text.length,
        "hidden": c["hidden_size"],
        "query_width": c["num_attention_heads"] * c["head_dim"],
        "kv_width": c["num_key_value_heads"] * c["head_dim"],
        "query_heads": c["num_attention_heads"],
        "kv_heads": c["num_key_value_heads"],
        "head_dim": c["head_dim"],
        "half_head_dim": c["head_dim"] // 2,
        "intermediate": c["intermediate_size"],
        "gate_and_up": 2 * c["intermediate_size"],
        "layers": c["num_hidden_layers"],
        "experts": c["num_local_experts"],
        "experts_per_token": c["num_experts_per_tok"],
        "window": case.text.window,
        "vocab": c["vocab_size"],
    }


def expert_specs(case: GptOssCase, prefix: str) -> dict[str, Spec]:
    """The expert tensors of one layer; a packed case keeps only the biases here."""
    c = case.sizes
    experts, width, inner = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    specs = {
        f"{prefix}.gate_up_proj_bias": Spec((experts, 2 * inner), 0.5),
        f"{prefix}.down_proj_bias": Spec((experts, width), 0.3),
    }
    if not case.packed:
        specs[f"{prefix}.gate_up_proj"] = matrix(experts, width, 2 * inner, fan_in=width)
        specs[f"{prefix}.down_proj"] = matrix(experts, inner, width, fan_in=inner)
    return specs


def specs_of(case: GptOssCase) -> dict[str, Spec]:
    """The inventory of bf16 tensors, under the released names."""
    c = case.sizes
    width, vocab, heads = c["hidden_size"], c["vocab_size"], c["num_attention_heads"]
    # A tied embedding is also the head: its scale sets that of the logits.
    specs = {"model.embed_tokens.weight": Spec((vocab, width), 0.3 if case.tied else 1.0)}
    specs["model.norm.weight"] = norm(width)
    if not case.tied:
        specs["lm_head.weight"] = matrix(vocab, width, fan_in=width, gain=2.0)
    outputs = {"q": heads * c["head_dim"], "k": c["num_key_value_heads"] * c["head_dim"]}
    outputs["v"] = outputs["k"]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        attention, router = f"{prefix}.self_attn", f"{prefix}.mlp.router"
        for letter, out in outputs.items():
            specs[f"{attention}.{letter}_proj.weight"] = matrix(out, width, fan_in=width)
            specs[f"{attention}.{letter}_proj.bias"] = Spec((out,), 0.3)
        specs[f"{attention}.o_proj.weight"] = matrix(width, outputs["q"], fan_in=outputs["q"])
        specs[f"{attention}.o_proj.bias"] = Spec((width,), 0.3)
        specs[f"{attention}.sinks"] = Spec((heads,), 1.0, 0.5)
        specs[f"{prefix}.input_layernorm.weight"] = norm(width)
        specs[f"{prefix}.post_attention_layernorm.weight"] = norm(width)
        specs[f"{router}.weight"] = matrix(c["num_local_experts"], width, fan_in=width, gain=2.0)
        specs[f"{router}.bias"] = Spec((c["num_local_experts"],), 0.5)
        specs |= expert_specs(case, f"{prefix}.mlp.experts")
    return specs


def packed_experts(case: GptOssCase) -> Tensors:
    """Random MXFP4 expert weights: all sixteen codes, scales from 2^-7 to 2^-4."""
    c = case.sizes
    width, inner = c["hidden_size"], c["intermediate_size"]
    tensors = {}
    for layer in range(c["num_hidden_layers"]):
        for proj, rows, columns in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
            name = f"model.layers.{layer}.mlp.experts.{proj}"
            random = stream(case.seed, name)
            shape = (c["num_local_experts"], rows, columns // GROUP)
            blocks = random.integers(0, 256, (*shape, GROUP // 2), dtype="uint8")
            scales = random.integers(120, 124, shape, dtype="uint8")
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)
    return tensors


def shard_of(name: str) -> int:
    """Two shards, cut so that layer 1 has the blocks, scales and biases of its experts on different sides."""
    if name.startswith("model.layers.1.mlp.experts."):
        return {"gate_up_proj_blocks": 1, "down_proj_scales": 1, "down_proj_bias": 1}.get(name.rsplit(".", 1)[-1], 0)
    return 1 if name.startswith(("model.layers.3.", "model.layers.4.", "model.layers.5.", "lm_head")) else 0


def write_and_load(case: GptOssCase, folder: Path) -> GptOssForCausalLM:
    """Write the checkpoint of a case, and read it back in float64; nothing may be missing or left over."""
    tensors = draw_all(case.seed, specs_of(case)) | (packed_experts(case) if case.packed else {})
    if case.loud_tokens:
        tensors["lm_head.weight"][: case.loud_tokens] *= 3
    write_checkpoint(folder, config_of(case), tensors, shard_of if case.packed else None)
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if case.packed else {}
    model, info = GptOssForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        **options,
    )
    problems = {kind: keys for kind, keys in info.items() if keys}
    if problems:
        raise ValueError(f"{folder.name}: {problems}")
    check_dequantised(model, tensors)
    return model.double().eval()


def check_dequantised(model: GptOssForCausalLM, tensors: Tensors) -> None:
    """The loaded expert weights are the decoded blocks, whichever shard they came from."""
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        torch.testing.assert_close(model.get_parameter(name), dense, rtol=0, atol=0)


def clamp_fractions(model: GptOssForCausalLM, ids: torch.Tensor) -> dict[str, float]:
    """How often a gate exceeds the limit, and how often an up value leaves it on either side."""
    seen = []
    original = GptOssExperts._apply_gate

    def spy(experts: GptOssExperts, gate_up: torch.Tensor) -> torch.Tensor:
        seen.append(gate_up)
        return original(experts, gate_up)

    with mock.patch.object(GptOssExperts, "_apply_gate", spy):
        model(ids)
    gate_up, limit = torch.cat(seen), model.config.swiglu_limit
    gate, up = gate_up[:, ::2], gate_up[:, 1::2]
    fractions = {"gate_above": gate > limit, "up_above": up > limit, "up_below": up < -limit}
    return {name: round(hit.float().mean().item(), 3) for name, hit in fractions.items()}


@torch.inference_mode()
def build(name: str, folder: Path) -> None:
    """Write one gpt-oss case."""
    case = GPT_OSS_CASES[name]
    dims = dimensions(case)
    check_distinct(dims)
    model = write_and_load(case, folder)
    expected, observed = observe(model, case.text, case.seed, routers=[x.mlp.router for x in model.model.layers])
    observed["clamped"] = clamp_fractions(model, expected["input_ids"])
    if case.swiglu_limit < 7 and min(observed["clamped"].values()) < 0.01:
        raise ValueError(f"{name}: the clamps hardly bite: {observed['clamped']}")
    details = {"family": "gpt_oss", "dims": dims, "text": case.text.described(), "observed": observed}
    write_golden(folder, "target", case.about, expected, TOLERANCE, **details)
