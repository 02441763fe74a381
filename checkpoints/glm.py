"""The GLM families: names of the released files. Experts lie one by one; the MTP layer is the one past the last."""

from checkpoints import mixture
from checkpoints.family import Family, Rules
from checkpoints.rules import Rule, Skip
from checkpoints.transforms import TRANSPOSE
from models.glm4_moe import Glm4MoeConfig
from models.glm4_moe_lite import Glm4MoeLiteConfig
from models.glm_moe_dsa import GlmMoeDsaConfig

LAYER = "model.layers.{i}."
ATTENTION, INDEXER, MLP = LAYER + "self_attn.", LAYER + "self_attn.indexer.", LAYER + "mlp."
PARTS = ("gate", "up", "down")

SHARED: Rules = (
    Rule(("model.embed_tokens.weight",), "embed"),
    Rule(("lm_head.weight",), "head", TRANSPOSE),
    Rule(("model.norm.weight",), "final_norm"),
    Rule((LAYER + "input_layernorm.weight",), "attention_norm_{i}"),
    Rule((LAYER + "post_attention_layernorm.weight",), "mlp_norm_{i}"),
    *(Rule((MLP + f"{p}_proj.weight",), f"mlp_{{i}}/{p}", TRANSPOSE) for p in PARTS),
    *(Rule((MLP + f"shared_experts.{p}_proj.weight",), f"moe_{{i}}/shared/{p}", TRANSPOSE) for p in PARTS),
    Rule((MLP + "gate.weight",), "moe_{i}/router", TRANSPOSE),
    Rule((MLP + "gate.e_score_correction_bias",), "moe_{i}/router_bias"),
    Skip("*rotary_emb.inv_freq", "rotary frequencies are computed from config.json"),
)

GROUPED: Rules = (
    *(Rule((ATTENTION + f"{p}_proj.weight",), f"attention_{{i}}/{p}", TRANSPOSE) for p in "qkvo"),
    *(Rule((ATTENTION + f"{p}_proj.bias",), f"attention_{{i}}/{p}_bias") for p in "qkv"),
    *(Rule((ATTENTION + f"{p}_norm.weight",), f"attention_{{i}}/{p}_norm") for p in "qk"),
)

LATENT_NAMES = {
    "q_a": "q_a_proj",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_b": "kv_b_proj",
    "o": "o_proj",
}
LATENT: Rules = (
    *(Rule((f"{ATTENTION}{name}.weight",), f"attention_{{i}}/{p}", TRANSPOSE) for p, name in LATENT_NAMES.items()),
    *(Rule((f"{ATTENTION}{LATENT_NAMES[p]}.bias",), f"attention_{{i}}/{p}_bias") for p in ("q_a", "kv_a", "o")),
    Rule((ATTENTION + "q_a_layernorm.weight",), "attention_{i}/q_norm"),
    Rule((ATTENTION + "kv_a_layernorm.weight",), "attention_{i}/kv_norm"),
)

INDEX: Rules = (
    Rule((INDEXER + "wq_b.weight",), "indexer_{i}/q", TRANSPOSE),
    Rule((INDEXER + "wk.weight",), "indexer_{i}/k", TRANSPOSE),
    Rule((INDEXER + "k_norm.weight",), "indexer_{i}/k_norm"),
    Rule((INDEXER + "k_norm.bias",), "indexer_{i}/k_norm_bias"),
    Rule((INDEXER + "weights_proj.weight",), "indexer_{i}/weights", TRANSPOSE),
)

MATRICES = (*"qkvo", "q_a", "q_b", "kv_b", *PARTS)
QUANTISED = (*(f".{name}_proj.weight" for name in MATRICES), ".kv_a_proj_with_mqa.weight", ".wq_b.weight", ".wk.weight")
"""What GLM-5-FP8 holds in FP8: all matrices of its layers but the router's and the indexer's ``weights_proj``."""


def _family(config_type: type, rules: Rules) -> Family:
    return Family(
        SHARED + rules,
        experts=mixture.chooser(config_type),
        expert_rules=mixture.expert_rules,
        stores={"bfloat16": "single", "fp8": "fp8"},
        float32=("e_score_correction_bias",),
        fp8=QUANTISED,
    )


GLM4_MOE = _family(Glm4MoeConfig, GROUPED)
GLM4_MOE_LITE = _family(Glm4MoeLiteConfig, LATENT)
GLM_MOE_DSA = _family(GlmMoeDsaConfig, LATENT + INDEX)
