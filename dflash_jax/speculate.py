"""Draft, verify, accept, roll back, absorb: DFlash's round (arXiv 2602.06036, section 3) as one pure function.

Between rounds, for every row: the target's cache holds every committed token except the last, the *anchor*, which has
been said but not yet heard; the drafter's cache holds the features of exactly the tokens the target's cache holds.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.cache import Cache, follow, rollback
from dflash_jax.delivery import Ends, LogProbs, cut, deliver, extend, no_logprobs, sound
from dflash_jax.protocols import AcceptRule, Draft, Drafter, Params, Target
from dflash_jax.sampling import Dice, Sampling, seed_keys
from dflash_jax.shapes import Array, Bool, Float, Int, Shaped, UInt


@struct.dataclass
class SpecState:
    """Everything that one round hands to the next.

    Attributes:
        anchor: int32 ``[B]`` last token said, not yet heard.
        cache: the target's.
        draft_cache: the drafter's own.
        tokens: int32 ``[B O]`` delivered tokens; ``delivered`` of each row are real.
        delivered: int32 ``[B]``.
        done: bool ``[B]``.
        broken: bool ``[B]`` ended by logits that are not numbers; what they would have said is not delivered.
        ends: what ends each row.
        sampling: how each row's tokens are drawn.
        counts: int8 ``[B O]`` tokens delivered by each round, 0 once the row is done; round r is column r.
        accepted: int8 ``[B O]`` drafts accepted by each round, before stop and budget cut; -1 once the row is done.
        union: int32 ``[M]`` sum over rounds of the distinct experts per mixture layer that live rows' tokens chose.
        rounds: int32, rounds so far.
        key: ``[B]`` one key per row, of its seed.
        logprobs: of the delivered tokens, or None.
    """

    anchor: jax.Array
    cache: Cache
    draft_cache: Any
    tokens: jax.Array
    delivered: jax.Array
    done: jax.Array
    broken: jax.Array
    ends: Ends
    sampling: Sampling
    counts: jax.Array
    accepted: jax.Array
    union: jax.Array
    rounds: jax.Array
    key: jax.Array
    logprobs: LogProbs | None


@struct.dataclass
class Heard:
    """Rows after some of their prompt. ``hidden`` ``[B 1 D]`` belongs to each row's last token so far."""

    hidden: jax.Array
    cache: Cache
    draft_cache: Any


