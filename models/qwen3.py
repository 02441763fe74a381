"""Qwen3 dense: grouped-query attention with per-head query/key norms, SwiGLU. The cross-check family.

Source: arXiv 2505.09388 and transformers ``models/qwen3/modeling_qwen3.py``.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax import cache as caches
from dflash_jax.attention import attend
from dflash_jax.cache import Cache, Places, Slots
from dflash_jax.nn import Rope, rms_norm, rope_angles, rotate, swiglu
from dflash_jax.protocols import StepOut, tapped
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.tree import Tree
from models.hf_config import require, rope_from, windows_from


@dataclass(frozen=True)
class Qwen3Config:
    """The sizes that define a Qwen3 network; ``windows``: one entry per layer, None for full attention."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    windows: tuple[int | None, ...]
    rope: Rope
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Qwen3Config":
        """From a ``config.json`` dictionary with ``model_type: qwen3``.

        Raises:
            ValueError: naming the key that is missing or unsupported.
        """
        layers = int(require(config, "num_hidden_layers"))
        head_dim = int(config.get("head_dim") or 128)  # the default of transformers' Qwen3Config
        if config.get("attention_bias"):
            raise ValueError("config.json: attention_bias is true; no released Qwen3 has it and it is not supported")
        return cls(
            vocab_size=int(require(config, "vocab_size")),
            hidden_size=int(require(config, "hidden_size")),
            layers=layers,
            heads=int(require(config, "num_attention_heads")),
            kv_heads=int(require(config, "num_key_value_heads")),
            head_dim=head_dim,
            intermediate_size=int(require(config, "intermediate_size")),
            windows=windows_from(config, layers),
            rope=rope_from(config, head_dim),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )


fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
ones = nn.initializers.ones


class Attention(nn.Module):
    """Attention whose queries and keys are normalised per head before the rotation."""

    config: Qwen3Config
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], slots: Slots, places: Places, angles) -> tuple[jax.Array, Slots]:
        c = self.config
        q = self._normed("q_norm", self._project("q", x, c.heads))
        k = self._normed("k_norm", self._project("k", x, c.kv_heads))
        v = self._project("v", x, c.kv_heads)
        slots = caches.write(slots, rotate(k, angles), v, places.written)
        seen = caches.step_visible(slots, places)
        mixed = attend(rotate(q, angles), [(slots.k, slots.v, seen)], scale=c.head_dim**-0.5)
        out = self.param("o", fan_in, (c.heads * c.head_dim, c.hidden_size), self.dtype)
        return mixed.reshape(*x.shape[:2], -1) @ out, slots

    def _project(self, name: str, x: jax.Array, heads: int) -> Float[Array, "B T heads H"]:
        width = heads * self.config.head_dim
        kernel = self.param(name, fan_in, (self.config.hidden_size, width), self.dtype)
        return (x @ kernel).reshape(*x.shape[:2], heads, self.config.head_dim)

    def _normed(self, name: str, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.param(name, ones, (self.config.head_dim,), self.dtype), self.config.rms_norm_eps)


class Mlp(nn.Module):
    """SwiGLU."""

    config: Qwen3Config
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        gate = self.param("gate", fan_in, (c.hidden_size, c.intermediate_size), self.dtype)
        up = self.param("up", fan_in, (c.hidden_size, c.intermediate_size), self.dtype)
        down = self.param("down", fan_in, (c.intermediate_size, c.hidden_size), self.dtype)
        return swiglu(x @ gate, x @ up) @ down


class Qwen3(nn.Module):
    """The network. ``taps``: layers whose output the drafter sees."""

    config: Qwen3Config
    taps: tuple[int, ...] = ()
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        self.table = self.param("embed", nn.initializers.normal(1.0), (c.vocab_size, c.hidden_size), self.dtype)
        if not c.tie_word_embeddings:
            self.head = self.param("head", fan_in, (c.hidden_size, c.vocab_size), self.dtype)
        self.attention = [Attention(c, self.dtype) for _ in range(c.layers)]
        self.mlp = [Mlp(c, self.dtype) for _ in range(c.layers)]
        vector = (c.hidden_size,)
        self.attention_norm = [self.param(f"attention_norm_{i}", ones, vector, self.dtype) for i in range(c.layers)]
        self.mlp_norm = [self.param(f"mlp_norm_{i}", ones, vector, self.dtype) for i in range(c.layers)]
        self.final_norm = self.param("final_norm", ones, vector, self.dtype)

    @property
    def mixture_layers(self) -> int:
        return 0

    def init_layers(self, batch: int, capacity: int, undo: int) -> tuple[Slots, ...]:
        c = self.config
        size = dict(capacity=capacity, undo=undo, dtype=self.dtype)
        return tuple(caches.init_slots(batch, c.kv_heads, c.head_dim, window=window, **size) for window in c.windows)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.table[tokens]

    def step(self, tokens: Int[Array, "B T"], cache: Cache, tree: Tree | None = None) -> StepOut:
        eps = self.config.rms_norm_eps
        places = caches.step_places(cache, tokens.shape[1], tree)
        angles = rope_angles(self.config.rope, places.positions, self.dtype)
        x, layers, stream = self.embed(tokens), [], []
        for i, slots in enumerate(cache.layers):
            mixed, slots = self.attention[i](rms_norm(x, self.attention_norm[i], eps), slots, places, angles)
            x = x + mixed
            x = x + self.mlp[i](rms_norm(x, self.mlp_norm[i], eps))
            layers.append(slots)
            stream.append(x)
        return StepOut(
            hidden=rms_norm(x, self.final_norm, eps),
            features=tapped(stream, self.taps),
            experts=jnp.zeros((*tokens.shape, 0, 0), jnp.int32),
            cache=cache.replace(length=cache.length + tokens.shape[1], layers=tuple(layers)),
        )

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return hidden @ (self.table.T if self.config.tie_word_embeddings else self.head)

    def __call__(self, tokens: Int[Array, "B T"], cache: Cache) -> Float[Array, "B T V"]:
        return self.unembed(self.step(tokens, cache).hidden)
