"""Tiny GLM checkpoints: grouped-query attention (4.5 to 4.7), latent attention (4.7-Flash), sparse latent (5.x)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from observe import Text, observe
from transformers import AutoConfig, AutoModelForCausalLM
from weights import (
    TOLERANCE,
    Config,
    Spec,
    Tensors,
    check_distinct,
    draw_all,
    matrix,
    norm,
    stream,
    write_checkpoint,
    write_golden,
)
from wide import wide


@dataclass(frozen=True)
class GlmCase:
    """Everything that distinguishes one golden from the next."""

    about: str
    model_type: str
    seed: int
    text: Text
    sizes: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)


MIXTURE = {
    "intermediate_size": 76,
    "moe_intermediate_size": 28,
    "n_routed_experts": 9,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
LATENT = {
    "hidden_size": 68,
    "num_hidden_layers": 5,
    "num_attention_heads": 7,
    "num_key_value_heads": 7,
    "q_lora_rank": 44,
    "kv_lora_rank": 34,
    "qk_nope_head_dim": 18,
    "qk_rope_head_dim": 12,
    "v_head_dim": 22,
    "vocab_size": 127,
} | MIXTURE
GROUPED = {
    "hidden_size": 68,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 127,
} | MIXTURE
OLD_ROPE = {"rope_theta": 1000000, "rope_scaling": None}
NEW_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}

CASES = {
    "glm4_moe": GlmCase(
        about="4.5 and later: query/key norms, biases, expert groups, routed scale, an MTP layer",
        model_type="glm4_moe",
        seed=51,
        text=Text(batch=3, length=47),
        sizes=GROUPED | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
        config={"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5} | OLD_ROPE,
    ),
    "glm4_moe_air": GlmCase(
        about="4.5-Air: no query/key norms, routed scale 1, new rope spelling",
        model_type="glm4_moe",
        seed=52,
        text=Text(batch=2, length=46),
        sizes=GROUPED | {"num_hidden_layers": 3, "routed_scaling_factor": 1.0},
        config={
            "use_qk_norm": False,
            "attention_bias": True,
            "rope_parameters": NEW_ROPE["rope_parameters"] | {"partial_rotary_factor": 0.5},
        },
    ),
    "glm4_moe_lite": GlmCase(
        about="4.7-Flash: latent attention; rope_interleave absent, so true",
        model_type="glm4_moe_lite",
        seed=53,
        text=Text(batch=3, length=47),
        sizes=LATENT | {"routed_scaling_factor": 1.8},
        config={"attention_bias": False, "partial_rotary_factor": 1.0} | OLD_ROPE,
    ),
    "glm4_moe_lite_half": GlmCase(
        about="latent attention with biases and rotary pairs in two halves",
        model_type="glm4_moe_lite",
        seed=54,
        text=Text(batch=2, length=46),
        sizes=LATENT | {"num_hidden_layers": 3, "routed_scaling_factor": 1.8},
        config={"attention_bias": True, "rope_interleave": False} | NEW_ROPE,
    ),
    "glm_moe_dsa": GlmCase(
        about="5.x: sparse latent attention, texts longer than the selection, full and shared indexers",
        model_type="glm_moe_dsa",
        seed=55,
        text=Text(batch=3, length=49),
        sizes=LATENT
        | {"num_hidden_layers": 6, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2}
        | {"index_n_heads": 32, "index_head_dim": 26, "index_topk": 16},
        config={
            "attention_bias": False,
            "rope_interleave": True,
            "indexer_rope_interleave": True,
            "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
        }
        | NEW_ROPE,
    ),
    "glm_moe_dsa_full": GlmCase(
        about="5 and 5.1: indexer_types absent, so every layer selects, mixtures too",
        model_type="glm_moe_dsa",
        seed=56,
        text=Text(batch=2, length=46),
        sizes=LATENT
        | {"num_hidden_layers": 3, "routed_scaling_factor": 2.5}
        | {"index_n_heads": 32, "index_head_dim": 26, "index_topk": 16},
        config={"attention_bias": False, "rope_interleave": True, "indexer_rope_interleave": True} | NEW_ROPE,
    ),
}


def config_of(case: GlmCase) -> Config:
    """The `config.json` of a case, with the keys of the releases."""
    names = {
        "glm4_moe": "Glm4MoeForCausalLM",
        "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
        "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    }
    return {
        "architectures": [names[case.model_type]],
        "attention_dropout": 0.0,
        "eos_token_id": [2, 3],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "model_type": case.model_type,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        **case.sizes,
        **case.config,
    }


def dimensions(case: GlmCase) -> dict[str, int]:
    """The named sizes that must differ pairwise."""
    c = case.sizes
    dims = {
        "batch": case.text.batch,
        "length": case.text.length,
        "hidden": c["hidden_size"],
        "layers": c["num_hidden_layers"],
        "heads": c["num_attention_heads"],
        "intermediate": c["intermediate_size"],
        "expert_size": c["moe_intermediate_size"],
        "experts": c["n_routed_experts"],
        "experts_per_token": c["num_experts_per_tok"],
        "vocab": c["vocab_size"],
    }
    named = ("head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    dims |= {name: c[name] for name in (*named, "index_n_heads", "index_head_dim", "index_topk") if name in c}
    if "q_lora_rank" in c:
        return dims | {"q_width": c["num_attention_heads"] * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])}
    return dims | {
        "q_width": c["num_attention_heads"] * c["head_dim"],
        "kv_width": c["num_key_value_heads"] * c["head_dim"],
    }


def mlp_specs(width: int, inner: int, prefix: str) -> dict[str, Spec]:
    """SwiGLU."""
    return {
        f"{prefix}.gate_proj.weight": matrix(inner, width, fan_in=width),
        f"{prefix}.up_proj.weight": matrix(inner, width, fan_in=width),
        f"{prefix}.down_proj.weight": matrix(width, inner, fan_in=inner, gain=1.5),
    }


def grouped_specs(case: GlmCase, prefix: str) -> dict[str, Spec]:
    """Grouped-query attention."""
    c, d = case.sizes, dimensions(case)
    width, head = c["hidden_size"], c["head_dim"]
    rows = {"q": d["q_width"], "k": d["kv_width"], "v": d["kv_width"]}
    specs = {f"{prefix}.{p}_proj.weight": matrix(out, width, fan_in=width) for p, out in rows.items()}
    specs |= {f"{prefix}.{p}_proj.bias": Spec((out,), 0.3) for p, out in rows.items()}
    if case.config["use_qk_norm"]:
        specs |= {f"{prefix}.{p}_norm.weight": norm(head) for p in "qk"}
    return specs | {f"{prefix}.o_proj.weight": matrix(width, d["q_width"], fan_in=d["q_width"])}


def latent_specs(case: GlmCase, prefix: str) -> dict[str, Spec]:
    """Latent attention."""
    c = case.sizes
    width, heads, q_lora, latent = (
        c[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    specs = {
        f"{prefix}.q_a_proj.weight": matrix(q_lora, width, fan_in=width),
        f"{prefix}.q_a_layernorm.weight": norm(q_lora),
        f"{prefix}.q_b_proj.weight": matrix(heads * (nope + rope), q_lora, fan_in=q_lora, gain=2.0),
        f"{prefix}.kv_a_proj_with_mqa.weight": matrix(latent + rope, width, fan_in=width),
        f"{prefix}.kv_a_layernorm.weight": norm(latent),
        f"{prefix}.kv_b_proj.weight": matrix(heads * (nope + value), latent, fan_in=latent),
        f"{prefix}.o_proj.weight": matrix(width, heads * value, fan_in=heads * value),
    }
    if case.config["attention_bias"]:
        rows = {"q_a_proj": q_lora, "kv_a_proj_with_mqa": latent + rope, "o_proj": width}
        specs |= {f"{prefix}.{name}.bias": Spec((out,), 0.3) for name, out in rows.items()}
    return specs


def indexer_specs(case: GlmCase, prefix: str) -> dict[str, Spec]:
    """The indexer of a layer that selects."""
    c = case.sizes
    width, q_lora, heads, dim = (c[n] for n in ("hidden_size", "q_lora_rank", "index_n_heads", "index_head_dim"))
    return {
        f"{prefix}.wq_b.weight": matrix(heads * dim, q_lora, fan_in=q_lora),
        f"{prefix}.wk.weight": matrix(dim, width, fan_in=width),
        f"{prefix}.k_norm.weight": norm(dim),
        f"{prefix}.k_norm.bias": Spec((dim,), 0.3),
        f"{prefix}.weights_proj.weight": matrix(heads, width, fan_in=width),
    }


def specs_of(case: GlmCase) -> dict[str, Spec]:
    """The inventory, experts one by one, and a sketch of the MTP layer, which is left out on load."""
    c = case.sizes
    width, vocab, layers, inner = (
        c[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers", "moe_intermediate_size")
    )
    specs = {
        "model.embed_tokens.weight": Spec((vocab, width), 3.0),
        "model.norm.weight": norm(width),
        "lm_head.weight": matrix(vocab, width, fan_in=width, gain=2.0),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        specs |= {f"{prefix}.{name}_layernorm.weight": norm(width) for name in ("input", "post_attention")}
        specs |= (grouped_specs if "head_dim" in c else latent_specs)(case, f"{prefix}.self_attn")
        if "index_topk" in c and case.config.get("indexer_types", ["full"] * layers)[layer] == "full":
            specs |= indexer_specs(case, f"{prefix}.self_attn.indexer")
        if layer < c["first_k_dense_replace"]:
            specs |= mlp_specs(width, c["intermediate_size"], f"{prefix}.mlp")
            continue
        specs[f"{prefix}.mlp.gate.weight"] = matrix(c["n_routed_experts"], width, fan_in=width)
        specs[f"{prefix}.mlp.gate.e_score_correction_bias"] = Spec((c["n_routed_experts"],), 0.2)
        specs |= mlp_specs(width, inner * c["n_shared_experts"], f"{prefix}.mlp.shared_experts")
        for expert in range(c["n_routed_experts"]):
            specs |= mlp_specs(width, inner, f"{prefix}.mlp.experts.{expert}")
    return specs


def mtp(case: GlmCase) -> Tensors:
    """Some tensors of the layer past the last, as the releases have them."""
    width, vocab, layers = (case.sizes[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers"))
    shapes = {"eh_proj": (width, 2 * width), "enorm": (width,), "embed_tokens": (vocab, width)}
    names = {f"model.layers.{layers}.{name}.weight": shape for name, shape in shapes.items()}
    draw: Callable[[str, tuple[int, ...]], torch.Tensor] = lambda name, shape: torch.from_numpy(  # noqa: E731
        stream(case.seed, name).standard_normal(shape)
    ).to(torch.bfloat16)
    return {name: draw(name, shape) for name, shape in names.items()}


def write_and_load(case: GlmCase, folder: Path) -> torch.nn.Module:
    """Write the checkpoint of a case; the reference takes the same tensors by name, experts stacked, in float64."""
    tensors = draw_all(case.seed, specs_of(case))
    wide = {name: t.float() if name.endswith("e_score_correction_bias") else t for name, t in tensors.items()}
    write_checkpoint(folder, config_of(case), wide | mtp(case))
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = AutoModelForCausalLM.from_config(config).double()
    own, experts = {}, {}
    for name, tensor in tensors.items():
        stem, _, rest = name.partition(".mlp.experts.")
        if not rest:
            own[name] = tensor.double()
            continue
        expert, part, _ = rest.split(".")
        experts.setdefault(stem, {}).setdefault(int(expert), {})[part] = tensor.double()
    for stem, parts in experts.items():
        joined = [torch.cat([p["gate_proj"], p["up_proj"]]) for _, p in sorted(parts.items())]
        own[f"{stem}.mlp.experts.gate_up_proj"] = torch.stack(joined)
        own[f"{stem}.mlp.experts.down_proj"] = torch.stack([p["down_proj"] for _, p in sorted(parts.items())])
    model.load_state_dict(own, strict=True)
    return model.eval()


@torch.inference_mode()
def build(name: str, folder: Path) -> None:
    """Write one case."""
    case = CASES[name]
    dims = dimensions(case)
    check_distinct(dims)
    model = write_and_load(case, folder)
    with wide(model):
        expected, observed = observe(model, case.text, case.seed)
    details = {"family": case.model_type, "dims": dims, "text": case.text.described(), "observed": observed}
    write_golden(folder, "target", case.about, expected, TOLERANCE, **details)
