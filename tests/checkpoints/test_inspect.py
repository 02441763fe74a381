"""The key-by-key table of a folder, from headers alone."""

import json

import pytest

from checkpoints.inspect import as_json, inspect, main
from checkpoints.reader import open_checkpoint
from tests.checkpoints.tiny_checkpoints import (
    LAYERS,
    bf16,
    edit_json,
    rewrite,
    write_drafter,
    write_gpt_oss,
    write_qwen3,
)


def test_every_tensor_has_a_row_and_the_totals_add_up(tmp_path):
    write_gpt_oss(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {f"model.layers.{LAYERS}.enorm.weight": bf16(4)})
    found = inspect(tmp_path)
    assert [row.tensor for row in found.rows] == list(open_checkpoint(tmp_path))
    totals = found.totals()
    assert totals["expert"]["tensors"] == 6 * LAYERS
    assert totals["skipped"] == {"tensors": 1, "bytes": 8}
    parts = [total["bytes"] for use, total in totals.items() if use != "total"]
    assert sum(parts) == totals["total"]["bytes"] == open_checkpoint(tmp_path).nbytes
    rows = {row.tensor: row for row in found.rows}
    assert rows["model.layers.1.mlp.experts.down_proj_blocks"].place == "moe_1/experts/0/down and 6 more (decode MXFP4)"
    assert rows["model.layers.1.self_attn.q_proj.weight"].place == "attention_1/q (transpose)"
    assert "MTP" in rows[f"model.layers.{LAYERS}.enorm.weight"].place
    assert (found.kind, found.problems) == ("target", [])


def test_no_tensor_is_read(tmp_path, monkeypatch):
    write_gpt_oss(tmp_path)
    monkeypatch.setattr("checkpoints.reader.Reader.__getitem__", lambda *_: pytest.fail("read a tensor"))
    assert inspect(tmp_path).problems == []


def test_drafters_and_look_alikes(tmp_path):
    write_drafter(tmp_path)
    found = inspect(tmp_path)
    assert found.kind == "drafter"
    assert set(found.totals()) == {"resident", "total"}
    edit_json(tmp_path / "config.json", architectures=["DFlash2DraftModel"])
    found = inspect(tmp_path)
    assert "DFlash2" in found.problems[0]
    assert {row.use for row in found.rows} == {"unknown"}


def test_the_command_prints_a_table_or_json_and_tells_by_its_status(tmp_path, capsys):
    write_qwen3(tmp_path)
    assert main(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "model.layers.2.mlp.down_proj.weight" in printed
    assert "mlp_2/down (transpose)" in printed
    assert "total" in printed
    assert main(tmp_path, machine=True) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(as_json(inspect(tmp_path))))
    edit_json(tmp_path / "config.json", num_hidden_layers=LAYERS + 1)
    assert main(tmp_path) == 1
    assert "is missing" in capsys.readouterr().out
    assert main(tmp_path / "nowhere") == 1
    edit_json(tmp_path / "config.json", model_type="llama")
    assert main(tmp_path) == 1
    assert "known: glm4_moe" in capsys.readouterr().out
