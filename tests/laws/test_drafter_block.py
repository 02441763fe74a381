"""The drafter's block: what its rows see, and that the training forward over many blocks is the inference forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import cache as caches
from dflash_jax.accept import argmax_draft
from models import dflash
from tests.support.context import BLOCK, CONTEXT, NAME, ROWS, Programs, programs
from tests.support.drafters import WINDOW
from tests.support.families import family, fresh
from tests.support.steps import agree

ANCHORS = np.array([[9, 20, 12], [15, 7, 22]])
"""Per row, three blocks; some anchors are closer to each other than a block is long."""


def _many(module, params, x, anchors, cache):
    return module.apply({"params": params}, x, anchors, cache, method="block")


many = jax.jit(_many, static_argnums=0)


def embedded(run: Programs, tokens) -> np.ndarray:
    return np.asarray(run.target.params["embed"])[tokens]


def training_forward(run: Programs, anchors: np.ndarray, program=many) -> np.ndarray:
    """Hidden ``[B blocks P D]``: all blocks side by side over the whole text's context."""
    blocks = anchors.shape[1]
    x = np.tile(embedded(run, run.tokens), (1, blocks, 1))
    hidden = program(run.tiny.drafter.module, run.tiny.params, x, anchors.astype(np.int32), run.at_once())
    return np.asarray(hidden).reshape(ROWS, blocks, BLOCK, -1)


def inference_forward(run: Programs, anchor: np.ndarray) -> np.ndarray:
    """Hidden ``[B P D]`` of one block whose context was absorbed up to the anchor and no further."""
    return run.block(run.absorb(run.empty(CONTEXT + 1), run.features, anchor))


def check_training_is_inference(run: Programs, program=many) -> None:
    trained = training_forward(run, ANCHORS, program)
    for index in range(ANCHORS.shape[1]):
        expected = inference_forward(programs(run.layers), ANCHORS[:, index])
        agree(trained[:, index], expected, f"block {index}")


@pytest.mark.parametrize("layers", ["full", "mixed", "sliding"])
class TestTrainingForward:
    def test_B67_every_block_is_an_inference_block(self, layers: str) -> None:
        check_training_is_inference(programs(layers))

    def test_B67_one_block_alone(self, layers: str) -> None:
        run = programs(layers)
        alone = training_forward(run, ANCHORS[:, :1])
        agree(alone[:, 0], inference_forward(run, ANCHORS[:, 0]), "one block")

    def test_moving_an_unrelated_anchor_changes_no_bit(self, layers: str) -> None:
        run, moved = programs(layers), ANCHORS.copy()
        moved[:, 1] = moved[:, 0] + 1
        before, after = training_forward(run, ANCHORS), training_forward(run, moved)
        np.testing.assert_array_equal(before[:, [0, 2]], after[:, [0, 2]])
        assert np.abs(before[:, 1] - after[:, 1]).max() > 1e-3


