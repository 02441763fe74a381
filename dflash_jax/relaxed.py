"""Lossy accept rules: more tokens a round, and a text that is no longer the target's. For the laboratory.

Each accepts an argmax draft by the target's opinion of it alone; where it does not, the target's own token follows. The
opinion is the row's distribution, at temperature 1 for greedy rows (a certainty has no opinion of other tokens).
What they give up is measured by ``python -m experiments.ablate_accept``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from dflash_jax.accept import ArgmaxDrafts, at_tokens, leading
from dflash_jax.protocols import Draft, Verdict
from dflash_jax.sampling import Dice, Sampling, distribution
from dflash_jax.shapes import Array, Bool, Float, Int


def opinion(logits: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """The distribution by which drafts are judged."""
    return distribution(logits, sampling.replace(temperature=jnp.where(sampling.greedy, 1, sampling.temperature)))


class Relaxed(ArgmaxDrafts, ABC):
    """Accept while ``stands`` says so; then the target's own token."""

    lossless: ClassVar[bool] = False
    pathwise: ClassVar[bool] = False
    samples: ClassVar[bool] = True

    def __call__(self, dice: Dice, draft: Draft, logits: Float[Array, "B P V"], sampling: Sampling) -> Verdict:
        stands = self.stands(opinion(logits, sampling)[:, :-1], draft.tokens)
        accepted = leading(stands & (draft.tokens >= 0))
        own = dice.tokens(distribution(logits, sampling))
        return Verdict(accepted=accepted, token=jnp.take_along_axis(own, accepted[:, None], axis=1)[:, 0])

    @abstractmethod
    def stands(self, p: Float[Array, "B drafts V"], tokens: Int[Array, "B drafts"]) -> Bool[Array, "B drafts"]:
        """Whether each draft would do, the ones before it accepted."""


@dataclass(frozen=True)
class Typical(Relaxed):
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): ``p(draft) > min(epsilon, delta exp(-H(p)))``."""

    name: ClassVar[str] = "typical"
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        _in_range("epsilon", self.epsilon, 1.0)
        _in_range("delta", self.delta, 1.0)

    def stands(self, p: Float[Array, "B drafts V"], tokens: Int[Array, "B drafts"]) -> Bool[Array, "B drafts"]:
        entropy = -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0).sum(-1)
        return at_tokens(p, tokens) > jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))


@dataclass(frozen=True)
class Threshold(Relaxed):
    """``p(draft) >= least``."""

    name: ClassVar[str] = "threshold"
    least: float = 0.3

    def __post_init__(self) -> None:
        _in_range("least", self.least, 1.0)

    def stands(self, p: Float[Array, "B drafts V"], tokens: Int[Array, "B drafts"]) -> Bool[Array, "B drafts"]:
        return at_tokens(p, tokens) >= self.least


@dataclass(frozen=True)
class TopKRelaxed(Relaxed):
    """The draft is one of the target's ``k`` likeliest tokens and within ``delta`` of the best (TensorRT-LLM's relaxed
    acceptance)."""

    name: ClassVar[str] = "top_k_relaxed"
    k: int = 10
    delta: float = 0.6

    def __post_init__(self) -> None:
        _in_range("delta", self.delta, 1.0)
        if self.k < 1:
            raise ValueError(f"k {self.k}: expected 1 or more tokens")

    def stands(self, p: Float[Array, "B drafts V"], tokens: Int[Array, "B drafts"]) -> Bool[Array, "B drafts"]:
        mine = at_tokens(p, tokens)
        better = (p > mine[..., None]).sum(-1)
        return (better < self.k) & (mine >= p.max(-1) - self.delta)


def _in_range(name: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{name} {value}: expected a number from 0 to {most}")
