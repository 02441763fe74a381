"""The loop's invariants after every round, the drafter's context in it, and streaming."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from dflash_jax.generate import Decoder
from models.dflash import DFlashDrafter
from tests.support.drafters import tiny_drafter
from tests.support.families import Family, family
from tests.support.oracle import ALL, ScriptedDrafter, script
from tests.support.steps import agree
from tests.support.texts import greedy, random_prompts, scripted

NAMES, BLOCK, TOKENS, LENGTHS = ("gpt_oss-split", "qwen3-untied"), 8, 40, (5, 29, 17, 1)
ACCEPT = ([7, 0, 3], [0, 0, 0], [1, 7, 1], [4, 4, 4])


def check_trace(chosen: Family, decoder: Decoder, budgets) -> None:
    """Run round by round; lengths, counts and texts agree with each other at every stop."""
    prompts = random_prompts(chosen, LENGTHS)
    prompt, truth = np.array(LENGTHS), greedy(chosen, prompts, TOKENS + BLOCK)
    state, rounds = decoder.start(prompts, budgets), 0
    while True:
        seen = jax.device_get(state.replace(key=None))
        assert seen.rounds == rounds
        heard = prompt + seen.delivered - 1
        assert seen.cache.length.tolist() == heard.tolist(), "the target heard all that was said but the anchor"
        assert seen.draft_cache.length.tolist() == heard.tolist(), "the drafter's context is the target's"
        assert (seen.counts.sum(1) + 1 == seen.delivered).all()
        assert (seen.counts[:, rounds:] == 0).all() and (seen.accepted[:, rounds:] == -1).all()
        assert ((seen.counts <= seen.accepted + 1) | (seen.counts == 0)).all()
        for row in range(4):
            said = seen.delivered[row]
            assert seen.tokens[row, :said].tolist() == truth[row][:said]
            assert seen.done[row] == (said == np.broadcast_to(budgets, 4)[row])
            assert seen.done[row] or seen.anchor[row] == truth[row][said - 1]
        if seen.done.all():
            return
        rounds += 1
        state = decoder.advance(state, until=rounds)


@pytest.mark.parametrize("budgets", [TOKENS, [TOKENS, 3, 17, 1]])
@pytest.mark.parametrize("name", NAMES)
def test_invariants_of_every_round(name: str, budgets) -> None:
    chosen = family(name)
    prompts = random_prompts(chosen, LENGTHS)
    known = script(greedy(chosen, prompts, TOKENS + BLOCK), prompts, ACCEPT)
    check_trace(chosen, Decoder(chosen.target, chosen.params, scripted(chosen, BLOCK), known), budgets)


def test_invariants_with_the_drafter_itself() -> None:
    chosen = family("qwen3-untied")
    check_trace(chosen, Decoder(chosen.target, chosen.params, *tiny_drafter("mixed", chosen.name)), TOKENS)


@dataclass(frozen=True)
class Guided:
    """Proposes by a script and absorbs as the DFlash drafter does: its context under any pattern of acceptance."""

    by: ScriptedDrafter
    drafter: DFlashDrafter
    fault: str = ""

    @property
    def block_size(self) -> int:
        return self.by.block_size

    def init_cache(self, batch: int, capacity: int, undo: int):
        return self.by.init_cache(batch, capacity, undo), self.drafter.init_cache(batch, capacity, undo)

    def absorb(self, params, features, count, cache):
        (known, weights), (place, context) = params, cache
        in_round = features.shape[1] == self.block_size
        if self.fault == "a round is not absorbed" and in_round:
            return self.by.absorb(known, features, count, place), context
        counted = count * 0 + features.shape[1] if self.fault == "rejected rows are kept" and in_round else count
        return self.by.absorb(known, features, count, place), self.drafter.absorb(weights, features, counted, context)

    def propose(self, params, target, target_params, anchor, cache, choose):
        return self.by.propose(params[0], target, target_params, anchor, cache[0], choose)


def _block(drafter, target, params, target_params, tokens, cache):
    return drafter.hidden(params, target, target_params, tokens, cache)


def check_context(chosen: Family, fault: str = "", accept=ACCEPT) -> None:
    """After a run, a block from the loop's context is the block from the features of a forward over the whole text."""
    drafter, weights = tiny_drafter("mixed", chosen.name)
    prompts = random_prompts(chosen, LENGTHS)
    truth = greedy(chosen, prompts, TOKENS + BLOCK)
    guided = Guided(scripted(chosen, BLOCK), drafter, fault)
    known = script(truth, prompts, accept)
    decoder = Decoder(chosen.target, chosen.params, guided, (known, weights))
    state = decoder.advance(decoder.start(prompts, TOKENS))
    _, context = state.draft_cache
    texts = np.zeros((4, 128), np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, truth, strict=True)):
        texts[row, : len(prompt) + TOKENS] = prompt + text[:TOKENS]
    heard = np.array(LENGTHS, np.int32) + TOKENS - 1
    out = jax.jit(chosen.target.step)(chosen.params, texts, chosen.target.init_cache(4, 128, 128))
    whole = jax.jit(drafter.absorb)(weights, out.features, heard, drafter.init_cache(4, 128, 128))
    block = jax.jit(_block, static_argnums=(0, 1))
    args = (drafter, chosen.target, weights, chosen.params, texts[:, :BLOCK])
    agree(block(*args, context), block(*args, whole), "block")
    assert context.length.tolist() == heard.tolist()


