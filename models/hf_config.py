"""Reading transformers' config dictionaries: both spellings of rope, layer types, and errors that name the key."""

from typing import Any

from dflash_jax.nn import Rope, plain_rope, yarn_rope


def require(config: dict[str, Any], key: str) -> Any:
    """``config[key]``.

    Raises:
        ValueError: naming the key, if it is missing.
    """
    if config.get(key) is None:
        raise ValueError(f"config.json: {key!r} is missing; found keys {sorted(config)}")
    return config[key]


def rope_from(config: dict[str, Any], head_dim: int) -> Rope:
    """The rotary embedding of a config: ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling``.

    Raises:
        ValueError: for a rope type other than default and yarn, or a YaRN block without its factor.
    """
    spec = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = theta_of(config)
    kind = spec.get("rope_type") or spec.get("type") or "default"
    if kind == "default":
        return plain_rope(theta, head_dim)
    if kind != "yarn":
        raise ValueError(f"config.json: rope type {kind!r} is not supported; known: default, yarn")
    original = spec.get("original_max_position_embeddings") or config.get("initial_context_length")
    if original is None:
        original = require(config, "max_position_embeddings")
    return yarn_rope(
        theta,
        head_dim,
        factor=float(require(spec, "factor")),
        original_max_position=int(original),
        beta_fast=float(spec.get("beta_fast") or 32.0),
        beta_slow=float(spec.get("beta_slow") or 1.0),
        truncate=bool(spec.get("truncate", True)),
        attention_factor=spec.get("attention_factor"),
    )


def theta_of(config: dict[str, Any]) -> float:
    """``rope_theta``, in ``rope_parameters`` or beside it."""
    spec = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return float(spec.get("rope_theta") or require(config, "rope_theta"))


def windows_from(config: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """The sliding window of every layer, None for full attention (``layer_types``, ``sliding_window``).

    Without ``layer_types``, ``use_sliding_window`` makes the layers from ``max_window_layers`` on slide
    (``Qwen3Config``); without either, all attention is full.

    Raises:
        ValueError: if ``layer_types`` has another length, an unknown name, or a sliding layer without a window.
    """
    kinds = config.get("layer_types")
    if not kinds:
        first = int(config.get("max_window_layers") or 0) if config.get("use_sliding_window") else layers
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {layers}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"config.json: layer_types has {unknown}; known: full_attention, sliding_attention")
    if "sliding_attention" in kinds:
        window = int(require(config, "sliding_window"))
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (None,) * layers


def rotary_dim(config: dict[str, Any], head_dim: int, default: float = 1.0) -> int:
    """Dimensions of a head that rotate: ``partial_rotary_factor``, in ``rope_parameters`` or beside it.

    Args:
        default: the family's factor where the config names none.
    """
    spec = config.get("rope_parameters") or {}
    factor = spec.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return int(head_dim * float(default if factor is None else factor))
