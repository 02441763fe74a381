"""Tiny DFlash drafters in every published variant, run with the authors' own module."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel, _crop_to, _draft_value, _make_cache
from qwen3 import dimensions, layer_specs
from torch import nn
from transformers import Cache
from weights import (
    TOLERANCE,
    Config,
    Spec,
    Tensors,
    check_distinct,
    draw,
    draw_all,
    draw_ids,
    matrix,
    norm,
    sizes,
    write_checkpoint,
    write_golden,
)

WINDOW = 8
SIZES = sizes(hidden=40, inner=52, layers=3, heads=10, kv_heads=2, head_dim=18, vocab=97)
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
PLAIN = {"rope_theta": 1000000, "rope_scaling": None}


@dataclass(frozen=True)
class DrafterCase:
    """Everything that distinguishes one drafter golden from the next."""

    about: str
    seed: int
    block: int = 6
    taps: tuple[int, ...] = (1, 4, 6, 9)
    target_layers: int = 13
    layer_types: tuple[str, ...] | None = None
    anchors: tuple[int, ...] = (23, 25, 31, 37)  # committed length at each round; the last is the whole context
    inside: bool = True  # block_size, mask_token_id and target_layer_ids inside `dflash_config`, or beside it
    rope: Config = field(default_factory=lambda: dict(PLAIN))
    extra: Config = field(default_factory=dict)  # further top-level keys, which win
    sizes: dict[str, int] = field(default_factory=lambda: dict(SIZES))

    @property
    def mask(self) -> int:
        """The mask token: the last row but one of the embedding."""
        return self.sizes["vocab_size"] - 2


DRAFTER_CASES = {
    "drafter_full": DrafterCase(
        about="full attention in both directions; settings inside dflash_config; four taps, three layers",
        seed=31,
    ),
    "drafter_sliding": DrafterCase(
        about="two sliding layers (causal in the block by default) and a full one; settings at top level; "
        "the context grows from shorter to longer than the window",
        seed=32,
        layer_types=(SLIDING, SLIDING, FULL),
        anchors=(5, 7, 13, 19, 25, 31, 37),
        inside=False,
    ),
    "drafter_sliding_wide_block": DrafterCase(
        about="sliding and full layers with a block (11) that is longer than the window (8)",
        seed=33,
        block=11,
        layer_types=(SLIDING, FULL, SLIDING),
        anchors=(3, 14, 15, 26, 37),
    ),
    "drafter_sliding_bidirectional": DrafterCase(
        about="is_causal false: sliding layers see both ways, less than a window away; the block is longer than it",
        seed=34,
        block=11,
        layer_types=(SLIDING, SLIDING, FULL),
        anchors=(9, 20, 21, 26, 37),
        extra={"is_causal": False},
    ),
    "drafter_causal": DrafterCase(
        about="is_causal true, full and sliding layers; target_layer_ids absent, so they follow from the layer counts",
        seed=35,
        layer_types=(FULL, SLIDING, FULL),
        target_layers=11,
        taps=(1, 4, 8),
        extra={"is_causal": True},
    ),
    "drafter_bias_yarn": DrafterCase(
        about="attention biases and YaRN with truncate false, old rope spelling, model_type gpt_oss",
        seed=36,
        rope={"rope_theta": 150000, "rope_scaling": {**YARN, "truncate": False}},
        extra={
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "model_type": "gpt_oss",
            "rms_norm_eps": 1e-05,
        },
    ),
    "drafter_yarn_truncate": DrafterCase(
        about="YaRN without a truncate key (so true), new rope spelling, sliding and full layers",
        seed=37,
        layer_types=(SLIDING, FULL, FULL),
        rope={"rope_parameters": {**YARN, "rope_theta": 150000.0}},
        extra={"max_position_embeddings": 131072},
    ),
    "drafter_scaled": DrafterCase(
        about="input_embedding_scale, output_multiplier and final_logit_softcapping; a top-level block_size "
        "that dflash_config overrides",
        seed=38,
        extra={
            "block_size": 16,
            "input_embedding_scale": 1.75,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 1.25,
        },
    ),
}


def settings_of(case: DrafterCase) -> dict[str, Any]:
    """What a reader of the config must end up with."""
    return {"block_size": case.block, "mask_token_id": case.mask, "target_layer_ids": list(case.taps)}


def config_of(case: DrafterCase) -> Config:
    """The `config.json` of a case, with the keys of the published drafters."""
    settings = settings_of(case)
    if list(case.taps) == default_taps(case):
        del settings["target_layer_ids"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "max_window_layers": case.sizes["num_hidden_layers"],
        "model_type": "qwen3",
        "num_target_layers": case.target_layers,
        "rms_norm_eps": 1e-06,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        **case.sizes,
        **case.rope,
    }
    if case.layer_types:
        config["layer_types"] = list(case.layer_types)
        if SLIDING in case.layer_types:
            config |= {"sliding_window": WINDOW, "use_sliding_window": True}
    return config | ({"dflash_config": settings} if case.inside else settings) | case.extra


def default_taps(case: DrafterCase) -> list[int]:
    """The taps of a drafter whose config names none: evenly spread, halves rounded to the even layer."""
    last = case.sizes["num_hidden_layers"] - 1
    return [round(1 + index * (case.target_layers - 4) / last) for index in range(last + 1)]


def specs_of(case: DrafterCase) -> dict[str, Spec]:
    """The whole inventory: no `model.` prefix, no embedding, no head."""
    width, features = case.sizes["hidden_size"], len(case.taps) * case.sizes["hidden_size"]
    specs = {
        "fc.weight": matrix(width, features, fan_in=features),
        "hidden_norm.weight": norm(width),
        "norm.weight": norm(width),
    }
    for layer in range(case.sizes["num_hidden_layers"]):
        specs |= layer_specs(case.sizes, f"layers.{layer}", bias=case.extra.get("attention_bias", False))
    return specs


def write_and_load(case: DrafterCase, folder: Path) -> DFlashDraftModel:
    """Write the checkpoint of a case, and read it back in float64; nothing may be missing or left over."""
    write_checkpoint(folder, config_of(case), draw_all(case.seed, specs_of(case)))
    model, info = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    problems = {kind: keys for kind, keys in info.items() if keys}
    if problems:
        raise ValueError(f"{folder.name}: {problems}")
    read = {name: getattr(model, name) for name in settings_of(case)}
    if read != settings_of(case):
        raise ValueError(f"{folder.name}: settings were read as {read}")
    return model.double().eval()


def run_block(
    model: DFlashDraftModel,
    inputs: Tensors,
    block_ids: torch.Tensor,
    start: int,
    anchor: int,
    cache: Cache | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [P D] and logits [P-1 V] of one block after absorbing the features from `start` to `anchor`."""
    scale = float(_draft_value(model.config, "input_embedding_scale", 1.0))
    hidden = model(
        target_hidden=inputs["context_features"][None, start:anchor],
        noise_embedding=inputs["embed_table"][block_ids][None] * scale,
        position_ids=torch.arange(start, anchor + len(block_ids))[None],
        past_key_values=cache,
        use_cache=cache is not None,
    )[0]
    if cache is not None:
        _crop_to(cache, anchor)
    return hidden, model.compute_logits(hidden[1:], lambda rows: nn.functional.linear(rows, inputs["head"]))


