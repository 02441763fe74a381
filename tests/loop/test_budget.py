"""Budgets and limits: exactly as many tokens as asked for, never past the context limit, and clear refusals."""

import numpy as np
import pytest

from dflash_jax.generate import SMALLEST_CAPACITY, Decoder, bucket
from dflash_jax.plain import NoDrafter
from tests.support.families import family, fresh
from tests.support.oracle import ALL, script
from tests.support.texts import greedy, lively_prompts, plain, random_prompts, scripted, speculate

FAMILIES = ("gpt_oss-split", "qwen3_5_moe-solve", "glm4_moe", "glm_moe_dsa")
NAME, BLOCK, LENGTHS = FAMILIES[0], 8, (5, 29, 17, 1)
BUDGETS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    chosen = family(request.param)
    prompts = lively_prompts(chosen, LENGTHS)
    return chosen, prompts, greedy(chosen, prompts, 48)


@pytest.mark.parametrize("accept", [[[ALL]], [[3]], [[0]]], ids=["all", "3", "none"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_B03_exactly_the_budget(case, budget: int, accept) -> None:
    chosen, prompts, truth = case
    out = speculate(chosen, prompts, truth, accept, max_new_tokens=budget)
    assert out.tokens == [text[:budget] for text in truth]
    assert out.finish == ["length"] * 4
    assert (out.counts.sum(1) + 1 == budget).all(), "the counts are the tokens delivered"
    per_round = min(accept[0][0], BLOCK - 1) + 1
    assert out.rounds == -(-(budget - 1) // per_round), "no round after the last token"


def test_B03_every_row_has_its_own_budget(case) -> None:
    chosen, prompts, truth = case
    for budgets in ([1, 8, 9, 40], [40, 1, 1, 7]):
        out = speculate(chosen, prompts, truth, [[ALL], [3], [0], [5, 1]], max_new_tokens=budgets)
        assert out.tokens == [text[:budget] for text, budget in zip(truth, budgets, strict=True)]
        assert (out.counts.sum(1) + 1).tolist() == budgets


def test_B03_one_token_needs_no_round(case) -> None:
    chosen, prompts, truth = case
    out = speculate(chosen, prompts, truth, [[ALL]], max_new_tokens=1, stop=[truth[0][0]])
    assert out.rounds == 0 and out.counts.shape == (4, 0)
    assert out.tokens == [[text[0]] for text in truth]
    assert out.finish == ["stop" if text[0] == truth[0][0] else "length" for text in truth]


def test_B03_a_stop_on_the_last_token_of_the_budget_is_a_stop(case) -> None:
    chosen, prompts, truth = case
    first = next(place for place in range(12, 40) if truth[0][place] not in truth[0][:place])
    out = speculate(chosen, prompts[:1] * 4, truth[:1] * 4, [[ALL]], max_new_tokens=first + 1, stop=[truth[0][first]])
    assert out.tokens[0] == truth[0][: first + 1] and out.finish[0] == "stop"


def decoder(limit: int | None = None) -> Decoder:
    chosen = family(NAME)
    return Decoder(chosen.target, chosen.params, NoDrafter(), context_limit=limit)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {"max_new_tokens": 4}, "empty prompt"),
        ([[]], {"max_new_tokens": 4}, "empty prompt"),
        ([[1], []], {"max_new_tokens": 4}, "empty prompt"),
        ([[1]], {"max_new_tokens": 0}, "at least 1, got 0"),
        ([[1]], {"max_new_tokens": -3}, "at least 1, got -3"),
        ([[1], [2]], {"max_new_tokens": [4, 0]}, "at least 1"),
        ([[1]], {}, "no context limit is known"),
        ([[1, 61]], {"max_new_tokens": 4}, "1 to 61; the vocabulary is 0 to 60"),
        ([[1], [-1]], {"max_new_tokens": 4}, "-1 to 1; the vocabulary is 0 to 60"),
    ],
)
def test_B03_refusals(prompts, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder().generate(prompts, **options)


start = fresh(Decoder.start)
"""As its callers meet it: without the tests' own check of types."""


@pytest.mark.parametrize("asked", [2.9, 2.0, np.float32(2), "2", True, np.True_, [2, 2.9], [True, 2], [2, None]])
def test_B03_no_budget_is_rounded(asked) -> None:
    with pytest.raises(ValueError, match=r"^max_new_tokens .*: expected an integer, or one for each row$") as refusal:
        start(decoder(), [[1], [2]], asked)
    assert repr(asked) in str(refusal.value)


@pytest.mark.parametrize("asked", [3, np.int8(3), np.uint64(3), [3, np.int64(3)], (3, 3), np.array([3, 3])])
def test_B03_integers_of_any_kind(asked) -> None:
    assert start(decoder(), [[1], [2]], asked).ends.budget.tolist() == [3, 3]


class TestB18ContextLimit:
    """Prompt and output together never exceed the limit; a request that does not fit harms no other."""

    @pytest.mark.parametrize(("length", "tokens"), [(62, 2), (63, 1)])
    def test_B18_as_much_as_the_limit_leaves(self, length: int, tokens: int) -> None:
        chosen = family(NAME)
        (prompt,) = random_prompts(chosen, [length])
        out = decoder(64).generate([prompt])
        assert out.tokens == greedy(chosen, [prompt], tokens) and out.finish == ["length"]

    @pytest.mark.parametrize("length", [64, 65])
    def test_B18_no_room_is_refused(self, length: int) -> None:
        chosen = family(NAME)
        limited = decoder(64)
        with pytest.raises(ValueError, match="no room below the limit of 64"):
            limited.generate([[1], random_prompts(chosen, [length])[0]])
        assert limited.generate([[1]], 2).tokens == greedy(chosen, [[1]], 2)

    def test_B18_a_budget_past_the_limit_is_cut_to_it(self) -> None:
        chosen = family(NAME)
        prompts = random_prompts(chosen, (28, 60, 5, 1))
        out = decoder(64).generate(prompts, 40)
        assert [len(tokens) for tokens in out.tokens] == [36, 4, 40, 40]

    def test_B18_blocks_near_the_limit_are_whole(self) -> None:
        """Speculation neither stops nor errs within a block of the limit."""
        chosen = family(NAME)
        prompts = random_prompts(chosen, (28, 60, 5, 1))
        truth = greedy(chosen, prompts, 48)
        limited = Decoder(
            chosen.target, chosen.params, scripted(chosen, BLOCK), script(truth, prompts, [[ALL]]), context_limit=64
        )
        out = limited.generate(prompts)
        assert out.tokens == [
            text[: 64 - len(prompt)] for text, prompt in zip(greedy(chosen, prompts, 63), prompts, strict=True)
        ]


class TestCapacity:
    def test_the_smallest_power_of_two_that_holds_everything(self) -> None:
        assert [bucket(n) for n in (1, 255, 256, 257, 512, 513)] == [256, 256, 256, 512, 512, 1024]

    def test_the_last_block_at_the_end_of_the_cache(self) -> None:
        """Prompt, budget and a block fill the cache to its last slot; rings have wrapped; block and window differ."""
        chosen, budget = family(NAME), 48
        longest = SMALLEST_CAPACITY - budget - BLOCK
        prompts = random_prompts(chosen, (longest, 150, 3, 1))
        truth = greedy(chosen, prompts, budget, longest=SMALLEST_CAPACITY)
        drafter = scripted(chosen, BLOCK)
        for accept in ([[ALL]], [[6]], [[0]], [[3, 0, 7], [1], [5, 2], [4]]):
            decoder = Decoder(chosen.target, chosen.params, drafter, script(truth, prompts, accept))
            state = decoder.start(prompts, budget)
            slots = state.cache.layers
            assert [s.ring for s in slots] == [s.window is not None for s in slots]
            assert all(s.k.shape[2] < longest if s.ring else s.k.shape[2] == SMALLEST_CAPACITY for s in slots)
            state = decoder.advance(state)
            assert np.asarray(state.tokens)[:, :budget].tolist() == truth
        assert plain(chosen, prompts, max_new_tokens=budget).tokens == truth
