"""The figures of the accept-rule laboratory by hand: drafts among tokens, how far they stray, quotients and errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.generate import Decoder
from dflash_jax.settings import SamplingParams
from experiments.arguments import Args
from experiments.laboratory.judge import drafted, opinion_of, straying_of
from experiments.laboratory.rows import perplexity_change, quotient
from experiments.pair import Pair, load_pair
from experiments.plan import prepare
from tests.experiments.random_pair import write_random_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    target, draft = write_random_pair(tmp_path_factory.mktemp("pairs"))
    plan = prepare(Args(target=target, draft=draft, max_samples=1))
    return load_pair(plan.folders, plan.tokenizer, dtype="float32", experts=None)


def test_which_tokens_are_drafts():
    """Rounds of two drafts and the own token; of none; of four drafts cut after three; and a row that is done."""
    counts, accepted = np.array([3, 1, 3, 0]), np.array([2, 0, 4, -1])
    marks = [False, True, True, False, False, True, True, True]
    assert drafted(counts, accepted).tolist() == marks


def test_total_variation_and_divergence_by_hand():
    """Drafts of p 1/2 and 1/4 among five tokens: TV 1/2 + 3/4, KL log 2 + log 4."""
    p = np.array([0.9, 0.5, 0.1, 0.25, 0.3])
    found = straying_of(p, np.array([False, True, False, True, False]))
    assert found.total_variation == pytest.approx(1.25)
    assert found.kl == pytest.approx(math.log(8))
    assert straying_of(p, np.zeros(5, bool)).kl == 0
    assert straying_of(np.array([0.0]), np.array([True])).kl == math.inf


def test_those_figures_are_the_distances_of_the_two_laws():
    """Half the sum of absolute differences, and the divergence, between certainty of d and p."""
    p, d = np.array([0.2, 0.5, 0.3]), 2
    said = np.eye(3)[d]
    found = straying_of(p[[d]], np.array([True]))
    assert found.total_variation == pytest.approx(0.5 * np.abs(said - p).sum())
    assert found.kl == pytest.approx((said[d] * np.log(said[d] / p[d])).sum())


def test_an_opinion_is_the_target_s(pair):
    """Probabilities and surprise of a long text, against one forward pass over all of it."""
    prompt, text = [3, 250, 7], np.random.default_rng(0).integers(0, 250, 150).tolist()
    setting = SamplingParams(temperature=0.7, top_k=40, seed=1)
    found = opinion_of(pair.plain, prompt, text, setting)
    row = jnp.array([[*prompt, *text[:-1]]])
    cache = pair.target.init_cache(1, 256, row.shape[1] + 1)
    whole = jax.jit(lambda params, row, cache: pair.target.unembed(params, pair.target.step(params, row, cache).hidden))
    logits = whole(pair.params, row, cache)[0, len(prompt) - 1 :]
    logits = np.asarray(logits, float)
    direct = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(text)), text]
    np.testing.assert_allclose(found.surprise, direct, rtol=2e-4, atol=2e-4)
    sharp = logits / 0.7
    for place in (0, 127, 149):
        kept = np.sort(sharp[place])[-40:]
        wanted = np.exp(sharp[place, text[place]]) / np.exp(kept).sum() * (sharp[place, text[place]] >= kept[0])
        assert found.p[place] == pytest.approx(wanted, rel=1e-3, abs=1e-9)


def test_greedy_texts_are_certain(pair):
    """Every token of plain greedy text has probability 1, any other 0."""
    plain = Decoder(pair.target, pair.params)
    (text,) = plain.generate([[5, 6]], 12).tokens
    assert opinion_of(plain, [5, 6], text, SamplingParams()).p.tolist() == [1.0] * 12
    other = [*text[:-1], (text[-1] + 1) % 250]
    assert opinion_of(plain, [5, 6], other, SamplingParams()).p[-1] == 0


def test_a_quotient_and_its_error():
    """Texts of 4/2, 6/2 and 5/2: 2.5, and deviations -1, 1, 0 over 6."""
    value, error = quotient(np.array([4.0, 6.0, 5.0]), np.array([2.0, 2.0, 2.0]))
    assert value == 2.5
    assert error == pytest.approx(math.sqrt(3 / 2 * 2) / 6)
    assert np.isnan(quotient(np.array([4.0]), np.array([2.0]))[1])
    assert np.isnan(quotient(np.zeros(2), np.zeros(2))).all()


def test_perplexity_change_by_hand():
    """Mean surprise log 2 against log 4: half the perplexity; equal texts leave no error."""

    class Told:
        def __init__(self, *surprise: float):
            self.surprise, self.lengths = surprise, np.array([2, 2])

        def by_prompt(self, values):
            return np.array(values, float)

    change, _ = perplexity_change(Told(2 * math.log(2), 2 * math.log(2)), Told(math.log(4), 3 * math.log(4)))
    assert change == pytest.approx(-0.5)
    assert perplexity_change(Told(1.0, 3.0), Told(1.0, 3.0)) == (0, 0)
