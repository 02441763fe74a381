"""The pairing contract: what does not belong together is refused by name, before any weight is loaded."""

import json

import numpy as np
import pytest

from checkpoints.contract import LOOK_ALIKES, look_alikes
from checkpoints.errors import CheckpointError
from checkpoints.load import load_drafter, load_target
from tests.checkpoints.tiny_checkpoints import (
    LAYERS,
    VOCABULARY,
    WIDTH,
    bf16,
    edit_json,
    equal,
    rewrite,
    write_drafter,
    write_gpt_oss,
    write_qwen3,
)

TARGET = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "vocab_size": VOCABULARY}


@pytest.fixture
def pair(tmp_path):
    """Folders of a Qwen3 target and of its drafter."""
    write_qwen3(tmp_path / "target", eos_token_id=98)
    write_drafter(tmp_path / "drafter")
    return tmp_path / "target", tmp_path / "drafter"


def refused(target, drafter, *said: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        load_drafter(drafter, target)
    for part in said:
        assert part in str(raised.value)
    return raised.value


def set_dflash(folder, **changes) -> None:
    """Change settings inside ``dflash_config``; None removes one."""
    settings = json.loads((folder / "config.json").read_text())["dflash_config"] | changes
    edit_json(folder / "config.json", dflash_config={k: v for k, v in settings.items() if v is not None})


def test_a_pair_that_fits_is_accepted_from_a_folder_and_from_a_config(pair):
    target, drafter = pair
    loaded, params = load_drafter(drafter, target)
    assert equal(load_drafter(drafter, TARGET)[1], params)
    assert equal(load_drafter(drafter, {"model_type": "outer", "text_config": TARGET})[1], params)
    assert (loaded.block_size, loaded.config.taps, loaded.config.mask_token_id) == (5, (0, 2), 99)


def test_a_drafter_fits_a_mixture_as_well(tmp_path):
    write_gpt_oss(tmp_path / "target")
    write_drafter(tmp_path / "drafter", attention_bias=True)
    assert load_drafter(tmp_path / "drafter", tmp_path / "target")[0].config.attention_bias


def test_B50_settings_may_stand_at_top_level(pair):
    target, drafter = pair
    _, params = load_drafter(drafter, target)
    settings = json.loads((drafter / "config.json").read_text())["dflash_config"]
    edit_json(drafter / "config.json", dflash_config=None, **settings)
    loaded, again = load_drafter(drafter, target)
    assert loaded.config.taps == (0, 2)
    assert equal(again, params)


@pytest.mark.parametrize(
    ("taps", "said"),
    [
        (None, "'target_layer_ids' is missing"),
        ([-1, 2], "negative entries [-1]"),
        ([0, LAYERS], f"has [{LAYERS}], but"),
        ([2, 2], "names a layer twice"),
        ([], "'target_layer_ids' is []"),
        ("0,2", "'target_layer_ids' is '0,2'"),
        ([0, True], "'target_layer_ids' is [0, True]"),
        ([0, 1, 2], "expected 192 columns"),
    ],
)
def test_B47_taps_that_are_missing_or_no_layers_are_refused(pair, taps, said):
    """Never guessed: the formula fits in number and not in place."""
    target, drafter = pair
    set_dflash(drafter, target_layer_ids=taps)
    refused(target, drafter, said, "target_layer_ids", str(drafter))


def test_B47_another_depth_than_trained_for_is_refused(pair):
    target, drafter = pair
    edit_json(drafter / "config.json", num_target_layers=LAYERS + 1)
    refused(target, drafter, f"'num_target_layers' is {LAYERS + 1}", f"'num_hidden_layers' is {LAYERS}", str(target))


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (None, "'mask_token_id' is missing"),
        (VOCABULARY, f"'mask_token_id' is {VOCABULARY}"),
        (VOCABULARY + 5, f"'vocab_size' is {VOCABULARY}"),
        (-1, "'mask_token_id' is -1"),
        ("<mask>", "'mask_token_id' is '<mask>'"),
    ],
)
def test_B53_a_mask_token_that_is_no_row_is_refused(pair, mask, said):
    target, drafter = pair
    set_dflash(drafter, mask_token_id=mask)
    refused(target, drafter, said)


def test_B53_a_mask_token_that_is_the_end_token_is_accepted(pair):
    target, drafter = pair
    set_dflash(drafter, mask_token_id=98)
    assert load_drafter(drafter, target)[0].config.mask_token_id == 98


@pytest.mark.parametrize("block", [1, 0, "8"])
def test_a_block_without_a_draft_is_refused(pair, block):
    target, drafter = pair
    edit_json(drafter / "config.json", block_size=block)
    refused(target, drafter, f"'block_size' is {block!r}")


