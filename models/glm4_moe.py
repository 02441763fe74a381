"""GLM-4.5, 4.6 and 4.7 MoE: grouped-query attention with biases and half of each head rotated.

Source: arXiv 2508.06471 and transformers ``models/glm4_moe/modeling_glm4_moe.py``.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax import cache as caches
from dflash_jax.attention import attend
from dflash_jax.cache import Cache, Places, Slots
from dflash_jax.nn import Rope, rms_norm, rope_angles, rotate
from dflash_jax.protocols import StepOut, tapped
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.tree import Tree
from models.glm_moe import Mlp, Moe, mixture_from
from models.hf_config import require, rope_from, rotary_dim


@dataclass(frozen=True)
class Glm4MoeConfig:
    """The sizes that define a network; from ``intermediate_size`` on see :func:`models.glm_moe.mixture_from`."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    attention_bias: bool
    rope: Rope
    intermediate_size: int
    dense_layers: int
    experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    groups: int = 1
    groups_per_token: int = 1
    normalise: bool = True
    routed_scale: float = 1.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Glm4MoeConfig":
        """From a ``config.json`` dictionary with ``model_type: glm4_moe``.

        Raises:
            ValueError: naming the key that is missing or unsupported.
        """
        layers, heads = int(require(config, "num_hidden_layers")), int(require(config, "num_attention_heads"))
        head_dim = int(config.get("head_dim") or require(config, "hidden_size") // heads)
        return cls(
            vocab_size=int(require(config, "vocab_size")),
            hidden_size=int(require(config, "hidden_size")),
            layers=layers,
            heads=heads,
            kv_heads=int(require(config, "num_key_value_heads")),
            head_dim=head_dim,
            qk_norm=bool(config.get("use_qk_norm", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            rope=rope_from(config, rotary_dim(config, head_dim, default=0.5)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            **mixture_from(config, layers),
        )


fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
ones = nn.initializers.ones


class Attention(nn.Module):
    """Biases on queries, keys and values, none on the output; queries and keys normed in the larger releases."""

    config: Glm4MoeConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], slots: Slots, places: Places, angles) -> tuple[jax.Array, Slots]:
        c = self.config
        q, k = self._normed("q", self._project("q", x, c.heads)), self._normed("k", self._project("k", x, c.kv_heads))
        v = self._project("v", x, c.kv_heads)
        slots = caches.write(slots, rotate(k, angles), v, places.written)
        seen = caches.step_visible(slots, places)
        mixed = attend(rotate(q, angles), [(slots.k, slots.v, seen)], scale=c.head_dim**-0.5)
        out = self.param("o", fan_in, (c.heads * c.head_dim, c.hidden_size), self.dtype)
        return mixed.reshape(*x.shape[:2], -1) @ out, slots

    def _project(self, name: str, x: jax.Array, heads: int) -> Float[Array, "B T heads H"]:
        width = heads * self.config.head_dim
        out = x @ self.param(name, fan_in, (self.config.hidden_size, width), self.dtype)
        if self.config.attention_bias:
            out = out + self.param(f"{name}_bias", nn.initializers.zeros, (width,), self.dtype)
        return out.reshape(*x.shape[:2], heads, self.config.head_dim)

    def _normed(self, name: str, x: jax.Array) -> jax.Array:
        c = self.config
        if not c.qk_norm:
            return x
        return rms_norm(x, self.param(f"{name}_norm", ones, (c.head_dim,), self.dtype), c.rms_norm_eps)


class Glm4Moe(nn.Module):
    """The network. ``taps``: layers whose output the drafter sees; ``layout``: see :mod:`dflash_jax.moe`."""

    config: Glm4MoeConfig
    taps: tuple[int, ...] = ()
    layout: str = "split"
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        self.table = self.param("embed", nn.initializers.normal(1.0), (c.vocab_size, c.hidden_size), self.dtype)
        if not c.tie_word_embeddings:
            self.head = self.param("head", fan_in, (c.hidden_size, c.vocab_size), self.dtype)
        self.attention = [Attention(c, self.dtype) for _ in range(c.layers)]
        self.mlp = [Mlp(c.hidden_size, c.intermediate_size, self.dtype) for _ in range(c.dense_layers)]
        self.moe = {str(i): Moe(c, self.layout, self.dtype) for i in range(c.dense_layers, c.layers)}
        vector = (c.hidden_size,)
        self.attention_norm = [self.param(f"attention_norm_{i}", ones, vector, self.dtype) for i in range(c.layers)]
        self.mlp_norm = [self.param(f"mlp_norm_{i}", ones, vector, self.dtype) for i in range(c.layers)]
        self.final_norm = self.param("final_norm", ones, vector, self.dtype)

    @property
    def mixture_layers(self) -> int:
        return self.config.layers - self.config.dense_layers

    def init_layers(self, batch: int, capacity: int, undo: int) -> tuple[Slots, ...]:
        c = self.config
        size = dict(capacity=capacity, undo=undo, window=None, dtype=self.dtype)
        return tuple(caches.init_slots(batch, c.kv_heads, c.head_dim, **size) for _ in range(c.layers))

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.table[tokens]

    def step(self, tokens: Int[Array, "B T"], cache: Cache, tree: Tree | None = None) -> StepOut:
        c = self.config
        places = caches.step_places(cache, tokens.shape[1], tree)
        angles = rope_angles(c.rope, places.positions, self.dtype)
        x, layers, stream, chosen = self.embed(tokens), [], [], []
        for i, slots in enumerate(cache.layers):
            normed = rms_norm(x, self.attention_norm[i], c.rms_norm_eps)
            mixed, slots = self.attention[i](normed, slots, places, angles)
            x = x + mixed
            normed = rms_norm(x, self.mlp_norm[i], c.rms_norm_eps)
            if i < c.dense_layers:
                x = x + self.mlp[i](normed)
            else:
                mixed, experts = self.moe[str(i)](normed)
                x, chosen = x + mixed, [*chosen, experts]
            layers.append(slots)
            stream.append(x)
        return StepOut(
            hidden=rms_norm(x, self.final_norm, c.rms_norm_eps),
            features=tapped(stream, self.taps),
            experts=jnp.stack(chosen, axis=2),
            cache=cache.replace(length=cache.length + tokens.shape[1], layers=tuple(layers)),
        )

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return hidden @ (self.table.T if self.config.tie_word_embeddings else self.head)

    def __call__(self, tokens: Int[Array, "B T"], cache: Cache) -> Float[Array, "B T V"]:
        return self.unembed(self.step(tokens, cache).hidden)
