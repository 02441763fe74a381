"""The lossy rules accept what their definitions say, by tables worked out by hand, and say the target's own token next.

Whether these tables tell a rule from a wrong one is shown by wrong ones, each of which must fail.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.accept import at_tokens, leading
from dflash_jax.protocols import Draft, Verdict
from dflash_jax.relaxed import Threshold, TopKRelaxed, Typical, opinion
from dflash_jax.sampling import distribution
from tests.support.loaded_dice import LoadedDice
from tests.support.tables import sampling_of

A_LITTLE = 2.0**-20

HALVES = (0.5, 0.25, 0.125, 0.125)
"""1.75 bits of entropy, so exp(-H) = 2**-1.75 = 0.297; in bits it would be exp(-1.75) = 0.174."""

NEAR = (0.5, 0.25 + A_LITTLE, 0.25 - A_LITTLE, 0.0)
TIED = (0.375, 0.375, 0.125, 0.125)
SURE = (1.0, 0.0, 0.0, 0.0)
"""H = 0, exp(-H) = 1."""

FLAT = (0.25, 0.25, 0.25, 0.25)
"""exp(-H) = 0.25."""

TABLES = {
    Typical: [
        ({}, HALVES, [True] * 4),  # min(0.09, 0.3 * 0.297)
        ({}, FLAT, [True] * 4),
        ({}, SURE, [True, False, False, False]),
        (dict(epsilon=0.25, delta=1.0), NEAR, [True, True, False, False]),
        (dict(epsilon=0.25, delta=1.0), HALVES, [True, False, False, False]),  # 0.25 is at the bound
        (dict(epsilon=0.125, delta=1.0), HALVES, [True, True, False, False]),
        (dict(epsilon=0.25, delta=0.5), HALVES, [True, True, False, False]),  # 0.149
        (dict(epsilon=0.25, delta=0.25), HALVES, [True] * 4),  # 0.074
        (dict(epsilon=1.0, delta=1.0), HALVES, [True, False, False, False]),  # 0.297
        (dict(epsilon=1.0, delta=0.4), HALVES, [True, True, True, True]),  # 0.119
        (dict(epsilon=1.0, delta=0.45), HALVES, [True, True, False, False]),  # 0.134
        (dict(epsilon=1.0, delta=1.0), SURE, [False] * 4),
        (dict(epsilon=0.0, delta=1.0), SURE, [True, False, False, False]),
        (dict(epsilon=1.0, delta=0.0), HALVES, [True] * 4),
    ],
    Threshold: [
        ({}, HALVES, [True, False, False, False]),
        (dict(least=0.25), NEAR, [True, True, False, False]),
        (dict(least=0.25), HALVES, [True, True, False, False]),
        (dict(least=0.5), HALVES, [True, False, False, False]),
        (dict(least=1.0), SURE, [True, False, False, False]),
        (dict(least=0.0), SURE, [True] * 4),
    ],
    TopKRelaxed: [
        ({}, HALVES, [True] * 4),
        ({}, (0.75, 0.125, 0.125, 0.0), [True, False, False, False]),
        (dict(delta=0.25), NEAR, [True, True, False, False]),
        (dict(delta=0.25), HALVES, [True, True, False, False]),
        (dict(delta=0.0), HALVES, [True, False, False, False]),
        (dict(delta=0.0), TIED, [True, True, False, False]),
        (dict(k=1, delta=1.0), HALVES, [True, False, False, False]),
        (dict(k=1, delta=1.0), TIED, [True, True, False, False]),  # both are the best
        (dict(k=2, delta=1.0), HALVES, [True, True, False, False]),
        (dict(k=2, delta=1.0), TIED, [True, True, False, False]),
        (dict(k=3, delta=1.0), HALVES, [True] * 4),  # as likely as the third
        (dict(k=3, delta=0.25), HALVES, [True, True, False, False]),
        (dict(k=10, delta=1.0), SURE, [True] * 4),  # be it impossible
    ],
}
"""Rule -> its parameters, p, and which of the tokens stand."""


def check_stands(kind: type, rule: type) -> None:
    """By exact probabilities: no softmax rounds them."""
    for parameters, p, stands in TABLES[kind]:
        found = rule(**parameters).stands(jnp.tile(jnp.asarray(p), (1, 4, 1)), jnp.arange(4)[None])
        assert found[0].tolist() == stands, f"{parameters} {p}"


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.name)
def test_below_at_and_above_the_bound(kind: type) -> None:
    check_stands(kind, kind)


LN2 = np.log(2)


def entropy(p):
    return -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0).sum(-1)


def bound(rule: Typical, p):
    return jnp.minimum(rule.epsilon, rule.delta * jnp.exp(-entropy(p)))


def better(p, mine):
    return (p > mine[..., None]).sum(-1)


def near(rule: TopKRelaxed, p, mine):
    return mine >= p.max(-1) - rule.delta


RIGHT = {
    Typical: lambda rule, p, mine: mine > bound(rule, p),
    Threshold: lambda rule, p, mine: mine >= rule.least,
    TopKRelaxed: lambda rule, p, mine: (better(p, mine) < rule.k) & near(rule, p, mine),
}

WRONG = {
    "the larger bound": (Typical, lambda r, p, mine: mine > jnp.maximum(r.epsilon, r.delta * jnp.exp(-entropy(p)))),
    "epsilon alone": (Typical, lambda r, p, mine: mine > r.epsilon),
    "the entropy's bound alone": (Typical, lambda r, p, mine: mine > r.delta * jnp.exp(-entropy(p))),
    "exp(+H)": (Typical, lambda r, p, mine: mine > jnp.minimum(r.epsilon, r.delta * jnp.exp(entropy(p)))),
    "H in bits": (Typical, lambda r, p, mine: mine > jnp.minimum(r.epsilon, r.delta * jnp.exp(-entropy(p) / LN2))),
    "at typical's bound": (Typical, lambda r, p, mine: mine >= bound(r, p)),
    "below typical's bound": (Typical, lambda r, p, mine: mine < bound(r, p)),
    "above the threshold only": (Threshold, lambda r, p, mine: mine > r.least),
    "below the threshold": (Threshold, lambda r, p, mine: mine <= r.least),
    "k is ignored": (TopKRelaxed, near),
    "one more than k": (TopKRelaxed, lambda r, p, mine: (better(p, mine) <= r.k) & near(r, p, mine)),
    "ties take a place of the k": (
        TopKRelaxed,
        lambda r, p, mine: ((p >= mine[..., None]).sum(-1) <= r.k) & near(r, p, mine),
    ),
    "delta is ignored": (TopKRelaxed, lambda r, p, mine: better(p, mine) < r.k),
    "nearer than delta": (TopKRelaxed, lambda r, p, mine: (better(p, mine) < r.k) & (mine > p.max(-1) - r.delta)),
    "delta as a share": (TopKRelaxed, lambda r, p, mine: (better(p, mine) < r.k) & (mine >= p.max(-1) * r.delta)),
}


def judging_by(kind: type, judge) -> type:
    """The rule with another ``stands``, of itself, p and the probabilities of the drafts."""
    return type("Judging", (kind,), {"stands": lambda self, p, tokens: judge(self, p, at_tokens(p, tokens))})


@pytest.mark.parametrize(("kind", "judge"), WRONG.values(), ids=WRONG)
def test_a_wrong_comparison_is_noticed(kind: type, judge) -> None:
    with pytest.raises(AssertionError):
        check_stands(kind, judging_by(kind, judge))


@pytest.mark.parametrize(("kind", "judge"), RIGHT.items(), ids=lambda kind: getattr(kind, "name", ""))
def test_the_right_one_written_out_passes(kind: type, judge) -> None:
    check_stands(kind, judging_by(kind, judge))


PLAIN, GREEDY, COOL = (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0)
TOP_K, TOP_P, MIN_P = (1.0, 1, 1.0, 0.0), (1.0, 0, 0.4, 0.0), (1.0, 0, 1.0, 0.6)

OPINIONS = {
    PLAIN: ([1, 1, 0, 0], HALVES),
    GREEDY: ([1, 1, 0, 0], SURE),  # judged at temperature 1
    COOL: ([1, 0, 0, 0], (16 / 22, 4 / 22, 1 / 22, 1 / 22)),
    TOP_K: ([1, 0, 0, 0], SURE),
    TOP_P: ([1, 0, 0, 0], SURE),
    MIN_P: ([1, 0, 0, 0], SURE),
}
"""Settings; with them and ``HALVES``: of a draft that is token 0, 1, 2 or 3, how many are accepted; and what the
target's own token is drawn from."""

