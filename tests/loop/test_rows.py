"""Batches: a row is what it would be alone, whatever stands beside it, in whatever order, whenever it ends."""

import itertools

import jax
import numpy as np
import pytest

from dflash_jax.generate import Decoder
from tests.support.drafters import tiny_drafter
from tests.support.families import family
from tests.support.oracle import ALL, script
from tests.support.texts import cut_at, greedy, random_prompts, scripted, speculate

NAMES = ("gpt_oss-split", "qwen3-untied", "qwen3_5_moe-solve", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
BLOCK, TOKENS = 8, 40
LENGTHS = (5, 61, 17, 1)
ACCEPT = ([7, 0, 3], [0, 0, 0], [1, 7, 1], [4, 4, 4])
EVERY = list(itertools.permutations(range(4)))
SQUARE = [(0, 1, 2, 3), (1, 3, 0, 2), (2, 0, 3, 1), (3, 2, 1, 0)]
"""Every row in every slot, and after every other."""


@pytest.mark.parametrize("name", NAMES)
class TestB25EveryRowIsItsSoloRun:
    def test_B25_every_order(self, name: str) -> None:
        chosen = family(name)
        prompts = random_prompts(chosen, LENGTHS)
        truth = greedy(chosen, prompts, TOKENS + BLOCK)
        solo = [
            speculate(chosen, [prompt], [text], [accept], max_new_tokens=TOKENS)
            for prompt, text, accept in zip(prompts, truth, ACCEPT, strict=True)
        ]
        for order in EVERY if name == NAMES[0] else SQUARE:
            pick = lambda items, order=order: [items[row] for row in order]  # noqa: E731
            out = speculate(chosen, pick(prompts), pick(truth), pick(ACCEPT), max_new_tokens=TOKENS)
            for place, row in enumerate(order):
                alone = solo[row]
                assert out.tokens[place] == alone.tokens[0] == truth[row][:TOKENS]
                live = out.accepted[place] >= 0
                assert out.accepted[place][live].tolist() == alone.accepted[0].tolist()
                assert out.counts[place][live].tolist() == alone.counts[0].tolist()

    def test_B24_prompts_of_one_token_beside_long_ones(self, name: str) -> None:
        """Prompts shorter and longer than the window: padding is never seen and nothing turns to NaN."""
        chosen = family(name)
        prompts = random_prompts(chosen, (1, 3, 40, 1), seed=2)
        drafter, params = tiny_drafter("mixed", name)
        decoder = Decoder(chosen.target, chosen.params, drafter, params)
        state = decoder.advance(decoder.start(prompts, TOKENS))
        assert np.asarray(state.tokens)[:, :TOKENS].tolist() == greedy(chosen, prompts, TOKENS)
        floats = [leaf for leaf in jax.tree.leaves((state.cache, state.draft_cache)) if leaf.dtype.kind == "f"]
        assert floats and all(np.isfinite(leaf).all() for leaf in floats)

    def test_B28_rows_that_end_beside_rows_that_go_on(self, name: str) -> None:
        chosen = family(name)
        prompts = random_prompts(chosen, LENGTHS)
        truth = greedy(chosen, prompts, TOKENS + BLOCK)
        place = next(at for at in range(10, TOKENS) if truth[2][at] not in truth[2][:at])
        stop, budgets = [truth[2][place]], [TOKENS, 3, TOKENS, 11]
        out = speculate(chosen, prompts, truth, ACCEPT, max_new_tokens=budgets, stop=stop)
        for row in range(4):
            options = dict(max_new_tokens=budgets[row], stop=stop)
            alone = speculate(chosen, prompts[row : row + 1], truth[row : row + 1], ACCEPT[row : row + 1], **options)
            assert out.tokens[row] == alone.tokens[0] == cut_at(truth[row], stop, budgets[row])
            assert out.finish[row] == alone.finish[0]
            assert out.counts[row][out.counts[row] > 0].tolist() == alone.counts[0].tolist()


def test_B28_a_done_row_changes_no_bit_of_itself() -> None:
    """What a done row has said, its lengths and its committed keys and values stay as they were."""
    chosen = family("gpt_oss-split")
    prompts = random_prompts(chosen, LENGTHS)
    truth = greedy(chosen, prompts, TOKENS + BLOCK)
    decoder = Decoder(chosen.target, chosen.params, scripted(chosen, BLOCK), script(truth, prompts, ACCEPT))
    state = decoder.advance(decoder.start(prompts, [TOKENS, 4, TOKENS, 2]), until=4)
    assert np.asarray(state.done).tolist() == [False, True, False, True]
    before = jax.device_get(state.replace(key=None))
    after = jax.device_get(decoder.advance(state, until=7).replace(key=None))
    for row in (1, 3):
        for name in ("anchor", "delivered", "tokens", "done"):
            np.testing.assert_array_equal(getattr(before, name)[row], getattr(after, name)[row], err_msg=name)
        length = before.cache.length[row]
        assert length == after.cache.length[row] == after.draft_cache.length[row]
        for one, other in zip(before.cache.layers, after.cache.layers, strict=True):
            keep = slice(0, length) if not one.ring else slice(max(0, length - one.window + 1), length)
            np.testing.assert_array_equal(one.k[row, :, keep], other.k[row, :, keep])
            np.testing.assert_array_equal(one.v[row, :, keep], other.v[row, :, keep])
    assert (before.anchor[[0, 2]] != after.anchor[[0, 2]]).any()


def test_all_rows_alike_are_alike() -> None:
    chosen = family("gpt_oss-split")
    prompts = random_prompts(chosen, (17,)) * 4
    truth = greedy(chosen, prompts, TOKENS + BLOCK)
    out = speculate(chosen, prompts, truth, [[ALL], [0], [3, 1], [2]], max_new_tokens=TOKENS)
    assert out.tokens == [truth[0][:TOKENS]] * 4
