"""Where a round's time goes: its parts as programs of their own, timed at a typical length of the run.

Each program runs several consecutive steps of real text in one call, over and over, so that neither Python nor the
transfer of arguments is in the figure. The programs take turns, between the repeats of the run that they explain.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.accept import argmax_draft
from dflash_jax.cache import Cache, rollback
from dflash_jax.draft_tree import chain
from dflash_jax.generate import CHUNKS, Decoder
from dflash_jax.nn import argmax
from dflash_jax.protocols import Drafter, Params, Target
from dflash_jax.shapes import Array, Float, Int

STEPS, TIMES = 8, 4
"""Consecutive positions that one call covers, and how often it goes over them: a single pass after other programs finds
weights out of the processor's caches, which in a run stay there."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one step, a median each.

    Attributes:
        length: tokens heard before the first timed step, longest row.
        width: P, positions of a verification.
        step_s: one token through the target, its head and an argmax.
        verify_s: the same for P tokens.
        draft_s: the drafter's proposal, and its taking in of a round's features.
        ratio: ``verify_s / step_s``, median of the ratios of each turn.
    """

    length: int
    width: int
    step_s: float
    verify_s: float
    draft_s: float
    ratio: float


@partial(jax.jit, static_argnames=("target", "width", "branched"), donate_argnames="cache")
def target_steps(
    target: Target, params: Params, blocks: Int[Array, "steps B P"], cache: Cache, width: int, branched: bool = False
) -> tuple[Cache, Int[Array, "steps B width"]]:
    """For each block: hear its first ``width`` tokens, say what follows each, and keep one of them. At the end the
    cache is as long as before.

    Args:
        branched: hear them by the program of a tree, each token after the one before it.
    """
    tree = chain(blocks.shape[1], width - 1) if branched else None

    def one(cache: Cache, block: jax.Array) -> tuple[Cache, jax.Array]:
        out = target.step(params, block[:, :width], cache, tree)
        own = argmax(target.unembed(params, out.hidden))
        return rollback(out.cache, cache.length + 1), own

    return _over_and_over(one, cache, blocks)


def _over_and_over(one: Callable, cache: Any, steps: Any) -> tuple[Any, Any]:
    """``one`` for every step, from the same cache each time; what came out is of the last time."""

    def again(cache: Any, _: None) -> tuple[Any, Any]:
        after, found = jax.lax.scan(one, cache, steps)
        return rollback(after, cache.length), found

    after, found = jax.lax.scan(again, cache, None, length=TIMES)
    return after, jax.tree.map(lambda leaf: leaf[-1], found)


@partial(jax.jit, static_argnames="target")
def features_of(target: Target, params: Params, tokens: Int[Array, "B T"], cache: Cache) -> Float[Array, "B T A D"]:
    """Features of the next tokens of every row."""
    return target.step(params, tokens, cache).features


@partial(jax.jit, static_argnames=("target", "drafter", "width"), donate_argnames="cache")
def draft_steps(
    target: Target,
    drafter: Drafter,
    params: Params,
    draft_params: Params,
    anchors: Int[Array, "steps B"],
    features: Float[Array, "B T A D"],
    cache: Any,
    width: int,
) -> tuple[Any, Int[Array, "steps B T"]]:
    """For each anchor: propose a block, then take in P features of which one counts. At the end the cache is as long
    as before. A block of fewer than ``width`` tokens, a tree's, is said again and again up to it."""
    one_each = jnp.ones(anchors.shape[1], jnp.int32)

    def one(cache: Any, item: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        step, anchor = item
        draft = drafter.propose(draft_params, target, params, anchor, cache, argmax_draft)
        seen = jax.lax.dynamic_slice_in_dim(features, step, drafter.block_size, axis=1)
        block = jnp.concatenate([anchor[:, None], draft.tokens], axis=1)
        block = jnp.tile(block, (1, -(-width // block.shape[1])))[:, : max(width, block.shape[1])]
        return drafter.absorb(draft_params, seen, one_each, cache), block

    return _over_and_over(one, cache, (jnp.arange(anchors.shape[0]), anchors))


class StepTimer:
    """One-token steps, verifications and drafts of a run, compiled and ready to be timed half-way through its text."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[list[int]],
        texts: Sequence[list[int]],
        max_new_tokens: int,
        steps: int = STEPS,
    ):
        """Hear half of every text, and run each program once.

        Args:
            prompts, texts: one batch of the run, and what came out.
            max_new_tokens: as in the run, so that the caches have its capacity.
            steps: consecutive positions that one call covers; fewer if the caches could not roll them back.
        """
        width = decoder.width
        self.steps, self.width = max(1, min(steps, CHUNKS[-1] - width)), width
        rows = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        heard = [len(prompt) + len(text) // 2 for prompt, text in zip(prompts, texts, strict=True)]
        left = [max(1, len(p) + max_new_tokens - length) for p, length in zip(prompts, heard, strict=True)]
        state = decoder.start([row[:length] for row, length in zip(rows, heard, strict=True)], left)
        follow = [_following(row, length, self.steps + width) for row, length in zip(rows, heard, strict=True)]
        self.length, self.decoder, self.follow = max(heard), decoder, np.array(follow, np.int32)
        self.cache, self.draft_cache = state.cache, state.draft_cache
        self.features = features_of(decoder.target, decoder.params, self.follow, self.cache)
        self.blocks = self._draft()
        self.programs = (partial(self._step, 1), partial(self._step, width), self._draft)
        self.seconds: list[list[float]] = []
        self.turn()
        self.seconds.clear()

    def turn(self) -> None:
        """Time each program once."""
        row = []
        for program in self.programs:
            started = time.perf_counter()
            jax.block_until_ready(program())
            row.append((time.perf_counter() - started) / self.steps / TIMES)
        self.seconds.append(row)

    def costs(self) -> StepCosts:
        """Medians of all turns."""
        step, verify, draft = np.array(self.seconds).T
        return StepCosts(
            length=self.length,
            width=self.width,
            step_s=float(np.median(step)),
            verify_s=float(np.median(verify)),
            draft_s=float(np.median(draft)),
            ratio=float(np.median(verify / step)),
        )

    def _draft(self) -> jax.Array:
        decoder, anchors = self.decoder, self.follow[:, : self.steps].T
        weights = decoder.params, decoder.draft_params
        self.draft_cache, blocks = draft_steps(
            decoder.target, decoder.drafter, *weights, anchors, self.features, self.draft_cache, self.width
        )
        return blocks

    def _step(self, width: int) -> jax.Array:
        decoder, branched = self.decoder, width > 1 and self.decoder.rule.budget > 0
        self.cache, said = target_steps(decoder.target, decoder.params, self.blocks, self.cache, width, branched)
        return said


def _following(row: list[int], length: int, count: int) -> list[int]:
    """``count`` tokens from position ``length`` on; a row that ends before is begun again."""
    return [row[(length + place) % len(row)] for place in range(count)]
