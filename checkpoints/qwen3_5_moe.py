"""Qwen3.5 and 3.6 MoE: names of the released files, text network only.

The network lies under ``model.language_model.`` and its config under ``text_config``; ``lm_head`` is outside. Main
layers have fused experts in bfloat16 files and single ones in FP8 files.
"""

from checkpoints import mixture
from checkpoints.family import Family, Rules
from checkpoints.rules import Rule, Skip
from checkpoints.transforms import CONVOLUTION, TRANSPOSE
from models.qwen3_5_moe import Qwen35MoeConfig

LAYER = "model.layers.{i}."
ATTENTION, LINEAR, MLP = LAYER + "self_attn.", LAYER + "linear_attn.", LAYER + "mlp."

RULES: Rules = (
    Rule(("model.embed_tokens.weight",), "embed"),
    Rule(("lm_head.weight",), "head", TRANSPOSE),
    Rule(("model.norm.weight",), "final_norm"),
    Rule((LAYER + "input_layernorm.weight",), "mixer_norm_{i}"),
    Rule((LAYER + "post_attention_layernorm.weight",), "moe_norm_{i}"),
    *(Rule((ATTENTION + f"{p}_proj.weight",), f"attention_{{i}}/{p}", TRANSPOSE) for p in "qkvo"),
    *(Rule((ATTENTION + f"{p}_norm.weight",), f"attention_{{i}}/{p}_norm") for p in "qk"),
    *(Rule((LINEAR + f"in_proj_{p}.weight",), f"delta_{{i}}/{p}", TRANSPOSE) for p in ("qkv", "z", "a", "b")),
    Rule((LINEAR + "out_proj.weight",), "delta_{i}/o", TRANSPOSE),
    Rule((LINEAR + "conv1d.weight",), "delta_{i}/conv", CONVOLUTION),
    *(Rule((LINEAR + p,), f"delta_{{i}}/{p}") for p in ("A_log", "dt_bias")),
    Rule((LINEAR + "norm.weight",), "delta_{i}/norm"),
    Rule((MLP + "gate.weight",), "moe_{i}/router", TRANSPOSE),
    Rule((MLP + "shared_expert_gate.weight",), "moe_{i}/shared_scale", TRANSPOSE),
    *(
        Rule((MLP + f"shared_expert.{p}_proj.weight",), f"moe_{{i}}/shared_{p}", TRANSPOSE)
        for p in ("gate", "up", "down")
    ),
    Skip("mtp.*", "multi-token prediction head; the drafter proposes instead"),
    Skip("visual.*", "vision tower; text only"),
    Skip("*rotary_emb.inv_freq", "rotary frequencies are computed from config.json"),
)

FAMILY = Family(
    rules=RULES,
    experts=mixture.chooser(Qwen35MoeConfig),
    expert_rules=mixture.expert_rules,
    stores={"fused": "fused", "single": "single"},
    prefix="model.language_model.",
    float32=("linear_attn.A_log", "linear_attn.norm.weight"),
)
