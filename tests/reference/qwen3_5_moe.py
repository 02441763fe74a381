"""Tiny Qwen3.5-MoE checkpoints: the fused layout of the bfloat16 releases, and one tensor per expert."""

from dataclasses import dataclass
from pathlib import Path

import torch
from observe import Text, observe
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from weights import (
    TOLERANCE,
    Config,
    Spec,
    Tensors,
    check_distinct,
    draw_all,
    matrix,
    stream,
    write_checkpoint,
    write_golden,
)
from wide import wide

PREFIX = "model.language_model."


@dataclass(frozen=True)
class Qwen35Case:
    """Everything that distinguishes one golden from the next."""

    about: str
    seed: int
    text: Text
    sizes: dict[str, int]
    fused: bool
    wide_gates: bool = False  # A_log and the gated norm in float32, as in the 3.5 release (3.6: bfloat16)


SIZES = {
    "hidden_size": 68,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 10,
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 18,
    "linear_conv_kernel_dim": 4,
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
    "vocab_size": 127,
}
CASES = {
    "qwen3_5_moe_fused": Qwen35Case(
        about="bfloat16 layout: fused experts, float32 A_log and gated norm, tensors of an mtp head and a vision tower",
        seed=41,
        text=Text(batch=2, length=86, chunks=(3, 1, 1, 1, 2, 7, 1, 66, 1, 2)),
        sizes=SIZES,
        fused=True,
        wide_gates=True,
    ),
    "qwen3_5_moe_single": Qwen35Case(
        about="one tensor per expert and projection, bfloat16 A_log and gated norm; other sizes",
        seed=42,
        text=Text(batch=3, length=47),
        sizes=SIZES
        | {"num_hidden_layers": 4, "linear_num_value_heads": 15, "num_experts": 9, "num_experts_per_tok": 8},
        fused=False,
    ),
}


def text_config(case: Qwen35Case) -> Config:
    """The inner config, with the keys of the releases."""
    layers = case.sizes["num_hidden_layers"]
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 3,
        "eos_token_id": 2,
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)],
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        **case.sizes,
    }


def config_of(case: Qwen35Case) -> Config:
    """The outer ``config.json``."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 5,
        "model_type": "qwen3_5_moe",
        "text_config": text_config(case),
        "tie_word_embeddings": False,
        "video_token_id": 6,
    }


def dimensions(case: Qwen35Case) -> dict[str, int]:
    """The named sizes that must differ pairwise."""
    c = case.sizes
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    return {
        "batch": case.text.batch,
        "length": case.text.length,
        "hidden": c["hidden_size"],
        "layers": c["num_hidden_layers"],
        "query_width": c["num_attention_heads"] * c["head_dim"],
        "kv_width": c["num_key_value_heads"] * c["head_dim"],
        "query_heads": c["num_attention_heads"],
        "head_dim": c["head_dim"],
        "key_heads": c["linear_num_key_heads"],
        "value_heads": c["linear_num_value_heads"],
        "key_dim": c["linear_key_head_dim"],
        "value_dim": c["linear_value_head_dim"],
        "keys": keys,
        "values": values,
        "channels": 2 * keys + values,
        "experts": c["num_experts"],
        "expert_size": c["moe_intermediate_size"],
        "shared_size": c["shared_expert_intermediate_size"],
        "vocab": c["vocab_size"],
    }


def centred(width: int) -> Spec:
    """A norm weight that is stored as its distance from one."""
    return Spec((width,), 0.3)


def linear_specs(case: Qwen35Case, prefix: str) -> dict[str, Spec]:
    """A GatedDeltaNet layer."""
    c, d = case.sizes, dimensions(case)
    width, heads = c["hidden_size"], c["linear_num_value_heads"]
    rows = {"qkv": d["channels"], "z": d["values"], "a": heads, "b": heads}
    specs = {f"{prefix}.in_proj_{part}.weight": matrix(out, width, fan_in=width) for part, out in rows.items()}
    return specs | {
        f"{prefix}.conv1d.weight": Spec((d["channels"], 1, 4), 0.5),
        f"{prefix}.A_log": Spec((heads,), 0.7, 0.3),
        f"{prefix}.dt_bias": Spec((heads,), 0.7, -1.0),
        f"{prefix}.norm.weight": Spec((c["linear_value_head_dim"],), 0.3, 1.0),
        f"{prefix}.out_proj.weight": matrix(width, d["values"], fan_in=d["values"], gain=0.7),
    }


def attention_specs(case: Qwen35Case, prefix: str) -> dict[str, Spec]:
    """A full-attention layer; every head's query rows are followed by its gate rows."""
    c, d = case.sizes, dimensions(case)
    width = c["hidden_size"]
    return {
        f"{prefix}.q_proj.weight": matrix(2 * d["query_width"], width, fan_in=width),
        f"{prefix}.k_proj.weight": matrix(d["kv_width"], width, fan_in=width),
        f"{prefix}.v_proj.weight": matrix(d["kv_width"], width, fan_in=width),
        f"{prefix}.o_proj.weight": matrix(width, d["query_width"], fan_in=d["query_width"]),
        f"{prefix}.q_norm.weight": centred(c["head_dim"]),
        f"{prefix}.k_norm.weight": centred(c["head_dim"]),
    }


