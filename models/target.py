"""A network and its weights' shapes, as the loop's :class:`~dflash_jax.protocols.Target`."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.cache import Cache
from dflash_jax.protocols import Params, StepOut
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.tree import Tree


@dataclass(frozen=True)
class FlaxTarget:
    """The four verbs, carried out by a linen module with methods ``init_layers, embed, step, unembed``."""

    module: nn.Module
    tokens: int | None = None
    """Ids of the tokenizer: rows of the head from here on are padding and get -inf as logits. None: there are none."""

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def mixture_layers(self) -> int:
        return self.module.mixture_layers

    @property
    def experts(self) -> int:
        return getattr(self.config, "experts", 0)

    def init_cache(self, batch: int, capacity: int, undo: int) -> Cache:
        """An empty cache: ``capacity`` positions a row, steps of up to ``undo`` tokens."""
        return Cache(length=jnp.zeros(batch, jnp.int32), layers=self.module.init_layers(batch, capacity, undo))

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.module.apply({"params": params}, tokens, method="embed")

    def step(self, params: Params, tokens: Int[Array, "B T"], cache: Cache, tree: Tree | None = None) -> StepOut:
        return self.module.apply({"params": params}, tokens, cache, tree, method="step")

    def unembed(self, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        logits = self.module.apply({"params": params}, hidden, method="unembed")
        if self.tokens is None or self.tokens >= logits.shape[-1]:
            return logits
        return jnp.where(jnp.arange(logits.shape[-1]) < self.tokens, logits, -jnp.inf)

    def init(self, key: jax.Array) -> Params:
        """Random parameters."""
        cache = self.init_cache(1, 8, 4)
        tokens = jnp.zeros((1, 4), jnp.int32)
        return self.module.init(key, tokens, cache)["params"]

    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters; nothing is allocated."""
        return jax.eval_shape(self.init, jax.random.key(0))
