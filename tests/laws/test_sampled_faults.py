"""Faults of sampled decoding that others had, by case: sums of nothing, NaN, huge vocabularies, drawing twice."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl

from dflash_jax.accept import Block, Greedy, Match, residual
from dflash_jax.draft_tree import TreeMatch
from dflash_jax.generate import Decoder
from dflash_jax.protocols import Draft
from dflash_jax.rules import ACCEPT
from dflash_jax.sampling import Dice, Sampling, seed_keys
from dflash_jax.settings import SamplingParams
from tests.support.drafters import tiny_drafter
from tests.support.exact import check_law
from tests.support.families import family
from tests.support.loaded_dice import LoadedDice, play, told
from tests.support.oracle import ScriptedDrafter, script
from tests.support.reciter import Reciter
from tests.support.tables import Cases, conditionals, sampling_of, target_joint

LOSSLESS = [replace(rule, budget=3) if rule.budget else rule for rule in ACCEPT.values() if rule.lossless]
SAMPLED = [rule for rule in LOSSLESS if rule.samples]
named = partial(pytest.mark.parametrize, "rule", ids=lambda rule: rule.name)


def settings(rows: int, temperature: float = 1.0) -> Sampling:
    return sampling_of([(temperature, 0, 1.0, 0.0)] * rows)


def dice(rows: int, position=5) -> Dice:
    """Each row's own."""
    seeds = jnp.stack([jnp.zeros(rows, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], axis=1)
    return Dice(seed_keys(seeds), jnp.broadcast_to(jnp.asarray(position, jnp.int32), rows))


@named(LOSSLESS)
def test_B11_a_nothing_is_left_of_equal_certainties(rule) -> None:
    """p = q = certainty, and the largest coin: the residual sums to 0. A greedy row, and if it may be a sampled one."""
    sampling = sampling_of([(0.0, 0, 1.0, 0.0), (1.0 if rule.samples else 0.0, 0, 1.0, 0.0)])
    sure = jnp.broadcast_to(jnp.where(jnp.arange(6) == 0, 0.0, -jnp.inf).astype(jnp.float32), (2, 4, 6))
    assert rule.width(4) == 4

    @jax.jit
    def decide(tokens: jax.Array, coins: jax.Array):
        loaded = LoadedDice(written={"drafts": tokens[:, 1:], "coins": coins, "tokens": tokens, "token": tokens[:, 0]})
        draft = rule.choose(loaded, sure[:, 1:], sampling)
        verdicts = rule(loaded, draft, sure, sampling), rule(dice(2), draft, sure, sampling)
        return verdicts, {verb: of for verb, of in loaded.asked.items() if verb != "coins"}

    verdicts, asked = decide(jnp.zeros((2, 4), jnp.int32), jnp.full((2, 3), 1 - 2.0**-24, jnp.float32))
    for verdict in verdicts:
        assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([3, 3], [0, 0])
    for p in asked.values():
        np.testing.assert_array_equal(p, jnp.broadcast_to(jnp.arange(6) == 0, p.shape))


@named(SAMPLED)
def test_B11_b_a_drafter_of_nan_proposes_nothing(rule) -> None:
    """Its q is NaN, its proposal id 0, which the target all but never says."""
    rows, p = 4096, jnp.asarray([1e-22, 0.01, 0.01, 0.005, 0.005, 0.97])
    logits = jnp.broadcast_to(jnp.log(p).astype(jnp.float32), (rows, 2, 6))
    broken = jnp.full((rows, 1, 6), jnp.nan, jnp.float32)

    @jax.jit
    def decide(given: Draft):
        chosen = rule.choose(dice(rows), broken, settings(rows))
        return chosen, rule(dice(rows), given, logits, settings(rows))

    given = Draft(tokens=jnp.zeros((rows, 1), jnp.int32), q=broken)
    chosen, verdict = decide(given)
    assert (chosen.tokens <= 0).all() and (chosen.q is None or jnp.isnan(chosen.q).all())
    assert (verdict.accepted == 0).all()
    assert (verdict.token > 0).all()
    np.testing.assert_allclose(np.bincount(verdict.token, minlength=6) / rows, p, atol=2 / np.sqrt(rows))


VOCABULARY, ALIVE = 201_088, 1_000


def sparse(rng: np.random.Generator, vocabulary: int, alive: int) -> jax.Array:
    """A float32 distribution with this many ids of any mass."""
    p = np.zeros(vocabulary)
    p[rng.choice(vocabulary, alive, replace=False)] = rng.exponential(size=alive)
    return jnp.asarray(p / p.sum(), jnp.float32)


@partial(jax.jit, static_argnames="turns")
def dead_ids_drawn(keys: jax.Array, p: jax.Array, turns: int) -> jax.Array:
    """How many of rows * turns draws from p, one after another, have no mass there."""

    def turn(dead: jax.Array, position: jax.Array):
        at = Dice(keys, jnp.broadcast_to(position, keys.shape))
        drawn = at.token(jnp.broadcast_to(p, (*keys.shape, *p.shape)), jnp.zeros(keys.shape, jnp.int32))
        return dead + (p[drawn] == 0).sum(), None

    return jax.lax.scan(turn, jnp.zeros((), int), jnp.arange(turns, dtype=jnp.int32))[0]


@pytest.mark.parametrize("source", ["p", "residual"])
def test_B11_c_no_id_without_mass_is_drawn(source) -> None:
    """A million draws; on a CPU, where they would take hours, of a small vocabulary, and a few of the whole one."""
    rng = np.random.default_rng(7)
    whole = (VOCABULARY, ALIVE)
    sizes = [(*whole, 1_000_000)] if jax.default_backend() != "cpu" else [(*whole, 64), (12, 3, 1_000_000)]
    for vocabulary, alive, draws in sizes:
        p = sparse(rng, vocabulary, alive)
        if source == "residual":
            p = residual(p[None], sparse(rng, vocabulary, alive)[None])[0]
        rows = min(draws, 2**22 // vocabulary)
        assert dead_ids_drawn(dice(rows).key, p, -(-draws // rows)) == 0


def test_B11_c_no_random_bits_draw_an_id_without_mass() -> None:
    """Whatever the bits are: the noise is finite at their ends, so the score of such an id is -inf and not NaN."""
    ends = jnp.asarray([0, 1, 2**9, 2**31 - 1, 2**31, 2**32 - 2**9, 2**32 - 1], jnp.uint32)
    vocabulary = len(ends) ** 2

    def bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        """Every pair of ends for the high and low half of a number; a key's first word moves them on."""
        place = jnp.arange(np.prod(shape)).reshape(shape)
        first, second = place % len(ends), place % vocabulary // len(ends)
        return ends[(jnp.where(place < vocabulary, first, second) + key[0].astype(int)) % len(ends)]

    scripted = define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.asarray([seed], jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
        random_bits=bits,
        fold_in=lambda key, data: key,
        name="ends",
    )
    keys = jax.random.wrap_key_data(jnp.arange(len(ends), dtype=jnp.uint32)[:, None], impl=scripted)
    p = jnp.where(jnp.arange(vocabulary) % 5 == 0, 1e-6, 0).astype(jnp.float32)
    scores = Dice(keys, jnp.zeros(len(ends), jnp.int32)).scores(jnp.broadcast_to(p, (len(ends), 2, vocabulary)))
    np.testing.assert_array_equal(jnp.isneginf(scores), jnp.broadcast_to(p == 0, scores.shape))
    assert jnp.isfinite(jnp.where(p > 0, scores, 0)).all()


def test_B11_d_a_row_of_nan_is_broken_and_its_neighbours_are_not() -> None:
    """The embedding of one token is NaN, and rows 0 (greedy) and 2 (sampled) have heard it; nobody says it."""
    chosen, (drafter, draft_params) = family("gpt_oss-split"), tiny_drafter("mixed", "gpt_oss-split", block_size=3)
    poison = chosen.target.config.vocab_size - 1
    target, embed = replace(chosen.target, tokens=poison), chosen.params["embed"]
    rows = [SamplingParams()] * 2 + [SamplingParams(0.9, top_p=0.9, seed=seed) for seed in range(3)]
    prompts = [[8, poison], [2, 3, 4], [poison, 7, 8, 9], [5, 1, 7, 3], [2, 3]]

    def decode(params):
        return Decoder(target, params, drafter, draft_params, Block()).generate(prompts, 20, sampling=rows)

    well, sick = decode(chosen.params), decode(chosen.params | {"embed": embed.at[poison].set(jnp.nan)})
    assert well.finish == ["length"] * 5
    assert sick.finish == ["broken", "length", "broken", "length", "length"]
    assert sick.tokens == [[], well.tokens[1], [], *well.tokens[3:]]


@pytest.mark.parametrize("accept", [[[7]], [[0]], [[2, 7]]], ids=["one block", "a token a round", "mid-block"])
@pytest.mark.parametrize("rule", [Greedy(), Match(), Block(), TreeMatch(12)], ids=lambda rule: rule.name)
def test_B11_d_what_was_sound_is_delivered(rule, accept) -> None:
    """A row says what plain decoding says before it is sick, and ends as it does if it ends before."""
    text, vocab = tuple(range(2, 22)), 32
    knows = script([list(text[1:])], [[text[0]]], accept)
    decoder = Decoder(Reciter(text, vocab, sick=6), None, ScriptedDrafter(8, vocab), knows, rule=rule)
    for budget, stop, finish in ((15, (), "broken"), (15, (text[4],), "stop"), (5, (), "length"), (6, (), "length")):
        out = decoder.generate([[text[0]]], budget, stop, logprobs=1)
        said = 4 if finish == "stop" else min(budget, 6)
        assert (out.tokens[0], out.finish[0]) == (list(text[1 : said + 1]), finish)
        assert out.counts.sum() == said - 1 and ((out.counts > 0) == (out.accepted >= 0)).all()
        assert np.isfinite(out.logprobs[0].said).all()


CHAIN = np.random.default_rng(12).normal(size=(5, 4)) * 1.2
"""Logits of a chain over 4 tokens: of the first one, and after each token."""

DRAFTERS = {"good": CHAIN[0] + 0.3, "bad": -2 * CHAIN[0]}
"""What a drafter thinks of every place."""


def known_joint() -> np.ndarray:
    """Of the first two tokens at T = 0.7, ``[16]``."""
    p = np.exp(CHAIN / 0.7) / np.exp(CHAIN / 0.7).sum(1, keepdims=True)
    return (p[0][:, None] * p[1:]).ravel()


@named(SAMPLED)
@pytest.mark.parametrize("block", [2, 4])
def test_B12_exact_joint_of_two_tokens(rule, block) -> None:
    """Argmax drafts and "accept if it is the target's own sample" among the rules: none is biased."""
    last = [0, *(token + 1 for length in range(1, block) for _ in range(4 ** (length - 1)) for token in range(4))]
    table = jnp.asarray(np.broadcast_to(CHAIN[last], (2, len(last), 4)))
    drafter = jnp.asarray(np.stack([np.tile(of, (block - 1, 1)) for of in DRAFTERS.values()]))
    cases = Cases(table, drafter, settings(2, 0.7))
    found = check_law(play(rule, cases), cases)
    pairs = target_joint(conditionals(cases)).reshape(2, 16, -1).sum(-1)
    np.testing.assert_allclose(pairs, np.tile(known_joint(), (2, 1)), rtol=1e-6)
    good, bad = found.accepted() @ np.arange(block)
    assert good > bad + 0.1


@partial(jax.jit, static_argnames=("rule", "block"))
def two_tokens(rule, block: int, chain: jax.Array, drafter: jax.Array, runs: Dice) -> jax.Array:
    """Of every run the first two tokens, by a round and, where that says but one, plain decoding; as one number."""
    rows, sampling = len(runs.position), settings(len(runs.position), 0.7)
    draft = rule.choose(runs, jnp.broadcast_to(drafter, (rows, block - 1, 4)), sampling)
    heard = jnp.pad(draft.tokens + 1, ((0, 0), (1, 0)))
    verdict = rule(runs, draft, chain[heard], sampling)
    said = told(draft, verdict, block)
    none, later = Draft(tokens=jnp.zeros((rows, 0), jnp.int32)), Dice(runs.key, runs.position + verdict.accepted + 1)
    second = rule(later, none, chain[verdict.token[:, None] + 1], sampling).token
    return said[:, 0] * 4 + jnp.where(verdict.accepted > 0, said[:, 1], second)


REAL = [(rule, 4, 100_000) for rule in SAMPLED if rule.name != "match"]
REAL += [(ACCEPT["match"], block, 400_000) for block in (2, 4)]
"""Runs with real dice: all of the rule that the reports are about."""


@pytest.mark.parametrize(("rule", "block", "runs"), REAL, ids=lambda value: getattr(value, "name", str(value)))
def test_B12_joint_of_two_tokens_by_the_real_dice(rule, block, runs) -> None:
    for drafter in DRAFTERS.values():
        found = two_tokens(rule, block, *(jnp.asarray(of, jnp.float32) for of in (CHAIN, drafter)), dice(runs))
        share, p = np.bincount(found, minlength=16) / runs, known_joint()
        off = (share - p) / np.sqrt(p * (1 - p) / runs)
        assert (abs(off) < 4).all(), off