def tokenizer(folder, tokens: int, prefix: str = "t") -> None:
    vocabulary = {f"{prefix}{index}": index for index in range(tokens - 1)}
    added = [{"id": tokens - 1, "content": "<end>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))


@pytest.mark.parametrize("size", [97, 101, 128])
def test_B54_padding_rows_are_no_difference(pair, size):
    """97 tokens; the target's table has 101 rows, the drafter says 97, 101 or 128."""
    target, drafter = pair
    tokenizer(target, 97)
    set_dflash(drafter, mask_token_id=96)
    edit_json(drafter / "config.json", vocab_size=size)
    load_drafter(drafter, target)
    assert load_target(target)[0].tokens == 97, "rows 97 .. 100 are padding"


def test_B54_fewer_rows_than_tokens_are_refused(pair):
    target, drafter = pair
    tokenizer(target, 97)
    edit_json(drafter / "config.json", vocab_size=90)
    refused(target, drafter, "'vocab_size' is 90", "'vocab_size' is 101", "the tokenizer has 97 tokens")


def test_B54_other_sizes_without_a_tokenizer_are_refused(pair):
    target, drafter = pair
    edit_json(drafter / "config.json", vocab_size=128)
    refused(target, drafter, "'vocab_size' is 128", "a tokenizer.json only")
    refused(TARGET, drafter, "'vocab_size' is 128", "the target/config.json")


def test_B54_another_tokenizer_is_refused_and_an_added_mask_token_is_not(pair):
    target, drafter = pair
    tokenizer(target, 97)
    tokenizer(drafter, 97)
    vocabulary = json.loads((drafter / "tokenizer.json").read_text())
    vocabulary["added_tokens"].append({"id": 99, "content": "<mask>"})
    (drafter / "tokenizer.json").write_text(json.dumps(vocabulary))
    load_drafter(drafter, target)
    tokenizer(drafter, 97, prefix="other")
    refused(target, drafter, "differ in 96 tokens", "another tokenizer")


def test_widths_name_both_values_and_both_files(pair):
    target, drafter = pair
    edit_json(target / "config.json", hidden_size=72)
    error = refused(target, drafter, "'hidden_size' is 64", "'hidden_size' is 72", str(target), str(drafter))
    assert any("'fc.weight' is [64, 128], expected 144 columns" in problem for problem in error.problems)


def test_all_disagreements_are_reported_together(pair):
    target, drafter = pair
    set_dflash(drafter, mask_token_id=-1, target_layer_ids=[0, 7])
    edit_json(drafter / "config.json", block_size=1, vocab_size=55, num_target_layers=None)
    assert len(refused(target, drafter).problems) == 4


def test_the_contract_is_asked_before_any_tensor_is_read(pair, monkeypatch):
    target, drafter = pair
    set_dflash(drafter, mask_token_id=None)
    monkeypatch.setattr("checkpoints.reader.Reader.__getitem__", lambda *_: pytest.fail("read a tensor"))
    refused(target, drafter, "mask_token_id")


def test_a_folder_that_is_no_drafter_says_so(pair):
    target, _ = pair
    refused(target, target, "'fc.weight' is missing")


LOOKS = {
    "DFlash2": [
        {"architectures": ["DFlash2DraftModel"]},
        "candidate_selector.query.weight",
        "layers.0.attention_conv.base_kernel",
    ],
    "DeepSpec": [{"architectures": ["Qwen3DSparkModel"]}, {"markov_rank": 0}, "markov_head.w1.weight"],
    "speculators": [{"speculators_model_type": "dflash"}, {"aux_hidden_state_layer_ids": [2, 10]}, "d2t"],
    "MiMo": [{"attention_value_scale": 0.7}, {"attention_sink_bias": True}, "layers.0.self_attn.attention_sink_bias"],
    "Muse Glimmer": [
        {"architectures": ["MuseGlimmerAssistantModel"]},
        "encoder.fc.weight",
        "encoder.output_norm_enc.weight",
    ],
}


@pytest.mark.parametrize(("name", "sign"), [(name, sign) for name, signs in LOOKS.items() for sign in signs])
def test_look_alikes_are_refused_by_name(pair, name, sign):
    """By architecture, by config key, or by a tensor's name."""
    target, drafter = pair
    if isinstance(sign, dict):
        edit_json(drafter / "config.json", **sign)
        shown = next(iter(sign.values()))[0] if "architectures" in sign else next(iter(sign))
    else:
        rewrite(drafter, lambda tensors: tensors | {sign: np.zeros(3, np.int64) if sign == "d2t" else bf16(3)})
        shown = sign
    error = refused(target, drafter, name, "not DFlash v1", shown)
    assert len(error.problems) == 1


def test_every_look_alike_has_a_test():
    assert len(LOOKS) == len(LOOK_ALIKES)
    assert look_alikes({"architectures": ["DFlashDraftModel"]}, ["fc.weight", "layers.0.self_attn.q_proj.bias"]) == []
