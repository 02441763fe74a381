"""Log-probabilities of delivered tokens: one per token, of its own position and row, before temperature and filters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import speculate
from dflash_jax.accept import Greedy, Match
from dflash_jax.draft_tree import TreeMatch
from dflash_jax.generate import Decoder
from dflash_jax.generation import Generation
from dflash_jax.plain import NoDrafter
from dflash_jax.settings import GREEDY, SamplingParams
from tests.support.drafters import tiny_drafter
from tests.support.families import Family, family, fresh
from tests.support.loop import trace_anew
from tests.support.oracle import script
from tests.support.texts import cut_at, random_prompts, scripted

LENGTHS, BLOCK, TOKENS, TOP, WIDTH = (9, 14), 8, 24, 3, 48
ACCEPT = ([7, 0, 3], [0, 5, 2])
BOUND = {"float32": 1e-4, "float64": 1e-9}
FAMILIES = [("gpt_oss-split", "float32"), ("qwen3_5_moe-solve", "float64"), ("glm4_moe_lite", "float64")]
SAMPLED = (SamplingParams(1.2, seed=7), SamplingParams(0.6, top_k=4, top_p=0.9, seed=8))


@functools.partial(jax.jit, static_argnames="target")
def forced(target, params, tokens):
    """The log-softmax after every prefix of ``tokens``, in one forward."""
    out = target.step(params, tokens, target.init_cache(*tokens.shape, tokens.shape[1]))
    return jax.nn.log_softmax(target.unembed(params, out.hidden), axis=-1)


def check_values(chosen: Family, prompts, out: Generation, top: int = TOP) -> None:
    """One entry per token; its value and the best others' are the target's, read off its own forward."""
    tokens = np.zeros((len(prompts), WIDTH), np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, out.tokens, strict=True)):
        tokens[row, : len(prompt) + len(text)] = prompt + text
    known = np.asarray(forced(chosen.target, chosen.params, tokens))
    bound = BOUND[known.dtype.name]
    for row, (prompt, text, found) in enumerate(zip(prompts, out.tokens, out.logprobs, strict=True)):
        assert found.said.shape == (len(text),)
        assert found.ids.shape == found.values.shape == (len(text), top)
        wanted = known[row, len(prompt) - 1 :][: len(text)]
        at = np.arange(len(text))
        np.testing.assert_allclose(found.said, wanted[at, text], rtol=0, atol=bound)
        np.testing.assert_allclose(found.values, -np.sort(-wanted)[:, :top], rtol=0, atol=bound)
        np.testing.assert_array_equal(found.ids, np.argsort(-wanted, kind="stable")[:, :top])


def without_drafts(chosen: Family, rule, sampling, prompts, top: int = TOP, **options) -> Generation:
    decoder = Decoder(chosen.target, chosen.params, NoDrafter(), rule=rule)
    return decoder.generate(prompts, TOKENS, sampling=sampling, logprobs=top, **options)


def with_drafts(chosen: Family, rule, sampling, prompts, truth, top: int = TOP, **options) -> Generation:
    drafter, known = scripted(chosen, BLOCK), script(truth, prompts, ACCEPT)
    decoder = Decoder(chosen.target, chosen.params, drafter, known, rule=rule)
    return decoder.generate(prompts, TOKENS, sampling=sampling, logprobs=top, **options)


def stop_in_a_block(text: list[int]) -> int:
    """An id that row 0, which accepts 7, 0 and 3 drafts, first says in the middle of a block."""
    return next(text[place] for place in (11, 10, 12, 4, 5, 3) if text[place] not in text[:place])


def check_B16(chosen: Family, rule, sampling) -> None:
    prompts = random_prompts(chosen, LENGTHS)
    alone = without_drafts(chosen, rule, sampling, prompts)
    stop = [stop_in_a_block(alone.tokens[0])]
    check_values(chosen, prompts, alone)
    for options in ({}, {"stop": stop}):
        out = with_drafts(chosen, rule, sampling, prompts, alone.tokens, **options)
        assert out.tokens == [cut_at(text, options.get("stop", ())) for text in alone.tokens]
        if not options:
            assert [a[:3].tolist() for a in out.accepted] == [[7, 0, 3], [0, 5, 2]], "rows go on at their own pace"
        check_values(chosen, prompts, out)
        for row, (mine, theirs) in enumerate(zip(out.logprobs, alone.logprobs, strict=True)):
            count = len(out.tokens[row])
            np.testing.assert_allclose(mine.said, theirs.said[:count], rtol=0, atol=BOUND[mine.said.dtype.name])
            np.testing.assert_array_equal(mine.ids, theirs.ids[:count])
    assert out.finish[0] == "stop" and len(out.tokens[0]) < TOKENS


@pytest.mark.parametrize(("name", "dtype"), FAMILIES)
def test_B16_greedy_rows(name: str, dtype: str) -> None:
    check_B16(family(name, dtype), Greedy(), GREEDY)


def test_B16_sampled_rows_have_the_values_before_temperature_and_filters() -> None:
    check_B16(family("gpt_oss-split"), Match(), SAMPLED)


def test_B16_along_the_path_of_a_tree() -> None:
    """A path's places are nodes of the tree in another order."""
    chosen = family("qwen3-untied")
    prompts = random_prompts(chosen, LENGTHS)
    drafter, params = tiny_drafter("mixed", "qwen3-untied")
    decoder = Decoder(chosen.target, chosen.params, drafter, params, rule=TreeMatch(20))
    out = decoder.generate(prompts, TOKENS, sampling=SAMPLED, logprobs=TOP)
    assert (out.accepted > 0).any()
    assert out.tokens == without_drafts(chosen, Match(), SAMPLED, prompts).tokens
    check_values(chosen, prompts, out)