def hear_prompt(
    target: Target,
    drafter: Drafter,
    params: Params,
    draft_params: Params,
    heard: Heard,
    tokens: Int[Array, "B T"],
    count: Int[Array, "B"],
) -> Heard:
    """One more chunk of every prompt: ``count[b]`` of the T tokens are real, the rest is padding on the right."""
    out = target.step(params, tokens, heard.cache)
    last = jnp.take_along_axis(out.hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
    return Heard(
        hidden=jnp.where((count > 0)[:, None, None], last, heard.hidden),
        cache=rollback(out.cache, heard.cache.length + count),
        draft_cache=drafter.absorb(draft_params, out.features, count, heard.draft_cache),
    )


def first_token(
    target: Target,
    rule: AcceptRule,
    params: Params,
    hidden: Float[Array, "B 1 D"],
    cache: Cache,
    draft_cache: Any,
    ends: Ends,
    sampling: Sampling,
    seeds: UInt[Array, "B 2"],
    room: int,
    alternatives: int | None = None,
) -> SpecState:
    """Say the first token of every row, by the same rule as all others, and set up the rounds.

    Args:
        hidden, cache, draft_cache: the parts of a :class:`Heard` whose prompts are heard to the end.
        seeds: uint32, the high and the low half of each row's.
        room: O, the width of the output buffer; at least the largest budget.
        alternatives: n of the log-probabilities; None: they are not kept.
    """
    batch, layers = hidden.shape[0], target.mixture_layers
    none, zero = Draft(tokens=jnp.zeros((batch, 0), jnp.int32)), jnp.zeros(batch, jnp.int32)
    logits = target.unembed(params, hidden)
    key = seed_keys(seeds)
    token = rule(Dice(key, cache.length), none, logits, sampling).token
    count, ended = cut(token[:, None], sound(logits), ends, zero)
    broken = count == 0
    logprobs = None if alternatives is None else no_logprobs(batch, room, alternatives, logits.dtype)
    return SpecState(
        anchor=token,
        cache=cache,
        draft_cache=draft_cache,
        tokens=deliver(jnp.zeros((batch, room), jnp.int32), token[:, None], count, zero),
        delivered=count,
        done=ended | broken,
        broken=broken,
        ends=ends,
        sampling=sampling,
        counts=jnp.zeros((batch, room), jnp.int8),
        accepted=jnp.full((batch, room), -1, jnp.int8),
        union=jnp.zeros(layers, jnp.int32),
        rounds=jnp.zeros((), jnp.int32),
        key=key,
        logprobs=extend(logprobs, logits, token[:, None], count, zero),
    )


def spec_step(
    target: Target, drafter: Drafter, rule: AcceptRule, params: Params, draft_params: Params, state: SpecState
) -> SpecState:
    """One round for every row. Rows accept, stop and run out on their own; a done row changes nothing of itself."""
    start = state.cache.length
    dice = Dice(state.key, start + 1)
    choose = partial(rule.choose, dice, sampling=state.sampling)
    draft = drafter.propose(draft_params, target, params, state.anchor, state.draft_cache, choose)
    proposal = jnp.concatenate([state.anchor[:, None], jnp.maximum(draft.tokens, 0)], axis=1)
    out = target.step(params, proposal, state.cache, draft.tree)
    logits = target.unembed(params, out.hidden)
    verdict = rule(dice, draft, logits, state.sampling)

    said, cache, features = draft.tokens, out.cache, out.features
    if verdict.path is not None:
        path = verdict.path[:, : drafter.block_size]
        said, logits, features = _along(path[:, 1:] - 1, said), _along(path, logits), _along(path, features)
        cache = follow(cache, start, path)
    said = jnp.concatenate([said, state.anchor[:, None]], axis=1)  # last column: room for the bonus token
    said = said.at[jnp.arange(said.shape[0]), verdict.accepted].set(verdict.token)
    whole = sound(logits)
    count, ended = cut(said, jnp.minimum(verdict.accepted + 1, whole), state.ends, state.delivered)
    broken = (whole <= verdict.accepted) & ~ended & ~state.done
    count = jnp.where(state.done, 0, count)
    return state.replace(
        anchor=jnp.where(state.done | broken, state.anchor, verdict.token),
        cache=rollback(cache, start + count),
        draft_cache=drafter.absorb(draft_params, features, count, state.draft_cache),
        tokens=deliver(state.tokens, said, count, state.delivered),
        delivered=state.delivered + count,
        done=state.done | ended | broken,
        broken=state.broken | broken,
        counts=state.counts.at[:, state.rounds].set(count.astype(jnp.int8), mode="drop"),
        accepted=state.accepted.at[:, state.rounds].set(
            jnp.where(count > 0, verdict.accepted, -1).astype(jnp.int8), mode="drop"
        ),
        union=state.union + distinct_experts(out.experts, ~state.done),
        rounds=state.rounds + 1,
        logprobs=extend(state.logprobs, logits, said, count, state.delivered),
    )


def _along(path: Int[Array, "B P"], each: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B P *rest"]:
    """What belongs to the places of a path."""
    places = jnp.maximum(path, 0).reshape(*path.shape, *(1,) * (each.ndim - 2))
    return jnp.take_along_axis(each, places, axis=1)


def distinct_experts(experts: Int[Array, "B T M K"], live: Bool[Array, "B"]) -> Int[Array, "M"]:
    """Distinct experts that live rows' tokens chose, per mixture layer.

    A sorted list has one more distinct value at each place where it changes; rows that are done are moved to -1.
    """
    layers = experts.shape[2]
    if 0 in experts.shape:
        return jnp.zeros(layers, jnp.int32)
    ids = jnp.where(live[:, None, None, None], experts, -1)
    ids = jnp.sort(jnp.moveaxis(ids, 2, 0).reshape(layers, -1), axis=1)
    changes = (ids[:, 1:] != ids[:, :-1]).sum(1)
    return (changes + (ids[:, 0] >= 0)).astype(jnp.int32)
