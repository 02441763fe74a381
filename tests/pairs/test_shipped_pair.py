"""The shipped pairs: exact on held-out text, as good as their committed figures say, and in the released layouts."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import load_drafter, load_target
from checkpoints.reader import open_checkpoint
from dflash_jax.generate import Decoder
from dflash_jax.metrics import acceptance_length
from dflash_jax.plain import NoDrafter
from experiments import run_spec
from experiments.arguments import Args
from experiments.corpus import load_tokenizer
from experiments.pair import PAIRS, known_pairs
from experiments.prompts import read_rows
from experiments.recipes import RECIPES

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
NEW_TOKENS = 128


def load(pair: str, dtype: str = "float32", **options) -> tuple[Decoder, Decoder]:
    """Plain and speculative decoders."""
    folder, kind = PAIRS / pair, jnp.dtype(dtype)
    drafter, draft_params = load_drafter(f"{folder}-dflash", folder, dtype=kind)
    target, params = load_target(folder, dtype=kind, taps=drafter.config.taps, **options)
    return Decoder(target, params), Decoder(target, params, drafter, draft_params)


def test_every_recipe_is_shipped() -> None:
    assert sorted(RECIPES) == known_pairs()


@pytest.fixture(scope="module", params=sorted(RECIPES))
def pair(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def decoders(pair):
    return load(pair)


@pytest.fixture(scope="module")
def prompts(pair):
    """Token ids of the held-out prompts, by split."""
    tokenizer = load_tokenizer(PAIRS / pair)
    found = {}
    for row in read_rows(PAIRS / "tiny-gpt-oss" / "prompts.jsonl"):
        found.setdefault(row.split, []).append(tokenizer.encode(row.text).ids)
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


def test_acceptance_is_what_the_committed_results_say(pair, texts):
    """Batches of rows give the acceptance that solo runs were committed with, for the prompts they share."""
    counts = np.concatenate([speculative.counts[row, :] for _, speculative in texts[:4] for row in range(8)])
    committed = json.loads((RESULTS / "pairs.json").read_text())["pairs"][pair]
    assert committed["block_size"] == 8
    assert acceptance_length(counts) == pytest.approx(committed["acceptance_length"], rel=0.15)
    assert committed["acceptance_length"] >= 3.0
    assert committed["agreement"] == 1.0


def test_the_config_is_the_recipes(pair):
    written = json.loads((PAIRS / pair / "config.json").read_text())
    written.pop("quantization_config", None)
    assert written == RECIPES[pair].config


def test_experts_are_stored_as_released(pair):
    codes = {entry.code for name, entry in open_checkpoint(PAIRS / pair).entries.items() if ".mlp.experts." in name}
    assert (
        codes
        == {
            "tiny-gpt-oss": {"U8", "BF16"},
            "tiny-qwen3.5-moe": {"BF16"},
            "tiny-glm4-moe": {"F8_E4M3", "F32"},
        }[pair]
    )


def test_packed_experts_of_all_pairs_are_refused_before_any_is_loaded(monkeypatch, capsys):
    """Qwen3.5's are plain bfloat16."""
    monkeypatch.setattr(run_spec, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(run_spec, "load_pair", lambda *_, **__: pytest.fail("a pair was loaded"))
    with pytest.raises(SystemExit):
        run_spec.main(Args(pair="all", experts="packed"))
    assert "tiny-qwen3.5-moe" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-glm4-moe"])
def test_packed_experts_say_what_decoded_ones_say(name):
    tokenizer = load_tokenizer(PAIRS / name)
    prompts = [tokenizer.encode(row.text).ids for row in read_rows(PAIRS / "tiny-gpt-oss" / "prompts.jsonl")[:8]]
    (_, decoded), (_, packed) = load(name), load(name, experts="packed")
    assert packed.generate(prompts, 64).tokens == decoded.generate(prompts, 64).tokens


def test_a_mixed_batch_equals_solo_runs(decoders, prompts):
    """Of as many rows and as much room as the batches above: their programs."""
    _, speculative = decoders
    batch = [prompts["modeling"][0][:1], prompts["stdlib"][0], (prompts["modeling"][3] * 2)[:150]]
    others = prompts["library"][:5]
    together = speculative.generate(batch + others, [40, 9, 64, *[100] * len(others)])
    for prompt, budget, row in zip(batch, [40, 9, 64], together.tokens, strict=False):
        assert speculative.generate([prompt], budget).tokens[0] == row


def test_bfloat16_at_the_same_width_is_bit_equal(pair, prompts):
    """Plain decoding at a verification's width has its matmuls, so its roundings, so its text."""
    _, speculative = load(pair, "bfloat16")
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
