"""Dice whose every outcome is written beforehand, and a round of an accept rule under all of them.

A rule asks its dice for drafts, coins and tokens of the target's own. :class:`LoadedDice` answer what they are told to
and keep what they were to draw from, so that each outcome has an exact probability: a draft's by the recorded q, an own
token's by the recorded distribution, a coin's by the threshold at which the verdict turns, bisected to the last bit.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from dflash_jax import accept, draft_tree
from dflash_jax.protocols import AcceptRule, Draft, Verdict
from dflash_jax.sampling import Dice, Sampling
from tests.support.families import fresh
from tests.support.tables import Cases, prefix_id

LAST_COIN = 1 - 2.0**-53
TRIED = 12
"""Random coins with which the thresholds of every draft are checked."""


@dataclass(frozen=True)
class LoadedDice(Dice):
    """``written``: verb -> what it answers. ``asked``: verb -> what it was to draw from (of coins: how many)."""

    key: None = None
    position: None = None
    written: dict = field(default_factory=dict)
    asked: dict = field(default_factory=dict)

    def tokens(self, p, place=None):
        return self._answer("tokens", p)

    def token(self, p, place):
        return self._answer("token", p)

    def drafts(self, q):
        return self._answer("drafts", q)

    def coins(self, count, dtype):
        return self._answer("coins", count).astype(dtype)

    def scores(self, p):
        raise NotImplementedError("scores have no finite number of outcomes")

    def _answer(self, verb: str, of):
        if verb in self.asked:
            raise NotImplementedError(f"{verb} asked twice in a round: real dice would answer the same again")
        self.asked[verb] = of
        if {"token", "tokens"} <= set(self.asked):
            raise NotImplementedError("token and tokens are one stream, not two independent draws")
        return self.written[verb]


@struct.dataclass
class Round:
    """A round's outcomes: of K cells of coins, X own tokens, C cases and R drafts of each. ``[K X C R]`` if not said.

    Attributes:
        said: int32 ``[K X C R P]`` tokens, the first ``count`` of which are said.
        count: int32, drafts accepted and one.
        weight: probability; NaN for a draw without mass that would have to be made.
        possible: bool, the dice can fall so, be it with a coin that has a probability of 2^-53.
        thresholds: ``[C R coins]`` below which each coin says yes.
        unfit: bool ``[C R]``, a coin is used otherwise than by one threshold.
    """

    said: jax.Array
    count: jax.Array
    weight: jax.Array
    possible: jax.Array
    thresholds: jax.Array
    unfit: jax.Array

    def accepted(self) -> np.ndarray:
        """The law of the number of accepted drafts, ``[C P]``."""
        weight, count = np.asarray(self.weight), np.asarray(self.count)
        return np.stack([(weight * (count == m)).sum((0, 1, 3)) for m in range(1, self.said.shape[-1] + 1)], axis=1)


def told(draft: Draft, verdict: Verdict, places: int) -> jax.Array:
    """``[B P]``: the accepted drafts, then the target's own token; the rest is garbage."""
    said = draft.tokens
    if verdict.path is not None:
        said = jnp.take_along_axis(said, jnp.maximum(verdict.path[:, 1:] - 1, 0), axis=1)
    said = jnp.pad(said[:, : places - 1], ((0, 0), (0, max(places - said.shape[1], 1))))
    return said.at[jnp.arange(said.shape[0]), verdict.accepted].set(verdict.token)


def heard(table: jax.Array, draft: Draft) -> jax.Array:
    """The target's logits at every place, ``[B T V]``; like the loop it hears token 0 where nothing is proposed."""
    drafts = draft.tokens.shape[1]
    vocabulary, none = table.shape[-1], jnp.zeros((len(table), 1), jnp.int32)
    depth, digits = none, none
    for place in range(1, drafts + 1):
        above = none + place - 1 if draft.tree is None else draft.tree.parent[:, place : place + 1]
        token = jnp.maximum(draft.tokens[:, place - 1 : place], 0)
        below = jnp.take_along_axis(digits, above, axis=1) * vocabulary + token
        depth = jnp.concatenate([depth, jnp.take_along_axis(depth, above, axis=1) + 1], axis=1)
        digits = jnp.concatenate([digits, below], axis=1)
    shorter = jnp.asarray([prefix_id(np.zeros(length, int), length, vocabulary) for length in range(drafts + 1)])
    return jnp.take_along_axis(table, (shorter[depth] + digits)[..., None], axis=1)


