"""What the loader asks of a family: its rules, and for mixtures how the stored experts become parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from checkpoints.reader import Reader
from checkpoints.rules import Rule, Skip

Rules = tuple[Rule | Skip, ...]

SPLIT_AT_MOST = 16
"""Experts of a layer up to which each gets buffers of its own; with more, one conditional per expert costs too much."""

DECODED_BY_DEFAULT = 2 * 2**30
"""Bytes of decoded experts below which they are decoded at load unless asked otherwise."""


@dataclass(frozen=True)
class Experts:
    """A choice for the experts of one checkpoint.

    Attributes:
        layout: of :data:`dflash_jax.moe.LAYOUTS`.
        rules: file tensors <-> parameters in that layout.
        dtype: of the decoded matrices.
        note: the choice in words, for the report.
    """

    layout: str
    rules: Rules
    dtype: jnp.dtype
    note: str


@dataclass(frozen=True)
class Family:
    """Rules of a model type.

    Attributes:
        rules: of everything but routed experts.
        experts: for mixtures, the choice ``(config, reader, dtype, option) -> Experts``.
        expert_rules: for mixtures, ``(stored, layout) -> rules``.
        stores: for mixtures, how experts can be exported: option -> what ``expert_rules`` calls it; the first is the
            default.
        prefix: what exported names have in the place of the rules' ``model.``.
        float32: ends of the names of tensors that are exported in float32; all others are in bfloat16.
        fp8: ends of the names of the matrices that an FP8 export quantises.
    """

    rules: Rules
    experts: Callable[[dict[str, Any], Reader, jnp.dtype, str | None], Experts] | None = None
    expert_rules: Callable[[str, str], Rules] | None = None
    stores: dict[str, str] = field(default_factory=dict)
    prefix: str = "model."
    float32: tuple[str, ...] = ()
    fp8: tuple[str, ...] = ()
