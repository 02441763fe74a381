"""Drafters against z-lab's own package, and whole runs against its greedy loop (``tests/goldens/README.md``)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints.load import fill, load_drafter, load_target, plan_drafter, read_config
from checkpoints.reader import open_checkpoint
from dflash_jax.generate import Decoder
from dflash_jax.protocols import Target

GOLDENS = Path(__file__).parents[1] / "goldens"


def cases(kind):
    found = (case for case in GOLDENS.glob("*/case.json") if json.loads(case.read_text())["kind"] == kind)
    return sorted(case.parent.name for case in found)


class Borrowed(Target):
    """The part of a target that a drafter borrows: an embedding table and a head."""

    def embed(self, params, tokens):
        return params["embed"][tokens]

    def unembed(self, params, hidden):
        return hidden @ params["head"]


@pytest.fixture(scope="module", params=cases("drafter"))
def case(request):
    folder = GOLDENS / request.param
    reader, config = open_checkpoint(folder), read_config(folder)
    # One golden leaves its taps to z-lab's default formula; we refuse to guess (B47), so they are told here.
    config.setdefault(
        "target_layer_ids", json.loads((folder / "case.json").read_text())["settings"]["target_layer_ids"]
    )
    drafter, tree, plan = plan_drafter(reader, config, dtype=jnp.float64)
    golden = load_file(folder / "expected.safetensors")
    borrowed = {"embed": golden["embed_table"], "head": golden["head"].T}
    borrowed = {name: jnp.asarray(value, jnp.float64) for name, value in borrowed.items()}
    return drafter, fill(reader, plan, tree, "drafter"), borrowed, golden


def features_of(drafter, golden):
    """``[1 T A D]``: the golden lays the taps side by side."""
    flat = jnp.asarray(golden["context_features"], jnp.float64)
    return flat.reshape(1, flat.shape[0], len(drafter.config.taps), -1)


def assert_close(actual, golden, what):
    bound = 1e-5 * max(1.0, float(golden.std()))
    worst = float(np.abs(np.asarray(actual, np.float64) - golden).max())
    assert worst <= bound, f"{what}: off by {worst:.2e}, allowed {bound:.2e}"


def draft(drafter, params, borrowed, ids, cache):
    """Hidden ``[P D]`` and logits ``[P-1 V]`` of one block."""
    tokens = jnp.asarray(ids, jnp.int32)[None]
    hidden = jax.jit(lambda p, b, c: drafter.hidden(p, Borrowed(), b, tokens, c))(params, borrowed, cache)
    return hidden[0], drafter.head(Borrowed(), borrowed, hidden[:, 1:])[0]


def test_a_block_after_the_whole_context(case):
    drafter, params, borrowed, golden = case
    features = features_of(drafter, golden)
    context = features.shape[1]
    cache = drafter.absorb(params, features, jnp.array([context]), drafter.init_cache(1, 64, context))
    hidden, logits = draft(drafter, params, borrowed, golden["block_ids"], cache)
    assert_close(hidden, golden["hidden"], "hidden")
    assert_close(logits, golden["logits"], "logits")


def test_blocks_between_pieces_of_context(case):
    """Rounds as in decoding: absorb what was committed, with garbage behind it, and draft again."""
    drafter, params, borrowed, golden = case
    features = features_of(drafter, golden)
    width = int(np.diff(golden["round_anchors"], prepend=0).max()) + 2
    cache = drafter.init_cache(1, 64, width)
    for anchor, ids, hidden, logits in zip(
        golden["round_anchors"], golden["round_block_ids"], golden["round_hidden"], golden["round_logits"], strict=True
    ):
        start = int(cache.length[0])
        count = int(anchor) - start
        piece = jnp.full((1, width, *features.shape[2:]), 1e4).at[:, :count].set(features[:, start : start + count])
        cache = drafter.absorb(params, piece, jnp.array([count]), cache)
        ours = draft(drafter, params, borrowed, ids, cache)
        assert_close(ours[0], hidden, f"hidden at {anchor}")
        assert_close(ours[1], logits, f"logits at {anchor}")


@pytest.mark.parametrize("name", cases("pair"))
def test_a_whole_run_equals_the_authors_loop(name):
    """Text, acceptance lengths and proposals; the reference shrinks its last blocks, so those rounds are left out."""
    folder = GOLDENS / name
    golden = load_file(folder / "expected.safetensors")
    drafter, draft_params = load_drafter(folder / "drafter", folder / "target")
    target, params = load_target(folder / "target", taps=drafter.config.taps)
    decoder = Decoder(target, params, drafter, draft_params)
    for row, prompt in enumerate(golden["prompt_ids"].tolist()):
        out = decoder.generate([prompt], golden["greedy_ids"].shape[1])
        assert out.tokens[0] == golden["greedy_ids"][row].tolist()
        full = int(golden["full_rounds"][row])
        assert out.counts[0, :full].tolist() == golden["acceptance_lengths"][row, :full].tolist()
    prompt, stop = golden["prompt_ids"][0].tolist(), golden["stop_id"].tolist()
    stopped = decoder.generate([prompt], golden["greedy_ids"].shape[1], stop=stop)
    assert stopped.tokens[0] == golden["stopped_ids"].tolist()
