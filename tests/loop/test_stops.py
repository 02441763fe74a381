"""Stopping: right after the first stop id, wherever in a block it falls, and never because of a token not said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import generate, speculate
from dflash_jax.generate import MOST_STOP_IDS, Decoder
from tests.support.drafters import tiny_drafter
from tests.support.families import Family, family, fresh
from tests.support.loop import trace_anew
from tests.support.oracle import ALL, script
from tests.support.texts import cut_at, greedy, lively_prompts, plain, random_prompts, scripted
from tests.support.texts import speculate as decode

FAMILIES = ("gpt_oss-split", "qwen3-untied", "qwen3_5_moe-solve", "glm4_moe", "glm_moe_dsa")
BLOCK, TOKENS, LENGTHS = 8, 40, (9, 5, 17, 1)


def check_stops(chosen: Family, accept=((ALL,),), places=range(17)) -> set[int]:
    """Declare every token of the first row's text a stop id in turn. Returns the offsets in a block that were tried."""
    prompts, offsets = lively_prompts(chosen, LENGTHS), set()
    truth = greedy(chosen, prompts, TOKENS + BLOCK)
    for row, text in enumerate(truth):
        for place in places:
            if text[place] in text[:place]:
                continue
            out = decode(chosen, prompts, truth, accept, max_new_tokens=TOKENS, stop=[text[place]])
            assert out.tokens == [cut_at(each, [text[place]], TOKENS) for each in truth]
            assert len(out.tokens[row]) == place + 1 and out.finish[row] == "stop"
            assert out.finish == ["stop" if t[-1] == text[place] else "length" for t in out.tokens]
            offsets.add((place - 1) % BLOCK)
    return offsets


@pytest.mark.parametrize("name", FAMILIES)
def test_B01_a_stop_id_at_every_offset_of_a_block(name: str) -> None:
    assert check_stops(family(name)) == set(range(BLOCK))


def test_B01_a_stop_id_as_a_bonus_token_or_behind_a_rejected_draft() -> None:
    for accept in ([[0]], [[3, 0, 1]]):
        check_stops(family("qwen3-untied"), accept)


def test_B01_nothing_is_streamed_after_the_stop() -> None:
    chosen = family("qwen3-untied")
    prompts = random_prompts(chosen, LENGTHS)
    truth = greedy(chosen, prompts, TOKENS + BLOCK)
    for stop in (truth[0][4], truth[2][11]):
        decoder = Decoder(chosen.target, chosen.params, scripted(chosen, BLOCK), script(truth, prompts, [[ALL]]))
        *pieces, last = decoder.stream(prompts, TOKENS, stop=[stop], rounds_per_call=1)
        joined = [[token for piece in pieces for token in piece[row]] for row in range(len(prompts))]
        assert joined == last.tokens == [cut_at(text, [stop], TOKENS) for text in truth]


def prompts_that_end_in(chosen: Family, stop: int, tokens: int) -> list[list[int]]:
    """Prompts of 1..17 tokens that end in ``stop`` and whose greedy text does not say it."""
    found: dict[int, list[int]] = {}
    for seed in range(200):
        for at in range(1, 18, 4):
            lengths = [min(length, 17) for length in range(at, at + 4)]
            prompts = [[*prompt[:-1], stop] for prompt in random_prompts(chosen, lengths, seed)]
            if any(length not in found for length in lengths):
                texts = plain(chosen, prompts, max_new_tokens=tokens).tokens
                quiet = [(p, t) for p, t in zip(prompts, texts, strict=True) if stop not in t]
                found |= {len(prompt): prompt for prompt, _ in quiet if len(prompt) not in found}
        if len(found) == 17:
            return [found[length] for length in range(1, 18)]
    raise AssertionError(f"no prompts found: lengths {sorted(found)}")


def quiet_id(chosen: Family, tokens: int) -> int:
    """An id that the text after it alone does not say."""
    for at in range(0, 48, 4):
        prompts = [[id] for id in range(at, at + 4)]
        texts = plain(chosen, prompts, max_new_tokens=tokens).tokens
        for (id,), text in zip(prompts, texts, strict=True):
            if id not in text:
                return id
    raise AssertionError("every id is said after itself")


@pytest.fixture(scope="module")
def stop() -> int:
    return quiet_id(family("qwen3-untied"), 20)


@pytest.fixture(scope="module")
def prompts(stop: int) -> list[list[int]]:
    """Prompts that end in the stop id; the texts of the first 17 do not say it."""
    return [*prompts_that_end_in(family("qwen3-untied"), stop, 20), [stop] * 2, [5, stop], [stop]]


class TestB04TheStopIdBelongsToThePrompt:
    """The last prompt token is the stop id; in the second test it is the drafter's mask id too."""

    def test_B04_last_prompt_token_is_the_stop_id(self, stop: int, prompts) -> None:
        chosen = family("qwen3-untied")
        for at in range(0, 20, 4):
            truth = greedy(chosen, prompts[at : at + 4], 28)
            out = decode(chosen, prompts[at : at + 4], truth, [[ALL]], max_new_tokens=20, stop=[stop])
            assert out.tokens == [cut_at(text, [stop], 20) for text in truth]
            assert [len(tokens) for tokens in out.tokens[: 17 - at]] == [20] * len(out.tokens[: 17 - at])

    def test_B04_B53_the_mask_id_is_a_stop_id_and_stands_in_the_prompt(self, stop: int, prompts) -> None:
        chosen = family("qwen3-untied")
        drafter, params = tiny_drafter("mixed", chosen.name, mask_token_id=stop)
        decoder = Decoder(chosen.target, chosen.params, drafter, params)
        for at in range(0, 20, 4):
            out = decoder.generate(prompts[at : at + 4], 20, stop=[stop])
            assert out.tokens == [cut_at(text, [stop], 20) for text in greedy(chosen, prompts[at : at + 4], 28)]