def draw_inputs(case: DrafterCase) -> Tensors:
    """The context features, the borrowed embedding and head, and the first token of each round's block."""
    width, vocab = case.sizes["hidden_size"], case.sizes["vocab_size"]
    blocks = torch.full((len(case.anchors), case.block), case.mask)
    blocks[:, 0] = draw_ids(case.seed, "anchor_ids", vocab - 2, (len(case.anchors),))
    specs = {
        "context_features": Spec((case.anchors[-1], len(case.taps) * width), 2.0, 0.5),
        "embed_table": Spec((vocab, width), 1.0),
        "head": matrix(vocab, width, fan_in=width, gain=2.0),
    }
    floats = {name: draw(case.seed, name, spec).double() for name, spec in specs.items()}
    return floats | {"round_anchors": torch.tensor(case.anchors), "round_block_ids": blocks}


def run_rounds(model: DFlashDraftModel, case: DrafterCase, inputs: Tensors) -> Tensors:
    """Absorb the context in pieces, one per round, and check each round against an uncached run."""
    cache, start = _make_cache(model.config), 0
    hidden, logits = [], []
    for anchor, block_ids in zip(case.anchors, inputs["round_block_ids"], strict=True):
        cached = run_block(model, inputs, block_ids, start, anchor, cache)
        fresh = run_block(model, inputs, block_ids, 0, anchor)
        torch.testing.assert_close(cached, fresh, rtol=0, atol=2e-5)
        hidden.append(cached[0])
        logits.append(cached[1])
        start = anchor
    return {"round_hidden": torch.stack(hidden), "round_logits": torch.stack(logits)}


@torch.inference_mode()
def build(name: str, folder: Path) -> None:
    """Write one drafter case."""
    case = DRAFTER_CASES[name]
    dims = {
        "context": case.anchors[-1],
        "block": case.block,
        "layers": case.sizes["num_hidden_layers"],
        "taps": len(case.taps),
        "features": len(case.taps) * case.sizes["hidden_size"],
        "window": WINDOW,
        **dimensions(case.sizes),
    }
    # With as many taps as layers the default formula applies: that one pair of equal sizes is meant.
    check_distinct({key: size for key, size in dims.items() if key != "taps" or len(case.taps) != dims["layers"]})
    model = write_and_load(case, folder)
    inputs = draw_inputs(case)
    block_ids, anchor = inputs["round_block_ids"][-1], case.anchors[-1]
    hidden, logits = run_block(model, inputs, block_ids, 0, anchor)
    whole = {"anchor": torch.tensor([anchor]), "block_ids": block_ids, "hidden": hidden, "logits": logits}
    expected = inputs | whole | run_rounds(model, case, inputs)
    best = logits.topk(2).values
    observed = {
        "hidden_std": round(hidden.std().item(), 3),
        "logit_std": round(logits.std().item(), 3),
        "argmax_gap": round((best[:, 0] - best[:, 1]).min().item(), 5),
    }
    details = {"dims": dims, "settings": settings_of(case), "observed": observed}
    write_golden(folder, "drafter", case.about, expected, TOLERANCE, **details)