def test_B16_no_alternatives() -> None:
    """The said tokens' own values alone."""
    chosen = family("glm4_moe_lite")
    prompts = random_prompts(chosen, LENGTHS)
    some, none = (without_drafts(chosen, Greedy(), GREEDY, prompts, top) for top in (TOP, 0))
    check_values(chosen, prompts, none, 0)
    assert some.tokens == none.tokens
    for one, other in zip(some.logprobs, none.logprobs, strict=True):
        np.testing.assert_array_equal(one.said, other.said)


start = fresh(Decoder.start)
"""As its callers meet it: without the tests' own check of types."""


@pytest.mark.parametrize("asked", [-1, 62, 2.5, 3.0, np.float64(3), "3", [3], True, np.True_, np.int8(-1)])
def test_B16_other_numbers_are_refused(asked) -> None:
    chosen = family("gpt_oss-split")
    with pytest.raises(ValueError, match="expected an integer from 0 to 61, or None") as refusal:
        start(Decoder(chosen.target, chosen.params), [[1]], 2, logprobs=asked)
    assert str(refusal.value).startswith(f"logprobs {asked!r}: ")


@pytest.mark.parametrize("asked", [0, 3, np.int64(3), np.uint8(61)])
def test_B16_integers_of_any_kind(asked) -> None:
    chosen = family("gpt_oss-split")
    state = start(Decoder(chosen.target, chosen.params), [[1]], 2, logprobs=asked)
    assert state.logprobs.ids.shape[-1] == asked


def rows_are_swapped(kept, logits, *rest):
    return speculate_extend(kept, logits[::-1], *rest)


def places_are_shifted(kept, logits, *rest):
    return speculate_extend(kept, jnp.roll(logits, 1, axis=1), *rest)


speculate_extend = speculate.extend


@pytest.mark.parametrize("fault", [rows_are_swapped, places_are_shifted])
def test_the_comparison_can_fail(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = family("qwen3-untied")
    prompts = random_prompts(chosen, LENGTHS)
    monkeypatch.setattr(speculate, "extend", fault)
    trace_anew(monkeypatch)
    drafter, known = scripted(chosen, 3), script([[0] * TOKENS] * 2, prompts, ACCEPT)
    out = Decoder(chosen.target, chosen.params, drafter, known).generate(prompts, 12, logprobs=TOP)
    with pytest.raises(AssertionError):
        check_values(chosen, prompts, out)
