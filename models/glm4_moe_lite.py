"""GLM-4.7-Flash: multi-head latent attention and a mixture of experts.

Source: transformers ``models/glm4_moe_lite/modeling_glm4_moe_lite.py``.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from dflash_jax import cache as caches
from dflash_jax.cache import Cache, Slots
from dflash_jax.nn import Rope, rms_norm, rope_angles
from dflash_jax.protocols import StepOut, tapped
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.tree import Tree
from models.glm_moe import Mlp, Moe, mixture_from
from models.hf_config import require, rotary_dim
from models.mla import LatentAttention, Widths, init_latents, latent_rope


@dataclass(frozen=True)
class Glm4MoeLiteConfig:
    """The sizes that define a network; from ``intermediate_size`` on see :func:`models.glm_moe.mixture_from`."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    widths: Widths
    attention_bias: bool
    interleaved: bool
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
    def from_hf(cls, config: dict[str, Any]) -> "Glm4MoeLiteConfig":
        """From a ``config.json`` dictionary with ``model_type: glm4_moe_lite``.

        Raises:
            ValueError: naming the key that is missing or unsupported.
        """
        layers, widths = int(require(config, "num_hidden_layers")), Widths.from_hf(config)
        return cls(
            vocab_size=int(require(config, "vocab_size")),
            hidden_size=int(require(config, "hidden_size")),
            layers=layers,
            heads=int(require(config, "num_attention_heads")),
            widths=widths,
            attention_bias=bool(config.get("attention_bias", False)),
            interleaved=bool(config.get("rope_interleave", True)),
            rope=latent_rope(config, rotary_dim(config, widths.rope)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            **mixture_from(config, layers),
        )


fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
ones = nn.initializers.ones


class Glm4MoeLite(nn.Module):
    """The network. ``taps``: layers whose output the drafter sees; ``layout``: see :mod:`dflash_jax.moe`."""

    config: Glm4MoeLiteConfig
    taps: tuple[int, ...] = ()
    layout: str = "split"
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        self.table = self.param("embed", nn.initializers.normal(1.0), (c.vocab_size, c.hidden_size), self.dtype)
        if not c.tie_word_embeddings:
            self.head = self.param("head", fan_in, (c.hidden_size, c.vocab_size), self.dtype)
        self.attention = [LatentAttention(c, self.dtype) for _ in range(c.layers)]
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
        widths = self.config.widths
        latents = (init_latents(batch, widths, capacity=capacity, dtype=self.dtype) for _ in range(self.config.layers))
        return tuple(latents)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.table[tokens]

    def step(self, tokens: Int[Array, "B T"], cache: Cache, tree: Tree | None = None) -> StepOut:
        c = self.config
        places = caches.step_places(cache, tokens.shape[1], tree)
        angles = rope_angles(c.rope, places.positions, self.dtype)
        x, layers, stream, chosen = self.embed(tokens), [], [], []
        for i, slots in enumerate(cache.layers):
            normed = rms_norm(x, self.attention_norm[i], c.rms_norm_eps)
            slots = self.attention[i].write(normed, slots, places, angles)
            seen = caches.step_visible(slots, places)
            x = x + self.attention[i].read(self.attention[i].q_residual(normed), slots, angles, seen)
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
