"""Drafter training: the same forward as decoding, the right labels, and batches that must not break a run."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax.generate import Decoder
from dflash_jax.nn import plain_rope
from dflash_jax.training.continuations import continue_greedily
from dflash_jax.training.drafter import (
    Decay,
    DPace,
    block_logits,
    block_loss,
    make_lengths,
    make_update,
    replayed_tokens_per_round,
    sample_anchors,
)
from dflash_jax.training.optimize import cosine_schedule, init_state, muon
from experiments import train_drafter
from models.dflash import DFlash, DFlashConfig, DFlashDrafter
from models.qwen3 import Qwen3, Qwen3Config
from models.target import FlaxTarget

TAPS, BLOCK, VOCAB, WIDTH = (0, 2), 4, 37, 20
DTYPE = jnp.dtype(jnp.float64)


@pytest.fixture(scope="module")
def pair():
    sizes = dict(hidden_size=WIDTH, heads=4, kv_heads=2, head_dim=6, intermediate_size=28, rope=plain_rope(1e4, 6))
    sizes_of_target = Qwen3Config(vocab_size=VOCAB, layers=3, windows=(None,) * 3, **sizes)
    target = FlaxTarget(Qwen3(sizes_of_target, taps=TAPS, dtype=DTYPE))
    config = DFlashConfig(
        target_hidden_size=WIDTH,
        layers=2,
        windows=(8, None),
        causal=(True, False),
        taps=TAPS,
        mask_token_id=1,
        block_size=BLOCK,
        **sizes,
    )
    drafter = DFlashDrafter(DFlash(config, dtype=DTYPE), BLOCK)
    return target, jax.jit(target.init)(jax.random.key(0)), drafter, jax.jit(drafter.init)(jax.random.key(1))


@pytest.fixture(scope="module")
def text(pair):
    """Two texts of 20 tokens and the features of every position."""
    target, params, _, _ = pair
    prompts = jax.random.randint(jax.random.key(2), (2, 5), 3, VOCAB)
    return continue_greedily(target, params, prompts.astype(jnp.int32), 15)


def test_continuations_are_the_targets_own_and_features_those_of_one_pass(pair, text):
    target, params, _, _ = pair
    tokens, features = text
    out = jax.jit(target.step)(params, tokens, target.init_cache(2, 20, 20))
    own = jnp.argmax(target.unembed(params, out.hidden), -1)
    assert (own[:, 4:-1] == tokens[:, 5:]).all()
    np.testing.assert_allclose(features, out.features, atol=1e-12)


def test_B67_training_rows_equal_inference_rows(pair, text):
    """The block at anchor 6 sees the features of positions 0..5 and predicts positions 7, 8, 9."""
    target, params, drafter, draft_params = pair
    tokens, features = text
    anchors = jnp.array([[6, 11, 9], [14, 6, 7]], jnp.int32)
    program = jax.jit(block_logits, static_argnums=(0, 1))
    logits = program(drafter, target, draft_params, params, tokens, features, anchors)
    for row, column in ((0, 0), (0, 1), (1, 1)):
        anchor = int(anchors[row, column])
        context = features[row : row + 1, :anchor]
        cache = drafter.absorb(draft_params, context, jnp.array([anchor]), drafter.init_cache(1, 32, 20))
        ids = jnp.array([[int(tokens[row, anchor]), 1, 1, 1]], jnp.int32)
        want = drafter.logits(draft_params, target, params, ids, cache)[0]
        np.testing.assert_allclose(logits[row, column], want, atol=1e-10)


def test_B67_labels_and_weights():
    """Right labels make the loss vanish; unsupervised rows and rows past the end weigh nothing."""
    tokens = jnp.arange(20, dtype=jnp.int32)[None]
    supervised = jnp.ones((1, 20), bool).at[0, 9].set(False)
    anchors, real = jnp.array([[6, 18]], jnp.int32), jnp.ones((1, 2), bool)
    right = 50.0 * jax.nn.one_hot(anchors[:, :, None] + jnp.arange(1, BLOCK), VOCAB)
    loss, report = block_loss(right, tokens, anchors, real, supervised, Decay(4.0))
    assert loss < 1e-9
    assert report["acceptance"] == 1 + (2 + 1) / 2  # 7, 8 of the first block (9 is not supervised), 19 of the second
    shifted = 50.0 * jax.nn.one_hot(anchors[:, :, None] + jnp.arange(BLOCK - 1), VOCAB)
    assert block_loss(shifted, tokens, anchors, real, supervised, Decay(4.0))[0] > 40


def test_anchors_are_distinct_and_supervised():
    supervised = jnp.zeros((2, 20), bool).at[0, 8:12].set(True).at[1, 19].set(True)
    anchors, real = sample_anchors(jax.random.key(0), supervised, 5)
    assert sorted(anchors[0][real[0]].tolist()) == [8, 9, 10]
    assert not real[1].any()  # one supervised token has no successor to predict


@pytest.mark.parametrize("weigh", [Decay(4.0), DPace()])
def test_B68_a_batch_without_supervision_gives_zero_finite_gradients(pair, text, weigh):
    target, params, drafter, draft_params = pair
    tokens, features = text
    optimizer = muon(cosine_schedule(10, 1e-3, 1), weight_decay=0.0)
    update = make_update(drafter, target, optimizer, weigh, 3)
    state = init_state(draft_params, optimizer)
    after, report = update(state, params, tokens, features, jnp.zeros(tokens.shape, bool), jax.random.key(0))
    assert report["loss"] == 0
    assert report["grad_norm"] == 0
    assert after.step == 1
    assert optax.tree.norm(optax.tree.sub(after.params, state.params)) == 0


def test_B68_a_gradient_that_is_not_finite_is_skipped(pair, text):
    target, params, drafter, draft_params = pair
    tokens, features = text
    optimizer = muon(cosine_schedule(10, 1e-3, 1), weight_decay=0.0)
    update = make_update(drafter, target, optimizer, Decay(4.0), 3)
    state = init_state(draft_params, optimizer)
    spiked = features.at[0, 3].set(jnp.inf)
    after, report = update(state, params, tokens, spiked, jnp.ones(tokens.shape, bool), jax.random.key(0))
    assert not np.isfinite(report["grad_norm"])
    assert optax.tree.norm(optax.tree.sub(after.params, state.params)) == 0
    assert after.step == 1


def test_dpace_weights_by_hand():
    chance = jnp.array([[[0.5, 0.0, 1.0]]])
    # c = .75, .5, 1; P = .75, .375, .375; sums from the right.
    np.testing.assert_allclose(DPace()(chance)[0, 0], [1.5, 0.75, 0.375])
    np.testing.assert_allclose(Decay(4.0)(chance)[0, 0], np.exp(-np.arange(3) / 4))


def test_replayed_rounds_by_hand():
    """Rounds start at 0, 2 and 3 of the first text; at 0 and 4 of the second, where the last one runs past the end."""
    lengths = jnp.array([[2, 9, 1, 2, 1], [4, 9, 9, 9, 3]])
    assert float(replayed_tokens_per_round(lengths)) == 10 / 5


def _assert_replay_is_decoding(target, params, drafter, draft_params, tokens, features):
    """The rounds replayed from the text are those of the compiled loop, and fewer than one per token."""
    lengths = make_lengths(drafter, target, 5)(draft_params, params, tokens, features)
    prompts = [row[:5].tolist() for row in tokens]
    made = [Decoder(target, params, drafter, draft_params).generate([prompt], 15) for prompt in prompts]
    assert [out.tokens[0] for out in made] == [row[5:].tolist() for row in tokens]
    assert float(replayed_tokens_per_round(lengths)) == 28 / sum(out.rounds for out in made) > 1


def test_training_learns_and_resumes_exactly(pair, text):
    """The loss falls on one batch, and a run cut in two is the run in one piece."""
    target, params, drafter, draft_params = pair
    tokens, features = text
    optimizer = muon(cosine_schedule(40, 2e-2, 1), weight_decay=0.0)
    update = make_update(drafter, target, optimizer, Decay(4.0), 6)
    supervised = jnp.ones(tokens.shape, bool)
    state, losses = init_state(draft_params, optimizer), []
    for step in range(30):
        state, report = update(state, params, tokens, features, supervised, jax.random.key(step))
        losses.append(float(report["loss"]))
        if step == 14:
            middle = jax.tree.map(np.asarray, state)
    assert losses[-1] < 0.5 * losses[0]
    _assert_replay_is_decoding(target, params, drafter, state.params, tokens, features)
    for step in range(15, 30):
        middle, report = update(middle, params, tokens, features, supervised, jax.random.key(step))
    assert float(report["loss"]) == losses[-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"texts": 100}, "--texts 100: a multiple of --generate-batch 64"),
        ({"texts": 0}, "--texts 0"),
        ({"batch": 6}, "--batch 6: must divide --generate-batch 64"),
    ],
)
def test_sizes_that_would_break_off_late_are_refused_first(change, words):
    args = train_drafter.Args(target=Path("nowhere"), out=Path("nowhere"))
    train_drafter.check(args)
    with pytest.raises(ValueError, match=words):
        train_drafter.main(replace(args, **change))
