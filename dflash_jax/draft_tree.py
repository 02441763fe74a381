"""Draft trees: the likeliest continuations by the drafter's marginals, verified in one step, matched with the target's
own draws.

A drafter that proposes a whole block at once gives a distribution per position. The probability that a path is what the
target says is taken as the product of its tokens' probabilities; the tree is the ``budget`` paths of highest
probability (DDTree, arXiv 2604.12989), with all their beginnings, since none is likelier than its own beginning.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from dflash_jax.protocols import Draft, Verdict
from dflash_jax.relaxed import opinion
from dflash_jax.sampling import Dice, Sampling, distribution
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.tree import Tree


def best_first(log_q: Float[Array, "B drafts V"], budget: int) -> tuple[Int[Array, "B N"], Tree]:
    """The ``budget`` nodes of highest summed log-probability, and what follows what; the root is place 0 of the tree.

    Grown a level at a time with a beam of ``budget`` nodes, in fixed shapes: an ancestor of one of the best nodes is
    itself among the best of its level, and so are the tokens it needs among the ``budget`` likeliest of theirs. Equal
    scores: the shallower node first, so that no child comes without its parent. A node of probability 0 proposes
    nothing (-1).
    """
    rows, levels, vocabulary = log_q.shape
    values, ids = jax.lax.top_k(log_q, min(budget, vocabulary))
    kinds = values.shape[-1]

    def grow(beam: jax.Array, level: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        every = (beam[:, :, None] + level[:, None, :]).reshape(rows, -1)
        scores, at = jax.lax.top_k(every, budget)
        return scores, (scores, at)

    root = jnp.full((rows, budget), -jnp.inf, log_q.dtype).at[:, 0].set(0)
    _, (scores, at) = jax.lax.scan(grow, root, jnp.moveaxis(values, 1, 0))
    scores, at = (jnp.moveaxis(part, 0, 1).reshape(rows, -1) for part in (scores, at))  # [B levels*budget]
    best, chosen = jax.lax.top_k(scores, budget)
    chosen = jnp.sort(jnp.where(best > -jnp.inf, chosen, levels * budget), axis=1)  # by level: parents come first
    real, node = chosen < levels * budget, jnp.minimum(chosen, levels * budget - 1)
    place = jnp.zeros((rows, levels * budget + 1), jnp.int32)
    place = place.at[jnp.arange(rows)[:, None], chosen].set(jnp.arange(1, budget + 1, dtype=jnp.int32))
    level, picked = node // budget, jnp.take_along_axis(at, node, axis=1)
    above = (level - 1) * budget + picked // kinds
    parent = jnp.where(level > 0, jnp.take_along_axis(place, jnp.maximum(above, 0), axis=1), 0)
    tokens = jnp.take_along_axis(ids.reshape(rows, -1), level * kinds + picked % kinds, axis=1)
    tokens, parent = jnp.where(real, tokens, -1), jnp.where(real, parent, 0)
    root_first = jnp.concatenate([jnp.full((rows, 1), -1, jnp.int32), parent], axis=1)
    return tokens.astype(jnp.int32), Tree(parent=root_first)


@dataclass(frozen=True)
class TreeMatch:
    """Follow the tree while it holds the token that the target draws.

    Lossless for any tree that is built without a look at the target's draws, and for one seed it says what plain
    decoding says. ``budget``: nodes besides the anchor.
    """

    name: ClassVar[str] = "tree"
    lossless: ClassVar[bool] = True
    pathwise: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    budget: int = 16

    def width(self, block_size: int) -> int:
        return self.budget + 1 if block_size > 1 else 1

    def choose(self, dice: Dice, logits: Float[Array, "B drafts V"], sampling: Sampling) -> Draft:
        if not logits.shape[1]:
            return Draft(tokens=jnp.zeros(logits.shape[:2], jnp.int32))
        tokens, tree = best_first(jnp.log(opinion(logits, sampling)), self.budget)
        return Draft(tokens=tokens, tree=tree)

    def __call__(self, dice: Dice, draft: Draft, logits: Float[Array, "B T V"], sampling: Sampling) -> Verdict:
        tree = draft.tree or _chain(*draft.tokens.shape)
        depth, ancestors = tree.depth, tree.ancestors
        own = dice.tokens(distribution(logits, sampling), depth)
        parent = jnp.maximum(tree.parent[:, 1:], 0)
        fits = draft.tokens == jnp.take_along_axis(own, parent, axis=1)
        fits = jnp.concatenate([jnp.ones_like(depth[:, :1], bool), fits], axis=1)
        reached = (fits[:, None, :] | ~ancestors).all(-1)
        accepted = jnp.max(jnp.where(reached, depth, 0), axis=1)
        level = jnp.arange(logits.shape[1])
        path = jnp.argmax(reached[:, None, :] & (depth[:, None, :] == level[:, None]), axis=-1)
        last = jnp.take_along_axis(path, accepted[:, None], axis=1)
        token = jnp.take_along_axis(own, last, axis=1)[:, 0]
        return Verdict(accepted=accepted.astype(jnp.int32), token=token, path=path.astype(jnp.int32))


def _chain(rows: int, drafts: int) -> Tree:
    """Every token follows the one before it."""
    return Tree(parent=jnp.broadcast_to(jnp.arange(-1, drafts, dtype=jnp.int32), (rows, drafts + 1)))
