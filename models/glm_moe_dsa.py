"""GLM-5, 5.1 and 5.2: latent attention to the keys that a small indexer selects (DeepSeek sparse attention, arXiv
2512.02556), and a mixture of experts.

Source: transformers ``models/glm_moe_dsa/modeling_glm_moe_dsa.py``. The index runs in float32; the released kernels
round its queries and keys to FP8 after a Hadamard transform, transformers and this file do not.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from dflash_jax import cache as caches
from dflash_jax.attention import select_keys
from dflash_jax.cache import Cache, Places, Slots
from dflash_jax.nn import Rope, accumulation_dtype, layer_norm, rms_norm, rope_angles, rotate_interleaved
from dflash_jax.protocols import StepOut, tapped
from dflash_jax.shapes import Array, Bool, Float, Int
from dflash_jax.tree import Tree
from models.glm_moe import Mlp, Moe, mixture_from
from models.hf_config import require
from models.mla import LatentAttention, Widths, init_latents, latent_rope

INDEX_EPS = 1e-6
"""Of the LayerNorm on index keys (``GlmMoeDsaIndexer.k_norm``)."""


@struct.dataclass
class SparseLatents:
    """Memory of one layer: ``latents`` as in :mod:`models.mla`; ``index`` keys ``[B 1 S Hi]`` in its ``k`` (``v`` is
    empty), None in a layer that shares the selection of the one before."""

    latents: Slots
    index: Slots | None


@dataclass(frozen=True)
class GlmMoeDsaConfig:
    """The sizes that define a network; ``selects``: per layer, whether it has an indexer of its own. From
    ``intermediate_size`` on as :func:`models.glm_moe.mixture_from` reads them."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    widths: Widths
    attention_bias: bool
    rope: Rope
    index_heads: int
    index_dim: int
    index_topk: int
    selects: tuple[bool, ...]
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

    @property
    def interleaved(self) -> bool:
        """Rotary pairs are neighbours (transformers has no other form for this family)."""
        return True

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "GlmMoeDsaConfig":
        """From a ``config.json`` dictionary with ``model_type: glm_moe_dsa``.

        Raises:
            ValueError: naming the key that is missing or unsupported.
        """
        layers, widths = int(require(config, "num_hidden_layers")), Widths.from_hf(config)
        for key in ("rope_interleave", "indexer_rope_interleave"):
            if not config.get(key, True):
                raise ValueError(
                    f"config.json: {key} is false; only interleaved rotary pairs are released and supported"
                )
        return cls(
            vocab_size=int(require(config, "vocab_size")),
            hidden_size=int(require(config, "hidden_size")),
            layers=layers,
            heads=int(require(config, "num_attention_heads")),
            widths=widths,
            attention_bias=bool(config.get("attention_bias", False)),
            rope=latent_rope(config, widths.rope),
            index_heads=int(require(config, "index_n_heads")),
            index_dim=int(require(config, "index_head_dim")),
            index_topk=int(require(config, "index_topk")),
            selects=_selecting_layers(config, layers),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            **mixture_from(config, layers),
        )


