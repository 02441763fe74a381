"""Targets against the PyTorch golden files: logits, residual streams, increments, greedy text.

The goldens are float64 runs of transformers 5.24 (see ``tests/goldens/README.md``), so the bound of 1e-5 * max(1, std)
is on our own error alone, in float64 and in float32.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints.load import load_target, read_config
from dflash_jax.generate import Decoder

GOLDENS = Path(__file__).parents[1] / "goldens"
TARGETS = sorted(
    case.parent.name for case in GOLDENS.glob("*/case.json") if json.loads(case.read_text())["kind"] == "target"
)
BOUND = 1e-5
"""Allowed error in units of max(1, std of the golden)."""


@pytest.fixture(scope="module", params=TARGETS)
def case(request):
    folder = GOLDENS / request.param
    return folder, json.loads((folder / "case.json").read_text()), load_file(folder / "expected.safetensors")


@functools.cache
def load_tapped(folder, dtype):
    """The golden's network, tapped after every layer."""
    taps = tuple(range(read_config(folder)["num_hidden_layers"]))
    return load_target(folder, dtype=jnp.dtype(dtype), taps=taps)


def run(folder, dtype, pieces):
    """Logits ``[B T V]`` and residuals ``[L B T D]`` of the golden's text, heard in pieces of the given lengths."""
    target, params = load_tapped(folder, dtype)
    ids = load_file(folder / "expected.safetensors")["input_ids"]
    step, unembed = jax.jit(target.step), jax.jit(target.unembed)
    cache = target.init_cache(ids.shape[0], 128, max(pieces))
    logits, residuals, at = [], [], 0
    for piece in pieces:
        out = step(params, jnp.asarray(ids[:, at : at + piece], jnp.int32), cache)
        cache, at = out.cache, at + piece
        logits.append(unembed(params, out.hidden))
        residuals.append(jnp.moveaxis(out.features, 2, 0))
    return np.concatenate(logits, 1), np.concatenate(residuals, 2)


def assert_close(actual, golden, what):
    bound = BOUND * max(1.0, float(golden.std()))
    worst = float(np.abs(np.asarray(actual, np.float64) - golden).max())
    assert worst <= bound, f"{what}: off by {worst:.2e}, allowed {bound:.2e}"


def pieces_of(length):
    """Blocks, single tokens and blocks again: two lengths, so two compilations."""
    start = [7, 1, 1, 1, 7, 1, 7, 7]
    return [*start, *[1] * (length - sum(start))]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_full_forward_and_taps(case, dtype):
    folder, _, golden = case
    logits, residuals = run(folder, dtype, [golden["input_ids"].shape[1]])
    assert_close(logits, golden["logits"], "logits")
    assert_close(residuals, golden["residuals"][1:], "residual stream")


def test_incremental(case):
    folder, _, golden = case
    logits, residuals = run(folder, "float32", pieces_of(golden["input_ids"].shape[1]))
    assert_close(logits, golden["incremental_logits"], "incremental logits")
    assert_close(residuals, golden["residuals"][1:], "incremental residual stream")


def test_a_prompt_in_pieces(case):
    """Cut inside the reach of a short convolution, and across a chunk of the delta rule where the text is longer."""
    folder, _, golden = case
    length = golden["input_ids"].shape[1]
    first = 2 + length % 2
    pieces = [2, 63, length - 65] if length > 66 else [first, *[(length - first) // 2] * 2]
    logits, residuals = run(folder, "float32", pieces)
    assert_close(logits, golden["logits"], f"logits in pieces of {pieces}")
    assert_close(residuals, golden["residuals"][1:], "residual stream")


def test_greedy_text(case):
    """The golden's text comes from forwards over everything said so far: transformers' cache, cropped after a rejected
    block, leaves the rejected tokens in a recurrent state."""
    folder, description, golden = case
    target, params = load_target(folder)
    prompts = golden["input_ids"][:, : description["text"]["greedy_prefix"]].tolist()
    wanted = golden["greedy_ids"]
    assert Decoder(target, params).generate(prompts, wanted.shape[1]).tokens == wanted.tolist()


@pytest.mark.parametrize("experts", ["packed", "float32"])
def test_packed_and_unpacked_experts_give_the_same_logits(experts):
    folder = GOLDENS / "gpt_oss_mxfp4"
    target, params = load_target(folder, experts=experts)
    golden = load_file(folder / "expected.safetensors")
    ids = jnp.asarray(golden["input_ids"], jnp.int32)
    out = jax.jit(target.step)(params, ids, target.init_cache(ids.shape[0], 64, ids.shape[1]))
    assert_close(target.unembed(params, out.hidden), golden["logits"], experts)


def test_a_wrong_window_is_seen():
    """The comparison can fail: one token more in the window moves the logits far beyond the bound."""
    folder = GOLDENS / "gpt_oss_mxfp4"
    target, params = load_target(folder)
    golden = load_file(folder / "expected.safetensors")
    ids = jnp.asarray(golden["input_ids"], jnp.int32)
    cache = target.init_cache(ids.shape[0], 64, ids.shape[1] + 1)
    wider = tuple(s.replace(window=s.window + 1) if s.window else s for s in cache.layers)
    out = jax.jit(target.step)(params, ids, cache.replace(layers=wider))
    with pytest.raises(AssertionError, match="off by"):
        assert_close(target.unembed(params, out.hidden), golden["logits"], "logits")