def test_the_drafters_context_is_the_committed_text() -> None:
    check_context(family("qwen3-untied"))


@pytest.mark.parametrize("fault", ["a round is not absorbed", "rejected rows are kept"])
def test_the_context_law_can_fail(fault: str) -> None:
    with pytest.raises(AssertionError):
        check_context(family("qwen3-untied"), fault)


@pytest.mark.parametrize("rounds_per_call", [1, 3, 100])
def test_streaming_is_the_same_text(rounds_per_call: int) -> None:
    chosen = family("gpt_oss-split")
    prompts = random_prompts(chosen, LENGTHS)
    truth = greedy(chosen, prompts, TOKENS + BLOCK)
    decoder = Decoder(
        chosen.target, chosen.params, scripted(chosen, BLOCK), script(truth, prompts, [[ALL], [0], [2], [3]])
    )
    options = dict(max_new_tokens=[TOKENS, 9, TOKENS, 1], stop=[truth[2][7]])
    whole = decoder.generate(prompts, **options)
    *pieces, last = decoder.stream(prompts, **options, rounds_per_call=rounds_per_call)
    assert pieces[0] == [text[:1] for text in truth], "the first tokens come before any round"
    joined = [[token for piece in pieces for token in piece[row]] for row in range(4)]
    assert joined == last.tokens == whole.tokens
    assert last.finish == whole.finish
    for name in ("counts", "accepted", "union"):
        np.testing.assert_array_equal(getattr(last, name), getattr(whole, name))
    most = rounds_per_call * BLOCK
    assert all(len(row) <= most for piece in pieces[1:] for row in piece)


def test_a_state_has_the_documented_dtypes() -> None:
    """Whatever the default integer is: a state that changes dtype compiles the rounds twice."""
    chosen = family("gpt_oss-split")
    prompts = random_prompts(chosen, LENGTHS)
    known = script(greedy(chosen, prompts, TOKENS + BLOCK), prompts, ACCEPT)
    decoder = Decoder(chosen.target, chosen.params, scripted(chosen, BLOCK), known)
    started = decoder.start(prompts, TOKENS)
    assert {name: getattr(started, name).dtype.name for name in SMALL} == SMALL
    advanced = decoder.advance(started, until=2)
    assert {name: getattr(advanced, name).dtype.name for name in SMALL} == SMALL


SMALL = {
    "anchor": "int32",
    "tokens": "int32",
    "delivered": "int32",
    "done": "bool",
    "counts": "int8",
    "accepted": "int8",
    "union": "int32",
    "rounds": "int32",
}
