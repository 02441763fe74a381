"""Trees of drafted tokens: which of a step's tokens follow which.

A step hears T tokens of every row in topological order. Token 0 is the root (the anchor), every other one follows an
earlier one, and is heard as if the tokens on its path from the root, and no others, had come before it (tree attention
as in SpecInfer, arXiv 2305.09781; DDTree, arXiv 2604.12989). A chain is the tree in which each token follows the one
before it.

Rows may need fewer nodes than T: a node that is not used has parent 0 and any token. It is a leaf under the root, and a
leaf is nobody's ancestor, so it changes no other node.
"""

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.shapes import Array, Bool, Int


@struct.dataclass
class Tree:
    """``parent`` int32 ``[B T]``: the place within the step of the token that each token follows, before its own;
    -1 for the root, token 0."""

    parent: jax.Array

    @property
    def ancestors(self) -> Bool[Array, "B T T"]:
        """Row i: token i and all that it follows. Each squaring doubles how far a row reaches."""
        tokens = self.parent.shape[1]
        reach = jax.nn.one_hot(self.parent, tokens, dtype=jnp.float32) + jnp.eye(tokens, dtype=jnp.float32)
        for _ in range(max(tokens - 2, 0).bit_length()):
            reach = jnp.minimum(reach @ reach, 1)
        return reach > 0

    @property
    def depth(self) -> Int[Array, "B T"]:
        """Tokens between the root and each token, itself included: 0 for the root."""
        return self.ancestors.sum(-1, dtype=self.parent.dtype) - 1


def lineage(parent: Int[Array, "B T"], count: int) -> Int[Array, "B T count"]:
    """The ``count`` last tokens of each token's path, itself the last, as places within the step; -1 is the newest
    token before the step, -2 the one before that, and so on."""
    place = jnp.broadcast_to(jnp.arange(parent.shape[1], dtype=parent.dtype), parent.shape)
    path = [place]
    for _ in range(count - 1):
        before = jnp.take_along_axis(parent, jnp.maximum(place, 0), axis=1)
        place = jnp.where(place > 0, before, place - 1)
        path.insert(0, place)
    return jnp.stack(path, axis=-1)
