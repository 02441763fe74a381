"""Experts of three plain matrices: what Qwen3.5 and the GLM families share on disk.

Fused files hold ``experts.gate_up_proj [E, 2F, D]`` (gate rows first) and ``experts.down_proj [E, D, F]`` per layer;
split files hold ``experts.{e}.gate_proj.weight``, ``up_proj`` and ``down_proj`` per expert.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from checkpoints.family import SPLIT_AT_MOST, Experts
from checkpoints.reader import Reader
from checkpoints.rules import Rule
from checkpoints.transforms import JOIN, TRANSPOSE

EXPERTS = "model.layers.{i}.mlp.experts."


def expert_rules(stored: str, layout: str) -> tuple[Rule, ...]:
    """Rules of the experts for a file that is ``stored`` as "fused" or "single" and parameters in a ``layout``."""
    place = "{e}/" if layout == "split" else ""
    gate_up, down = (f"moe_{{i}}/experts/{place}{name}" for name in ("gate_up", "down"))
    if stored == "fused":
        return (
            Rule((EXPERTS + "gate_up_proj",), gate_up, TRANSPOSE, expert=True),
            Rule((EXPERTS + "down_proj",), down, TRANSPOSE, expert=True),
        )
    one = EXPERTS + "{e}."
    return (
        Rule((one + "gate_proj.weight", one + "up_proj.weight"), gate_up, JOIN, expert=True),
        Rule((one + "down_proj.weight",), down, TRANSPOSE, expert=True),
    )


def stored_as(reader: Reader) -> str:
    """ "fused" or "single"."""
    return "fused" if any(name.endswith("mlp.experts.gate_up_proj") for name in reader) else "single"


def chooser(config_type: type) -> Callable[[dict[str, Any], Reader, jnp.dtype, str | None], Experts]:
    """The choice of a family (see :class:`checkpoints.family.Family`) whose config has ``experts``."""

    def choose(config: dict[str, Any], reader: Reader, dtype: jnp.dtype, option: str | None) -> Experts:
        stored, sizes = stored_as(reader), config_type.from_hf(config)
        if option is None:
            option = "bfloat16" if dtype == jnp.bfloat16 else "float32"
        if option not in ("bfloat16", "float32"):
            raise ValueError(f"experts={option!r} is not known for these files; known: bfloat16, float32")
        layout = "split" if sizes.experts <= SPLIT_AT_MOST else "stacked"
        return Experts(layout, expert_rules(stored, layout), jnp.dtype(option), f"read to {option}, {layout}")

    return choose