def mlp_specs(case: Qwen35Case, prefix: str) -> dict[str, Spec]:
    """Router, routed experts (fused) and the shared expert."""
    c = case.sizes
    width, inner, shared, experts = (
        c[name] for name in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts")
    )
    return {
        f"{prefix}.gate.weight": matrix(experts, width, fan_in=width, gain=2.0),
        f"{prefix}.experts.gate_up_proj": matrix(experts, 2 * inner, width, fan_in=width),
        f"{prefix}.experts.down_proj": matrix(experts, width, inner, fan_in=inner),
        f"{prefix}.shared_expert.gate_proj.weight": matrix(shared, width, fan_in=width),
        f"{prefix}.shared_expert.up_proj.weight": matrix(shared, width, fan_in=width),
        f"{prefix}.shared_expert.down_proj.weight": matrix(width, shared, fan_in=shared),
        f"{prefix}.shared_expert_gate.weight": matrix(1, width, fan_in=width),
    }


def specs_of(case: Qwen35Case) -> dict[str, Spec]:
    """The text network, under the released names, experts fused."""
    width, vocab = case.sizes["hidden_size"], case.sizes["vocab_size"]
    specs = {
        f"{PREFIX}embed_tokens.weight": Spec((vocab, width), 2.0),
        f"{PREFIX}norm.weight": centred(width),
        "lm_head.weight": matrix(vocab, width, fan_in=width, gain=2.0),
    }
    for layer, kind in enumerate(text_config(case)["layer_types"]):
        prefix = f"{PREFIX}layers.{layer}"
        specs[f"{prefix}.input_layernorm.weight"] = centred(width)
        specs[f"{prefix}.post_attention_layernorm.weight"] = centred(width)
        specs |= mlp_specs(case, f"{prefix}.mlp")
        if kind == "linear_attention":
            specs |= linear_specs(case, f"{prefix}.linear_attn")
        else:
            specs |= attention_specs(case, f"{prefix}.self_attn")
    return specs


def stored(case: Qwen35Case, tensors: Tensors) -> Tensors:
    """The tensors as the case's file holds them."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if case.wide_gates and name.endswith(("A_log", "linear_attn.norm.weight")):
            out[name] = tensor.float()
        elif not case.fused and name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stem = name.replace("gate_up_proj", f"{expert}.")
                out |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif not case.fused and name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): part for e, part in enumerate(tensor)}
        else:
            out[name] = tensor
    if case.fused:  # parts of a release that a text model leaves out
        extra = {
            "mtp.fc.weight": (4, 8),
            "mtp.layers.0.mlp.gate.weight": (3, 4),
            "model.visual.pos_embed.weight": (4, 3),
        }
        for name, shape in extra.items():
            out[name] = torch.from_numpy(stream(case.seed, name).standard_normal(shape)).to(torch.bfloat16)
    return out


def write_and_load(case: Qwen35Case, folder: Path) -> Qwen3_5MoeForCausalLM:
    """Write the checkpoint of a case; the reference takes the same tensors by name, in float64, all of them."""
    tensors = draw_all(case.seed, specs_of(case))
    write_checkpoint(folder, config_of(case), stored(case, tensors))
    config = Qwen3_5MoeTextConfig(**text_config(case))
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = Qwen3_5MoeForCausalLM(config)
    own = {name.replace(PREFIX, "model."): tensor.double() for name, tensor in tensors.items()}
    model.double().load_state_dict(own, strict=True)
    return model.eval()


@torch.inference_mode()
def build(name: str, folder: Path) -> None:
    """Write one case."""
    case = CASES[name]
    dims = dimensions(case)
    check_distinct(dims)
    model = write_and_load(case, folder)
    routers = [layer.mlp.gate for layer in model.model.layers]
    with wide(model):
        expected, observed = observe(model, case.text, case.seed, routers=routers)
    details = {"family": "qwen3_5_moe", "dims": dims, "text": case.text.described(), "observed": observed}
    write_golden(folder, "target", case.about, expected, TOLERANCE, **details)
