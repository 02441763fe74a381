"""How wide to draft, decided as the text comes: by running acceptance and measured costs, down to plain decoding.

Rounds run in segments, each one compiled loop of one block size. Between two segments the host looks at what was
accepted and how long it took, and picks the block size of the next (the switch of Cascade, arXiv 2506.20675, over
widths). The choice looks at text that is already said and at the clock, never at a coin that is still to fall, so every
lossless rule stays so. Under a pathwise rule the text is the plain one whatever is chosen. Under the others it has the
same law, but depends on where rounds begin: a seed alone does not repeat it, because a clock has a say.
"""

import time
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax.controller import PENDING, Controller
from dflash_jax.generate import FOREVER, Decoder, run_rounds
from dflash_jax.generation import Generation, collect
from dflash_jax.plain import NoDrafter
from dflash_jax.protocols import Drafter, Params
from dflash_jax.settings import GREEDY
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.speculate import SpecState

SHORT, LONG, TURNS = 2, 12, 3
"""Rounds of the two segments whose difference is what a round costs at first, without the call; and how often."""


@struct.dataclass
class Pending:
    """Features ``[B U A D]`` of tokens heard by plain rounds, ``count`` int32 ``[B]`` of each row."""

    features: jax.Array
    count: jax.Array


@dataclass(frozen=True)
class Resting(NoDrafter):
    """Plain decoding that lays features aside, so that drafting can go on later where it left off."""

    def absorb(self, params: Params, features: Float[Array, "B T A D"], count: Int[Array, "B"], cache: Pending) -> Any:
        """Keep the only token's features."""
        slot = jnp.where(count > 0, cache.count, cache.features.shape[1])[:, None]
        slot = jnp.pad(slot, ((0, 0), (0, 1)), constant_values=cache.features.shape[1])  # see cache.write
        rows = jnp.arange(slot.shape[0])[:, None]
        put = cache.features.at[rows, slot].set(jnp.pad(features, ((0, 0), (0, 1), (0, 0), (0, 0))), mode="drop")
        return Pending(put, cache.count + count)


@partial(jax.jit, static_argnames="drafter", donate_argnames="cache")
def catch_up(drafter: Drafter, params: Params, cache: Any, pending: Pending) -> Any:
    """The drafter's cache with all that waited."""
    return drafter.absorb(params, pending.features, pending.count, cache)


@dataclass(frozen=True)
class AdaptiveDecoder:
    """A decoder that picks the block size as it goes.

    Args:
        decoder: with its drafter; its block size is the largest that is tried.
        sizes: further block sizes to choose from; 1, plain decoding, is always among them.
        controllers: batch size -> what is known of it; kept from text to text. ``measured``: what was known first.
    """

    decoder: Decoder
    sizes: tuple[int, ...] = (2, 3, 4, 6)
    controllers: dict[int, Controller] = field(default_factory=dict, compare=False)
    measured: dict[int, Controller] = field(default_factory=dict, compare=False)

    @property
    def block_sizes(self) -> list[int]:
        largest = self.decoder.drafter.block_size
        return sorted({1, largest, *(size for size in self.sizes if size < largest)})

    @cached_property
    def features(self) -> jax.ShapeDtypeStruct:
        """Those of one token; traced once."""
        target, params = self.decoder.target, self.decoder.params
        tokens, cache = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.eval_shape(lambda: target.init_cache(1, 8, 4))
        return jax.eval_shape(lambda *args: target.step(*args).features, params, tokens, cache)

    def start(self, *args, **kwargs) -> SpecState:
        """The decoder's."""
        return self.decoder.start(*args, **kwargs)

    def warm_up(self, prompts, max_new_tokens=None, stop=(), sampling=GREEDY) -> None:
        """Compile every block size for these prompts, and measure what its rounds cost: with the caches that the text
        will have, and on over its end as far as they reach; and what it costs to begin drafting after plain rounds.
        What the largest accepts meanwhile is known from then on.

        Raises:
            ValueError: if they leave no room to measure plain decoding. Larger sizes for which they leave none are not
                chosen from.
        """
        found = {size: [] for size in self.block_sizes}
        for turn in range(TURNS + 1):
            for size, each in found.items():
                run = _Run(self, self.start(prompts, max_new_tokens, (), sampling))
                run.go_on((2 + SHORT + LONG) * self.decoder.drafter.block_size)
                run.segment(1, 1)
                once = run.segment(size, 2)
                short, few = run.segment(size, 2 + SHORT), run.rounds - 2
                long, many = run.segment(size, 2 + SHORT + LONG), run.rounds - 2 - few
                if turn and many > few:  # the first turn compiles
                    cost = max(long - short, 0.5 * long) / (many - few)
                    each.append((cost, max(once - cost, 0.0)))
                if not turn and size == 1:
                    run.plainly(run.rounds + 1)
                ledger = run.ledger(1)  # at last of the largest
        if not found[1]:
            raise ValueError(
                f"the caches have no room to measure what a round costs: max_new_tokens {max_new_tokens}; ask for "
                f"{SHORT + LONG} or more, or decode with a fixed block size"
            )
        costs = {size: float(np.median([cost for cost, _ in each])) for size, each in found.items() if each}
        calls = [call for size in costs if size > 1 for _, call in found[size]]
        known = Controller(costs, float(np.median(calls)) / costs[1] if calls else 0.0)
        if max(known.costs) == size > 1:
            known.learn(size, *ledger)
        self.measured[len(prompts)] = known
        self.forget()

    def forget(self) -> None:
        """Know what :meth:`warm_up` measured, and no more."""
        self.controllers.update(deepcopy(self.measured))

    def generate(self, prompts, max_new_tokens=None, stop=(), sampling=GREEDY, logprobs=None) -> Generation:
        """As :meth:`~dflash_jax.generate.Decoder.generate`. The first call for a batch size begins with
        :meth:`warm_up`."""
        if len(prompts) not in self.controllers:
            self.warm_up(prompts, max_new_tokens, stop, sampling)
        controller = self.controllers[len(prompts)]
        started = time.perf_counter()
        state = jax.block_until_ready(self.start(prompts, max_new_tokens, stop, sampling, logprobs))
        first = time.perf_counter()
        run, sizes = _Run(self, state), []
        while not run.done:
            size, count = controller.next(run.left)
            before, programs = run.rounds, _programs()
            if size == 1 and count >= run.left:
                seconds = run.plainly(int(FOREVER))
            else:
                seconds = run.segment(size, before + min(count, PENDING))
            known = _programs() == programs  # else something was compiled meanwhile
            controller.saw(size, *run.ledger(before), seconds if known else None, first=before == 0)
            sizes += [size] * (run.rounds - before)
        found = collect(run.state, ttft_s=first - started, decode_s=time.perf_counter() - first)
        return replace(found, widths=np.array(sizes, np.int64))