class TestB53SpecialIdsInDrafts:
    def test_B53_stop_and_mask_ids_are_proposed(self) -> None:
        """A rejected draft that is a stop id ends nothing; -1 proposes nothing."""
        chosen = family("qwen3-untied")
        prompts = random_prompts(chosen, LENGTHS)
        truth = greedy(chosen, prompts, TOKENS + BLOCK)
        unsaid = [id for id in range(53) if not any(id in text for text in truth)]
        for lie in (unsaid[0], unsaid[1], -1):
            out = decode(
                chosen, prompts, truth, [[5, 0, 2], [0], [6], [1]], lie=lie, max_new_tokens=TOKENS, stop=unsaid[:2]
            )
            assert out.tokens == [text[:TOKENS] for text in truth]
            assert out.finish == ["length"] * 4


class TestB05SeveralStopIds:
    def test_B05_every_one_of_them_stops(self) -> None:
        chosen = family("qwen3-untied")
        prompts = random_prompts(chosen, LENGTHS)
        truth = greedy(chosen, prompts, TOKENS + BLOCK)
        stop = [truth[0][6], truth[1][3], truth[2][9], truth[0][6]]
        out = decode(chosen, prompts, truth, [[ALL]], max_new_tokens=TOKENS, stop=stop)
        assert out.tokens == [cut_at(text, stop, TOKENS) for text in truth]

    def test_B05_as_many_as_there_is_room_for(self) -> None:
        chosen = family("qwen3-untied")
        prompts = random_prompts(chosen, LENGTHS)
        truth = greedy(chosen, prompts, TOKENS + BLOCK)
        unsaid = [id for id in range(1000) if not any(id in text for text in truth)]
        stop = [*unsaid[: MOST_STOP_IDS - 1], truth[3][5]]
        out = decode(chosen, prompts, truth, [[ALL]], max_new_tokens=TOKENS, stop=stop)
        assert out.tokens == [cut_at(text, stop, TOKENS) for text in truth]
        with pytest.raises(ValueError, match="at most 16 stop ids, got 17"):
            decode(chosen, prompts, truth, [[ALL]], max_new_tokens=TOKENS, stop=range(17))
        with pytest.raises(ValueError, match="must not be negative"):
            decode(chosen, prompts, truth, [[ALL]], max_new_tokens=TOKENS, stop=[-1])
        with pytest.raises(ValueError, match=r"stop \['own f'\]: expected integer ids; strings are for"):
            fresh(generate._stop_row)(["own f"])  # as its callers meet it: without the tests' own check of types


def only_the_last_token_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    right = speculate.cut

    def wrong(said, count, ends, delivered):
        last = jnp.arange(said.shape[1]) == count[:, None] - 1
        return right(jnp.where(last, said, -2), count, ends, delivered)

    monkeypatch.setattr(speculate, "cut", wrong)


def the_whole_block_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    right = speculate.cut

    def wrong(said, count, ends, delivered):
        _, ended = right(said, jnp.full_like(count, said.shape[1]), ends, delivered)
        kept, _ = right(said, count, ends, delivered)
        return kept, ended

    monkeypatch.setattr(speculate, "cut", wrong)


@pytest.mark.parametrize("mutate", [only_the_last_token_is_checked, the_whole_block_is_searched])
def test_these_tests_can_fail(mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = family("qwen3-untied")
    prompts = random_prompts(chosen, LENGTHS)
    greedy(chosen, prompts, TOKENS + BLOCK)
    mutate(monkeypatch)
    trace_anew(monkeypatch)
    with pytest.raises(AssertionError):
        check_stops(chosen, [[3, ALL, 0]])


def test_cut_keeps_what_was_said_up_to_the_stop_or_the_budget() -> None:
    """Every count, stop place and budget of one block, against a loop in Python."""
    said = np.array([[7, 5, 9, 5]] * 60, np.int32)
    cases = [(count, stop, room) for count in (1, 2, 3, 4) for stop in (7, 5, 9, 8, -1) for room in (1, 3, 9)]
    count, stop, room = (np.array(column, np.int32) for column in zip(*cases, strict=True))
    ends = speculate.Ends(budget=jnp.asarray(room + 2), stop=jnp.asarray(np.stack([stop, np.full(60, -1)], 1)))
    kept, ended = jax.jit(speculate.cut)(said, count, ends, np.full(60, 2, np.int32))
    for row, (count, stop, room) in enumerate(cases):
        text = cut_at(said[row, :count].tolist(), [stop], room)
        assert kept[row] == len(text), cases[row]
        assert ended[row] == (text[-1] == stop or len(text) == room), cases[row]
