"""Formulas by hand and against plain numpy: YaRN, rotation, norms, gated units, attention, masks, routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention import attend, masked_softmax
from dflash_jax.cache import Slots, slot_positions, visible
from dflash_jax.moe import mix_experts, route_topk_softmax
from dflash_jax.nn import argmax, clamped_swiglu, plain_rope, rms_norm, rope_angles, rotate, swiglu, yarn_rope
from models.hf_config import rope_from, windows_from

GPT_OSS_YARN = dict(factor=32.0, original_max_position=4096, beta_fast=32.0, beta_slow=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_argmax_is_jnp_argmax_with_ties_infinities_and_nan(dtype):
    rows = np.random.default_rng(0).integers(-3, 3, (64, 33)).astype(np.float32)
    rows[1], rows[2], rows[3] = -np.inf, np.nan, np.inf
    rows[4, 7], rows[5, 20], rows[6, [9, 4]] = np.nan, -np.inf, np.nan
    logits = jnp.asarray(rows, dtype)
    np.testing.assert_array_equal(argmax(logits), jnp.argmax(logits, axis=-1))


def test_B35_yarn_of_gpt_oss_is_not_truncated():
    rope = yarn_rope(150000.0, 64, truncate=False, **GPT_OSS_YARN)
    frequencies = np.array(rope.frequencies)
    assert rope.attention_factor == pytest.approx(1.3465735902799727, abs=1e-15)
    assert frequencies[[0, 8, 12, 17, 31]] == pytest.approx(
        [1, 0.0508133, 6.79496e-3, 1.29319e-4, 3.02351e-7], rel=1e-5
    )


def test_B35_an_absent_truncate_means_rounded_ends():
    spec = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 150000}
    assert rope_from({"rope_parameters": spec}, 64).frequencies[12] == pytest.approx(7.01571e-3, rel=1e-5)
    old = {"rope_theta": 150000, "rope_scaling": {k: v for k, v in spec.items() if k != "rope_theta"}}
    assert rope_from(old, 64) == rope_from({"rope_parameters": spec}, 64)
    assert rope_from({"rope_parameters": spec | {"truncate": False}}, 64) == yarn_rope(
        150000.0, 64, truncate=False, **GPT_OSS_YARN
    )


def test_B34_the_gate_is_clamped_from_above_only():
    gate, up = jnp.array([10.0, -20.0]), jnp.array([-9.0, 3.0])
    out = clamped_swiglu(gate, up, limit=7.0)
    assert out[0] == pytest.approx(-41.99972, abs=1e-5)
    assert out[1] == pytest.approx(-1.3e-13, rel=0.05)  # clamped on both sides it would be -1.87e-4
    assert swiglu(gate, up) == pytest.approx(np.array(gate) / (1 + np.exp(-np.array(gate))) * np.array(up))


def test_rms_norm_rounds_where_each_family_does():
    x, scale = jnp.linspace(-3, 5, 7, dtype=jnp.bfloat16), jnp.linspace(0.1, 2.3, 7, dtype=jnp.bfloat16)
    wide = np.array(x, np.float32)
    normed = wide / np.sqrt((wide**2).mean() + 1e-6)
    late = jnp.asarray(normed * np.array(scale, np.float32)).astype(jnp.bfloat16)
    early = jnp.asarray(normed).astype(jnp.bfloat16) * scale
    assert (rms_norm(x, scale, 1e-6, scale_before_cast=True) == late).all()
    assert (rms_norm(x, scale, 1e-6) == early).all()
    assert (late != early).any()  # the two are different roundings


def test_rotation_turns_pairs_of_the_two_halves():
    rope = plain_rope(100.0, 6)
    x = np.random.default_rng(0).normal(size=(1, 2, 1, 6))
    angles = rope_angles(rope, jnp.array([[3, 11]]), jnp.dtype(jnp.float64))
    turned = np.array(rotate(jnp.asarray(x), angles))[0, :, 0]
    for row, position in enumerate((3, 11)):
        for j in range(3):
            pair = complex(x[0, row, 0, j], x[0, row, 0, j + 3]) * np.exp(1j * position * 100.0 ** (-2 * j / 6))
            assert turned[row, [j, j + 3]] == pytest.approx([pair.real, pair.imag], abs=1e-12)


def numpy_attention(q, k, v, seen, scale, sinks):
    """Grouped-query attention of one row by loops."""
    out = np.zeros_like(q)
    repeat = q.shape[1] // k.shape[0]
    for t in range(q.shape[0]):
        for n in range(q.shape[1]):
            keys = np.flatnonzero(seen[t])
            logits = k[n // repeat, keys] @ q[t, n] * scale
            total = np.exp(logits).sum() + (0 if sinks is None else np.exp(sinks[n]))
            out[t, n] = (np.exp(logits) / total) @ v[n // repeat, keys] if len(keys) else 0
    return out


@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_over_two_segments_is_attention_over_their_union(with_sinks):
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(2, 3, 6, 5)))
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 9, 5))) for _ in range(2))
    sinks = jnp.asarray(rng.normal(size=6)) if with_sinks else None
    seen = jnp.asarray(rng.random((2, 3, 9)) < 0.6)
    whole = attend(q, [(k, v, seen)], scale=0.3, sinks=sinks)
    cuts = [(k[:, :, part], v[:, :, part], seen[:, :, part]) for part in (slice(0, 4), slice(4, 9))]
    np.testing.assert_allclose(attend(q, cuts, scale=0.3, sinks=sinks), whole, atol=1e-12)
    for row in range(2):
        plain = numpy_attention(*(np.array(part[row]) for part in (q, k, v, seen)), 0.3, sinks)
        np.testing.assert_allclose(whole[row], plain, atol=1e-12)


def test_grouped_keys_are_seen_by_their_own_queries_only():
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.normal(size=(1, 6, 4, 5)))
    k, v = (jnp.asarray(rng.normal(size=(1, 2, 3, 2, 5))) for _ in range(2))
    grouped = attend(q, [(k, v, jnp.ones((1, 6, 2), bool))], scale=0.5)
    block = jnp.kron(jnp.eye(3), jnp.ones((2, 2)))[None] > 0
    flat = attend(q, [(k.reshape(1, 2, 6, 5), v.reshape(1, 2, 6, 5), block)], scale=0.5)
    np.testing.assert_allclose(grouped, flat, atol=1e-12)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_B24_a_query_that_sees_nothing_gets_zeros(with_sinks):
    scores = jnp.full((1, 1, 2, 3), 4.0)
    seen = jnp.array([[[[False] * 3, [True, False, True]]]])
    sinks = jnp.zeros((1, 2)) if with_sinks else None
    weights = masked_softmax(scores, seen, sinks)
    assert (weights[0, 0, 0] == 0).all()
    share = np.exp(4) / (2 * np.exp(4) + (1 if with_sinks else 0))
    assert weights[0, 0, 1] == pytest.approx([share, 0, share])


def test_B22_a_window_of_128_is_128_keys_with_the_query():
    slots = Slots(k=jnp.zeros((1, 1, 256, 1)), v=jnp.zeros((1, 1, 256, 1)), window=128)
    query = jnp.array([[200]])
    seen = np.array(visible(slots, query, query + 1, jnp.array([201])))[0, 0]
    assert np.flatnonzero(seen).tolist() == list(range(73, 201))


@pytest.mark.parametrize("end", [0, 3, 7, 12, 40])
def test_a_ring_holds_the_newest_position_of_each_residue(end):
    slots = Slots(k=jnp.zeros((1, 1, 7, 1)), v=jnp.zeros((1, 1, 7, 1)), window=4, ring=True)
    held = np.array(slot_positions(slots, jnp.array([end])))[0]
    for slot, position in enumerate(held):
        written = [p for p in range(end) if p % 7 == slot]
        assert (position == written[-1]) if written else (position < 0)


def test_windows_of_every_spelling():
    both = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    assert windows_from(both, 2) == (8, None)
    assert windows_from({}, 2) == (None, None)
    assert windows_from({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, 3) == (None, 8, 8)
    assert windows_from({"use_sliding_window": False, "max_window_layers": 1, "sliding_window": 8}, 2) == (None, None)
    with pytest.raises(ValueError, match="layer_types has 2 entries"):
        windows_from(both, 3)
    with pytest.raises(ValueError, match="sliding_window"):
        windows_from({"layer_types": ["sliding_attention"]}, 1)


def test_routing_picks_k_distinct_experts_on_ties_and_weighs_by_softmax():
    chosen, weights = route_topk_softmax(jnp.array([[1.0, 1.0, 1.0, 0.0], [0.0, 2.0, 1.0, -1.0]]), 2)
    assert chosen.tolist() == [[0, 1], [1, 2]]
    assert weights[1] == pytest.approx(np.exp([2, 1]) / np.exp([2, 1]).sum())


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_the_mixture_is_the_weighted_sum_in_both_layouts(rows):
    rng = np.random.default_rng(3)
    x, matrices = rng.normal(size=(rows, 4)), rng.normal(size=(5, 4, 4))
    chosen = jnp.asarray(np.stack([rng.permutation(5)[:2] for _ in range(rows)]), jnp.int32)
    weights = jnp.asarray(rng.random((rows, 2)))
    want = np.einsum("tk,ti,tkio->to", weights, x, matrices[np.array(chosen)])
    stacked = {"w": jnp.asarray(matrices)}
    for experts in (stacked, tuple({"w": jnp.asarray(m)} for m in matrices)):
        mixed = jax.jit(lambda *a: mix_experts(*a, lambda x, e: x @ e["w"]))(jnp.asarray(x), chosen, weights, experts)
        np.testing.assert_allclose(mixed, want, atol=1e-12)
