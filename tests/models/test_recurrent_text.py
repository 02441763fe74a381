"""Qwen3.5's recurrent layers on texts that are padded, cut, rejected and held up: public fault cases by their ids."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import cache as caches
from dflash_jax import recurrence
from dflash_jax.generate import Decoder
from dflash_jax.recurrence import Recurrence
from tests.support.families import family
from tests.support.steps import step
from tests.support.texts import greedy, random_prompts, speculate

METHODS = ("qwen3_5_moe-solve", "qwen3_5_moe-replay", "qwen3_5_moe-states")
BLOCK = 8
rollback = jax.jit(caches.rollback)


def tokens_of(name: str, count: int, rows: int = 1) -> np.ndarray:
    vocabulary = family(name).target.config.vocab_size
    return np.random.default_rng(7).integers(0, vocabulary, (rows, count), np.int32)


def memories(name: str, cache) -> list[tuple[np.ndarray, np.ndarray]]:
    """State and convolution window of every recurrent layer, after the tokens that the cache's length counts."""
    layers = [memory for memory in cache.layers if isinstance(memory, Recurrence)]
    return jax.device_get(_resume(layers, cache.length))


@jax.jit
def _resume(layers, length):
    return [recurrence.resume(memory, length) for memory in layers]


def hear(name: str, tokens: np.ndarray, pieces, undo: int, capacity: int = 160):
    """The last logits and the cache after the tokens in pieces of these lengths."""
    chosen, at = family(name), 0
    cache = chosen.target.init_cache(tokens.shape[0], capacity, undo)
    for size in pieces:
        heard = step(chosen.target, chosen.params, tokens[:, at : at + size], cache)
        cache, at = heard.cache, at + size
    assert at == tokens.shape[1]
    return np.asarray(heard.logits[:, -1]), cache


def check_same(name: str, one, other, what: str, tolerance: float = 1e-10) -> None:
    for layer, pair in enumerate(zip(memories(name, one), memories(name, other), strict=True)):
        for got, want in zip(*pair, strict=True):
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=f"{what}, memory {layer}")


@pytest.mark.parametrize("pads", [1, 2, 3, 4, 7, 64])
def test_B26_padding_never_reaches_a_convolution_or_a_state(pads: int) -> None:
    """A prompt of 6 tokens beside longer ones: its memory is the one that it has alone."""
    name, length = METHODS[0], 6
    chosen = family(name)
    prompts = random_prompts(chosen, (length, length + pads, 3))
    decoder = Decoder(chosen.target, chosen.params)
    together = decoder.start(prompts, 8).cache
    alone = decoder.start(prompts[:1], 8).cache
    assert together.length.tolist() == [length, length + pads, 3]
    for one, other in zip(memories(name, together), memories(name, alone), strict=True):
        for got, want in zip(one, other, strict=True):
            np.testing.assert_allclose(got[:1], want, rtol=1e-10, atol=1e-10)
    assert decoder.generate(prompts, 8).tokens == greedy(chosen, prompts, 8)


@functools.cache
def one_by_one(name: str) -> tuple[np.ndarray, tuple]:
    """Logits of a fixed text of 64 tokens, and the cache after every token."""
    chosen, tokens = family(name), tokens_of(name, 64)
    cache, logits, after = chosen.target.init_cache(1, 96, BLOCK), [], []
    for at in range(64):
        heard = step(chosen.target, chosen.params, tokens[:, at : at + 1], cache)
        cache = heard.cache
        logits.append(np.asarray(heard.logits[:, 0]))
        after.append(cache)
    return np.stack(logits, 1), tuple(after)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("script", [(1,), (8,), (4, 6), (1, 8, 3)])
