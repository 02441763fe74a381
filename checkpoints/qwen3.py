"""Qwen3 dense: names of the released files."""

from checkpoints.family import Family, Rules
from checkpoints.rules import Rule, Skip
from checkpoints.transforms import TRANSPOSE

LAYER = "model.layers.{i}."
ATTENTION = LAYER + "self_attn."

RULES: Rules = (
    Rule(("model.embed_tokens.weight",), "embed"),
    Rule(("lm_head.weight",), "head", TRANSPOSE),
    Rule(("model.norm.weight",), "final_norm"),
    Rule((LAYER + "input_layernorm.weight",), "attention_norm_{i}"),
    Rule((LAYER + "post_attention_layernorm.weight",), "mlp_norm_{i}"),
    *(Rule((ATTENTION + f"{p}_proj.weight",), f"attention_{{i}}/{p}", TRANSPOSE) for p in "qkvo"),
    Rule((ATTENTION + "q_norm.weight",), "attention_{i}/q_norm"),
    Rule((ATTENTION + "k_norm.weight",), "attention_{i}/k_norm"),
    *(Rule((LAYER + f"mlp.{p}_proj.weight",), f"mlp_{{i}}/{p}", TRANSPOSE) for p in ("gate", "up", "down")),
    Skip("*rotary_emb.inv_freq", "rotary frequencies are computed from config.json"),
)

FAMILY = Family(rules=RULES)
