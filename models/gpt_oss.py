"""gpt-oss: grouped-query attention with sinks and alternating windows, and a mixture of clamped-SwiGLU experts.

Source: arXiv 2508.10925 and transformers ``models/gpt_oss/modeling_gpt_oss.py``. The attention softmax runs in
float32 here (in the model's dtype there); in float32 the two are the same.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax import cache as caches
from dflash_jax.attention import attend
from dflash_jax.cache import Cache, Places, Slots
from dflash_jax.moe import init_experts, matmul, mix_experts, route_topk_softmax
from dflash_jax.nn import Rope, clamped_swiglu, rms_norm, rope_angles, rotate
from dflash_jax.protocols import StepOut, tapped
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.tree import Tree
from models.hf_config import require, rope_from, windows_from


@dataclass(frozen=True)
class GptOssConfig:
    """The sizes that define a gpt-oss network; ``windows``: one entry per layer, None for full attention."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    experts: int
    experts_per_token: int
    windows: tuple[int | None, ...]
    rope: Rope
    rms_norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "GptOssConfig":
        """From a ``config.json`` dictionary with ``model_type: gpt_oss``.

        Raises:
            ValueError: naming the key that is missing or unsupported.
        """
        layers = int(require(config, "num_hidden_layers"))
        head_dim = int(require(config, "head_dim"))
        if config.get("attention_bias") is False:
            raise ValueError("config.json: attention_bias is false; gpt-oss has biases in attention")
        return cls(
            vocab_size=int(require(config, "vocab_size")),
            hidden_size=int(require(config, "hidden_size")),
            layers=layers,
            heads=int(require(config, "num_attention_heads")),
            kv_heads=int(require(config, "num_key_value_heads")),
            head_dim=head_dim,
            intermediate_size=int(require(config, "intermediate_size")),
            experts=int(require(config, "num_local_experts")),
            experts_per_token=int(require(config, "num_experts_per_tok")),
            windows=windows_from(config, layers),
            rope=rope_from(config, head_dim),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            swiglu_limit=float(config.get("swiglu_limit", 7.0)),
            swiglu_alpha=float(config.get("swiglu_alpha", 1.702)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )


fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
ones = nn.initializers.ones


class Attention(nn.Module):
    """Attention with biases everywhere and one learned sink logit per head."""

    config: GptOssConfig
    window: int | None
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], slots: Slots, places: Places, angles) -> tuple[jax.Array, Slots]:
        c = self.config
        q = self._project("q", x, c.heads)
        k = self._project("k", x, c.kv_heads)
        v = self._project("v", x, c.kv_heads)
        sinks = self.param("sinks", nn.initializers.zeros, (c.heads,), self.dtype)
        slots = caches.write(slots, rotate(k, angles), v, places.written)
        seen = caches.step_visible(slots, places)
        mixed = attend(rotate(q, angles), [(slots.k, slots.v, seen)], scale=c.head_dim**-0.5, sinks=sinks)
        out = self.param("o", fan_in, (c.heads * c.head_dim, c.hidden_size), self.dtype)
        bias = self.param("o_bias", nn.initializers.zeros, (c.hidden_size,), self.dtype)
        return mixed.reshape(*x.shape[:2], -1) @ out + bias, slots

    def _project(self, name: str, x: jax.Array, heads: int) -> Float[Array, "B T heads H"]:
        width = heads * self.config.head_dim
        kernel = self.param(name, fan_in, (self.config.hidden_size, width), self.dtype)
        bias = self.param(f"{name}_bias", nn.initializers.zeros, (width,), self.dtype)
        return (x @ kernel + bias).reshape(*x.shape[:2], heads, self.config.head_dim)


