"""The shipped pair: exact on held-out text, as good as its committed figures say, and in the released layouts."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from checkpoints.load import load_drafter, load_target
from dflash_jax.generate import Decoder
from dflash_jax.metrics import acceptance_length
from dflash_jax.plain import NoDrafter

PAIRS = Path(__file__).parents[2] / "checkpoints" / "pairs"
TARGET, DRAFT = PAIRS / "tiny-gpt-oss", PAIRS / "tiny-gpt-oss-dflash"
RESULTS = Path(__file__).parents[2] / "experiments" / "results"
NEW_TOKENS = 128


def load(dtype=jnp.float32):
    drafter, draft_params = load_drafter(DRAFT, TARGET, dtype=jnp.dtype(dtype))
    target, params = load_target(TARGET, dtype=jnp.dtype(dtype), taps=drafter.config.taps)
    return Decoder(target, params), Decoder(target, params, drafter, draft_params)


@pytest.fixture(scope="module")
def decoders():
    return load()


@pytest.fixture(scope="module")
def prompts():
    """Token ids of the held-out prompts, by split."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    rows = [json.loads(line) for line in (TARGET / "prompts.jsonl").read_text().splitlines()]
    found = {}
    for row in rows:
        found.setdefault(row["split"], []).append(tokenizer.encode(row["text"]).ids)
    return found


@pytest.fixture(scope="module")
def texts(decoders, prompts):
    """Plain and speculative generations of 56 held-out prompts of all splits, in batches of 8."""
    chosen = prompts["modeling"][:32] + prompts["stdlib"][:16] + prompts["library"][:8]
    return [
        tuple(decoder.generate(chosen[at : at + 8], NEW_TOKENS) for decoder in decoders)
        for at in range(0, len(chosen), 8)
    ]


def test_float32_text_is_plain_text_on_56_held_out_prompts(texts):
    assert len(texts) * 8 >= 50
    for plain, speculative in texts:
        assert speculative.tokens == plain.tokens
        assert all(len(row) == NEW_TOKENS for row in plain.tokens)


def test_acceptance_is_what_the_committed_results_say(texts):
    """Batches of rows give the acceptance that solo runs were committed with, for the prompts they share."""
    counts = np.concatenate([speculative.counts[row, :] for _, speculative in texts[:4] for row in range(8)])
    committed = json.loads((RESULTS / "pair_modeling.json").read_text())["acceptance_length"]
    assert acceptance_length(counts) == pytest.approx(committed, rel=0.15)


def test_a_mixed_batch_equals_solo_runs(decoders, prompts):
    _, speculative = decoders
    batch = [prompts["modeling"][0][:1], prompts["stdlib"][0], prompts["modeling"][3] * 3]
    together = speculative.generate(batch, [40, 9, 64])
    for prompt, budget, row in zip(batch, [40, 9, 64], together.tokens, strict=True):
        assert speculative.generate([prompt], budget).tokens[0] == row


def test_bfloat16_at_the_same_width_is_bit_equal(prompts):
    """Plain decoding at a verification's width has its matmuls, so its roundings, so its text."""
    _, speculative = load(jnp.bfloat16)
    wide = Decoder(speculative.target, speculative.params, NoDrafter(speculative.drafter.block_size))
    for prompt in prompts["modeling"][:4]:
        assert speculative.generate([prompt], 64).tokens == wide.generate([prompt], 64).tokens


def test_the_head_and_embedding_are_borrowed(decoders):
    _, speculative = decoders
    assert not {"embed", "head"} & set(speculative.draft_params)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(speculative.draft_params)]
    assert sum(sizes) < 20 * 2**20


def test_no_shipped_file_is_over_24_mib():
    large = [path for path in PAIRS.rglob("*") if path.is_file() and path.stat().st_size > 24 * 2**20]
    assert not large