def rows_see_another_block(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = dflash.attend

    def crossed(q, segments, **rest):
        (*context, (k, v, seen)) = segments
        return attend(q, [*context, (jnp.roll(k, 1, axis=2), jnp.roll(v, 1, axis=2), seen)], **rest)

    monkeypatch.setattr(dflash, "attend", crossed)


def context_past_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = caches.visible
    monkeypatch.setattr(caches, "visible", lambda slots, query, before, end: visible(slots, query, before + BLOCK, end))


def offsets_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    angles = dflash.rope_angles
    monkeypatch.setattr(dflash, "rope_angles", lambda rope, at, dtype: angles(rope, at + 1, dtype))


@pytest.mark.parametrize("mutate", [rows_see_another_block, context_past_the_anchor, offsets_from_one])
def test_the_law_can_fail(mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    run = programs("full")
    for index in range(ANCHORS.shape[1]):
        inference_forward(run, ANCHORS[:, index])
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_training_is_inference(run, program=jax.jit(fresh(_many), static_argnums=0))


@pytest.mark.parametrize(("layers", "earlier_rows_change"), [("full", True), ("sliding", False), ("mixed", True)])
def test_B52_a_later_row_of_the_block(layers: str, earlier_rows_change: bool) -> None:
    run = programs(layers)
    tokens = run.tokens.copy()
    tokens[:, 6] = (tokens[:, 6] + 1) % 53
    cache = run.at_once()
    change = np.abs(run.block(cache, tokens) - run.block(cache)).max((0, 2))
    assert (change[6:] > 1e-6).all()
    assert (change[:6] > 1e-6).all() if earlier_rows_change else (change[:6] == 0).all()


@pytest.mark.parametrize("back", range(1, WINDOW + 3))
def test_B50_row_j_of_a_sliding_layer_sees_back_to_its_window(back: int) -> None:
    """Context position ``s - back`` is seen by block row j iff ``s - back > s + j - W``: W keys with itself (B22)."""
    run = programs("one_sliding")
    features = run.features.copy()
    features[:, CONTEXT - back] += 1.0
    changed = run.absorb(run.empty(CONTEXT + 1), features, CONTEXT)
    rows = np.abs(run.block(changed) - run.block(run.at_once())).max((0, 2)) > 1e-9
    assert rows.tolist() == [j < WINDOW - back for j in range(BLOCK)]


def test_B50_far_context_reaches_the_block_through_the_full_layer_only() -> None:
    run = programs("mixed")
    features = run.features.copy()
    features[:, 5] += 1.0
    cache, changed = run.at_once(), run.absorb(run.empty(CONTEXT + 1), features, CONTEXT)
    expected = run.block(cache)
    through_sliding = run.block(cache.replace(layers=(changed.layers[0], cache.layers[1])))
    through_full = run.block(cache.replace(layers=(cache.layers[0], changed.layers[1])))
    np.testing.assert_array_equal(through_sliding, expected)
    assert np.abs(through_full - expected).max() > 1e-6


@pytest.mark.parametrize("layers", ["one_full", "one_causal", "one_sliding", "one_band"])
def test_B52_who_sees_whom_in_a_block(layers: str) -> None:
    """Change one row's embedding at a time and watch the others: a layer's mask, read off its outputs."""
    run = programs(layers)
    ((window,), (causal,)) = run.tiny.drafter.config.windows, run.tiny.drafter.config.causal
    x, cache, anchors = embedded(run, run.tokens), run.at_once(), np.full((ROWS, 1), CONTEXT, np.int32)
    expected = np.asarray(many(run.tiny.drafter.module, run.tiny.params, x, anchors, cache))
    for key in range(BLOCK):
        changed = x.copy()
        changed[:, key] += 1.0
        found = many(run.tiny.drafter.module, run.tiny.params, changed, anchors, cache)
        for query in range(BLOCK):
            distance = query - key
            seen = (not causal or distance >= 0) and (window is None or abs(distance) < window)
            assert (np.abs(found[:, query] - expected[:, query]).max() > 1e-9) == seen, (query, key)


def test_B52_the_proposal_is_read_from_the_rows_after_the_anchor() -> None:
    """Row j of 1..P-1 proposes the token at its own place; head, multiplier and soft cap are as the config says."""
    run = programs("mixed")
    drafter, params, cache = run.tiny.drafter, run.tiny.params, run.at_once()
    target, config = family(NAME), drafter.config
    anchor = jnp.array([17, 4], jnp.int32)
    propose = jax.jit(drafter.propose, static_argnums=(1, 5))
    draft = propose(params, target.target, target.params, anchor, cache, argmax_draft)
    tokens = np.full((ROWS, BLOCK), config.mask_token_id, np.int32)
    tokens[:, 0] = anchor
    raw = run.block(cache, tokens)[:, 1:] @ np.asarray(target.params["head"])
    capped = config.final_logit_softcapping * np.tanh(config.output_multiplier * raw / config.final_logit_softcapping)
    logits = jax.jit(drafter.logits, static_argnums=1)(params, target.target, target.params, tokens, cache)
    agree(logits, capped, "logits of the drafts")
    assert draft.tokens.tolist() == capped.argmax(-1).tolist()
    assert draft.tokens.shape == (ROWS, BLOCK - 1)
