"""Tensors of a release that the text network must not take: MTP heads, vision towers; public fault cases by ids."""

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints.load import load_target, plan_target, read_config
from checkpoints.reader import open_checkpoint
from checkpoints.rules import MTP_REASON
from tests.checkpoints.tiny_checkpoints import (
    GLM4_MOE_HF,
    GLM_MOE_DSA_HF,
    QWEN3_5_MOE_HF,
    equal,
    rewrite,
    write_mixture,
)


def skipped(folder: Path) -> dict[str, str]:
    return plan_target(open_checkpoint(folder), read_config(folder))[2].skipped


def with_mtp_head(tensors: dict) -> dict:
    """A multi-token head as Qwen3.5 ships it: a layer of its own with grouped experts."""
    inside = {name: value for name, value in tensors.items() if ".layers.1." in name}
    copies = {
        "mtp." + name.split("language_model.")[1].replace("layers.1", "layers.0"): v for name, v in inside.items()
    }
    return tensors | copies | {"mtp.fc.weight": np.ones((4, 8), ml_dtypes.bfloat16)}


def test_B41_an_mtp_head_changes_no_norm(tmp_path):
    """Its presence was once taken as the sign that norms still want their 1."""
    _, params = write_mixture(tmp_path, QWEN3_5_MOE_HF, "fused")
    rewrite(tmp_path, with_mtp_head)
    assert len([name for name in skipped(tmp_path) if name.startswith("mtp.")]) > 10
    assert equal(load_target(tmp_path)[1], params)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.", ""])
def test_B41_every_prefix_gives_one_network(tmp_path, prefix):
    _, params = write_mixture(tmp_path, QWEN3_5_MOE_HF, "fused")
    rewrite(tmp_path, lambda tensors: {name.replace("model.language_model.", prefix): v for name, v in tensors.items()})
    assert equal(load_target(tmp_path)[1], params)


def test_B41_the_gated_norm_is_the_files_own_and_the_others_are_distances_from_one(tmp_path):
    write_mixture(tmp_path, QWEN3_5_MOE_HF, "fused")

    def plain(tensors: dict) -> dict:
        return {
            name: np.zeros_like(v) if "norm" in name and "linear_attn" not in name else v for name, v in tensors.items()
        }

    rewrite(tmp_path, plain)
    reader, (target, params) = open_checkpoint(tmp_path), load_target(tmp_path)
    stored = np.asarray(reader["model.language_model.layers.0.linear_attn.norm.weight"], np.float32)
    np.testing.assert_array_equal(params["delta_0"]["norm"], stored)
    hidden = target.step(params, jnp.array([[1, 2, 3]]), target.init_cache(1, 8, 4)).hidden
    np.testing.assert_allclose(np.mean(np.square(hidden), axis=-1), 1.0, rtol=1e-2)


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_B40_a_tied_head_of_a_nested_config_is_the_embedding(tmp_path, place):
    config = QWEN3_5_MOE_HF
    if place == "top":
        config = config | {"tie_word_embeddings": True}
    else:
        config = config | {"text_config": config["text_config"] | {"tie_word_embeddings": True}}
    target, params = write_mixture(tmp_path, config, "fused")
    assert not [name for name in open_checkpoint(tmp_path) if "lm_head" in name]
    _, loaded = load_target(tmp_path)
    assert "head" not in loaded and equal(loaded, params)
    hidden = jnp.ones((1, 2, target.config.hidden_size))
    np.testing.assert_array_equal(target.unembed(loaded, hidden), hidden @ loaded["embed"].T)


def as_extra_layer(tensors: dict, prefix: str, layer: int, ends: tuple[str, ...]) -> dict:
    """The last layer again as the MTP layer, with its own projections, and copies of what ``ends`` names."""
    last = {name: value for name, value in tensors.items() if f"layers.{layer - 1}." in name}
    extra = {name.replace(f"layers.{layer - 1}.", f"layers.{layer}."): value for name, value in last.items()}
    stem = f"model.layers.{layer}."
    some = np.ones((3, 5), ml_dtypes.bfloat16)
    extra |= {f"{stem}{name}": some for name in ("eh_proj.weight", "enorm.weight", "hnorm.weight", *ends)}
    return {name.replace("model.", prefix, 1): value for name, value in (tensors | extra).items()}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("ends", [(), ("embed_tokens.weight", "shared_head.norm.weight", "shared_head.head.weight")])
@pytest.mark.parametrize("config", [GLM4_MOE_HF, GLM_MOE_DSA_HF], ids=lambda config: config["model_type"])
def test_B43_the_mtp_layer_is_known_by_its_index_under_any_prefix(tmp_path, config, prefix, ends):
    target, params = write_mixture(tmp_path, config)
    layers = target.config.layers
    rewrite(tmp_path, lambda tensors: as_extra_layer(tensors, prefix, layers, ends))
    loaded, again = load_target(tmp_path)
    assert loaded.config.layers == layers
    assert equal(again, params)
    left = skipped(tmp_path)
    assert set(left.values()) == {MTP_REASON}
    assert all(f"layers.{layers}." in name for name in left)


def test_B43_another_quantisation_of_the_mtp_layer_is_no_matter(tmp_path):
    target, params = write_mixture(tmp_path, GLM4_MOE_HF)
    layers = target.config.layers

    def change(tensors: dict) -> dict:
        both = as_extra_layer(tensors, "model.", layers, ())
        extra = {name for name in both if f"layers.{layers}." in name and both[name].ndim == 2}
        codes = {name: np.zeros(both[name].shape, ml_dtypes.float8_e4m3fn) for name in extra}
        scales = {name + "_scale_inv": np.ones((1, 1), np.float32) for name in extra}
        return both | codes | scales

    rewrite(tmp_path, change)
    assert equal(load_target(tmp_path)[1], params)
