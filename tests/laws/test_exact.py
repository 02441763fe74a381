"""Lossless law, sampled: under every accept rule that claims it, a text has exactly the law of the target's own.

Nothing is sampled. Targets are tables of logits after every prefix; a round's drafts, coins and own tokens are all
enumerated with their probabilities, plain decoding goes on where the round ends early, and the law of n+1 tokens must
be the target's, by a definition of its own, to rounding. Rounds after the first follow by induction.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import accept
from dflash_jax.draft_tree import TreeMatch
from dflash_jax.protocols import AcceptRule, Draft, Verdict
from dflash_jax.rules import ACCEPT
from dflash_jax.sampling import distribution
from experiments.laboratory.plan import GREEDY_AT_ZERO
from tests.support.exact import TOLERANCE, check_law, deviation
from tests.support.loaded_dice import Round, of_probabilities, play
from tests.support.tables import SETTINGS, Cases, all_cases, dyadic_cases, logits_of

SHAPES = ((2, 2), (3, 0), (3, 1), (4, 3))
"""Vocabulary and drafts."""

LOSSLESS = [replace(rule, budget=3) if rule.budget else rule for rule in ACCEPT.values() if rule.lossless]
"""Of trees with few nodes: own tokens are enumerated at every one."""

LOSSY = [rule for rule in ACCEPT.values() if not rule.lossless]
DRAWN = [rule for rule in LOSSLESS if type(rule).choose is accept.DrawnDrafts.choose]

GREEDY = (SETTINGS["greedy"], (0.0, 0, 1.0, 0.0), (1e-6, -1, 1.0, 0.0))

POINTS = 16
"""Of the lattice of coins."""

PLAYED: dict[tuple, Round] = {}


def name_of(value) -> str:
    return getattr(value, "name", None) or "x".join(map(str, value))


def cases_of(rule: AcceptRule, shape, **options) -> Cases:
    """A rule that knows only the argmax is judged by greedy rows."""
    return all_cases(shape, **options) if rule.samples else all_cases(shape, GREEDY, **options)


def played(rule: AcceptRule, shape) -> Round:
    if (rule, shape) not in PLAYED:
        cases = cases_of(rule, shape)
        PLAYED[rule, shape] = check_law(play(rule, cases), cases)
    return PLAYED[rule, shape]


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("rule", LOSSLESS, ids=name_of)
def test_the_text_has_the_law_of_the_target(rule, shape) -> None:
    found = played(rule, shape)
    np.testing.assert_allclose(found.accepted().sum(1), 1, atol=TOLERANCE)


@pytest.mark.parametrize("rule", LOSSY, ids=name_of)
def test_a_lossy_rule_has_another_law(rule) -> None:
    cases = all_cases((3, 2), [SETTINGS["plain"]])
    found = play(rule, cases)
    assert not np.asarray(found.unfit).any()
    assert np.sort(deviation(found, cases))[-5] > 0.05


def proposed(cases: Cases) -> Cases:
    """Every case with every draft that can be proposed, one of "nothing" among its tokens, by a drafter without q."""
    count, vocabulary = cases.drafter.shape[1:]
    drafts = np.indices((vocabulary + 1,) * count).reshape(count, -1).T - 1
    each = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(drafts), axis=0), cases)
    return each.replace(drafts=jnp.asarray(np.tile(drafts, (len(cases.table), 1)), jnp.int32))


@pytest.mark.parametrize("rule", LOSSLESS, ids=name_of)
def test_whatever_is_proposed_and_be_it_nothing(rule) -> None:
    """Each draft on its own has the law, so any way to come by drafts has it."""
    cases = proposed(cases_of(rule, (3, 2)))
    check_law(play(rule, cases), cases)


@dataclass(frozen=True)
class Gaps:
    """A rule whose draft has a gap: nothing at one place, or a q that is no number and a token that it cannot have
    given."""

    rule: AcceptRule
    place: int
    broken: bool = False

    @property
    def name(self) -> str:
        return f"{self.rule.name} with a gap"

    def choose(self, dice, logits, sampling) -> Draft:
        draft = self.rule.choose(dice, logits, sampling)
        if self.broken:
            tokens = draft.tokens.at[:, self.place].set(0)
            return Draft(tokens=tokens, q=draft.q.at[:, self.place].set(jnp.nan))
        return replace(draft, tokens=draft.tokens.at[:, self.place].set(-1))

    def __call__(self, dice, draft, logits, sampling):
        return self.rule(dice, draft, logits, sampling)


@pytest.mark.parametrize("rule", DRAWN, ids=name_of)
@pytest.mark.parametrize(("place", "broken"), [(0, False), (1, True)])
def test_gaps_among_drawn_drafts(rule, place, broken) -> None:
    cases = all_cases((3, 2))
    check_law(play(Gaps(rule, place, broken), cases), cases)


def mean_accepted(found: Round) -> np.ndarray:
    law = found.accepted()
    return law @ np.arange(law.shape[1])


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
class TestAcceptedDrafts:
    def test_block_verification_accepts_no_fewer_than_rejection(self, shape) -> None:
        gain = mean_accepted(played(ACCEPT["block"], shape)) - mean_accepted(played(ACCEPT["rejection"], shape))
        assert (gain >= -TOLERANCE).all()
        assert shape[1] < 2 or gain.max() > 0.05
        assert shape[1] >= 2 or abs(gain).max() <= TOLERANCE, "a single draft is accepted as by rejection"

    def test_match_and_one_hot_accept_alike(self, shape) -> None:
        match, one_hot = (played(ACCEPT[name], shape).accepted() for name in ("match", "one_hot"))
        np.testing.assert_allclose(match, one_hot, atol=TOLERANCE)


def check_greedy(rule, shape) -> None:
    """However the dice fall, as many drafts are accepted as by greedy and the same tokens are said."""
    cases = all_cases(shape, GREEDY)
    found, wanted = play(rule, cases), play(ACCEPT["greedy"], cases)
    np.testing.assert_allclose(np.asarray(found.weight).sum((0, 1, 3)), 1, atol=TOLERANCE)
    possible, count = np.asarray(found.possible), np.asarray(wanted.count)
    assert (np.asarray(found.count) == count)[possible].all(), "other drafts are accepted"
    unsaid = np.arange(wanted.said.shape[-1]) >= count[..., None]
    same = (np.asarray(found.said) == np.asarray(wanted.said)) | unsaid
    assert same[possible].all(), "other tokens are said"


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("name", GREEDY_AT_ZERO)
def test_at_temperature_0_it_accepts_and_says_what_greedy_does(name: str, shape) -> None:
    check_greedy(ACCEPT[name], shape)


@dataclass(frozen=True)
class AnotherToken(accept.Match):
    """Accepts as greedy does and goes on with another token."""

    def __call__(self, dice, draft, logits, sampling) -> Verdict:
        verdict = super().__call__(dice, draft, logits, sampling)
        return verdict.replace(token=(verdict.token + 1) % logits.shape[-1])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ACCEPT["typical"], "other drafts are accepted"),
        (Gaps(ACCEPT["match"], 1), "other drafts are accepted"),  # fewer, and the same is said
        (AnotherToken(), "other tokens are said"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_another_rule_does_not_do_what_greedy_does(rule, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_greedy(rule, (3, 2))


def on_the_lattice(program, rule: AcceptRule, cases: Cases) -> Cases:
    """Those whose thresholds all are multiples of 1/POINTS."""
    found = program(rule, cases)
    steps, used = np.asarray(found.thresholds) * POINTS, np.asarray(found.possible).any((0, 1))
    exact = (np.abs(steps - np.round(steps)) < 1e-9).all(-1)
    return cases[np.flatnonzero((exact | ~used).all(1))]


@pytest.mark.parametrize("rule", [rule for rule in LOSSLESS if rule.samples], ids=name_of)
def test_coins_at_their_thresholds_and_0(rule, monkeypatch) -> None:
    """Coins of a lattice that has 0 and every threshold decide as the cell above each does."""
    program = of_probabilities(monkeypatch)
    cases = on_the_lattice(program, rule, dyadic_cases((3, 2), 400))
    assert len(cases.table) >= 20
    check_law(program(rule, cases, points=POINTS), logits_of(cases))


@dataclass(frozen=True)
class WrongBranch(TreeMatch):
    """A tree rule that takes a node for reached when its own draw fits, whatever became of its ancestors'."""

    def __call__(self, dice, draft, logits, sampling):
        if draft.tree is None:
            return super().__call__(dice, draft, logits, sampling)
        own = dice.tokens(distribution(logits, sampling), draft.tree.depth)
        fits = draft.tokens == jnp.take_along_axis(own, jnp.maximum(draft.tree.parent[:, 1:], 0), axis=1)
        fits = jnp.concatenate([jnp.ones_like(fits[:, :1]), fits], axis=1)
        reached = jnp.where(fits, draft.tree.depth, 0)
        path = jnp.argmax((reached[:, None] == jnp.arange(logits.shape[1])[:, None]) & fits[:, None], axis=-1)
        accepted = reached.max(1)
        last = jnp.take_along_axis(path, accepted[:, None], axis=1)
        token = jnp.take_along_axis(own, last, axis=1)[:, 0]
        return Verdict(accepted=accepted.astype(jnp.int32), token=token, path=path.astype(jnp.int32))


def test_the_law_of_a_tree_can_fail() -> None:
    cases = all_cases((3, 2), [SETTINGS["plain"]])
    with pytest.raises(AssertionError):
        check_law(play(WrongBranch(3), cases), cases)
