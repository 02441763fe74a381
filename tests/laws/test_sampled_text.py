"""Pathwise law: every token is the draw of its position by its row's seed, whoever proposes what and however much.

The rule ``Match`` says it for every target, every script and every block size. The truth is what it says when nothing
is proposed, and, for one target of each kind, one forward over the whole text, of which each position draws once: no
loop, no cache's history, no round.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import generate, sampling
from dflash_jax.accept import Match
from dflash_jax.generate import Decoder
from dflash_jax.sampling import Dice, Stream, distribution, seed_keys
from dflash_jax.settings import GREEDY, SamplingParams, packed
from tests.support.families import STEPS, Family, family
from tests.support.loop import trace_anew
from tests.support.oracle import ALL, script
from tests.support.texts import random_prompts, scripted

LENGTHS, TOKENS, BLOCK, WIDTH = (5, 29, 17, 1), 24, 8, 56
ROWS = (
    SamplingParams(1.2, seed=7),
    SamplingParams(0.8, top_k=9, top_p=0.9, min_p=0.02, seed=2**40 + 7),
    GREEDY,
    SamplingParams(1.2, seed=7),
)
DRAWN_AGAIN = ("gpt_oss-split", "qwen3_5_moe-solve", "glm4_moe_lite", "qwen3-untied")
NOTHING_PROPOSED = ((0,),)
SCRIPTS = (
    [[ALL]],
    [[7, 0, 3], [0], [1, 7, 1], [4, 4, 2, ALL]],
    np.random.default_rng(5).integers(0, 8, (4, 16)).tolist(),
)


@functools.partial(jax.jit, static_argnames="target")
def draws(target, params, tokens, sampling, seeds):
    """What each row's seed draws after every prefix of ``tokens``; index i is the token of position i + 1."""
    rows, width = tokens.shape
    hidden = target.step(params, tokens, target.init_cache(rows, width, width)).hidden
    p = distribution(target.unembed(params, hidden), sampling)
    return Dice(seed_keys(seeds), jnp.ones(rows, jnp.int32)).tokens(p)


def is_drawn(chosen: Family, prompts, texts, settings=ROWS) -> None:
    """Every token of the texts is the draw of its position."""
    tokens = np.zeros((len(prompts), WIDTH), np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        tokens[row, : len(prompt) + len(text)] = prompt + text
    rows = [
        setting if setting.seed is not None else SamplingParams(setting.temperature, seed=0) for setting in settings
    ]
    drawn = np.asarray(draws(chosen.target, chosen.params, tokens, *jax.tree.map(jnp.asarray, packed(rows))))
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert drawn[row, len(prompt) - 1 :][: len(text)].tolist() == text, row


def decode(chosen: Family, prompts, truth, accept, block: int = BLOCK):
    drafter, known = scripted(chosen, block), script(truth, prompts, accept)
    return Decoder(chosen.target, chosen.params, drafter, known, rule=Match()).generate(prompts, TOKENS, sampling=ROWS)


def check_pathwise(chosen: Family, block: int = BLOCK) -> None:
    prompts = random_prompts(chosen, LENGTHS)
    alone = decode(chosen, prompts, [[0]] * 4, NOTHING_PROPOSED, block)
    assert alone.rounds == TOKENS - 1, "a token a round"
    if chosen.name in DRAWN_AGAIN:
        is_drawn(chosen, prompts, alone.tokens)
    for accept in SCRIPTS:
        out = decode(chosen, prompts, alone.tokens, accept, block)
        assert out.tokens == alone.tokens, accept
        assert accept != [[ALL]] or out.rounds == -(-(TOKENS - 1) // block), "all of each block stands"


@pytest.mark.parametrize("name", STEPS)
def test_B13_every_token_is_its_positions_draw(name: str) -> None:
    check_pathwise(family(name))


@pytest.mark.parametrize("block", [2, 3])
def test_B13_whatever_the_block_size(block: int) -> None:
    check_pathwise(family("qwen3-untied"), block)


def the_round_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    right = generate.spec_step

    def wrong(target, drafter, rule, params, draft_params, state):
        key = jax.vmap(jax.random.fold_in, (0, None))(state.key, state.rounds)
        return right(target, drafter, rule, params, draft_params, state.replace(key=key)).replace(key=state.key)

    monkeypatch.setattr(generate, "spec_step", wrong)


def the_place_in_the_block_is_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(dice, p):
        places = jnp.broadcast_to(jnp.arange(p.shape[1]), p.shape[:2])
        return sampling.argmax(sampling._scores(p, dice._keys(Stream.TOKEN, places)))

    monkeypatch.setattr(Dice, "tokens", wrong)


@pytest.mark.parametrize("mutate", [the_round_is_in_the_key, the_place_in_the_block_is_the_key])
def test_the_law_can_fail(mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    trace_anew(monkeypatch)
    chosen = family("qwen3-untied")
    prompts = random_prompts(chosen, LENGTHS)
    alone = decode(chosen, prompts, [[0]] * 4, NOTHING_PROPOSED, 3)
    with pytest.raises(AssertionError):
        assert decode(chosen, prompts, alone.tokens, [[1, 0, 2]], 3).tokens == alone.tokens


def test_the_truth_can_be_missed() -> None:
    chosen = family("qwen3-untied")
    prompts = random_prompts(chosen, LENGTHS)
    texts = decode(chosen, prompts, [[0]] * 4, NOTHING_PROPOSED).tokens
    for fault in (
        (*ROWS[:3], SamplingParams(1.2, seed=7 + 2**32)),
        (*ROWS[:3], SamplingParams(1.0, seed=7)),
        (*ROWS[:2], SamplingParams(1.2, seed=0), ROWS[3]),
    ):
        with pytest.raises(AssertionError):
            is_drawn(chosen, prompts, texts, fault)
