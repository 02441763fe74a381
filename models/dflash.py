"""The DFlash drafter: a few Qwen3-shaped layers that see the target's features as context keys and values.

Source: arXiv 2602.06036 and z-lab's published checkpoints (``DFlashDraftModel``). One forward proposes a whole block:
the anchor and P-1 mask tokens go in, rows 1..P-1 come out and each predicts the token at its own position. Context
keys and values depend on features and positions alone, so they are computed once and kept; the block's own are never
stored. Embedding and output head are the target's.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax import cache as caches
from dflash_jax.attention import attend
from dflash_jax.cache import Cache
from dflash_jax.nn import Rope, rms_norm, rope_angles, rotate, swiglu
from dflash_jax.protocols import Choose, Draft, Params, Target
from dflash_jax.shapes import Array, Bool, Float, Int
from models.hf_config import require, rope_from, windows_from

QWEN3_HEAD_DIM = 128
"""What an absent ``head_dim`` means in a Qwen3-shaped config (transformers ``Qwen3Config``)."""


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter, as its own config.json describes it.

    Attributes:
        windows: sliding window per layer, None for full attention.
        causal: per layer, whether a block row sees only earlier rows of its block.
        taps: target layers whose outputs are the features (``target_layer_ids``).
        block_size: P, the anchor and P-1 drafts.
    """

    hidden_size: int
    target_hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rope: Rope
    taps: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "DFlashConfig":
        """From a ``config.json`` dictionary; a key in ``dflash_config`` wins over the same key at top level.

        In-block causality: ``is_causal`` or ``dflash_config.causal`` for every layer if given, else sliding layers are
        causal and full ones see the whole block (the published drafters' rule).

        Raises:
            ValueError: naming the key that is missing or unsupported.
        """
        own = config.get("dflash_config") or {}
        config = config | {key: value for key, value in own.items() if value is not None}
        layers = int(require(config, "num_hidden_layers"))
        head_dim = int(config.get("head_dim") or QWEN3_HEAD_DIM)
        windows = windows_from(config, layers)
        override = config.get("causal") if config.get("is_causal") is None else config["is_causal"]
        causal = tuple(window is not None if override is None else bool(override) for window in windows)
        softcap = config.get("final_logit_softcapping")
        return cls(
            hidden_size=int(require(config, "hidden_size")),
            target_hidden_size=int(config.get("target_hidden_size") or config["hidden_size"]),
            layers=layers,
            heads=int(require(config, "num_attention_heads")),
            kv_heads=int(require(config, "num_key_value_heads")),
            head_dim=head_dim,
            intermediate_size=int(require(config, "intermediate_size")),
            windows=windows,
            causal=causal,
            rope=rope_from(config, head_dim),
            taps=tuple(int(layer) for layer in require(config, "target_layer_ids")),
            mask_token_id=int(require(config, "mask_token_id")),
            block_size=int(config.get("block_size", 16)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(config.get("attention_bias", False)),
            input_embedding_scale=float(config.get("input_embedding_scale") or 1.0),
            output_multiplier=float(config.get("output_multiplier") or 1.0),
            final_logit_softcapping=float(softcap) if softcap else None,
        )


fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
ones = nn.initializers.ones


class DFlashAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block, by the same matrices."""

    config: DFlashConfig
    dtype: jnp.dtype

    def setup(self):
        c = self.config
        widths = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
        shapes = {name: (c.hidden_size, width) for name, width in widths.items()}
        shapes["o"] = (c.heads * c.head_dim, c.hidden_size)
        self.kernels = {name: self.param(name, fan_in, shape, self.dtype) for name, shape in shapes.items()}
        if c.attention_bias:
            zeros = nn.initializers.zeros
            self.biases = {n: self.param(f"{n}_bias", zeros, shape[1:], self.dtype) for n, shape in shapes.items()}
        self.q_norm = self.param("q_norm", ones, (c.head_dim,), self.dtype)
        self.k_norm = self.param("k_norm", ones, (c.head_dim,), self.dtype)

    def keys_values(self, x: Float[Array, "B T D"], angles) -> tuple[jax.Array, jax.Array]:
        """Rotated keys and plain values ``[B T G H]`` of context rows or of block rows."""
        c = self.config
        k = rms_norm(self._heads("k", x, c.kv_heads), self.k_norm, c.rms_norm_eps)
        return rotate(k, angles), self._heads("v", x, c.kv_heads)

    def __call__(self, x, angles, blocks: int, slots, seen_context, seen_block) -> Float[Array, "B T D"]:
        c = self.config
        q = rotate(rms_norm(self._heads("q", x, c.heads), self.q_norm, c.rms_norm_eps), angles)
        k, v = (_in_groups(part, blocks) for part in self.keys_values(x, angles))
        segments = [(slots.k, slots.v, seen_context), (k, v, seen_block)]
        mixed = attend(q, segments, scale=c.head_dim**-0.5)
        return self._linear("o", mixed.reshape(*x.shape[:2], -1))

    def _heads(self, name: str, x: jax.Array, heads: int) -> jax.Array:
        return self._linear(name, x).reshape(*x.shape[:2], heads, self.config.head_dim)

    def _linear(self, name: str, x: jax.Array) -> jax.Array:
        out = x @ self.kernels[name]
        return out + self.biases[name] if self.config.attention_bias else out


def _in_groups(x: Float[Array, "B T G H"], blocks: int) -> Float[Array, "B G n P H"]:
    """Keys or values of rows, block by block, as :func:`~dflash_jax.attention.attend` takes them."""
    return x.reshape(x.shape[0], blocks, -1, *x.shape[2:]).transpose(0, 3, 1, 2, 4)


class DFlashMlp(nn.Module):
    """SwiGLU, never biased."""

    config: DFlashConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        gate = self.param("gate", fan_in, (c.hidden_size, c.intermediate_size), self.dtype)
        up = self.param("up", fan_in, (c.hidden_size, c.intermediate_size), self.dtype)
        down = self.param("down", fan_in, (c.intermediate_size, c.hidden_size), self.dtype)
        return swiglu(x @ gate, x @ up) @ down


class DFlash(nn.Module):
    """The drafter's network."""

    config: DFlashConfig
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        # fc.weight is [D, A * D_target]; kept as one matrix per tap, so that the concatenation is never built.
        fc_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=(0, 1), out_axis=2)
        self.fc = self.param("fc", fc_init, (len(c.taps), c.target_hidden_size, c.hidden_size), self.dtype)
        self.hidden_norm = self.param("hidden_norm", ones, (c.hidden_size,), self.dtype)
        self.norm = self.param("norm", ones, (c.hidden_size,), self.dtype)
        self.attention = [DFlashAttention(c, self.dtype) for _ in range(c.layers)]
        self.mlp = [DFlashMlp(c, self.dtype) for _ in range(c.layers)]
        vector = (c.hidden_size,)
        self.attention_norm = [self.param(f"attention_norm_{i}", ones, vector, self.dtype) for i in range(c.layers)]
        self.mlp_norm = [self.param(f"mlp_norm_{i}", ones, vector, self.dtype) for i in range(c.layers)]

    def absorb(self, features: Float[Array, "B T A D"], cache: Cache) -> Cache:
        """Write the context keys and values of T more positions. Advances ``length`` by T."""
        c = self.config
        positions = caches.step_positions(cache, features.shape[1])
        angles = rope_angles(c.rope, positions, self.dtype)
        context = jnp.einsum("BTAD,ADE->BTE", features.astype(self.dtype), self.fc)
        context = rms_norm(context, self.hidden_norm, c.rms_norm_eps)
        layers = tuple(
            caches.write(slots, *attention.keys_values(context, angles), positions)
            for attention, slots in zip(self.attention, cache.layers, strict=True)
        )
        return cache.replace(length=cache.length + features.shape[1], layers=layers)

    def block(self, x: Float[Array, "B T D"], anchors: Int[Array, "B n"], cache: Cache) -> Float[Array, "B T D"]:
        """Run embedded block rows; hidden rows after the final norm.

        T = n * P: decoding runs one block, training many side by side. A row sees the context before its own block's
        anchor, and the rows of its own block.

        Args:
            anchors: absolute position of each block's first row.
        """
        c = self.config
        size = x.shape[1] // anchors.shape[1]
        offset = jnp.tile(jnp.arange(size, dtype=anchors.dtype), anchors.shape[1])
        anchor = jnp.repeat(anchors, size, axis=1)
        angles = rope_angles(c.rope, anchor + offset, self.dtype)
        for i, slots in enumerate(cache.layers):
            seen_context = caches.visible(slots, anchor + offset, anchor, cache.length)
            seen_block = jnp.tile(_seen_in_block(size, c.causal[i], c.windows[i]), (x.shape[0], anchors.shape[1], 1))
            normed = rms_norm(x, self.attention_norm[i], c.rms_norm_eps)
            x = x + self.attention[i](normed, angles, anchors.shape[1], slots, seen_context, seen_block)
            x = x + self.mlp[i](rms_norm(x, self.mlp_norm[i], c.rms_norm_eps))
        return rms_norm(x, self.norm, c.rms_norm_eps)

    def __call__(self, features, x, cache):
        """Declares every parameter."""
        cache = self.absorb(features, cache)
        return self.block(x, cache.length[:, None], cache)