def _play(rule: AcceptRule, cases: Cases, points: int | None = None) -> Round:
    """Every outcome of a round.

    Args:
        points: N; coins are then 0, 1/N .. (N-1)/N, all as likely, and not cells between bisected thresholds.
    """
    draft, sampling, chance = _all_drafts(rule, cases)
    logits = heard(jnp.repeat(cases.table, chance.shape[1], axis=0), draft)
    rows, vocabulary = logits.shape[0], logits.shape[-1]
    places = (draft.tokens if cases.drafts is not None else cases.drafter).shape[1] + 1
    asked = _asked(rule, draft, logits, sampling)
    coins = asked.get("coins", 0)
    if coins and "tokens" in asked:
        raise NotImplementedError("thresholds that depend on the target's own tokens")
    own = _products(asked, vocabulary)

    def outcome(cell: jax.Array, drawn: dict) -> tuple[Verdict, jax.Array]:
        """The verdict when the coins are ``[rows coins]`` and the own tokens those; and how likely these are."""
        written = {verb: jnp.broadcast_to(of, (rows, *of.shape)) for verb, of in drawn.items()}
        dice = LoadedDice(written=written | {"coins": cell})
        verdict = rule(dice, draft, logits, sampling)
        return verdict, math.prod((_chance(dice.asked[verb], of) for verb, of in written.items()), start=jnp.ones(rows))

    def accepted(cell: jax.Array) -> jax.Array:
        return outcome(cell, jax.tree.map(lambda of: of[0], own))[0].accepted

    if points is None:
        thresholds, unfit = _thresholds(accepted, rows, coins)
        cells, size = _cells(thresholds)
    else:
        thresholds, unfit = jnp.ones((rows, coins)), jnp.zeros(rows, bool)
        cells, size = _lattice(rows, coins, points)
    tried = jax.random.uniform(jax.random.key(0), (TRIED if coins else 0, rows, coins))
    each_own = jax.vmap(outcome, (None, 0 if own else None), axis_size=None if own else 1)
    verdict, odds = jax.vmap(each_own, (0, None))(jnp.concatenate([cells, tried]), own)
    if points is None:
        unfit |= _contradicted(thresholds, tried, *jnp.split(verdict.accepted[:, 0], [len(cells)]))
    verdict, odds = jax.tree.map(lambda leaf: leaf[: len(cells)], (verdict, odds))
    said = jax.vmap(jax.vmap(lambda draft, verdict: told(draft, verdict, places), (None, 0)), (None, 0))(draft, verdict)

    shape, before = (*odds.shape[:2], *chance.shape), size[:, None].reshape(-1, 1, *chance.shape) * chance
    odds = odds.reshape(shape)
    return Round(
        said=said.reshape(*shape, places),
        count=verdict.accepted.reshape(shape) + 1,
        weight=jnp.where(before > 0, before * odds, 0),
        possible=(chance > 0) & (odds > 0),
        thresholds=thresholds.reshape(*chance.shape, coins),
        unfit=unfit.reshape(chance.shape) & (chance > 0),
    )


def play_anew() -> Callable:
    """:func:`play`, traced anew: with a function of the rules patched."""
    # The compiler's last passes would take longer than all cases.
    return jax.jit(
        fresh(_play), static_argnames=("rule", "points"), compiler_options={"xla_backend_optimization_level": 0}
    )


play = play_anew()


def of_probabilities(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """:func:`play` for rules that take logits for probabilities: no rounding of a softmax comes between a coin and its
    threshold."""
    for module in (accept, draft_tree):
        monkeypatch.setattr(module, "distribution", lambda logits, sampling: logits)
    return play_anew()


def _every(vocabulary: int, places: int) -> jax.Array:
    """All texts of this many tokens, ``[V^places places]``."""
    texts = [*itertools.product(range(vocabulary), repeat=places)]
    return jnp.asarray(np.array(texts, np.int32).reshape(len(texts), places))


def _all_drafts(rule: AcceptRule, cases: Cases) -> tuple[Draft, Sampling, jax.Array]:
    """Every draft of every case in rows, case by case, with its settings; its probability ``[C R]``."""
    batch, count, vocabulary = cases.drafter.shape
    if cases.drafts is not None:
        return Draft(tokens=cases.drafts), cases.sampling, jnp.ones((batch, 1))
    every = _every(vocabulary, count)
    drafter, sampling = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(every), axis=0), (cases.drafter, cases.sampling))
    dice = LoadedDice(written={"drafts": jnp.tile(every, (batch, 1))})
    draft = rule.choose(dice, drafter, sampling)
    if "drafts" in dice.asked:
        return draft, sampling, _chance(dice.asked["drafts"], dice.written["drafts"]).reshape(batch, -1)
    return jax.tree.map(lambda leaf: leaf[:: len(every)], draft), cases.sampling, jnp.ones((batch, 1))


def _asked(rule: AcceptRule, draft: Draft, logits: jax.Array, sampling: Sampling) -> dict:
    """Which verbs a rule uses, with shapes in place of what they are drawn from; how many coins."""
    own, dice = jnp.zeros(logits.shape[:2], jnp.int32), LoadedDice()
    dice.written.update(coins=jnp.zeros(draft.tokens.shape), drafts=own[:, :1], tokens=own, token=own[:, 0])
    jax.eval_shape(lambda: rule(dice, draft, logits, sampling))
    return dict(dice.asked)


