"""What the loop asks of a target, of a drafter and of an accept rule. The loop knows these and no model's name."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.cache import Cache
from dflash_jax.sampling import Dice, Sampling
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.tree import Tree

Params = Any


@struct.dataclass
class StepOut:
    """What a target returns for T tokens.

    Attributes:
        hidden: ``[B T D]`` after the final norm: what ``unembed`` takes.
        features: ``[B T A D]`` the residual stream after each tapped layer, in the order of the taps.
        experts: int32 ``[B T M K]`` expert ids chosen in each of the M mixture layers (M = 0 for a dense network).
        cache: with the T tokens heard.
    """

    hidden: jax.Array
    features: jax.Array
    experts: jax.Array
    cache: Cache


def tapped(stream: list[jax.Array], taps: tuple[int, ...]) -> jax.Array:
    """``[B T A D]`` of the residual stream after each layer; tap i is the output of layer i, before any final norm."""
    if not taps:
        return jnp.zeros((*stream[0].shape[:2], 0, stream[0].shape[-1]), stream[0].dtype)
    return jnp.stack([stream[tap] for tap in taps], axis=2)


@struct.dataclass
class Draft:
    """What is proposed after the anchor.

    Attributes:
        tokens: int32 ``[B P-1]``, or ``[B N]`` nodes of a tree; -1 proposes nothing and is never accepted.
        q: ``[B P-1 V]`` the distribution that each of them was drawn from; None: they were not drawn.
        tree: of N + 1 places, the anchor's first; None: each token follows the one before it.
    """

    tokens: jax.Array
    q: jax.Array | None = None
    tree: Tree | None = None


Choose = Callable[[jax.Array], Draft]
"""From a drafter's logits ``[B P-1 V]`` to the draft: an accept rule's ``choose``, with its dice."""


@struct.dataclass
class Verdict:
    """What of a draft stands.

    Attributes:
        accepted: int32 ``[B]`` in 0..P-1, leading drafts.
        token: int32 ``[B]`` the target's own next one.
        path: int32 ``[B T]`` places of the step from the anchor (0) on, the accepted ones first; None: 0, 1, 2, ...
    """

    accepted: jax.Array
    token: jax.Array
    path: jax.Array | None = None


@runtime_checkable
class Target(Protocol):
    """A causal language model. Instances are hashable: they are static arguments of the compiled loop.

    ``mixture_layers`` is M, ``experts`` is E of each of them (0 for a dense network).
    """

    mixture_layers: int
    experts: int

    def init_cache(self, batch: int, capacity: int, undo: int) -> Cache:
        """Empty, for ``capacity`` tokens a row, of which the newest ``undo`` can be rolled back; no step is longer."""
        ...

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the first layer hears; drafters hear it too."""
        ...

    def step(self, params: Params, tokens: Int[Array, "B T"], cache: Cache, tree: Tree | None = None) -> StepOut:
        """Hear T more tokens of every row, any T: a prompt's chunk, a block, one token, all by the same path.

        In a ``tree`` each token is heard after its own ancestors only. ``cache.length`` moves on by T all the same:
        :func:`~dflash_jax.cache.follow` and a roll-back then keep one path.
        """
        ...

    def unembed(self, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits: the head, over the final norm's output."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes a block. ``block_size`` is P: the anchor and P-1 drafts."""

    block_size: int

    def init_cache(self, batch: int, capacity: int, undo: int) -> Any:
        """Empty, for the features of ``capacity`` tokens a row, of which the newest ``undo`` can be rolled back."""
        ...

    def absorb(self, params: Params, features: Float[Array, "B T A D"], count: Int[Array, "B"], cache: Any) -> Any:
        """Take in the features of the next ``count`` committed tokens of each row (the rest of T is garbage)."""
        ...

    def propose(
        self, params: Params, target: Target, target_params: Params, anchor: Int[Array, "B"], cache: Any, choose: Choose
    ) -> Draft:
        """Draft the tokens after ``anchor``. Reads the cache, never writes it.

        A drafter with distributions lets ``choose`` pick from them; one that knows its tokens leaves ``q`` None.
        """
        ...


@runtime_checkable
class AcceptRule(Protocol):
    """What to propose, and how much of it stands.

    Attributes:
        lossless: what is said has exactly the law of the target's own distribution.
        pathwise: more than that, for one seed it is what plain decoding says, token for token.
        samples: the rule honours temperatures above 0.
        budget: nodes of its draft trees; 0: it proposes one token per place.
    """

    name: str
    lossless: bool
    pathwise: bool
    samples: bool
    budget: int

    def width(self, block_size: int) -> int:
        """Tokens of a verification, the anchor included."""
        ...

    def choose(self, dice: Dice, logits: Float[Array, "B drafts V"], sampling: Sampling) -> Draft:
        """Drafts by the drafter's logits, with the distribution that each was really drawn from."""
        ...

    def __call__(self, dice: Dice, draft: Draft, logits: Float[Array, "B P V"], sampling: Sampling) -> Verdict:
        """How much of the draft stands by the target's logits, and the token after it."""
        ...
