"""What a run reports: tokens and accepted drafts per round, and nothing left over from an earlier request."""

import jax
import numpy as np
import pytest

from dflash_jax.generate import Decoder
from dflash_jax.generation import Generation
from tests.support.drafters import tiny_drafter
from tests.support.families import family
from tests.support.oracle import ALL, script
from tests.support.texts import greedy, random_prompts, scripted, speculate

NAME, BLOCK, LENGTHS = "qwen3-untied", 8, (5, 29, 17, 1)


@pytest.fixture(scope="module")
def case():
    chosen = family(NAME)
    prompts = random_prompts(chosen, LENGTHS)
    return chosen, prompts, greedy(chosen, prompts, 48)


def acceptance(out: Generation, block: int) -> tuple[int, int]:
    """Drafts accepted and drafts verified, over the rounds that ran."""
    live = out.accepted >= 0
    return int(out.accepted[live].sum()), int(live.sum()) * (block - 1)


def per_position(out: Generation, block: int) -> np.ndarray:
    """How many rounds accepted the draft at each place of a block."""
    live = out.accepted[out.accepted >= 0]
    return (live[:, None] > np.arange(block - 1)).sum(0)


def test_B07_two_rounds(case) -> None:
    """3 and 7 drafts stand: 4 and 8 tokens, 6.0 a round; 10 of the 14 drafts verified, not of 16."""
    chosen, prompts, truth = case
    out = speculate(chosen, prompts, truth, [[3, 7]], max_new_tokens=13)
    assert out.counts.tolist() == [[4, 8]] * 4 and out.accepted.tolist() == [[3, 7]] * 4
    assert out.counts.mean() == 6.0
    assert acceptance(out, BLOCK) == (4 * 10, 4 * 14)
    places = per_position(out, BLOCK)
    assert (np.diff(places) <= 0).all() and places.tolist() == [8, 8, 8, 4, 4, 4, 4]
    assert [len(tokens) for tokens in out.tokens] == [1 + 12] * 4


def test_B07_tokens_behind_a_stop_are_not_counted(case) -> None:
    """A stop at the third token of a round: three tokens count, though the rule accepted the whole block."""
    chosen, prompts, truth = case
    place = next(at for at in range(3, 40) if truth[0][at] not in truth[0][:at])
    whole, rest = divmod(place - 3, BLOCK)
    accept = [[rest - 1, *[ALL] * 5]] if rest else [[ALL]]
    out = speculate(chosen, prompts, truth, accept, max_new_tokens=40, stop=[truth[0][place]])
    live = out.counts[0][out.counts[0] > 0]
    assert live.tolist() == [*([rest] if rest else []), *[BLOCK] * whole, 3]
    assert out.accepted[0][len(live) - 1] == BLOCK - 1
    assert live.sum() + 1 == len(out.tokens[0]) == place + 1


def test_B07_a_done_row_counts_no_further(case) -> None:
    chosen, prompts, truth = case
    out = speculate(chosen, prompts, truth, [[ALL], [0], [2], [3]], max_new_tokens=[5, 20, 2, 9])
    done = np.arange(out.rounds) >= np.array([[1], [19], [1], [2]])
    assert ((out.counts == 0) == done).all() and ((out.accepted == -1) == done).all()
    assert (out.counts.sum(1) + 1).tolist() == [5, 20, 2, 9]


def test_B07_union_counts_distinct_experts_of_live_rows() -> None:
    """Against the experts that a forward over each round's blocks chooses."""
    chosen = family("gpt_oss-split")
    prompts = random_prompts(chosen, LENGTHS)
    truth = greedy(chosen, prompts, 48)
    out = speculate(chosen, prompts, truth, [[ALL]], max_new_tokens=1 + BLOCK)
    assert out.rounds == 1
    experts, layers = chosen.target.experts, chosen.target.mixture_layers
    texts = np.zeros((4, 128), np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, truth, strict=True)):
        texts[row, : len(prompt) + BLOCK] = prompt + text[:BLOCK]
    chosen_ids = experts_of(chosen, texts)
    for layer in range(layers):
        ids = {
            int(expert)
            for row, prompt in enumerate(prompts)
            for expert in chosen_ids[row, len(prompt) : len(prompt) + BLOCK, layer].ravel()
        }
        assert out.union[layer] == len(ids) <= experts


def experts_of(chosen, texts: np.ndarray) -> np.ndarray:
    heard = jax.jit(chosen.target.step)(chosen.params, texts, chosen.target.init_cache(4, 128, 128))
    return np.asarray(heard.experts)


class TestB57NothingIsLeftOver:
    """A decoder that has served other requests answers as a new one does: ids, counts and acceptance."""

    @staticmethod
    def equal(one: Generation, other: Generation) -> bool:
        arrays = (one.counts, other.counts), (one.accepted, other.accepted), (one.union, other.union)
        return one.tokens == other.tokens and all(np.array_equal(a, b) for a, b in arrays)

    def test_B57_a_shorter_request_after_a_longer_one(self, case) -> None:
        chosen, prompts, truth = case
        drafter, params = tiny_drafter("mixed", NAME)
        new = Decoder(chosen.target, chosen.params, drafter, params).generate(prompts, 30)
        used = Decoder(chosen.target, chosen.params, drafter, params)
        longer = random_prompts(chosen, (60, 60, 40, 60), seed=9)
        used.generate(longer, 40, stop=[truth[0][20]])
        assert self.equal(used.generate(prompts, 30), new)
        used.advance(used.start(longer, 40), until=2)
        assert self.equal(used.generate(prompts, 30), new)
        assert self.equal(used.generate(prompts, 30), new)

    def test_B57_an_abandoned_stream(self, case) -> None:
        chosen, prompts, truth = case
        decoder = Decoder(chosen.target, chosen.params, scripted(chosen, BLOCK), script(truth, prompts, [[2, 5]]))
        new = decoder.generate(prompts, 30)
        stream = decoder.stream(prompts, 30, rounds_per_call=1)
        next(stream), next(stream)
        stream.close()
        assert self.equal(decoder.generate(prompts, 30), new)