def _programs() -> int:
    """How many programs segments have compiled so far."""
    return run_rounds._cache_size() + catch_up._cache_size()


class _Run:
    """One generation: its state, and what the host knows of it, asked for once a segment; while the drafter rests its
    cache, ``context``, and how many plain rounds wait to be absorbed into it."""

    def __init__(self, adaptive: AdaptiveDecoder, state: SpecState):
        self.decoder, self.features, self.state = adaptive.decoder, adaptive.features, state
        self.context, self.waiting = None, 0
        self._look()

    def go_on(self, reach: int) -> None:
        """Let every row say at least ``reach`` tokens, as far as its cache has room for them."""
        state = self.state
        room = state.tokens.shape[1] - self.decoder.width - state.cache.length
        budget = jnp.maximum(state.ends.budget, jnp.minimum(reach, room).astype(jnp.int32))
        self.state = state.replace(ends=state.ends.replace(budget=budget), done=jnp.copy(state.broken))
        self._look()

    def _look(self) -> None:
        """``rounds`` so far; whether all rows are ``done``; ``left``, most rounds that one may still need; and the
        ledger."""
        state = self.state
        asked = (state.rounds, state.done, state.ends.budget, state.delivered, state.counts, state.accepted)
        rounds, done, budget, delivered, self.counts, self.accepted = jax.device_get(asked)
        left = np.where(done, 0, budget - delivered)
        self.rounds, self.done, self.left = int(rounds), bool(done.all()), int(left.max())

    def plainly(self, until: int) -> float:
        """Plain rounds of a text that will be drafted no more: nothing is laid aside. The seconds they took."""
        started = time.perf_counter()
        self.state = self.state.replace(draft_cache=NoDrafter().init_cache(0, 0, 0))
        self._advance(NoDrafter(), None, until)
        return time.perf_counter() - started

    def segment(self, size: int, until: int) -> float:
        """Rounds of one block size; the seconds they took."""
        decoder, started = self.decoder, time.perf_counter()
        drafter, params = replace(decoder.drafter, block_size=size), decoder.draft_params
        if self.context is not None and (size > 1 or self.waiting + until - self.rounds > PENDING):
            context = catch_up(decoder.drafter, params, self.context, self.state.draft_cache)
            self.state, self.context, self.waiting = self.state.replace(draft_cache=context), None, 0
        if size > 1:
            self._advance(drafter, params, until)
            return time.perf_counter() - started
        if self.context is None:
            self.context = self.state.draft_cache
            self.state = self.state.replace(draft_cache=self._nothing_pending())
        before = self.rounds
        self._advance(Resting(), None, until)
        self.waiting += self.rounds - before
        return time.perf_counter() - started

    def _advance(self, drafter: Drafter, draft_params: Params, until: int) -> None:
        decoder, rounds = self.decoder, jnp.asarray(until, jnp.int32)
        self.state = run_rounds(decoder.target, drafter, decoder.rule, decoder.params, draft_params, self.state, rounds)
        self._look()

    def ledger(self, since: int) -> tuple[np.ndarray, np.ndarray]:
        """Counts and accepted drafts of the rounds from ``since`` on."""
        return self.counts[:, since : self.rounds], self.accepted[:, since : self.rounds]

    def _nothing_pending(self) -> Pending:
        rows = self.state.done.shape[0]
        shape = (rows, PENDING, *self.features.shape[2:])
        return Pending(jnp.zeros(shape, self.features.dtype), jnp.zeros(rows, jnp.int32))
