"""Donated states: consumed once, copied when kept, alive after an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError

from dflash_jax import generate
from dflash_jax.generate import FOREVER, Decoder
from dflash_jax.speculate import SpecState
from tests.support.drafters import tiny_drafter
from tests.support.families import family
from tests.support.oracle import script
from tests.support.texts import greedy, random_prompts, scripted

NAME, BLOCK, TOKENS, LENGTHS = "gpt_oss-split", 8, 40, (5, 29, 17, 1)


@pytest.fixture
def case() -> tuple[Decoder, list[list[int]], list[list[int]]]:
    chosen = family(NAME)
    prompts = random_prompts(chosen, LENGTHS)
    truth = greedy(chosen, prompts, TOKENS + BLOCK)
    decoder = Decoder(chosen.target, chosen.params, scripted(chosen, BLOCK), script(truth, prompts, [[3, 0], [7]] * 2))
    return decoder, prompts, [text[:TOKENS] for text in truth]


def texts(state: SpecState) -> list[list[int]]:
    return np.asarray(state.tokens)[:, :TOKENS].tolist()


def test_B64_no_two_leaves_of_a_fresh_state_share_a_buffer(case) -> None:
    decoder, prompts, _ = case
    dflash = Decoder(decoder.target, decoder.params, *tiny_drafter("mixed", NAME))
    for each in (decoder, dflash):
        state = each.start(prompts, TOKENS)
        leaves = jax.tree.leaves(state.replace(key=jax.random.key_data(state.key)))
        places = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]
        assert len(places) == len(set(places))


def test_B64_a_consumed_state_is_refused_and_nothing_else_breaks(case) -> None:
    decoder, prompts, truth = case
    state = decoder.start(prompts, TOKENS)
    finished = decoder.advance(state)
    assert state.tokens.is_deleted(), "the rounds reuse their state's memory"
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)delete|donate"):
        decoder.advance(state)
    assert texts(finished) == truth
    assert decoder.generate(prompts, TOKENS).tokens == truth


def test_B64_a_copy_outlives_the_original(case) -> None:
    decoder, prompts, truth = case
    state = decoder.advance(decoder.start(prompts, TOKENS), until=2)
    kept = jax.tree.map(jnp.copy, state)
    assert texts(decoder.advance(state)) == truth
    assert int(kept.rounds) == 2
    assert texts(decoder.advance(kept)) == truth


def test_B64_two_requests_from_one_prefix(case) -> None:
    decoder, prompts, truth = case
    prefix = decoder.start(prompts, TOKENS)
    first, second = jax.tree.map(jnp.copy, prefix), prefix
    short = first.replace(ends=first.ends.replace(budget=jnp.full(4, 9, jnp.int32)))
    assert np.asarray(decoder.advance(short).delivered).tolist() == [9] * 4
    assert texts(decoder.advance(second)) == truth


def test_B64_the_state_survives_an_error_before_the_rounds(case) -> None:
    decoder, prompts, truth = case
    state = decoder.start(prompts, TOKENS)
    broken = {**decoder.params, "head": decoder.params["head"][:-1]}
    with pytest.raises(ScopeParamShapeError):
        generate.run_rounds(
            decoder.target, decoder.drafter, decoder.rule, broken, decoder.draft_params, state, jnp.asarray(FOREVER)
        )
    assert texts(decoder.advance(state)) == truth


def test_B64_params_are_never_consumed(case) -> None:
    decoder, prompts, truth = case
    for _ in range(2):
        assert decoder.generate(prompts, TOKENS).tokens == truth
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((decoder.params, decoder.draft_params)))
