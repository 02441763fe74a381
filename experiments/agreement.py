"""Does speculative decoding write the text that plain decoding writes? And where it does not: a tie, or a defect?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.cache import Cache
from dflash_jax.generate import Decoder
from dflash_jax.protocols import Params, Target
from dflash_jax.sampling import Dice, Sampling, distribution, seed_keys
from dflash_jax.settings import GREEDY, SamplingParams, packed, per_row
from dflash_jax.shapes import Array, Float, Int, UInt

TIE = {"float32": 1e-3, "bfloat16": 0.25}
"""Dtype -> margin below which the order of the two best tokens may turn on rounding: a matmul of another width adds up
in another order. State corruption shows logit margins of 0.6 and more. Of a drawn token the scores are its
log-probability and the position's noise."""


@dataclass(frozen=True)
class Divergence:
    """The first token of a prompt's text at which the two runs part.

    Attributes:
        prompt: index of the prompt.
        place: index of the token in the text.
        plain, speculative: the two tokens; None where a text had ended.
        margin: largest minus second largest score of the target there, after the text that both agree on.
        tie: whether rounding can explain it (:data:`TIE`).
    """

    prompt: int
    place: int
    plain: int | None
    speculative: int | None
    margin: float
    tie: bool


@dataclass(frozen=True)
class Agreement:
    """Over ``prompts`` texts; ``share`` of them are the same ids from first to last."""

    prompts: int
    divergences: tuple[Divergence, ...]

    @property
    def share(self) -> float:
        return 1.0 - len(self.divergences) / self.prompts


@partial(jax.jit, static_argnames="target")
def two_best(
    target: Target,
    params: Params,
    token: Int[Array, "B T"],
    cache: Cache,
    sampling: Sampling,
    seeds: UInt[Array, "B 2"],
) -> Float[Array, "B T 2"]:
    """The two largest scores after one more token of every row: what decides which token is said. Of a greedy row its
    logits, of another its log-probabilities and the position's noise."""
    logits = target.unembed(params, target.step(params, token, cache).hidden)
    drawn = Dice(seed_keys(seeds), cache.length + 1).scores(distribution(logits, sampling))
    return jax.lax.top_k(jnp.where(sampling.greedy[:, None, None], logits, drawn), 2)[0]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first place where two texts differ, which may be the end of the shorter; None: they are equal."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def margin_after(decoder: Decoder, text: Sequence[int], setting: SamplingParams = GREEDY) -> float:
    """Largest minus second largest score of the target after it heard ``text``. ``decoder`` is plain."""
    target, heard = decoder.target, list(text[:-1])
    cache = decoder.start([heard], 1).cache if heard else target.init_cache(1, 8, 4)
    best = two_best(target, decoder.params, np.array([text[-1:]], np.int32), cache, *packed(per_row([setting], 1)))[
        0, 0
    ]
    return float(best[0] - best[1])


def compare(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    plain: Sequence[list[int]],
    speculative: Sequence[list[int]],
    dtype: str,
    settings: Sequence[SamplingParams] | None = None,
) -> Agreement:
    """Hold both texts of every prompt against each other.

    Args:
        decoder: plain; asked for the margin where two texts part.
        dtype: the run's, a key of :data:`TIE`.
        settings: how each prompt's tokens were drawn; None: greedy.
    """
    found = []
    for index, (prompt, mine, theirs) in enumerate(zip(prompts, plain, speculative, strict=True)):
        place = first_difference(mine, theirs)
        if place is None:
            continue
        margin = margin_after(decoder, [*prompt, *mine[:place]], settings[index] if settings else GREEDY)
        sides = [text[place] if place < len(text) else None for text in (mine, theirs)]
        found.append(Divergence(index, place, *sides, margin=margin, tie=margin < TIE[dtype]))
    return Agreement(len(prompts), tuple(found))


def worst(repeats: Iterable[Agreement]) -> Agreement:
    """Of several repeats of the same prompts: a prompt whose texts part in any of them parts, and not at a tie if once
    it did not."""
    found: dict[int, Divergence] = {}
    for repeat in repeats:
        for each in repeat.divergences:
            if each.prompt not in found or (found[each.prompt].tie and not each.tie):
                found[each.prompt] = each
    return Agreement(repeat.prompts, tuple(found[prompt] for prompt in sorted(found)))
