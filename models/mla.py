"""Multi-head latent attention as the GLM families have it (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of a token are one latent and one rotated key, shared by all heads: that is what the cache holds
(``Slots.k``: latents ``[B 1 S M]``, ``Slots.v``: rotated keys ``[B 1 S H]``). Attention runs in the absorbed form:
queries are taken into the latent space, so that keys and values are never expanded.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax import cache as caches
from dflash_jax.attention import attend_latent
from dflash_jax.cache import Places, Slots
from dflash_jax.nn import Rope, plain_rope, rms_norm, rotate, rotate_interleaved
from dflash_jax.shapes import Array, Bool, Float
from models.hf_config import require, rope_from, theta_of

LATENT_EPS = 1e-6
"""Of the norms inside: the default of transformers' RMSNorm classes, not ``rms_norm_eps``."""

fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
ones = nn.initializers.ones


class Widths(NamedTuple):
    """``q_lora_rank``, ``kv_lora_rank`` (M), ``qk_nope_head_dim``, ``qk_rope_head_dim`` (H), ``v_head_dim``."""

    q_lora: int
    latent: int
    nope: int
    rope: int
    value: int

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "Widths":
        """From a ``config.json`` dictionary.

        Raises:
            ValueError: naming the key that is missing.
        """
        keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return cls(*(int(require(config, key)) for key in keys))


def init_latents(batch: int, widths: Widths, *, capacity: int, dtype: jnp.dtype) -> Slots:
    """Empty slots for ``capacity`` positions."""
    shape = (batch, 1, capacity)
    return Slots(k=jnp.zeros((*shape, widths.latent), dtype), v=jnp.zeros((*shape, widths.rope), dtype))


def latent_rope(config: dict[str, Any], width: int) -> Rope:
    """The rotary embedding of ``width`` dimensions.

    Raises:
        ValueError: for YaRN, whose ``mscale`` would also change the scale of the scores; no release has it.
    """
    rope = rope_from(config, width)
    if rope != plain_rope(theta_of(config), width):
        raise ValueError(
            "config.json: latent attention with scaled rotary positions is not supported; no release has it"
        )
    return rope


class LatentAttention(nn.Module):
    """``config`` has ``hidden_size``, ``heads``, ``widths``, ``attention_bias`` and ``interleaved``."""

    config: Any
    dtype: jnp.dtype

    def setup(self):
        c, w = self.config, self.config.widths
        shapes = {
            "q_a": (c.hidden_size, w.q_lora),
            "q_b": (w.q_lora, c.heads * (w.nope + w.rope)),
            "kv_a": (c.hidden_size, w.latent + w.rope),
            "kv_b": (w.latent, c.heads * (w.nope + w.value)),
            "o": (c.heads * w.value, c.hidden_size),
        }
        self.kernels = {name: self.param(name, fan_in, shape, self.dtype) for name, shape in shapes.items()}
        biased = ("q_a", "kv_a", "o") if c.attention_bias else ()
        zeros = nn.initializers.zeros
        self.biases = {n: self.param(f"{n}_bias", zeros, shapes[n][1:], self.dtype) for n in biased}
        self.q_norm = self.param("q_norm", ones, (w.q_lora,), self.dtype)
        self.kv_norm = self.param("kv_norm", ones, (w.latent,), self.dtype)

    def q_residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T Q"]:
        """The normed query latent; a sparse indexer reads it too."""
        return rms_norm(self._linear("q_a", x), self.q_norm, LATENT_EPS)

    def write(self, x: Float[Array, "B T D"], slots: Slots, places: Places, angles) -> Slots:
        """Put the latents and rotated keys of T tokens into the cache."""
        w = self.config.widths
        both = self._linear("kv_a", x)
        latent = rms_norm(both[..., : w.latent], self.kv_norm, LATENT_EPS)[:, :, None]
        key = self._rotate(both[:, :, None, w.latent :], angles)
        return caches.write(slots, latent, key, places.written)

    def read(self, residual: Float[Array, "B T Q"], slots: Slots, angles, seen: Bool[Array, "B T S"]) -> jax.Array:
        """Attend to what ``seen`` allows of the cache; ``[B T D]``."""
        c, w = self.config, self.config.widths
        q = self._linear("q_b", residual).reshape(*residual.shape[:2], c.heads, w.nope + w.rope)
        up = self.kernels["kv_b"].reshape(w.latent, c.heads, w.nope + w.value)
        q_latent = jnp.einsum("BTNH,MNH->BTNM", q[..., : w.nope], up[..., : w.nope])
        q_rope = self._rotate(q[..., w.nope :], angles)
        scale = (w.nope + w.rope) ** -0.5
        mixed = attend_latent(q_latent, q_rope, slots.k, slots.v, seen, scale=scale)
        values = jnp.einsum("BTNM,MNH->BTNH", mixed, up[..., w.nope :])
        return self._linear("o", values.reshape(*residual.shape[:2], -1))

    def _rotate(self, x: jax.Array, angles) -> jax.Array:
        return rotate_interleaved(x, angles) if self.config.interleaved else rotate(x, angles)

    def _linear(self, name: str, x: jax.Array) -> jax.Array:
        out = x @ self.kernels[name]
        return out + self.biases[name] if name in self.biases else out
