"""A tiny drafter's two verbs through jit, with a random context for it."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.drafters import tiny_drafter
from tests.support.families import family, fresh

NAME, ROWS, CONTEXT, BLOCK, UNDO = "qwen3-untied", 2, 30, 8, 8


def _absorb(drafter, params, features, count, cache):
    return drafter.absorb(params, features, count, cache)


def _block(drafter, target, params, target_params, tokens, cache):
    return drafter.hidden(params, target, target_params, tokens, cache)


class Programs:
    """The drafter's two verbs through jit."""

    def __init__(self, layers: str, anew: bool = False):
        copied = fresh if anew else lambda function: function
        self.layers, self.target, self.tiny = layers, family(NAME), tiny_drafter(layers, NAME)
        self._absorb = jax.jit(copied(_absorb), static_argnums=0)
        self._block = jax.jit(copied(_block), static_argnums=(0, 1))
        taps, width = self.tiny.drafter.config.taps, self.target.target.config.hidden_size
        rng = np.random.default_rng(3)
        self.features = rng.standard_normal((ROWS, CONTEXT, len(taps), width))
        self.tokens = rng.integers(0, 53, (ROWS, BLOCK), np.int32)

    def empty(self, capacity: int = 64):
        return self.tiny.drafter.init_cache(ROWS, capacity, UNDO if capacity == 64 else capacity)

    def absorb(self, cache, features, count):
        count = jnp.broadcast_to(jnp.asarray(count, jnp.int32), (ROWS,))
        return self._absorb(self.tiny.drafter, self.tiny.params, features, count, cache)

    def at_once(self, length: int = CONTEXT):
        """The whole context in a cache that holds it all."""
        return self.absorb(self.empty(CONTEXT + 1), self.features, length)

    def block(self, cache, tokens=None) -> np.ndarray:
        tokens = self.tokens if tokens is None else tokens
        args = (self.tiny.params, self.target.params, tokens, cache)
        return np.asarray(self._block(self.tiny.drafter, self.target.target, *args))


PROGRAMS: dict[str, Programs] = {}


def programs(layers: str) -> Programs:
    return PROGRAMS.setdefault(layers, Programs(layers))
