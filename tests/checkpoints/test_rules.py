"""The checkpoint law: rules map file names onto parameters one to one, nothing is skipped without a written reason, and
the round trip is exact. ``test_law_can_fail.py`` breaks it on purpose."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import config as configs
from checkpoints import export, registry
from checkpoints.errors import CheckpointError
from checkpoints.load import load_drafter, load_target, plan_drafter, plan_target
from checkpoints.reader import open_checkpoint
from checkpoints.rules import MTP_REASON, flatten
from tests.checkpoints.tiny_checkpoints import (
    GLM4_MOE_HF,
    GLM4_MOE_LITE_HF,
    GLM_MOE_DSA_HF,
    LAYERS,
    QWEN3_5_MOE_HF,
    VOCABULARY,
    WIDTH,
    bf16,
    edit_json,
    equal,
    rewrite,
    write_drafter,
    write_gpt_oss,
    write_mixture,
    write_qwen3,
)

TARGET = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "vocab_size": VOCABULARY}


FAMILIES = {
    "gpt_oss-mxfp4": lambda folder: write_gpt_oss(folder),
    "gpt_oss-bfloat16": lambda folder: write_gpt_oss(folder, "bfloat16"),
    "gpt_oss-tied": lambda folder: write_gpt_oss(folder, tie_word_embeddings=True),
    "gpt_oss-many-experts": lambda folder: write_gpt_oss(folder, experts=19),
    "glm4_moe": lambda folder: write_mixture(folder, GLM4_MOE_HF),
    "glm4_moe-air": lambda folder: write_mixture(folder, GLM4_MOE_HF, use_qk_norm=False),
    "glm4_moe_lite": lambda folder: write_mixture(folder, GLM4_MOE_LITE_HF),
    "glm_moe_dsa": lambda folder: write_mixture(folder, GLM_MOE_DSA_HF),
    "qwen3_5_moe-fused": lambda folder: write_mixture(folder, QWEN3_5_MOE_HF, "fused"),
    "qwen3_5_moe-single": lambda folder: write_mixture(folder, QWEN3_5_MOE_HF, "single"),
    "qwen3": write_qwen3,
    "qwen3-tied": lambda folder: write_qwen3(folder, tie_word_embeddings=True),
    "drafter": write_drafter,
    "drafter-biases": lambda folder: write_drafter(folder, attention_bias=True),
}


STORED = {"gpt_oss-bfloat16": "bfloat16", "qwen3_5_moe-single": "single"}
"""Families that are not stored in their first way."""

DRAFTERS = ("drafter", "drafter-biases")


def load(name: str, folder, **options):
    return load_drafter(folder, TARGET, **options) if name in DRAFTERS else load_target(folder, **options)


def plan_of(name: str, folder):
    reader, config = open_checkpoint(folder), configs.read_config(folder)
    return plan_drafter(reader, config)[2] if name in DRAFTERS else plan_target(reader, config)[2]


def says(folder, message: str, name: str = "qwen3") -> str:
    with pytest.raises(CheckpointError, match=message) as raised:
        plan_of(name, folder)
    return str(raised.value)


def test_every_registered_family_is_under_the_law():
    assert {name.split("-")[0] for name in FAMILIES if name not in DRAFTERS} == set(registry.RULES)


@pytest.mark.parametrize("name", FAMILIES)
def test_law_bijection(tmp_path, name):
    """Every tensor is consumed once, every parameter assigned once, nothing skipped."""
    network, _ = FAMILIES[name](tmp_path)
    made, reader = plan_of(name, tmp_path), open_checkpoint(tmp_path)
    consumed = [tensor for assignment in made.assignments for tensor in assignment.names]
    assert sorted(consumed) == sorted(reader)
    assert made.skipped == {}
    if name != "gpt_oss-many-experts":  # loaded as a stack, described as split
        assigned = [path for assignment in made.assignments for path in assignment.paths]
        assert sorted(assigned) == sorted(flatten(network.abstract_params())[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_law_round_trip(tmp_path, name):
    """params -> folder -> params is exact, and so is folder -> params -> folder."""
    network, params = FAMILIES[name](tmp_path / "first")
    again, loaded = load(name, tmp_path / "first", **{} if name in DRAFTERS else {"taps": network.module.taps})
    if name == "gpt_oss-many-experts":
        params = _stacked(params)
        assert again.module.layout == "stacked"
    else:
        assert again == network
    assert equal(loaded, params)
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    write = export.export_drafter if name in DRAFTERS else export.export_target
    more = {"experts": STORED[name]} if name in STORED else {}
    write(loaded, config, tmp_path / "second", **more)
    first, second = open_checkpoint(tmp_path / "first"), open_checkpoint(tmp_path / "second")
    assert list(first) == list(second)
    assert all(first[tensor].tobytes() == second[tensor].tobytes() for tensor in first)
    assert json.loads((tmp_path / "second" / "config.json").read_text()) == config


def _stacked(params):
    return {
        name: value | {"experts": jax.tree.map(lambda *leaves: np.stack(leaves), *value["experts"])}
        if name.startswith("moe_") and "norm" not in name
        else value
        for name, value in params.items()
    }


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "qwen3", "drafter"])
def test_bfloat16_is_the_files_own_values(tmp_path, name):
    _, params = FAMILIES[name](tmp_path)
    _, loaded = load(name, tmp_path, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(jnp.bfloat16)}
    assert equal(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), loaded), params)


def test_kernels_are_transposed_and_fc_is_split_by_taps(tmp_path):
    """Against the file, element by element: q [in, out], fc [taps, target width, width]."""
    write_drafter(tmp_path)
    _, params = load_drafter(tmp_path, TARGET)
    reader = open_checkpoint(tmp_path)
    q, fc = reader["layers.1.self_attn.q_proj.weight"], reader["fc.weight"]
    assert params["attention_1"]["q"][5, 41] == float(q[41, 5])
    assert params["fc"].shape == (2, WIDTH, WIDTH)
    assert params["fc"][1, 7, 33] == float(fc[33, WIDTH + 7])


def test_names_are_found_with_and_without_prefix(tmp_path):
    """z-lab's drafters have no ``model.`` prefix and others write one; targets have it and some exports drop it."""
    _, params = write_drafter(tmp_path / "d")
    rewrite(tmp_path / "d", lambda tensors: {f"model.{name}": value for name, value in tensors.items()})
    assert equal(load_drafter(tmp_path / "d", TARGET)[1], params)
    _, params = write_qwen3(tmp_path / "t")
    rewrite(tmp_path / "t", lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()})
    assert equal(load_target(tmp_path / "t")[1], params)
    rewrite(tmp_path / "t", lambda tensors: tensors | {"model.norm.weight": tensors["norm.weight"]})
    says(tmp_path / "t", "the same parameter")


