"""Tiny DFlash drafters for the tiny targets, with every parameter random."""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from dflash_jax.nn import plain_rope, yarn_rope
from models.dflash import DFlash, DFlashConfig, DFlashDrafter
from tests.support.families import Family, randomised, tiny_target

WINDOW = 6

LAYERS: dict[str, tuple[tuple[int | None, ...], tuple[bool, ...]]] = {
    "full": ((None, None), (False, False)),
    "mixed": ((WINDOW, None), (True, False)),
    "sliding": ((WINDOW, WINDOW), (True, True)),
    "one_sliding": ((WINDOW,), (True,)),
    "one_full": ((None,), (False,)),
    "one_causal": ((None,), (True,)),
    "one_band": ((3,), (False,)),
    "wide_sliding": ((16, 16), (True, False)),
}
"""name -> (windows, in-block causality) of each layer; "mixed" is the published drafters' rule."""


class Tiny(NamedTuple):
    """A drafter and its parameters."""

    drafter: DFlashDrafter
    params: dict


def config(
    layers: str, family: Family, *, mask_token_id: int = 3, bias: bool = True, block_size: int = 8
) -> DFlashConfig:
    """A config whose dimensions are pairwise different and differ from the target's, but for the width they share."""
    windows, causal = LAYERS[layers]
    rope = yarn_rope(2000.0, 14, factor=3.0, original_max_position=16) if bias else plain_rope(2000.0, 14)
    return DFlashConfig(
        hidden_size=family.target.config.hidden_size,
        target_hidden_size=family.target.config.hidden_size,
        layers=len(windows),
        heads=9,
        kv_heads=3,
        head_dim=14,
        intermediate_size=26,
        windows=windows,
        causal=causal,
        rope=rope,
        taps=family.target.module.taps,
        mask_token_id=mask_token_id,
        block_size=block_size,
        attention_bias=bias,
        output_multiplier=0.7,
        final_logit_softcapping=8.0,
    )


@functools.cache
def tiny_drafter(layers: str, name: str, dtype: str = "float64", mask_token_id: int = 3, block_size: int = 8) -> Tiny:
    """A drafter for a target's variant, biased and with YaRN unless all its layers slide."""
    family = Family(name, tiny_target(name, dtype), {})
    settings = dict(mask_token_id=mask_token_id, bias="sliding" not in layers, block_size=block_size)
    module = DFlash(config(layers, family, **settings), dtype=jnp.dtype(dtype))
    drafter = DFlashDrafter(module, block_size)
    return Tiny(drafter, randomised(drafter.abstract_params(), seed=1))
