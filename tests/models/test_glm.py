"""GLM's own pieces against hand-worked figures and plain numpy: public fault cases by their ids."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import cache as caches
from dflash_jax.attention import select_keys
from dflash_jax.moe import route_sigmoid_topk
from dflash_jax.nn import rope_angles, rotate
from models import glm4_moe_lite, glm_moe, glm_moe_dsa, qwen3_5_moe
from models.glm4_moe import Glm4MoeConfig
from models.glm_moe_dsa import GlmMoeDsaConfig
from models.target import FlaxTarget
from tests.checkpoints.tiny_checkpoints import GLM4_MOE_HF, GLM_MOE_DSA_HF
from tests.support.families import GLM4_MOE_LITE, GLM_MOE_DSA, family, randomised

WIDE = jnp.dtype("float64")
BIAS = [6.900, 6.910, 6.895, 6.890]


@pytest.mark.parametrize("expert", [glm_moe._expert, qwen3_5_moe._mlp])
def test_B34_the_gate_is_a_plain_silu(expert) -> None:
    """gpt-oss's unit would clamp 10 and add 1 to ``up``."""
    gate, up = np.array([10.0, -20.0]), np.array([-9.0, 3.0])
    weights = {"gate_up": jnp.concatenate([jnp.diag(gate), jnp.diag(up)], axis=1), "down": jnp.eye(2)}
    got = expert(jnp.ones((1, 2)), weights)
    np.testing.assert_allclose(got[0], gate / (1 + np.exp(-gate)) * up, rtol=1e-6)


@pytest.mark.parametrize(("count", "wanted"), [(1, [1]), (2, [1, 0])])
def test_B44_the_router_bias_is_never_rounded_to_bfloat16(count: int, wanted: list[int]) -> None:
    """In bfloat16 three of the four would be 6.90625 and expert 0 would win."""
    rounded = jnp.asarray(BIAS, jnp.bfloat16)
    assert len(set(np.asarray(rounded, np.float32).tolist())) < 4
    config = replace(family("glm4_moe").target.config, experts=4, experts_per_token=count, groups=1)
    module = glm_moe.Moe(config, "split", jnp.dtype("bfloat16"))
    x = jnp.zeros((1, 3, config.hidden_size), jnp.bfloat16)
    params = module.init(jax.random.key(0), x)["params"]
    assert params["router"].dtype == params["router_bias"].dtype == jnp.float32
    _, chosen = module.apply({"params": params | {"router_bias": jnp.asarray(BIAS, jnp.float32)}}, x)
    assert chosen[0].tolist() == [wanted] * 3


def test_B44_weights_are_unbiased_sigmoids_normalised_then_scaled() -> None:
    logits = jnp.array([[0.0, 1.0, -1.0, 2.0]])
    chosen, weights = route_sigmoid_topk(logits, jnp.array([5.0, 0.0, 6.0, 0.0]), 2, scale=2.5)
    assert chosen[0].tolist() == [2, 0]
    scores = 1 / (1 + np.exp([1.0, 0.0]))
    np.testing.assert_allclose(weights[0], 2.5 * scores / scores.sum(), rtol=1e-6)


def test_B44_ties_give_distinct_experts_and_finite_weights() -> None:
    for rows in (1, 8, 40):  # decode, verify, prefill
        chosen, weights = route_sigmoid_topk(jnp.full((rows, 6), -60.0), jnp.full(6, 0.5), 3)
        assert chosen.tolist() == [[0, 1, 2]] * rows
        assert np.isfinite(weights).all()


PLACES = {
    "top": {"partial_rotary_factor": 0.5},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    "absent": {},
}


@pytest.mark.parametrize("place", PLACES)
def test_B45_half_of_a_head_rotates_wherever_the_config_says_so(place: str) -> None:
    plain = {
        key: value for key, value in GLM4_MOE_HF.items() if key not in ("partial_rotary_factor", "rope_parameters")
    }
    config = Glm4MoeConfig.from_hf(plain | PLACES[place] | {"head_dim": 16})
    x = jax.random.normal(jax.random.key(1), (1, 5, 2, 16))
    turned = rotate(x, rope_angles(config.rope, jnp.arange(5)[None] + 3, x.dtype))
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    assert (turned[..., :8] != x[..., :8]).all()


def logits_of(target: FlaxTarget, params, tokens: jax.Array) -> np.ndarray:
    cache = target.init_cache(*tokens.shape, tokens.shape[1])
    return np.asarray(target.unembed(params, target.step(params, tokens, cache).hidden))


TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, 59, (2, 20), np.int32))


def test_B46_an_indexer_that_may_take_everything_is_dense_attention() -> None:
    wide = FlaxTarget(glm_moe_dsa.GlmMoeDsa(replace(GLM_MOE_DSA, index_topk=64), layout="stacked", dtype=WIDE))
    params = randomised(wide.abstract_params(), 0)
    dense = FlaxTarget(
        glm4_moe_lite.Glm4MoeLite(replace(GLM4_MOE_LITE, interleaved=True), layout="stacked", dtype=WIDE)
    )
    shared = {name: part for name, part in params.items() if not name.startswith("indexer_")}
    assert len(shared) < len(params)
    np.testing.assert_allclose(
        logits_of(wide, params, TOKENS), logits_of(dense, shared, TOKENS), rtol=1e-11, atol=1e-11
    )
    narrow = FlaxTarget(wide.module.clone(config=replace(GLM_MOE_DSA, index_topk=4)))
    differ = np.abs(logits_of(narrow, params, TOKENS) - logits_of(wide, params, TOKENS)).max((0, 2))
    assert (differ[:4] < 1e-11).all(), "rows with no more than four keys see them all"
    assert (differ[5:] > 1e-6).all()


def selected_by_numpy(params: dict, x: np.ndarray, residual: np.ndarray, rope, count: int) -> list[set[int]]:
    """DeepSeek sparse attention's choice, query by query, with neighbouring rotary pairs."""

    def turn(vector: np.ndarray, position: int) -> np.ndarray:
        out = vector.copy()
        for j, frequency in enumerate(rope.frequencies):
            a, b = vector[2 * j], vector[2 * j + 1]
            angle = position * frequency
            out[2 * j] = a * np.cos(angle) - b * np.sin(angle)
            out[2 * j + 1] = b * np.cos(angle) + a * np.sin(angle)
        return out

    p = {name: np.asarray(leaf) for name, leaf in params.items()}
    raw = x @ p["k"]
    centred = raw - raw.mean(-1, keepdims=True)
    keys = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p["k_norm"] + p["k_norm_bias"]
    keys = np.stack([turn(key, position) for position, key in enumerate(keys)])
    heads, chosen = p["weights"].shape[1], []
    for position in range(len(x)):
        queries = (residual[position] @ p["q"]).reshape(heads, -1)
        near = np.stack([turn(query, position) for query in queries]) @ keys[: position + 1].T
        scores = (x[position] @ p["weights"]) @ np.maximum(near, 0)
        chosen.append(set(np.argsort(-scores, kind="stable")[:count].tolist()))
    return chosen


def test_B46_the_selection_is_a_plain_numpy_indexers() -> None:
    config = GLM_MOE_DSA
    module = glm_moe_dsa.Indexer(config, WIDE)
    x = np.random.default_rng(4).standard_normal((1, 20, config.hidden_size))
    residual = np.random.default_rng(5).standard_normal((1, 20, config.widths.q_lora))
    cache = family("glm_moe_dsa").target.init_cache(1, 32, 20)
    index, places = cache.layers[0].index, caches.step_places(cache, 20)
    angles = rope_angles(config.rope, places.positions, WIDE)
    params = family("glm_moe_dsa").params["indexer_0"]
    scores, _ = module.apply({"params": params}, jnp.asarray(x), jnp.asarray(residual), index, places, angles)
    seen = jnp.arange(32) <= places.positions[..., None]
    got = np.asarray(select_keys(scores, seen, 4))[0]
    want = selected_by_numpy(params, x[0], residual[0], config.rope, 4)
    assert [set(np.flatnonzero(row).tolist()) for row in got] == want
    assert [len(row) for row in want[:5]] == [1, 2, 3, 4, 4]


def test_B46_half_split_rotary_pairs_are_refused_not_guessed() -> None:
    for key in ("indexer_rope_interleave", "rope_interleave"):
        with pytest.raises(ValueError, match=key):
            GlmMoeDsaConfig.from_hf(GLM_MOE_DSA_HF | {key: False})


def test_B46_shared_layers_own_no_indexer() -> None:
    config = GlmMoeDsaConfig.from_hf(GLM_MOE_DSA_HF | {"indexer_types": ["full", "shared", "full", "shared"]})
    tree = FlaxTarget(glm_moe_dsa.GlmMoeDsa(config, dtype=WIDE)).abstract_params()
    assert sorted(name for name in tree if name.startswith("indexer_")) == ["indexer_0", "indexer_2"]
