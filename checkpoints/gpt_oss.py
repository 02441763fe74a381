"""gpt-oss: names and layouts of the released MXFP4 files and of bfloat16 exports.

Experts are stored ``[E, O, I]`` as MXFP4 blocks and scales (openai/gpt-oss-20b), or ``[E, I, O]`` in floats under
names without suffix (exports by transformers). Both have gate and up columns alternating, as the module wants them.
"""

import math
from typing import Any

import jax.numpy as jnp

from checkpoints.errors import raise_if
from checkpoints.family import DECODED_BY_DEFAULT, SPLIT_AT_MOST, Experts, Family
from checkpoints.reader import Reader
from checkpoints.rules import Rule, Skip
from checkpoints.transforms import CODES, DECODE, SCALES, TRANSPOSE
from models.gpt_oss import GptOssConfig

LAYER = "model.layers.{i}."
ATTENTION = LAYER + "self_attn."
EXPERTS = LAYER + "mlp.experts."

RESIDENT: tuple[Rule | Skip, ...] = (
    Rule(("model.embed_tokens.weight",), "embed"),
    Rule(("lm_head.weight",), "head", TRANSPOSE),
    Rule(("model.norm.weight",), "final_norm"),
    Rule((LAYER + "input_layernorm.weight",), "attention_norm_{i}"),
    Rule((LAYER + "post_attention_layernorm.weight",), "moe_norm_{i}"),
    *(Rule((ATTENTION + f"{p}_proj.weight",), f"attention_{{i}}/{p}", TRANSPOSE) for p in "qkvo"),
    *(Rule((ATTENTION + f"{p}_proj.bias",), f"attention_{{i}}/{p}_bias") for p in "qkvo"),
    Rule((ATTENTION + "sinks",), "attention_{i}/sinks"),
    Rule((LAYER + "mlp.router.weight",), "moe_{i}/router", TRANSPOSE),
    Rule((LAYER + "mlp.router.bias",), "moe_{i}/router_bias"),
    Skip("*rotary_emb.inv_freq", "rotary frequencies are computed from config.json"),
)


def expert_rules(stored: str, layout: str) -> tuple[Rule, ...]:
    """Rules of the experts for a file that is ``stored`` as "mxfp4" or "plain" and parameters in a ``layout``.

    Raises:
        ValueError: packed parameters have no place in a plain file.
    """
    if (stored, layout) == ("plain", "packed"):
        raise ValueError("packed experts cannot be stored as floats; decode them first, or store them as MXFP4")
    place = "{e}/" if layout == "split" else ""
    rules = []
    for name in ("gate_up", "down"):
        rules.append(Rule((f"{EXPERTS}{name}_proj_bias",), f"moe_{{i}}/experts/{place}{name}_bias", expert=True))
        blocks, scales = f"{EXPERTS}{name}_proj_blocks", f"{EXPERTS}{name}_proj_scales"
        if layout == "packed":
            rules.append(Rule((blocks,), f"moe_{{i}}/experts/{name}/codes", CODES, expert=True))
            rules.append(Rule((scales,), f"moe_{{i}}/experts/{name}/scales", SCALES, expert=True))
        elif stored == "mxfp4":
            rules.append(Rule((blocks, scales), f"moe_{{i}}/experts/{place}{name}", DECODE, expert=True))
        else:
            rules.append(Rule((f"{EXPERTS}{name}_proj",), f"moe_{{i}}/experts/{place}{name}", expert=True))
    return tuple(rules)


def stored_as(reader: Reader) -> str:
    """ "mxfp4" or "plain"."""
    return "mxfp4" if any(name.endswith("_proj_blocks") for name in reader) else "plain"


def choose_experts(config: dict[str, Any], reader: Reader, dtype: jnp.dtype, option: str | None) -> Experts:
    """How the experts of a file become parameters.

    Args:
        option: "packed" keeps MXFP4; "bfloat16" and "float32" decode at load; None decodes to the model's dtype if
            that takes less than 2 GiB and keeps MXFP4 otherwise.

    Raises:
        CheckpointError: packed experts from a file that has none.
        ValueError: an unknown option.
    """
    stored, sizes = stored_as(reader), GptOssConfig.from_hf(config)
    values = sizes.layers * sizes.experts * 3 * sizes.hidden_size * sizes.intermediate_size
    if option is None:
        option = "bfloat16" if dtype == jnp.bfloat16 else "float32"
        if stored == "mxfp4" and values * jnp.dtype(option).itemsize >= DECODED_BY_DEFAULT:
            option = "packed"
    if option not in ("packed", "bfloat16", "float32"):
        raise ValueError(f"experts={option!r} is not known; known: packed, bfloat16, float32")
    if option == "packed":
        if stored != "mxfp4":
            what = "experts='packed' needs MXFP4 tensors (*_proj_blocks, *_proj_scales); this file has plain ones"
            raise_if(reader.folder, [f"{what}: use experts='bfloat16' or 'float32'"])
        note = f"kept as MXFP4, {values * 17 / 32 / 2**30:.2f} GiB"
        return Experts("packed", expert_rules(stored, "packed"), dtype, note)
    layout = "split" if sizes.experts <= SPLIT_AT_MOST else "stacked"
    verb = "decoded from MXFP4" if stored == "mxfp4" else "read"
    note = f"{verb} to {option}, {layout}, {values * jnp.dtype(option).itemsize / 2**30:.2f} GiB"
    return Experts(layout, expert_rules(stored, layout), jnp.dtype(option), note)


def hf_config(
    config: GptOssConfig, *, rope_theta: float, rope_scaling: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """A ``config.json`` for these sizes, in the spelling of the released files (``rope_theta``, ``rope_scaling``).

    Args:
        more: further keys, e.g. ``eos_token_id``, ``pad_token_id``, ``max_position_embeddings``.

    Raises:
        ValueError: if reading it back does not give ``config``: then it was made of other rope arguments.
    """
    windows = {window for window in config.windows if window is not None}
    scaling = rope_scaling or {}
    written = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "experts_per_token": config.experts_per_token,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initial_context_length": scaling.get("original_max_position_embeddings", 4096),
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
        "max_position_embeddings": math.ceil(
            scaling.get("original_max_position_embeddings", 131072) * scaling.get("factor", 1)
        ),
        "model_type": "gpt_oss",
        "num_attention_heads": config.heads,
        "num_experts_per_tok": config.experts_per_token,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "num_local_experts": config.experts,
        "output_router_logits": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": rope_scaling,
        "rope_theta": rope_theta,
        "sliding_window": max(windows, default=None),
        "swiglu_limit": config.swiglu_limit,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    } | more
    if GptOssConfig.from_hf(written) != config:
        raise ValueError(f"config.json would not read back as {config}; check rope_theta and rope_scaling")
    return written


FAMILY = Family(
    rules=RESIDENT,
    experts=choose_experts,
    expert_rules=expert_rules,
    stores={"mxfp4": "mxfp4", "bfloat16": "plain"},
)