class Moe(nn.Module):
    """Router and experts. Gate and up columns alternate in ``gate_up``, as in the checkpoints."""

    config: GptOssConfig
    layout: str
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Int[Array, "B T K"]]:
        c = self.config
        router = self.param("router", fan_in, (c.hidden_size, c.experts), self.dtype)
        router_bias = self.param("router_bias", nn.initializers.zeros, (c.experts,), self.dtype)
        experts = self.param("experts", self._init_experts)
        rows = x.reshape(-1, c.hidden_size)
        logits = rows @ router + router_bias
        self.sow("router", "logits", logits)  # seen by training only: the collection is not mutable elsewhere
        chosen, weights = route_topk_softmax(logits, c.experts_per_token)
        mixed = mix_experts(rows, chosen, weights, experts, self._expert)
        return mixed.reshape(x.shape), chosen.reshape(*x.shape[:2], -1)

    def _expert(self, x: Float[Array, "T D"], expert: dict) -> Float[Array, "T D"]:
        both = matmul(x, expert["gate_up"]) + expert["gate_up_bias"]
        limit, alpha = self.config.swiglu_limit, self.config.swiglu_alpha
        unit = clamped_swiglu(both[:, 0::2], both[:, 1::2], limit=limit, alpha=alpha)
        return matmul(unit, expert["down"]) + expert["down_bias"]

    def _init_experts(self, key: jax.Array):
        c = self.config
        return init_experts(
            key,
            count=c.experts,
            matrices={
                "gate_up": (c.hidden_size, 2 * c.intermediate_size),
                "down": (c.intermediate_size, c.hidden_size),
            },
            biases={"gate_up_bias": 2 * c.intermediate_size, "down_bias": c.hidden_size},
            layout=self.layout,
            dtype=self.dtype,
        )


class GptOss(nn.Module):
    """The network. ``taps``: layers whose output the drafter sees; ``layout``: see :mod:`dflash_jax.moe`."""

    config: GptOssConfig
    taps: tuple[int, ...] = ()
    layout: str = "split"
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        self.table = self.param("embed", nn.initializers.normal(1.0), (c.vocab_size, c.hidden_size), self.dtype)
        if not c.tie_word_embeddings:
            self.head = self.param("head", fan_in, (c.hidden_size, c.vocab_size), self.dtype)
        self.attention = [Attention(c, window, self.dtype) for window in c.windows]
        self.moe = [Moe(c, self.layout, self.dtype) for _ in c.windows]
        vector = (c.hidden_size,)
        self.attention_norm = [self.param(f"attention_norm_{i}", ones, vector, self.dtype) for i in range(c.layers)]
        self.moe_norm = [self.param(f"moe_norm_{i}", ones, vector, self.dtype) for i in range(c.layers)]
        self.final_norm = self.param("final_norm", ones, vector, self.dtype)

    @property
    def mixture_layers(self) -> int:
        return self.config.layers

    def init_layers(self, batch: int, capacity: int, undo: int) -> tuple[Slots, ...]:
        c = self.config
        size = dict(capacity=capacity, undo=undo, dtype=self.dtype)
        return tuple(caches.init_slots(batch, c.kv_heads, c.head_dim, window=window, **size) for window in c.windows)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.table[tokens]

    def step(self, tokens: Int[Array, "B T"], cache: Cache, tree: Tree | None = None) -> StepOut:
        c = self.config
        places = caches.step_places(cache, tokens.shape[1], tree)
        angles = rope_angles(c.rope, places.positions, self.dtype)
        x, layers, stream, chosen = self.embed(tokens), [], [], []
        for i, slots in enumerate(cache.layers):
            mixed, slots = self.attention[i](self._norm(x, self.attention_norm[i]), slots, places, angles)
            x = x + mixed
            mixed, experts = self.moe[i](self._norm(x, self.moe_norm[i]))
            x = x + mixed
            layers.append(slots)
            stream.append(x)
            chosen.append(experts)
        return StepOut(
            hidden=self._norm(x, self.final_norm),
            features=tapped(stream, self.taps),
            experts=jnp.stack(chosen, axis=2),
            cache=cache.replace(length=cache.length + tokens.shape[1], layers=tuple(layers)),
        )

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return hidden @ (self.table.T if self.config.tie_word_embeddings else self.head)

    def __call__(self, tokens: Int[Array, "B T"], cache: Cache) -> Float[Array, "B T V"]:
        return self.unembed(self.step(tokens, cache).hidden)

    def _norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x, scale, self.config.rms_norm_eps, scale_before_cast=True)