SURELY = np.full((4, 4), 0.0625) + 0.75 * np.eye(4)
"""At place j token j is the one that stands."""

DRAFTS = {(0, 1, 2): 3, (1, 1, 2): 0, (0, 2, 2): 1, (0, 1, 3): 2, (-1, 1, 2): 0, (0, -1, 2): 1, (3, 3, 3): 0}
"""Three drafts -> how many are accepted."""

SAID = 10 * np.arange(len(DRAFTS), dtype=np.int32)[:, None] + np.arange(4, dtype=np.int32)
"""What the dice say at each place, another token everywhere."""

RULES = [Typical(epsilon=0.2, delta=1.0), Threshold(0.2), TopKRelaxed(delta=0.26)]
"""Of one mind about all rows of ``OPINIONS`` and ``DRAFTS``."""


@partial(jax.jit, static_argnames="rule")
def judged(rule, p, drafts, sampling, said) -> tuple[Verdict, jax.Array]:
    """The verdict on drafts ``[B drafts]``, every row with ``p`` ``[P V]``; and what own tokens were drawn from."""
    dice, logits = LoadedDice(written={"tokens": said}), jnp.tile(jnp.log(p), (len(drafts), 1, 1))
    return rule(dice, Draft(drafts), logits, sampling), dice.asked["tokens"]


