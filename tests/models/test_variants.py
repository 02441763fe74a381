"""The tiny networks that the laws run on can show a fault: no two dimensions alike, no parameter without effect."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support.drafters import LAYERS, tiny_drafter
from tests.support.families import VARIANTS, family

SIZES = (
    "vocab_size",
    "hidden_size",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate_size",
    "experts",
    "experts_per_token",
    "expert_size",
    "shared_size",
    "linear_key_heads",
    "linear_value_heads",
    "linear_key_dim",
    "linear_value_dim",
    "conv_taps",
    "index_heads",
    "index_dim",
    "index_topk",
)


def dimensions(config) -> list[int]:
    """Every size that an axis of a parameter or of an activation may have."""
    known = dataclasses.asdict(config)
    sizes = [known[name] for name in SIZES if name in known]
    if "widths" in known:
        return [*sizes, *known["widths"]]
    return [*sizes, config.heads * config.head_dim, config.kv_heads * config.head_dim]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_swapped_axis_cannot_pass(name: str) -> None:
    sizes = dimensions(family(name).target.config)
    assert len(sizes) == len(set(sizes)), sizes


@pytest.mark.parametrize("name", VARIANTS)
def test_no_parameter_of_a_target_is_constant(name: str) -> None:
    assert not constant(family(name).params)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_tiny_drafter_is_as_varied(layers: str) -> None:
    drafter, params = tiny_drafter(layers, "qwen3-untied")
    sizes = dimensions(drafter.config)
    assert len(sizes) == len(set(sizes)), sizes
    assert not constant(params)


def constant(params: dict) -> list[str]:
    """Names of the leaves whose values are all alike."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [jax.tree_util.keystr(path) for path, leaf in leaves if len(np.unique(np.asarray(leaf))) == 1]
