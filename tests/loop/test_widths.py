"""Low precision: float32 text is the same at every width; at one compiled width nothing differs by a single bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.generate import Decoder
from dflash_jax.plain import NoDrafter
from dflash_jax.speculate import SpecState
from experiments.agreement import compare
from tests.support.families import Family, family
from tests.support.oracle import ALL, script
from tests.support.texts import plain, random_prompts, scripted, speculate

LENGTHS, BLOCK = (9, 1, 17, 33, 4), 8
SCRIPTS = ([[ALL]], [[0]], [[7, 0, 3], [1], [5, 2], [4, 6, 0], [2]])


CASES = [
    *(("gpt_oss-split", 2), ("gpt_oss-split", 16), ("qwen3-untied", 8)),
    *(("qwen3_5_moe-solve", 8), ("glm4_moe", 8), ("glm4_moe_lite", 4), ("glm_moe_dsa", 8)),
]


@pytest.mark.parametrize(("name", "block"), CASES)
def test_B08_float32_text_is_the_plain_text(name: str, block: int) -> None:
    chosen = family(name, "float32")
    prompts = random_prompts(chosen, LENGTHS)
    truth = plain(chosen, prompts, max_new_tokens=64 + block).tokens
    for accept in SCRIPTS:
        out = speculate(chosen, prompts, truth, accept, block=block, max_new_tokens=64)
        assert out.tokens == [text[:64] for text in truth]


@pytest.mark.parametrize(("name", "block"), CASES[1:])
def test_B08_bfloat16_text_parts_from_the_plain_text_at_ties_only(name: str, block: int) -> None:
    """Where they first differ, the plain run's two best logits are nearer than rounding can move them."""
    chosen = family(name, "bfloat16")
    prompts = random_prompts(chosen, LENGTHS)
    truth = plain(chosen, prompts, max_new_tokens=64 + block).tokens
    one_by_one = [text[:64] for text in truth]
    decoder = Decoder(chosen.target, chosen.params, NoDrafter())
    for accept in SCRIPTS:
        out = speculate(chosen, prompts, truth, accept, block=block, max_new_tokens=64)
        parted = compare(decoder, prompts, one_by_one, out.tokens, "bfloat16").divergences
        assert all(divergence.tie for divergence in parted), parted


def test_B08_a_text_that_parts_elsewhere_is_no_tie() -> None:
    chosen = family("qwen3-untied", "bfloat16")
    prompts = random_prompts(chosen, LENGTHS)
    texts = plain(chosen, prompts, max_new_tokens=64).tokens
    size = chosen.target.config.vocab_size
    wrong = [[(token + 1) % size for token in text] for text in texts]
    parted = compare(Decoder(chosen.target, chosen.params, NoDrafter()), prompts, texts, wrong, "bfloat16").divergences
    assert len(parted) == len(prompts)
    assert not all(divergence.tie for divergence in parted)


def test_B08_the_prompt_is_heard_alike_whichever_decoder_follows() -> None:
    """The caches after the prompt are equal to the bit, for every block size and for none."""
    chosen = family("gpt_oss-split", "float32")
    prompts = random_prompts(chosen, LENGTHS)
    truth = plain(chosen, prompts, max_new_tokens=72).tokens
    alone = Decoder(chosen.target, chosen.params, NoDrafter()).start(prompts, 64)
    known = script(truth, prompts, [[0]])
    for block in (2, 16):
        other = Decoder(chosen.target, chosen.params, scripted(chosen, block), known).start(prompts, 64)
        assert_same_bits(alone, other)
        np.testing.assert_array_equal(alone.anchor, other.anchor)


def assert_same_bits(one: SpecState, other: SpecState) -> None:
    """Every committed key and value: all below ``length``, of a ring those that a window can still reach."""
    lengths = np.asarray(one.cache.length)
    np.testing.assert_array_equal(lengths, other.cache.length)
    for mine, theirs in zip(one.cache.layers, other.cache.layers, strict=True):
        size = mine.k.shape[2]
        for row, length in enumerate(lengths):
            first = max(0, length - mine.window + 1) if mine.ring else 0
            slots = np.arange(first, length) % size
            for name in ("k", "v"):
                pair = (np.asarray(getattr(each, name))[row][:, slots] for each in (mine, theirs))
                np.testing.assert_array_equal(*(part.view(f"u{part.dtype.itemsize}") for part in pair))


def run(chosen: Family, drafter, known, prompts) -> SpecState:
    decoder = Decoder(chosen.target, chosen.params, drafter, known)
    return decoder.advance(decoder.start(prompts, 64))


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt_oss-split", "float32"), ("gpt_oss-split", "bfloat16"), ("qwen3-untied", "bfloat16")]
)
def test_plain_decoding_at_the_width_of_a_block_is_equal_to_the_bit(name: str, dtype: str) -> None:
    chosen = family(name, dtype)
    prompts = random_prompts(chosen, LENGTHS)
    truth = plain(chosen, prompts, width=BLOCK, max_new_tokens=64 + BLOCK).tokens
    expected = run(chosen, NoDrafter(BLOCK), None, prompts)
    assert np.asarray(expected.tokens)[:, :64].tolist() == [text[:64] for text in truth]
    for accept in SCRIPTS:
        found = run(chosen, scripted(chosen, BLOCK), script(truth, prompts, accept), prompts)
        np.testing.assert_array_equal(expected.tokens, found.tokens)
        assert_same_bits(expected, found)
        finite = jax.tree.map(lambda leaf: bool(np.isfinite(np.asarray(leaf, np.float32)).all()), found.cache.layers)
        assert jax.tree.all(finite)


def test_the_comparison_sees_one_bit() -> None:
    chosen = family("gpt_oss-split", "float32")
    state = run(chosen, NoDrafter(BLOCK), None, random_prompts(chosen, LENGTHS))
    assert_same_bits(state, state)
    (first, *rest) = state.cache.layers
    last = int(state.cache.length[2] - 1) % first.k.shape[2]
    touched = first.k.at[2, 0, last, 3].set(jnp.nextafter(first.k[2, 0, last, 3], jnp.float32(9)))
    other = state.replace(cache=state.cache.replace(layers=(first.replace(k=touched), *rest)))
    with pytest.raises(AssertionError):
        assert_same_bits(state, other)


def test_a_block_too_wide_to_count_is_refused():
    """Rounds are counted in int8: a wider block must not wrap silently."""
    with pytest.raises(ValueError, match="block size 128"):
        Decoder(None, None, NoDrafter(block_size=128))