def check_opinions(rule) -> None:
    """One draft a row, each row under its own settings."""
    rows = [(settings, token) for settings in OPINIONS for token in range(4)]
    settings, tokens = zip(*rows, strict=True)
    drafts, said = np.array(tokens, np.int32)[:, None], np.zeros((len(rows), 2), np.int32)
    found, drawn = judged(rule, np.array([HALVES, HALVES]), drafts, sampling_of(settings), said)
    assert found.accepted.tolist() == [OPINIONS[settings][0][token] for settings, token in rows]
    own = np.array([[OPINIONS[settings][1]] * 2 for settings, _ in rows])
    np.testing.assert_allclose(drawn, own, atol=1e-15, err_msg="own tokens are drawn from another p")


def check_drafts(rule, cases: dict[tuple, int] = DRAFTS) -> None:
    """Three drafts a row."""
    sampling, drafts = sampling_of([PLAIN] * len(cases)), np.array([*cases], np.int32)
    found, _ = judged(rule, SURELY, drafts, sampling, SAID[: len(cases)])
    assert found.accepted.tolist() == [*cases.values()]
    assert found.token.tolist() == [SAID[row, place] for row, place in enumerate(cases.values())]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
class TestVerdicts:
    def test_by_the_opinion_of_the_row(self, rule) -> None:
        check_opinions(rule)

    def test_leading_drafts_stand_and_the_own_token_of_the_next_place_follows(self, rule) -> None:
        check_drafts(rule)


NOTHING = {(-1, 1, 2): 0, (0, -1, 2): 1, (1, 0, -1): 2}


@pytest.mark.parametrize("rule", [Threshold(0.0), TopKRelaxed(delta=1.0)], ids=lambda rule: rule.name)
def test_nothing_is_accepted_where_nothing_is_proposed(rule) -> None:
    """Not even by a rule that accepts every token, be its probability 0."""
    check_drafts(rule, NOTHING)


@dataclass(frozen=True)
class Faulty(Threshold):
    """The threshold rule written out, with a place for every fault."""

    fault: str = ""

    def __call__(self, dice, draft, logits, sampling) -> Verdict:
        judge = opinion(logits, sampling)
        if self.fault == "greedy rows are judged by their certainty":
            judge = distribution(logits, sampling)
        elif self.fault == "judged at temperature 1 whatever the row's":
            judge = opinion(logits, sampling.replace(temperature=jnp.ones_like(sampling.temperature)))
        elif self.fault in ("top_k", "top_p", "min_p"):
            none = {"top_k": 0, "top_p": 1, "min_p": 0}[self.fault]
            value = jnp.full_like(getattr(sampling, self.fault), none)
            judge = opinion(logits, sampling.replace(**{self.fault: value}))
        place = slice(1, None) if self.fault == "judged by the place after" else slice(None, -1)
        stands = self.stands(judge[:, place], draft.tokens)
        if self.fault != "nothing is taken for a draft":
            stands &= draft.tokens >= 0
        accepted = leading(stands)
        if self.fault == "drafts after one that fell count":
            accepted = stands.sum(1, dtype=jnp.int32)
        own = dice.tokens(judge if self.fault == "draws from its opinion" else distribution(logits, sampling))
        at = jnp.maximum(accepted - 1, 0) if self.fault == "the own token of the place before" else accepted
        return Verdict(accepted=accepted, token=jnp.take_along_axis(own, at[:, None], axis=1)[:, 0])


FAULTS = {
    "greedy rows are judged by their certainty": check_opinions,
    "judged at temperature 1 whatever the row's": check_opinions,
    **dict.fromkeys(("top_k", "top_p", "min_p"), check_opinions),
    "draws from its opinion": check_opinions,
    "judged by the place after": check_drafts,
    "drafts after one that fell count": check_drafts,
    "the own token of the place before": check_drafts,
}


@pytest.mark.parametrize(("fault", "check"), FAULTS.items(), ids=lambda fault: fault if isinstance(fault, str) else "")
def test_a_wrong_verdict_is_noticed(fault: str, check) -> None:
    with pytest.raises(AssertionError):
        check(Faulty(0.2, fault))


def test_a_draft_of_nothing_that_is_accepted_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_drafts(Faulty(0.0, "nothing is taken for a draft"), NOTHING)


def test_verdicts_without_a_fault_pass() -> None:
    check_opinions(Faulty(0.2))
    check_drafts(Faulty(0.2))
    check_drafts(Faulty(0.0), NOTHING)


@pytest.mark.parametrize(
    ("kind", "name"), [(Typical, "epsilon"), (Typical, "delta"), (Threshold, "least"), (TopKRelaxed, "delta")]
)
class TestParameters:
    @pytest.mark.parametrize("value", [-1e-9, 1.001, float("inf"), float("nan")])
    def test_out_of_range_is_refused(self, kind: type, name: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"^{name} {value}: expected a number from 0 to 1"):
            kind(**{name: value})

    @pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
    def test_both_ends_are_in_range(self, kind: type, name: str, value: float) -> None:
        assert getattr(kind(**{name: value}), name) == value


@pytest.mark.parametrize("k", [0, -1])
def test_fewer_than_one_likeliest_token_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"^k {k}: expected 1 or more tokens"):
        TopKRelaxed(k=k)
    assert TopKRelaxed(k=1).k == 1
