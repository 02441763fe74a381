"""The exact law fails for rules with one thing wrong, and holds for the same code with nothing wrong."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.accept import (
    Block,
    Match,
    Rejection,
    argmax_draft,
    at_place,
    at_tokens,
    drawn_from,
    excess,
    leading,
    residual,
)
from dflash_jax.protocols import Draft, Verdict
from dflash_jax.sampling import distribution
from tests.support.exact import check_law, deviation
from tests.support.loaded_dice import of_probabilities, play
from tests.support.tables import SETTINGS, all_cases, dyadic_cases, logits_of

SHAPE = (3, 2)


def without_top_p(sampling):
    return sampling.replace(top_p=jnp.ones_like(sampling.top_p))


@dataclass(frozen=True)
class WrongRejection(Rejection):
    """Rejection, written out once more with a place for every fault."""

    fault: str = ""

    def choose(self, dice, logits, sampling) -> Draft:
        if self.fault == "argmax drafts, the whole softmax as q":
            return Draft(argmax_draft(logits).tokens, jax.nn.softmax(logits / sampling.temperature[:, None, None]))
        q = distribution(logits, sampling)
        drafts = dice.drafts(q)
        if self.fault == "raw q of a filtered draw":
            q = jax.nn.softmax(logits, axis=-1)
        return Draft(drafts, q)

    def __call__(self, dice, draft, logits, sampling) -> Verdict:
        p, (tokens, q) = distribution(logits, sampling), drawn_from(draft, logits)
        judge = distribution(logits, without_top_p(sampling)) if self.fault == "top-p missing in p's chance" else p
        mine, theirs = at_tokens(judge[:, :-1], tokens), at_tokens(q[:, :-1], tokens)
        coins = dice.coins(tokens.shape[1], p.dtype)
        stands = coins * theirs <= mine if self.fault == "a coin may equal its threshold" else coins * theirs < mine
        accepted = leading(stands)
        if self.fault == "counts drafts after a rejection":
            accepted = stands.sum(1, dtype=jnp.int32)
        place = jnp.maximum(accepted - 1, 0) if self.fault == "bonus of the row before" else accepted
        rest = residual(at_place(p, place), at_place(q, accepted))
        if self.fault == "p instead of the residual":
            rest = at_place(p, accepted)
        return Verdict(accepted=accepted, token=dice.token(rest, accepted))


@dataclass(frozen=True)
class WrongBlock(Block):
    """Block verification, written out by loops, with a place for every fault."""

    fault: str = ""

    def __call__(self, dice, draft, logits, sampling) -> Verdict:
        p, (tokens, q) = distribution(logits, sampling), drawn_from(draft, logits)
        mine, theirs, count = at_tokens(p[:, :-1], tokens), at_tokens(q[:, :-1], tokens), tokens.shape[1]
        coins, weight, accepted = dice.coins(count, p.dtype), jnp.ones(len(tokens)), jnp.zeros(len(tokens), jnp.int32)
        kept = weight
        for at in range(count):
            ratio = jnp.where(theirs[:, at] > 0, mine[:, at] / theirs[:, at], 0)
            weight = jnp.minimum(weight * ratio, 1)
            mass = excess(weight[:, None] * p[:, at + 1], q[:, at + 1]).sum(-1)
            chance = jnp.where(weight >= 1, 1, mass / (mass + 1 - weight))
            if self.fault == "chance without R" or at + 1 == count:
                chance = weight
            stands = coins[:, at] < chance
            accepted = jnp.where(stands, at + 1, accepted)
            kept = jnp.where(stands, weight, kept)
        if self.fault == "residual without the weight":
            kept = jnp.ones_like(kept)
        rest = residual(kept[:, None] * at_place(p, accepted), at_place(q, accepted))
        return Verdict(accepted=accepted, token=dice.token(rest, accepted))


@dataclass(frozen=True)
class WrongMatch(Match):
    """Matching that, at a mismatch, does not say the token that mismatched but draws again."""

    fault: str = ""

    def choose(self, dice, logits, sampling) -> Draft:
        return Draft(argmax_draft(logits).tokens, distribution(logits, sampling))

    def __call__(self, dice, draft, logits, sampling) -> Verdict:
        p, verdict = distribution(logits, sampling), super().__call__(dice, draft, logits, sampling)
        q = draft.q if self.fault == "draws again from (p - q)+" else None
        _, q = drawn_from(Draft(draft.tokens, q), logits)
        rest = at_place(p, verdict.accepted)
        if self.fault != "draws again from p":
            rest = residual(rest, at_place(q, verdict.accepted))
        again = dice.drafts(rest[:, None])[:, 0]  # a stream of its own
        return Verdict(verdict.accepted, jnp.where(verdict.accepted < draft.tokens.shape[1], again, verdict.token))


FAULTS = [
    WrongRejection(fault="raw q of a filtered draw"),
    WrongRejection(fault="top-p missing in p's chance"),
    WrongRejection(fault="argmax drafts, the whole softmax as q"),
    WrongRejection(fault="counts drafts after a rejection"),
    WrongRejection(fault="bonus of the row before"),
    WrongRejection(fault="p instead of the residual"),
    WrongBlock(fault="chance without R"),
    WrongBlock(fault="residual without the weight"),
    WrongMatch(fault="draws again from p"),
    WrongMatch(fault="draws again from (p - q)+"),
]

FILTERED = ("top-k and top-p", "all", "plain")


def cases():
    return all_cases(SHAPE, [SETTINGS[name] for name in FILTERED])


@pytest.mark.parametrize("rule", FAULTS, ids=lambda rule: rule.fault)
def test_a_fault_breaks_the_law(rule) -> None:
    found = play(rule, cases())
    assert not np.asarray(found.unfit).any()
    assert np.sort(np.nan_to_num(deviation(found, cases()), nan=1))[-5] > 1e-3
    with pytest.raises(AssertionError, match=r"laws are wrong|is said"):
        check_law(found, cases())


@pytest.mark.parametrize("rule", [WrongRejection(), WrongBlock(), WrongMatch()], ids=lambda rule: type(rule).__name__)
def test_without_a_fault_the_law_holds(rule) -> None:
    """Nor is it one to draw any token but the draft at a mismatch: that is rejection of a certain draft."""
    check_law(play(rule, cases()), cases())


def test_a_coin_that_may_equal_its_threshold_breaks_the_law(monkeypatch) -> None:
    """A coin of 0 then accepts what the target never says; no cell has that coin, the lattice does."""
    wrong = WrongRejection(fault="a coin may equal its threshold")
    dyadic = dyadic_cases(SHAPE, 200)
    with pytest.raises(AssertionError, match="laws are wrong"):
        check_law(of_probabilities(monkeypatch)(wrong, dyadic, points=8), logits_of(dyadic))
    with pytest.raises(AssertionError, match="is said"):
        check_law(play(wrong, cases()), cases())