def _selecting_layers(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """``indexer_types``, or ``index_topk_pattern`` ("FSSF"); without them, every ``index_topk_freq``-th layer from
    ``index_skip_topk_offset`` on selects, and all layers before (``GlmMoeDsaConfig``)."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if isinstance(kinds, str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in kinds]
    if kinds is None:
        every = max(int(config.get("index_topk_freq") or 1), 1)
        offset = int(config.get("index_skip_topk_offset", 2))
        kinds = ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"config.json: indexer_types has {len(kinds)} entries, num_hidden_layers is {layers}")
    if set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise ValueError("config.json: indexer_types must be 'full' or 'shared', the first of them 'full'")
    return tuple(kind == "full" for kind in kinds)


fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
zeros, ones = nn.initializers.zeros, nn.initializers.ones


class Indexer(nn.Module):
    """Scores every cached token for every query by a few cheap heads: ``sum_h w_h relu(q_h . k)``."""

    config: GlmMoeDsaConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], residual: Float[Array, "B T Q"], index: Slots, places: Places, angles
    ) -> tuple[Float[Array, "B T S"], Slots]:
        c, wide = self.config, accumulation_dtype(self.dtype)
        k = x @ self.param("k", fan_in, (c.hidden_size, c.index_dim), self.dtype)
        scale = self.param("k_norm", ones, (c.index_dim,), self.dtype)
        k = layer_norm(k, scale, self.param("k_norm_bias", zeros, (c.index_dim,), self.dtype), INDEX_EPS)
        k = rotate_interleaved(k[:, :, None], angles)
        index = caches.write(index, k, k[..., :0], places.written)
        q = residual @ self.param("q", fan_in, (c.widths.q_lora, c.index_heads * c.index_dim), self.dtype)
        q = rotate_interleaved(q.reshape(*x.shape[:2], c.index_heads, c.index_dim), angles)
        weights = x @ self.param("weights", fan_in, (c.hidden_size, c.index_heads), self.dtype)
        near = jnp.einsum("BTIH,BSH->BTIS", q.astype(wide), index.k[:, 0].astype(wide)) * c.index_dim**-0.5
        weights = weights.astype(wide) * c.index_heads**-0.5
        return jnp.einsum("BTI,BTIS->BTS", weights, jax.nn.relu(near)), index


class GlmMoeDsa(nn.Module):
    """The network. ``taps``: layers whose output the drafter sees; ``layout``: see :mod:`dflash_jax.moe`."""

    config: GlmMoeDsaConfig
    taps: tuple[int, ...] = ()
    layout: str = "split"
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        self.table = self.param("embed", nn.initializers.normal(1.0), (c.vocab_size, c.hidden_size), self.dtype)
        if not c.tie_word_embeddings:
            self.head = self.param("head", fan_in, (c.hidden_size, c.vocab_size), self.dtype)
        self.attention = [LatentAttention(c, self.dtype) for _ in range(c.layers)]
        self.indexer = {str(i): Indexer(c, self.dtype) for i, selects in enumerate(c.selects) if selects}
        self.mlp = [Mlp(c.hidden_size, c.intermediate_size, self.dtype) for _ in range(c.dense_layers)]
        self.moe = {str(i): Moe(c, self.layout, self.dtype) for i in range(c.dense_layers, c.layers)}
        vector = (c.hidden_size,)
        self.attention_norm = [self.param(f"attention_norm_{i}", ones, vector, self.dtype) for i in range(c.layers)]
        self.mlp_norm = [self.param(f"mlp_norm_{i}", ones, vector, self.dtype) for i in range(c.layers)]
        self.final_norm = self.param("final_norm", ones, vector, self.dtype)

    @property
    def mixture_layers(self) -> int:
        return self.config.layers - self.config.dense_layers

    def init_layers(self, batch: int, capacity: int, undo: int) -> tuple[SparseLatents, ...]:
        c = self.config

        def index() -> Slots:
            keys = jnp.zeros((batch, 1, capacity, c.index_dim), self.dtype)
            return Slots(k=keys, v=keys[..., :0])

        return tuple(
            SparseLatents(
                latents=init_latents(batch, c.widths, capacity=capacity, dtype=self.dtype),
                index=index() if selects else None,
            )
            for selects in c.selects
        )

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.table[tokens]

    def step(self, tokens: Int[Array, "B T"], cache: Cache, tree: Tree | None = None) -> StepOut:
        c = self.config
        places = caches.step_places(cache, tokens.shape[1], tree)
        angles = rope_angles(c.rope, places.positions, self.dtype)
        x, layers, stream, chosen, seen = self.embed(tokens), [], [], [], None
        for i, memory in enumerate(cache.layers):
            normed = rms_norm(x, self.attention_norm[i], c.rms_norm_eps)
            mixed, memory, seen = self._attend(i, normed, memory, places, angles, seen)
            x = x + mixed
            normed = rms_norm(x, self.mlp_norm[i], c.rms_norm_eps)
            if i < c.dense_layers:
                x = x + self.mlp[i](normed)
            else:
                mixed, experts = self.moe[str(i)](normed)
                x, chosen = x + mixed, [*chosen, experts]
            layers.append(memory)
            stream.append(x)
        return StepOut(
            hidden=rms_norm(x, self.final_norm, c.rms_norm_eps),
            features=tapped(stream, self.taps),
            experts=jnp.stack(chosen, axis=2),
            cache=cache.replace(length=cache.length + tokens.shape[1], layers=tuple(layers)),
        )

    def _attend(
        self, i: int, x: jax.Array, memory: SparseLatents, places: Places, angles, selected: Bool[Array, "B T S"] | None
    ) -> tuple[jax.Array, SparseLatents, Bool[Array, "B T S"]]:
        """One layer's attention, its memory, and the keys it saw: those that this layer or an earlier one selected."""
        attention, c = self.attention[i], self.config
        latents = attention.write(x, memory.latents, places, angles)
        residual, index = attention.q_residual(x), memory.index
        if c.selects[i]:
            scores, index = self.indexer[str(i)](x, residual, index, places, angles)
            visible = caches.step_visible(latents, places)
            selected = select_keys(scores, visible, c.index_topk)
        mixed = attention.read(residual, latents, angles, selected)
        return mixed, SparseLatents(latents=latents, index=index), selected

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return hidden @ (self.table.T if self.config.tie_word_embeddings else self.head)

    def __call__(self, tokens: Int[Array, "B T"], cache: Cache) -> Float[Array, "B T V"]:
        return self.unembed(self.step(tokens, cache).hidden)