def test_B29_rejected_drafts_leave_no_trace_in_the_state(name: str, script: tuple[int, ...]) -> None:
    """Blocks of eight, teacher-forced, of which ``script`` says how many tokens stay."""
    chosen, tokens = family(name), tokens_of(name, 64)
    logits, after = one_by_one(name)
    wrong = np.random.default_rng(8).integers(0, chosen.target.config.vocab_size, (64, 1, BLOCK), np.int32)
    cache, at, turn = chosen.target.init_cache(1, 96, BLOCK), 0, 0
    while at + BLOCK <= 64:
        stay = script[turn % len(script)]
        block = wrong[turn].copy()
        block[:, :stay] = tokens[:, at : at + stay]
        heard = step(chosen.target, chosen.params, block, cache)
        said = np.asarray(heard.logits)[:, :stay]
        assert (said.argmax(-1) == logits[:, at : at + stay].argmax(-1)).all()
        at, turn = at + stay, turn + 1
        cache = rollback(heard.cache, jnp.full(1, at, jnp.int32))
        check_same(name, cache, after[at - 1], f"after {at} tokens")


def test_B29_states_are_float32_in_a_bfloat16_network() -> None:
    target = family(METHODS[0]).target
    half = type(target)(target.module.clone(dtype=jnp.dtype("bfloat16")))
    layers = [memory for memory in half.init_cache(1, 32, BLOCK).layers if isinstance(memory, Recurrence)]
    assert layers
    for memory in layers:
        assert memory.state.dtype == jnp.float32
        assert all(leaf.dtype == jnp.float32 for leaf in memory.journal.values())


CUTS = (
    [130],
    *([1, 129], [2, 63, 65], [63, 2, 65], [64, 1, 65], [65, 65], [127, 3]),
    *([3, 16, 17, 64, 16, 3, 3, 3, 3, 2], [1] * 130),
)
"""Of few lengths, since each is a program."""

assert all(sum(pieces) == 130 for pieces in CUTS)


@pytest.mark.parametrize("pieces", CUTS[1:], ids=lambda cut: "-".join(map(str, cut[:4])) + f"x{len(cut)}")
def test_B31_a_prompt_may_be_cut_anywhere(pieces: list[int]) -> None:
    """Across chunks of 64, between the recurrent and the chunked form, and inside the convolution."""
    name = METHODS[0]
    tokens = tokens_of(name, 130)
    want, whole = _whole(name)
    got, cut = hear(name, tokens, pieces, undo=130)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    check_same(name, cut, whole, str(pieces[:4]))


@functools.cache
def _whole(name: str):
    return hear(name, tokens_of(name, 130), CUTS[0], undo=130)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_B31_prompts_shorter_than_the_convolution(length: int) -> None:
    name = METHODS[0]
    tokens = tokens_of(name, length)
    (want, whole), (got, cut) = (hear(name, tokens, pieces, undo=130) for pieces in ([length], [1] * length))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    check_same(name, cut, whole, f"{length} tokens")


@pytest.mark.parametrize("name", METHODS)
def test_B32_an_idle_row_keeps_its_state_to_the_bit(name: str) -> None:
    chosen, tokens = family(name), tokens_of(name, 40, rows=2)
    cache = step(chosen.target, chosen.params, tokens[:, :BLOCK], chosen.target.init_cache(2, 64, BLOCK)).cache
    cache = rollback(cache, jnp.array([8, 5], jnp.int32))
    before = memories(name, cache)
    for turn in range(1, 4):
        heard = step(chosen.target, chosen.params, tokens[:, 8 + 4 * turn : 16 + 4 * turn], cache).cache
        cache = rollback(heard, jnp.array([8 + 4 * turn, 5], jnp.int32))
        for one, other in zip(memories(name, cache), before, strict=True):
            for got, want in zip(one, other, strict=True):
                np.testing.assert_array_equal(got[1], want[1])
                assert (got[0] != want[0]).any()


def test_B32_a_row_that_waited_goes_on_as_if_alone() -> None:
    name = METHODS[0]
    chosen = family(name)
    prompts = random_prompts(chosen, (9, 13))
    truth = greedy(chosen, prompts, 40)
    out = speculate(chosen, prompts, truth, [[3], [0]], max_new_tokens=[24, 24])
    assert out.tokens == [text[:24] for text in truth]
    short = speculate(chosen, prompts, truth, [[3], [7]], max_new_tokens=[24, 2])
    assert short.tokens == [truth[0][:24], truth[1][:2]]