def _seen_in_block(size: int, causal: bool, window: int | None) -> Bool[Array, "P P"]:
    """Which rows of its block each row sees."""
    distance = jnp.arange(size)[:, None] - jnp.arange(size)
    seen = distance >= 0 if causal else jnp.ones((size, size), bool)
    return seen if window is None else seen & (jnp.abs(distance) < window)


@dataclass(frozen=True)
class DFlashDrafter:
    """The loop's :class:`~dflash_jax.protocols.Drafter`. ``block_size`` may differ from the one trained for."""

    module: DFlash
    block_size: int

    @property
    def config(self) -> DFlashConfig:
        return self.module.config

    def init_cache(self, batch: int, capacity: int, undo: int) -> Cache:
        c = self.config
        size = dict(capacity=capacity, undo=undo, dtype=self.module.dtype)
        layers = tuple(caches.init_slots(batch, c.kv_heads, c.head_dim, window=w, **size) for w in c.windows)
        return Cache(length=jnp.zeros(batch, jnp.int32), layers=layers)

    def absorb(self, params: Params, features: Float[Array, "B T A D"], count: Int[Array, "B"], cache: Cache) -> Cache:
        """All T rows are written, ``count`` of them count; the rest is invisible and overwritten next time."""
        written = self.module.apply({"params": params}, features, cache, method="absorb")
        return caches.rollback(written, cache.length + count)

    def propose(
        self,
        params: Params,
        target: Target,
        target_params: Params,
        anchor: Int[Array, "B"],
        cache: Cache,
        choose: Choose,
    ) -> Draft:
        """What ``choose`` picks from the block's distributions, one per position."""
        masks = jnp.full((anchor.shape[0], self.block_size - 1), self.config.mask_token_id, anchor.dtype)
        tokens = jnp.concatenate([anchor[:, None], masks], axis=1)
        logits = self.logits(params, target, target_params, tokens, cache)
        return choose(logits)

    def logits(
        self, params: Params, target: Target, target_params: Params, tokens: Int[Array, "B P"], cache: Cache
    ) -> Float[Array, "B drafts V"]:
        """Logits of rows 1..P-1 of one block that follows the cache, by the target's embedding and head."""
        hidden = self.hidden(params, target, target_params, tokens, cache)
        return self.head(target, target_params, hidden[:, 1:])

    def hidden(self, params, target, target_params, tokens: Int[Array, "B P"], cache: Cache) -> Float[Array, "B P D"]:
        x = target.embed(target_params, tokens).astype(self.module.dtype) * self.config.input_embedding_scale
        return self.module.apply({"params": params}, x, cache.length[:, None], cache, method="block")

    def head(self, target: Target, target_params: Params, hidden: jax.Array) -> jax.Array:
        """The target's head on drafter rows, with the drafter's multiplier and soft cap. The vocabulary's padding stays
        -inf: a cap would make it finite, and a draft."""
        logits, cap = target.unembed(target_params, hidden), self.config.final_logit_softcapping
        scaled = logits * self.config.output_multiplier
        return jnp.where(jnp.isneginf(logits), logits, scaled if cap is None else cap * jnp.tanh(scaled / cap))

    def init(self, key: jax.Array) -> Params:
        """Random parameters."""
        c = self.config
        features = jnp.zeros((1, 2, len(c.taps), c.target_hidden_size), self.module.dtype)
        x = jnp.zeros((1, 2, c.hidden_size), self.module.dtype)
        return self.module.init(key, features, x, self.init_cache(1, 4, 2))["params"]

    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters; nothing is allocated."""
        return jax.eval_shape(self.init, jax.random.key(0))
