"""Taps: tap i is the residual stream after layer i, before any final norm; features are in the order of the taps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.nn import rms_norm
from models import gpt_oss
from models.target import FlaxTarget
from tests.support.families import Family, family, fresh, tiny_target
from tests.support.steps import agree

FAMILIES = ("gpt_oss-split", "qwen3-untied")


def _features(target, params, tokens, cache):
    out = target.step(params, tokens, cache)
    return out.features, out.hidden, out.cache


features = jax.jit(_features, static_argnums=0)


def adding_constants(taps: tuple[int, ...]) -> tuple[FlaxTarget, dict, np.ndarray]:
    """A gpt-oss whose layer i adds a known vector b_i to the stream, whatever it hears; and the b_i ``[L D]``."""
    chosen, rng = family("gpt_oss-split"), np.random.default_rng(4)
    config = chosen.target.config
    b = rng.standard_normal((config.layers, 2, config.hidden_size))
    params = jax.tree.map(jnp.zeros_like, chosen.params) | {"embed": chosen.params["embed"]}
    for i in range(config.layers):
        experts = tuple({**expert, "down_bias": jnp.asarray(b[i, 1])} for expert in params[f"moe_{i}"]["experts"])
        params[f"attention_{i}"]["o_bias"] = jnp.asarray(b[i, 0])
        params[f"moe_{i}"]["experts"] = experts
    return tiny_target(chosen.name, taps=taps), params, b.sum(1)


def check_constants(taps: tuple[int, ...], program=features) -> None:
    """Heard at once and in blocks, the features are the embedding and all constants up to the tap."""
    target, params, b = adding_constants(taps)
    tokens = np.random.default_rng(5).integers(0, 61, (2, 9), np.int32)
    expected = np.asarray(params["embed"])[tokens][:, :, None] + b.cumsum(0)[list(taps)]
    whole, _, _ = program(target, params, tokens, target.init_cache(2, 16, 9))
    agree(whole, expected, "heard at once")
    cache, pieces = target.init_cache(2, 16, 9), []
    for piece in np.split(tokens, 3, axis=1):
        found, _, cache = program(target, params, piece, cache)
        pieces.append(found)
    agree(np.concatenate(pieces, axis=1), expected, "heard in blocks")


@pytest.mark.parametrize("taps", [(0, 1), (2, 0)])
def test_B48_a_tap_is_the_stream_after_its_layer(taps: tuple[int, ...]) -> None:
    check_constants(taps)


def test_B48_the_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpt_oss.tapped
    monkeypatch.setattr(gpt_oss, "tapped", lambda stream, taps: right(stream, tuple(tap + 1 for tap in taps)))
    with pytest.raises(AssertionError):
        check_constants((1,), program=jax.jit(fresh(_features), static_argnums=0))


@pytest.mark.parametrize("name", FAMILIES)
def test_B48_a_tap_is_what_a_network_of_so_many_layers_ends_with(name: str) -> None:
    """The last layer included, whose tap is the stream before the final norm."""
    chosen = family(name)
    layers = chosen.target.config.layers
    tokens = np.random.default_rng(6).integers(0, 53, (2, 9), np.int32)
    target = tiny_target(name, taps=tuple(range(layers)))
    found, hidden, _ = features(target, chosen.params, tokens, target.init_cache(2, 16, 9))
    agree(hidden, normed(chosen, found[:, :, -1]), "final norm of the last tap")
    short = truncated(chosen, 2)
    _, hidden, _ = features(short, chosen.params, tokens, short.init_cache(2, 16, 9))
    agree(hidden, normed(chosen, found[:, :, 1]), "final norm of the second tap")


def truncated(chosen: Family, layers: int) -> FlaxTarget:
    config = chosen.target.config
    config = replace(config, layers=layers, windows=config.windows[:layers])
    return FlaxTarget(chosen.target.module.clone(config=config, taps=()))


def normed(chosen: Family, x) -> jax.Array:
    norm = jax.jit(rms_norm, static_argnames="eps")
    return norm(x, chosen.params["final_norm"], eps=chosen.target.config.rms_norm_eps)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_taps_no_features(name: str) -> None:
    chosen, target = family(name), tiny_target(name, taps=())
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    found, hidden, _ = features.eval_shape(target, chosen.params, tokens, target.init_cache(2, 16, 3))
    assert found.shape == (2, 3, 0, hidden.shape[-1])
