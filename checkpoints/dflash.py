"""The DFlash drafter: names of z-lab's files. No embedding and no head: those are the target's."""

from typing import Any

from checkpoints.family import Rules
from checkpoints.rules import Rule, Skip
from checkpoints.transforms import TAPS, TRANSPOSE
from models.dflash import DFlashConfig

ATTENTION = "layers.{i}.self_attn."

RULES: Rules = (
    Rule(("fc.weight",), "fc", TAPS),
    Rule(("hidden_norm.weight",), "hidden_norm"),
    Rule(("norm.weight",), "norm"),
    Rule(("layers.{i}.input_layernorm.weight",), "attention_norm_{i}"),
    Rule(("layers.{i}.post_attention_layernorm.weight",), "mlp_norm_{i}"),
    *(Rule((ATTENTION + f"{p}_proj.weight",), f"attention_{{i}}/{p}", TRANSPOSE) for p in "qkvo"),
    *(Rule((ATTENTION + f"{p}_proj.bias",), f"attention_{{i}}/{p}_bias") for p in "qkvo"),
    Rule((ATTENTION + "q_norm.weight",), "attention_{i}/q_norm"),
    Rule((ATTENTION + "k_norm.weight",), "attention_{i}/k_norm"),
    *(Rule((f"layers.{{i}}.mlp.{p}_proj.weight",), f"mlp_{{i}}/{p}", TRANSPOSE) for p in ("gate", "up", "down")),
    Skip("*rotary_emb.inv_freq", "rotary frequencies are computed from config.json"),
)


def hf_config(
    config: DFlashConfig, *, rope_theta: float, vocab_size: int, target_layers: int, **more: Any
) -> dict[str, Any]:
    """A ``config.json`` for these sizes, as z-lab writes them.

    Args:
        vocab_size: of the target.
        target_layers: number of the target's layers.
        more: further keys, e.g. ``rope_scaling``, ``max_position_embeddings``.

    Raises:
        ValueError: if reading it back does not give ``config``.
    """
    windows = {window for window in config.windows if window is not None}
    dflash = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.taps)}
    if config.causal != tuple(window is not None for window in config.windows):
        dflash["causal"] = config.causal[0]
    optional = {
        "input_embedding_scale": (config.input_embedding_scale, 1.0),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.final_logit_softcapping, None),
        "target_hidden_size": (config.target_hidden_size, config.hidden_size),
    }
    written = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": dflash,
        "dtype": "bfloat16",
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
        "model_type": "qwen3",
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "num_target_layers": target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": rope_theta,
        "sliding_window": max(windows, default=None),
        "tie_word_embeddings": False,
        "use_sliding_window": bool(windows),
        "vocab_size": vocab_size,
    }
    written |= {key: value for key, (value, default) in optional.items() if value != default} | more
    if DFlashConfig.from_hf(written) != config:
        raise ValueError(f"config.json would not read back as {config}; check rope_theta and rope_scaling")
    return written
