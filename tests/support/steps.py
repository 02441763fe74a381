"""A target's step through jit, and what it must equal: one forward of an empty cache over the whole text."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import cache as caches
from dflash_jax.cache import Cache
from dflash_jax.recurrence import Recurrence
from tests.support.families import Family, family, fresh

ROWS, WIDTH = 4, 40
CAPACITY, UNDO = 64, 8
"""A ring for the tiny targets' windows of 5: 12 slots, which texts of up to 40 tokens wrap three times."""


class Heard(NamedTuple):
    """Logits ``[B T V]``, features ``[B T A D]`` and the cache after a step."""

    logits: jax.Array
    features: jax.Array
    cache: Cache


def _step(target, params, tokens, cache, tree=None) -> Heard:
    out = target.step(params, tokens, cache, tree)
    return Heard(target.unembed(params, out.hidden), out.features, out.cache)


step = jax.jit(_step, static_argnums=0)


def fresh_step():
    """The step, traced anew: what a mutation test calls."""
    return jax.jit(fresh(_step), static_argnums=0)


def empty(family: Family) -> Cache:
    """The cache that the laws step on."""
    return family.target.init_cache(ROWS, CAPACITY, UNDO)


class Text(NamedTuple):
    """Random tokens ``[B WIDTH]`` with the logits and features of all of them."""

    tokens: np.ndarray
    logits: np.ndarray
    features: np.ndarray


@functools.cache
def whole_text(name: str, seed: int = 0) -> Text:
    """The reference for a variant: every token heard at once, by a cache without a ring."""
    chosen = family(name)
    tokens = np.random.default_rng(seed).integers(0, chosen.target.config.vocab_size, (ROWS, WIDTH), np.int32)
    heard = step(chosen.target, chosen.params, tokens, chosen.target.init_cache(ROWS, WIDTH, WIDTH))
    assert not any(slots.ring for slots in slots_of(heard.cache))
    return Text(tokens, np.asarray(heard.logits), np.asarray(heard.features))


def agree(actual, expected, what: str, tolerance: float = 1e-12) -> None:
    """Equal to rounding in float64."""
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=tolerance, atol=tolerance, err_msg=what)


def slots_of(cache: Cache) -> list[caches.Slots]:
    """The attention layers' part of a cache."""
    return [memory for memory in jax.tree.leaves(cache.layers, is_leaf=_is_slots) if _is_slots(memory)]


def _is_slots(memory: object) -> bool:
    return isinstance(memory, caches.Slots)


def poisoned(cache: Cache, undo: int, value: float = 1e9) -> Cache:
    """``cache`` with garbage in every slot that a rejected token may have reached, and in all that were never used; in
    every entry of a journal that was not kept."""

    def spoil(slots: caches.Slots) -> caches.Slots:
        size = slots.k.shape[2]
        reach = undo if slots.ring else size
        past = cache.length[:, None] + jnp.arange(reach)
        slot = past % size if slots.ring else jnp.where(past < size, past, size)
        rows = jnp.arange(past.shape[0])[:, None]
        k, v = (part.at[rows, :, slot].set(value, mode="drop") for part in (slots.k, slots.v))
        return slots.replace(k=k, v=v)

    def spoil_journal(memory: Recurrence) -> Recurrence:
        kept = cache.length - memory.base
        before = memory.rows.shape[1] - undo

        def fill(leaf: jax.Array, first: jax.Array) -> jax.Array:
            rejected = jnp.arange(leaf.shape[1]) >= first[:, None]
            return jnp.where(rejected.reshape(*rejected.shape, *(1,) * (leaf.ndim - 2)), value, leaf)

        journal = {name: fill(leaf, kept) for name, leaf in memory.journal.items()}
        return memory.replace(rows=fill(memory.rows, before + kept), journal=journal)

    kinds = {caches.Slots: spoil, Recurrence: spoil_journal}
    spoilt = jax.tree.map(lambda memory: kinds[type(memory)](memory), cache.layers, is_leaf=lambda m: type(m) in kinds)
    return cache.replace(layers=spoilt)
