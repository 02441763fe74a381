"""A drafter's config.json: where keys may stand, what their absence means, and who sees whom by it."""

import pytest

from dflash_jax.nn import plain_rope, yarn_rope
from models.dflash import DFlashConfig

INNER = {"target_layer_ids": [1, 3], "mask_token_id": 60}
BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "intermediate_size": 40,
    "rope_theta": 1e4,
    "block_size": 8,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


def read(inner: dict | None = INNER, **changes) -> DFlashConfig:
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    return DFlashConfig.from_hf(config if inner is None else {**config, "dflash_config": inner})


def test_B50_both_places_of_the_keys_give_one_drafter() -> None:
    assert read() == read(inner=None, **INNER) == read(inner={**INNER, "block_size": 8}, block_size=None)
    assert read().taps == (1, 3) and read().mask_token_id == 60 and read().block_size == 8


def test_B50_the_inner_place_wins() -> None:
    assert read(inner={**INNER, "block_size": 4}).block_size == 4


def test_B50_layer_types_and_window_are_honoured_and_optional() -> None:
    assert read(**SLIDING).windows == (8, None)
    assert read().windows == (None, None)
    assert read(sliding_window=8).windows == (None, None)


def test_B50_an_explicit_head_dim_is_no_quotient() -> None:
    assert read().head_dim == 6 != BASE["hidden_size"] // BASE["num_attention_heads"]


@pytest.mark.parametrize(
    ("changes", "inner", "causal"),
    [
        ({}, {}, (False, False)),
        (SLIDING, {}, (True, False)),
        (SLIDING, {"causal": False}, (False, False)),
        (SLIDING, {"causal": True}, (True, True)),
        ({**SLIDING, "is_causal": False}, {}, (False, False)),
        ({"is_causal": True}, {}, (True, True)),
        ({**SLIDING, "is_causal": True}, {"causal": False}, (True, True)),
    ],
)
def test_B52_sliding_layers_are_causal_in_the_block_unless_the_config_says_otherwise(changes, inner, causal) -> None:
    assert read(inner={**INNER, **inner}, **changes).causal == causal


def test_B35_the_drafter_reads_its_own_rope() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
    assert read().rope == plain_rope(1e4, 6)
    expected = yarn_rope(1e4, 6, factor=4.0, original_max_position=64, truncate=False)
    assert read(rope_scaling=yarn).rope == expected
    assert read(rope_theta=None, rope_parameters={**yarn, "rope_theta": 1e4}).rope == expected


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id"])
def test_B47_B53_what_cannot_be_guessed_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' is missing"):
        read(inner={name: value for name, value in INNER.items() if name != key})


@pytest.mark.parametrize("key", [key for key in BASE if key not in ("head_dim", "block_size")])
def test_a_missing_size_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' is missing"):
        read(**{key: None})


def test_multipliers_and_soft_cap_are_read() -> None:
    read_back = read(input_embedding_scale=2.0, output_multiplier=0.5, final_logit_softcapping=30.0)
    assert (read_back.input_embedding_scale, read_back.output_multiplier) == (2.0, 0.5)
    assert read_back.final_logit_softcapping == 30.0
    assert (read().input_embedding_scale, read().output_multiplier, read().final_logit_softcapping) == (1.0, 1.0, None)
