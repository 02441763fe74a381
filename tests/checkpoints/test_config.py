"""What config files say about the head and about the end of a text."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import config as configs
from checkpoints.errors import CheckpointError
from checkpoints.load import load_target, plan_target
from checkpoints.reader import open_checkpoint
from tests.checkpoints.tiny_checkpoints import (
    VOCABULARY,
    WIDTH,
    bf16,
    edit_json,
    equal,
    rewrite,
    write_qwen3,
)


def refused(folder, message: str) -> str:
    with pytest.raises(CheckpointError, match=message) as raised:
        load_target(folder)
    return str(raised.value)


def skipped(folder) -> dict[str, str]:
    return plan_target(open_checkpoint(folder), configs.read_config(folder))[2].skipped


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_B40_a_tied_head_is_the_embedding(tmp_path, place):
    """No head in the file, the flag at top level or nested: there is no head parameter, so no copy either."""
    _, params = write_qwen3(tmp_path, tie_word_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    if place == "text_config":
        outer = {"model_type": config.pop("model_type"), "text_config": config}
        (tmp_path / "config.json").write_text(json.dumps(outer))
    target, loaded = load_target(tmp_path)
    assert "head" not in loaded
    assert equal(loaded, params)
    hidden = jax.random.normal(jax.random.key(3), (1, 2, WIDTH), jnp.float32)
    np.testing.assert_array_equal(target.unembed(loaded, hidden), hidden @ loaded["embed"].T)


def test_B40_a_missing_head_that_is_not_tied_is_named(tmp_path):
    write_qwen3(tmp_path, tie_word_embeddings=True)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    said = refused(tmp_path, "one problem")
    assert "'lm_head.weight'" in said
    assert "tie_word_embeddings" in said


def test_B40_a_stored_head_of_a_tied_model_is_skipped_with_a_reason(tmp_path):
    _, params = write_qwen3(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert "tie_word_embeddings" in skipped(tmp_path)["lm_head.weight"]
    assert equal(load_target(tmp_path)[1], params)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": bf16(VOCABULARY + 1, WIDTH)})
    refused(tmp_path, "'lm_head.weight'.*unexpected")


def test_B05_stop_ids_are_the_union_of_three_files(tmp_path):
    write_qwen3(tmp_path, eos_token_id=7)
    assert configs.stop_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 3]}))
    assert configs.stop_ids(tmp_path) == (3, 7, 9)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 11, "content": "<end>"}]}))
    assert configs.stop_ids(tmp_path) == (3, 7, 9, 11)
    decoder = {"12": {"content": "<end>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "added_tokens_decoder": decoder}))
    assert configs.stop_ids(tmp_path) == (3, 7, 9, 12)
    edit_json(tmp_path / "config.json", eos_token_id=[1, 2])
    assert configs.stop_ids(tmp_path) == (1, 2, 3, 7, 9, 12)
