"""Writing checkpoints: shards, layouts of experts, the released spelling of config.json."""

import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints import config as configs
from checkpoints import contract, export, gpt_oss
from checkpoints.config import read_config
from checkpoints.errors import CheckpointError
from checkpoints.load import load_drafter, load_target, plan_target
from checkpoints.reader import open_checkpoint
from tests.checkpoints.tiny_checkpoints import (
    equal,
    gpt_oss_config,
    gpt_oss_hf,
    write_gpt_oss,
    write_qwen3,
)


def test_M5_a_bias_may_lie_in_another_shard_than_its_weight(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 30000)
    _, params = write_gpt_oss(tmp_path)
    owners = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    assert owners[f"{experts}_bias"] != owners[f"{experts}_blocks"]
    assert equal(load_target(tmp_path)[1], params)


def test_shards_are_at_most_as_large_as_promised(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 20000)
    write_qwen3(tmp_path)
    reader = open_checkpoint(tmp_path)
    files = {entry.file for entry in reader.entries.values()}
    assert len(files) > 3
    for file in files:
        inside = [entry.nbytes for entry in reader.entries.values() if entry.file == file]
        assert sum(inside) <= 20000 or len(inside) == 1
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".partial")]


def test_export_overwrites_on_request_only_and_leaves_no_stale_shard(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(export, "SHARD_BYTES", 20000)
        _, params = write_qwen3(tmp_path)
    config = configs.read_config(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(export, "_tensors", lambda *_: pytest.fail("tensors were computed before the refusal"))
        with pytest.raises(CheckpointError, match="holds weights already"):
            export.export_target(params, config, tmp_path)
    export.export_target(params, config, tmp_path, overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert equal(load_target(tmp_path)[1], params)


def test_exported_gpt_oss_config_has_the_released_spelling(tmp_path):
    write_gpt_oss(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 150000.0
    assert config["rope_scaling"]["truncate"] is False
    assert "rope_parameters" not in config
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert config["architectures"] == ["GptOssForCausalLM"]
    with pytest.raises(ValueError, match="would not read back"):
        gpt_oss.hf_config(gpt_oss_config(), rope_theta=10000.0, rope_scaling=None)


@pytest.mark.parametrize("layout", ["split", "stacked", "packed"])
@pytest.mark.parametrize("stored", ["mxfp4", "plain"])
def test_gpt_oss_experts_in_every_pair_of_layouts(tmp_path, stored, layout):
    """All layouts come from both files where they can, hold the same values, and export to the same bytes."""
    if (stored, layout) == ("plain", "packed"):
        with pytest.raises(ValueError, match="cannot be stored as floats"):
            gpt_oss.expert_rules(stored, layout)
        return
    experts = 19 if layout == "stacked" else 7
    option = "packed" if layout == "packed" else None
    write_gpt_oss(tmp_path / "a", "mxfp4" if stored == "mxfp4" else "bfloat16", experts=experts)
    target, params = load_target(tmp_path / "a", experts=option)
    assert target.module.layout == layout
    assert export.layout_of(params) == layout
    config = gpt_oss_hf(target.config, eos_token_id=100)
    export.export_target(params, config, tmp_path / "b", "mxfp4" if stored == "mxfp4" else "bfloat16")
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert list(a) == list(b)
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)


GOLDENS = sorted(file.parent for file in (Path(__file__).parents[1] / "goldens").rglob("config.json"))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda folder: "-".join(folder.parts[-2:]).removeprefix("goldens-"))
def test_checkpoints_written_by_transformers_survive_the_round_trip(golden, tmp_path):
    """Files that other code wrote: loaded and exported, every tensor has its name, shape and bytes again. (Experts are
    compared packed: one value may have two encodings.)"""
    config = json.loads((golden / "config.json").read_text())
    if "num_target_layers" not in config:
        packed = "quantization_config" in config
        _, params = load_target(golden, experts="packed" if packed else None)
        options = {"gpt_oss": "mxfp4" if packed else "bfloat16", "qwen3_5_moe": golden.name.split("_")[-1]}
        export.export_target(params, config, tmp_path, options.get(config["model_type"]))
    else:
        target = {"num_hidden_layers": config["num_target_layers"]}
        target |= {key: config[key] for key in ("hidden_size", "vocab_size")}
        if contract.setting(config, "target_layer_ids") is None:
            with pytest.raises(CheckpointError, match="target_layer_ids"):
                load_drafter(golden, target)
            return
        export.export_drafter(load_drafter(golden, target)[1], config, tmp_path)
    theirs, ours = dict(open_checkpoint(golden)), open_checkpoint(tmp_path)
    if "num_target_layers" not in config:
        left_out = plan_target(open_checkpoint(golden), read_config(golden))[2].skipped
        theirs = {name: value for name, value in theirs.items() if name not in left_out}
    assert set(theirs) == set(ours)
    assert all(theirs[name].shape == ours[name].shape for name in theirs)
    either = ("A_log", "linear_attn.norm.weight")  # float32 in Qwen3.5, bfloat16 in 3.6
    theirs |= {name: value.astype(np.float32) for name, value in theirs.items() if name.endswith(either)}
    assert [name for name in theirs if theirs[name].tobytes() != ours[name].tobytes()] == []
