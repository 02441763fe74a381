"""Qwen3.5 and 3.6 MoE, the text network: three GatedDeltaNet layers, then one of gated full attention; every layer has
routed experts and a gated shared one.

Source: transformers ``models/qwen3_5_moe/modeling_qwen3_5_moe.py``.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax import cache as caches
from dflash_jax import recurrence
from dflash_jax.attention import attend
from dflash_jax.cache import Cache, Places, Slots
from dflash_jax.moe import init_experts, matmul, mix_experts, route_softmax_topk
from dflash_jax.nn import Rope, accumulation_dtype, rms_norm, rope_angles, rotate, swiglu
from dflash_jax.protocols import StepOut, tapped
from dflash_jax.recurrence import Recurrence, Sizes
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.tree import Tree
from models.gated_delta_net import GatedDeltaNet
from models.hf_config import require, rope_from, rotary_dim


@dataclass(frozen=True)
class Qwen35MoeConfig:
    """The sizes that define a network; ``linear``: per layer, whether it is a GatedDeltaNet layer."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linear: tuple[bool, ...]
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_taps: int
    experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    rope: Rope
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Qwen35MoeConfig":
        """From a ``config.json`` dictionary whose ``text_config`` is laid flat.

        Raises:
            ValueError: naming the key that is missing or unsupported.
        """
        layers, head_dim = int(require(config, "num_hidden_layers")), int(require(config, "head_dim"))
        for key, wanted in (("attn_output_gate", True), ("attention_bias", False), ("hidden_act", "silu")):
            if config.get(key, wanted) != wanted:
                raise ValueError(f"config.json: {key} is {config[key]!r}; only {wanted!r} is released and supported")
        if config.get("mlp_only_layers"):
            raise ValueError(f"config.json: mlp_only_layers {config['mlp_only_layers']}: layers without experts")
        value_heads, key_heads = (int(require(config, f"linear_num_{part}_heads")) for part in ("value", "key"))
        if value_heads % key_heads:
            raise ValueError(
                f"config.json: linear_num_value_heads {value_heads} is no multiple of {key_heads} key heads"
            )
        return cls(
            vocab_size=int(require(config, "vocab_size")),
            hidden_size=int(require(config, "hidden_size")),
            layers=layers,
            heads=int(require(config, "num_attention_heads")),
            kv_heads=int(require(config, "num_key_value_heads")),
            head_dim=head_dim,
            linear=_linear_layers(config, layers),
            linear_key_heads=key_heads,
            linear_value_heads=value_heads,
            linear_key_dim=int(require(config, "linear_key_head_dim")),
            linear_value_dim=int(require(config, "linear_value_head_dim")),
            conv_taps=int(require(config, "linear_conv_kernel_dim")),
            experts=int(require(config, "num_experts")),
            experts_per_token=int(require(config, "num_experts_per_tok")),
            expert_size=int(require(config, "moe_intermediate_size")),
            shared_size=int(require(config, "shared_expert_intermediate_size")),
            rope=rope_from(config, rotary_dim(config, head_dim)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def memory(self) -> Sizes:
        """Of a GatedDeltaNet layer."""
        return Sizes(
            key_heads=self.linear_key_heads,
            repeat=self.linear_value_heads // self.linear_key_heads,
            key_dim=self.linear_key_dim,
            value_dim=self.linear_value_dim,
            taps=self.conv_taps,
            channels=2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim,
        )


def _linear_layers(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """``layer_types``; without it every ``full_attention_interval``-th layer has full attention."""
    every = int(config.get("full_attention_interval") or 4)
    default = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    kinds = config.get("layer_types") or default
    if len(kinds) != layers:
        raise ValueError(f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {layers}")
    if unknown := sorted(set(kinds) - {"full_attention", "linear_attention"}):
        raise ValueError(f"config.json: layer_types has {unknown}; known: full_attention, linear_attention")
    return tuple(kind == "linear_attention" for kind in kinds)


fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
zeros = nn.initializers.zeros


def centred_norm(x: Float[Array, "*batch D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "*batch D"]:
    """RMS norm whose weight is stored as its distance from 1 (``Qwen3_5MoeRMSNorm``)."""
    return rms_norm(x, 1 + scale.astype(accumulation_dtype(x.dtype)), eps, scale_before_cast=True)


class Attention(nn.Module):
    """Full attention: normed queries and keys, a part of each head rotated, and a gate per output channel."""

    config: Qwen35MoeConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], slots: Slots, places: Places, angles) -> tuple[jax.Array, Slots]:
        c = self.config
        q, gate = jnp.split(self._project("q", x, c.heads, 2 * c.head_dim), 2, axis=-1)  # side by side in every head
        k = rotate(self._normed("k_norm", self._project("k", x, c.kv_heads, c.head_dim)), angles)
        v = self._project("v", x, c.kv_heads, c.head_dim)
        slots = caches.write(slots, k, v, places.written)
        seen = caches.step_visible(slots, places)
        q = rotate(self._normed("q_norm", q), angles)
        mixed = attend(q, [(slots.k, slots.v, seen)], scale=c.head_dim**-0.5) * jax.nn.sigmoid(gate)
        out = self.param("o", fan_in, (c.heads * c.head_dim, c.hidden_size), self.dtype)
        return mixed.reshape(*x.shape[:2], -1) @ out, slots

    def _project(self, name: str, x: jax.Array, heads: int, width: int) -> Float[Array, "B T heads width"]:
        kernel = self.param(name, fan_in, (self.config.hidden_size, heads * width), self.dtype)
        return (x @ kernel).reshape(*x.shape[:2], heads, width)

    def _normed(self, name: str, x: jax.Array) -> jax.Array:
        return centred_norm(x, self.param(name, zeros, (self.config.head_dim,), self.dtype), self.config.rms_norm_eps)


class Moe(nn.Module):
    """Router, routed experts, and a shared expert behind a sigmoid."""

    config: Qwen35MoeConfig
    layout: str
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Int[Array, "B T K"]]:
        c = self.config
        router = self.param("router", fan_in, (c.hidden_size, c.experts), self.dtype)
        experts = self.param("experts", self._init_experts)
        rows = x.reshape(-1, c.hidden_size)
        logits = rows @ router
        self.sow("router", "logits", logits)  # seen by training only: the collection is not mutable elsewhere
        chosen, weights = route_softmax_topk(logits, c.experts_per_token)
        mixed = mix_experts(rows, chosen, weights, experts, _mlp)
        scale = self.param("shared_scale", fan_in, (c.hidden_size, 1), self.dtype)
        mixed = mixed + jax.nn.sigmoid(rows @ scale) * self._shared(rows)
        return mixed.reshape(x.shape), chosen.reshape(*x.shape[:2], -1)

    def _shared(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        c = self.config
        gate = self.param("shared_gate", fan_in, (c.hidden_size, c.shared_size), self.dtype)
        up = self.param("shared_up", fan_in, (c.hidden_size, c.shared_size), self.dtype)
        return swiglu(x @ gate, x @ up) @ self.param("shared_down", fan_in, (c.shared_size, c.hidden_size), self.dtype)

    def _init_experts(self, key: jax.Array):
        c = self.config
        matrices = {"gate_up": (c.hidden_size, 2 * c.expert_size), "down": (c.expert_size, c.hidden_size)}
        return init_experts(key, count=c.experts, matrices=matrices, biases={}, layout=self.layout, dtype=self.dtype)


def _mlp(x: Float[Array, "T D"], expert: dict) -> Float[Array, "T D"]:
    """SwiGLU; the gate is the first half of ``gate_up``."""
    return matmul(swiglu(*jnp.split(matmul(x, expert["gate_up"]), 2, axis=-1)), expert["down"])


class Qwen35Moe(nn.Module):
    """The network. ``taps``: layers whose output the drafter sees; ``layout``: see :mod:`dflash_jax.moe`; ``method``:
    how recurrent state is rolled back, see :mod:`dflash_jax.recurrence`."""

    config: Qwen35MoeConfig
    taps: tuple[int, ...] = ()
    layout: str = "split"
    dtype: jnp.dtype = jnp.float32
    method: str = "solve"

    def setup(self):
        c = self.config
        self.table = self.param("embed", nn.initializers.normal(1.0), (c.vocab_size, c.hidden_size), self.dtype)
        if not c.tie_word_embeddings:
            self.head = self.param("head", fan_in, (c.hidden_size, c.vocab_size), self.dtype)
        self.attention = {str(i): Attention(c, self.dtype) for i, linear in enumerate(c.linear) if not linear}
        self.delta = {str(i): GatedDeltaNet(c, self.dtype) for i, linear in enumerate(c.linear) if linear}
        self.moe = [Moe(c, self.layout, self.dtype) for _ in c.linear]
        vector = (c.hidden_size,)
        self.mixer_norm = [self.param(f"mixer_norm_{i}", zeros, vector, self.dtype) for i in range(c.layers)]
        self.moe_norm = [self.param(f"moe_norm_{i}", zeros, vector, self.dtype) for i in range(c.layers)]
        self.final_norm = self.param("final_norm", zeros, vector, self.dtype)

    @property
    def mixture_layers(self) -> int:
        return self.config.layers

    def init_layers(self, batch: int, capacity: int, undo: int) -> tuple[Slots | Recurrence, ...]:
        c = self.config
        wide = accumulation_dtype(self.dtype)
        recurrent = dict(undo=undo, dtype=self.dtype, wide=wide, method=self.method)
        full = dict(capacity=capacity, undo=undo, window=None, dtype=self.dtype)
        return tuple(
            recurrence.init_recurrence(batch, c.memory, **recurrent)
            if linear
            else caches.init_slots(batch, c.kv_heads, c.head_dim, **full)
            for linear in c.linear
        )

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.table[tokens]

    def step(self, tokens: Int[Array, "B T"], cache: Cache, tree: Tree | None = None) -> StepOut:
        c = self.config
        places = caches.step_places(cache, tokens.shape[1], tree)
        angles = rope_angles(c.rope, places.positions, self.dtype)
        x, layers, stream, chosen = self.embed(tokens), [], [], []
        for i, memory in enumerate(cache.layers):
            normed = centred_norm(x, self.mixer_norm[i], c.rms_norm_eps)
            if c.linear[i]:
                mixed, memory = self.delta[str(i)](normed, memory, places)
            else:
                mixed, memory = self.attention[str(i)](normed, memory, places, angles)
            x = x + mixed
            mixed, experts = self.moe[i](centred_norm(x, self.moe_norm[i], c.rms_norm_eps))
            x = x + mixed
            layers.append(memory)
            stream.append(x)
            chosen.append(experts)
        return StepOut(
            hidden=centred_norm(x, self.final_norm, c.rms_norm_eps),
            features=tapped(stream, self.taps),
            experts=jnp.stack(chosen, axis=2),
            cache=cache.replace(length=cache.length + tokens.shape[1], layers=tuple(layers)),
        )

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return hidden @ (self.table.T if self.config.tie_word_embeddings else self.head)

    def __call__(self, tokens: Int[Array, "B T"], cache: Cache) -> Float[Array, "B T V"]:
        return self.unembed(self.step(tokens, cache).hidden)