def test_unknown_names_list_the_known_ones(tmp_path):
    write_qwen3(tmp_path)
    edit_json(tmp_path / "config.json", model_type="llama")
    with pytest.raises(ValueError, match=r"'llama' is not known; known: glm4_moe, .*gpt_oss, qwen3"):
        load_target(tmp_path)


def test_M2_missing_unexpected_and_misshapen_are_reported_together(tmp_path):
    write_qwen3(tmp_path)

    def damage(tensors: dict) -> dict:
        tensors.pop("model.layers.1.self_attn.k_norm.weight")
        return tensors | {"model.layers.0.self_attn.sinks": bf16(6), "model.norm.weight": bf16(63)}

    rewrite(tmp_path, damage)
    said = says(tmp_path, "3 problems")
    assert "'model.layers.1.self_attn.k_norm.weight' (parameter attention_1/k_norm, [10]) is missing" in said
    assert "'model.layers.0.self_attn.sinks' [6] in model.safetensors is unexpected" in said
    assert "'model.norm.weight' (parameter final_norm, [64]) has shape [63]" in said


def test_a_dtype_that_cannot_be_meant_is_refused(tmp_path):
    """8-bit floats without their scales are not weights."""
    write_gpt_oss(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"model.norm.weight": np.zeros(WIDTH, np.uint8)})
    assert "is stored as U8 in model.safetensors; can read BF16, F16, F32, F64" in says(tmp_path, "one problem")


def test_nothing_is_read_before_the_plan_is_clean(tmp_path, monkeypatch):
    write_qwen3(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"stray": bf16(1)})
    monkeypatch.setattr("checkpoints.reader.Reader.__getitem__", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(CheckpointError, match="'stray'"):
        load_target(tmp_path)


def test_skips_have_a_written_reason(tmp_path):
    """Rotary buffers of old files, and layers past the last one under any prefix; both without changing a weight."""
    _, params = write_qwen3(tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(5, np.float32),
        f"model.layers.{LAYERS}.self_attn.q_proj.weight": bf16(2, 2),
        f"model.language_model.layers.{LAYERS}.mlp.experts.weight": np.zeros(3, np.uint8),
        f"layers.{LAYERS + 5}.eh_proj.weight": bf16(2, 2),
    }
    rewrite(tmp_path, lambda tensors: tensors | extra)
    skipped = plan_of("qwen3", tmp_path).skipped
    assert set(skipped) == set(extra)
    assert all(skipped.values())
    assert [reason for reason in skipped.values() if reason == MTP_REASON] == [MTP_REASON] * 3
    assert equal(load_target(tmp_path)[1], params)


def test_a_drafters_extra_layer_is_an_error(tmp_path):
    """A drafter has no MTP layers: one that its config does not count is a wrong config."""
    write_drafter(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=1, layer_types=["sliding_attention"])
    says(tmp_path, "layers.1.mlp.down_proj.weight.* is unexpected", "drafter")


def test_M1_after_loading_no_parameter_is_zero_or_not_finite(tmp_path):
    write_gpt_oss(tmp_path)
    for path, leaf in flatten(load_target(tmp_path)[1])[0].items():
        assert np.isfinite(np.asarray(leaf)).all(), path
        assert np.asarray(leaf).any(), path
