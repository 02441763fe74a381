"""The shipped targets before they are trained: the ``config.json`` of each, and what its file can hold.

Small, in the released layouts. All have width 256, heads of 64 and the same 1,024 tokens.
"""

from dataclasses import dataclass
from typing import Any

from checkpoints.config import text_config
from dflash_jax.training.language_model import Rounding, round_experts_to_mxfp4, round_matrices_to_fp8
from models import MODELS
from models.target import FlaxTarget


@dataclass(frozen=True)
class Recipe:
    """A target to train.

    Attributes:
        config: its ``config.json``.
        stored: how its experts are written, see :func:`checkpoints.export.export_target`.
        rounding: what that leaves of the parameters; None: they are stored in bfloat16.
    """

    config: dict[str, Any]
    stored: str
    rounding: Rounding | None = None

    def build(self) -> FlaxTarget:
        """The network, its experts one by one."""
        config_type, module_type = MODELS[self.config["model_type"]]
        return FlaxTarget(module_type(config_type.from_hf(text_config(self.config)), layout="split"))


SIZES = {
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 1024,
}

TINY_GPT_OSS = Recipe(
    # Four experts, two per token, and many narrow layers, beside which a drafter of two is cheap (docs/slower.md).
    config=SIZES
    | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 2,
        "initial_context_length": 512,
        "intermediate_size": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 6,
        "model_type": "gpt_oss",
        "num_hidden_layers": 12,
        "num_local_experts": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 512,
            "truncate": False,
        },
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    stored="mxfp4",
    rounding=round_experts_to_mxfp4,
)

TINY_QWEN3_5_MOE = Recipe(
    config={
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": SIZES
        | {
            "attention_bias": False,
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 64,
            "mamba_ssm_dtype": "float32",
            "mlp_only_layers": [],
            "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_hidden_layers": 8,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 64,
        },
        "tie_word_embeddings": False,
    },
    stored="fused",
)

TINY_GLM4_MOE = Recipe(
    config=SIZES
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "intermediate_size": 512,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 64,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_hidden_layers": 8,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    stored="fp8",
    rounding=round_matrices_to_fp8,
)

RECIPES: dict[str, Recipe] = {
    "tiny-gpt-oss": TINY_GPT_OSS,
    "tiny-qwen3.5-moe": TINY_QWEN3_5_MOE,
    "tiny-glm4-moe": TINY_GLM4_MOE,
}
"""Name of a pair -> its target."""