def _products(asked: dict, vocabulary: int) -> dict:
    """Every combination of answers to what is asked for beside coins: verb -> ``[X ...]``."""
    lists = {verb: _every(vocabulary, math.prod(p.shape[1:-1])) for verb, p in asked.items() if verb != "coins"}
    chosen = np.indices([len(texts) for texts in lists.values()]).reshape(len(lists), -1 if lists else 0)
    return {
        verb: texts[index].reshape(-1, *asked[verb].shape[1:-1])
        for (verb, texts), index in zip(lists.items(), chosen, strict=True)
    }


def _chance(p: jax.Array, tokens: jax.Array) -> jax.Array:
    """The probability of drawing tokens from ``p`` ``[B n V]`` or ``[B V]``; NaN where there is no mass to draw from.
    The mass need not be 1: real dice draw in proportion."""
    mass, found = p.sum(-1), jnp.take_along_axis(p, tokens[..., None], axis=-1)[..., 0]
    each = jnp.where(mass > 0, found / jnp.where(mass > 0, mass, 1), jnp.nan)
    return each if p.ndim == 2 else each.prod(-1)


def _thresholds(accepted: Callable, rows: int, coins: int) -> tuple[jax.Array, jax.Array]:
    """Where each coin turns the verdict while the others lie at 0 or at the largest; whether these corners disagree. A
    coin that never does: 1."""
    if not coins:
        return jnp.ones((rows, 0)), jnp.zeros(rows, bool)
    corners = jnp.asarray([*itertools.product((0.0, LAST_COIN), repeat=coins)])
    corner, moved = (jnp.asarray(index.ravel()) for index in np.indices((len(corners), coins)))

    def at(coin: jax.Array) -> jax.Array:
        """Verdicts ``[corners * coins, rows]`` with the moved coin of each there."""
        return jax.vmap(
            lambda corner, moved, value: accepted(jnp.tile(corners[corner], (rows, 1)).at[:, moved].set(value))
        )(corner, moved, coin)

    def turn(number: jax.Array, known: tuple) -> tuple:
        """First the two ends, then halves of what is between: one call, so that the rule is compiled once."""
        low, high, first, last = known
        coin = jnp.where(number == 0, low, jnp.where(number == 1, high, (low + high) / 2))
        found = at(coin)
        first, last = jnp.where(number == 0, found, first), jnp.where(number <= 1, found, last)
        return jnp.where(found == first, coin, low), jnp.where((found == first) | (number < 2), high, coin), first, last

    ends = jnp.zeros((len(corner), rows)), jnp.full((len(corner), rows), LAST_COIN)
    nothing = jnp.zeros(ends[0].shape, jnp.int32)
    _, high, first, last = jax.lax.fori_loop(0, 56, turn, (*ends, nothing, nothing))
    turns = (first != last).reshape(len(corners), coins, rows)
    found = high.reshape(turns.shape)
    most, least = jnp.where(turns, found, 0).max(0), jnp.where(turns, found, 1).min(0)
    return jnp.where(turns.any(0), most, 1).T, (turns.any(0) & (most - least > 1e-15)).any(0)


def _cells(thresholds: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cells between thresholds: coins at the outer end of each ``[cells rows coins]``; its size."""
    coins = thresholds.shape[1]
    yes = jnp.asarray([*itertools.product((True, False), repeat=coins)], bool)[:, None]
    size = jnp.where(yes, thresholds, 1 - thresholds).prod(-1)
    return jnp.broadcast_to(jnp.where(yes, 0.0, LAST_COIN), (2**coins, *thresholds.shape)), size


def _lattice(rows: int, coins: int, points: int) -> tuple[jax.Array, jax.Array]:
    """Coins at every point, as :func:`_cells`."""
    every = jnp.asarray([*itertools.product(np.arange(points) / points, repeat=coins)])[:, None]
    return jnp.broadcast_to(every, (len(every), rows, coins)), jnp.full((len(every), rows), 1 / len(every))


def _contradicted(thresholds: jax.Array, tried: jax.Array, cells: jax.Array, found: jax.Array) -> jax.Array:
    """Whether coins that were tried, not at a threshold, are judged otherwise than their cell; per row."""
    rows, coins = thresholds.shape
    if not coins:
        return jnp.zeros(rows, bool)
    cell = ((tried >= thresholds) * 2 ** jnp.arange(coins - 1, -1, -1)).sum(-1)
    clear = (jnp.abs(tried - thresholds) > 1e-12).all(-1)
    return (clear & (found != jnp.take_along_axis(cells, cell, axis=0))).any(0)
