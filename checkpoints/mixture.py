"""Experts of three plain matrices: what Qwen3.5 and the GLM families share on disk.

Fused files hold ``experts.gate_up_proj [E, 2F, D]`` (gate rows first) and ``experts.down_proj [E, D, F]`` per layer;
split files hold ``experts.{e}.gate_proj.weight``, ``up_proj`` and ``down_proj`` per expert.
"""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from checkpoints.errors import raise_if
from checkpoints.family import DECODED_BY_DEFAULT, SPLIT_AT_MOST, Experts
from checkpoints.fp8 import SUFFIXES
from checkpoints.reader import Reader
from checkpoints.rules import Rule
from checkpoints.transforms import CODE, JOIN, ROWS, TRANSPOSE, repeated_scales

EXPERTS = "model.layers.{i}.mlp.experts."

OWNER = re.compile(r"(?!mtp\.).*layers\.(?P<layer>\d+)\.mlp\.experts\..*")

FP8 = {"fp8": SUFFIXES[0], "fp8-rows": SUFFIXES[1]}
"""How FP8 experts may be stored -> what the names of their scales end in."""


def expert_rules(stored: str, layout: str) -> tuple[Rule, ...]:
    """Rules of the experts for a file that is ``stored`` as "fused", "single", or one of :data:`FP8` (single, with
    scales per block or per row) and parameters in a ``layout``; the layout "fp8" keeps the codes.

    Raises:
        ValueError: FP8 parameters have no place in a file without scales.
    """
    if layout == "fp8":
        if stored not in FP8:
            raise ValueError("experts packed as FP8 cannot be stored as floats; decode them first (experts='float32')")
        return _packed_rules(FP8[stored])
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


def _packed_rules(suffix: str) -> tuple[Rule, ...]:
    """Codes as they are, and their scales by name."""
    rules = []
    for name, parts, codes in (("gate_up", ("gate", "up"), ROWS), ("down", ("down",), CODE)):
        weights = tuple(f"{EXPERTS}{{e}}.{part}_proj.weight" for part in parts)
        scales = tuple(weight + suffix for weight in weights)
        repeat = repeated_scales(len(parts), per_row=suffix == FP8["fp8-rows"])
        place = f"moe_{{i}}/experts/{name}"
        rules.append(Rule(weights, f"{place}/codes", codes, expert=True, raw=True))
        rules.append(Rule(scales, f"{place}/scales", repeat, expert=True))
    return tuple(rules)


def stored_as(reader: Reader, layers: int) -> str:
    """How the experts of the first ``layers`` layers are stored, as :func:`expert_rules` calls it: one of :data:`FP8`
    only if every matrix has scales. Those of multi-token heads do not count."""
    names = [name for name in reader if (at := OWNER.fullmatch(name)) and int(at["layer"]) < layers]
    if any(name.endswith(".gate_up_proj") for name in names):
        return "fused"
    weights = [name for name in names if name.endswith(".weight")]
    kinds = (kind for kind, suffix in FP8.items() if weights and all(name + suffix in reader for name in weights))
    return next(kinds, "single")


def chooser(config_type: type) -> Callable[[dict[str, Any], Reader, jnp.dtype, str | None], Experts]:
    """The choice of a family (see :class:`checkpoints.family.Family`) whose config has ``experts``."""

    def choose(config: dict[str, Any], reader: Reader, dtype: jnp.dtype, option: str | None) -> Experts:
        sizes = config_type.from_hf(config)
        stored = stored_as(reader, sizes.layers)
        mixtures = sizes.layers - getattr(sizes, "dense_layers", 0)
        values = mixtures * sizes.experts * 3 * sizes.hidden_size * sizes.expert_size
        if option is None:
            option = "bfloat16" if dtype == jnp.bfloat16 else "float32"
            if stored in FP8 and values * jnp.dtype(option).itemsize >= DECODED_BY_DEFAULT:
                option = "packed"
        if option not in ("packed", "bfloat16", "float32"):
            raise ValueError(f"experts={option!r} is not known; known: packed, bfloat16, float32")
        if option == "packed":
            if stored not in FP8:
                what = "experts='packed' needs FP8 experts with scales in every layer; this file has plain ones"
                raise_if(reader.folder, [f"{what}: use experts='bfloat16' or 'float32'"])
            note = f"kept as FP8, {values / 2**30:.2f} GiB"
            return Experts("fp8", expert_rules(stored, "fp8"), dtype, note)
        layout = "split" if sizes.experts <= SPLIT_AT_MOST else "stacked"
        note = f"read to {option}, {layout}, {values * jnp.dtype(option).itemsize / 2**30:.2f} GiB"
        return Experts(layout, expert_rules(stored, layout), jnp.dtype(option), note)

    return choose
