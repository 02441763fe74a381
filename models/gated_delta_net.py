"""Gated DeltaNet (arXiv 2412.06464) as Qwen3.5 has it: the layer around :mod:`dflash_jax.delta`.

Source: transformers ``Qwen3_5MoeGatedDeltaNet``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax import delta, recurrence
from dflash_jax.cache import Places
from dflash_jax.nn import accumulation_dtype, rms_norm
from dflash_jax.recurrence import Recurrence
from dflash_jax.shapes import Array, Float
from dflash_jax.tree import lineage

fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
ones = nn.initializers.ones


def _log_of_1_to_16(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Mamba-2's first values (arXiv 2405.21060): with the steps below, memories of 1 to 1000 tokens."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _softplus_of_short_steps(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Biases whose softplus is 0.001 to 0.1, evenly in the logarithm."""
    step = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(0.001), jnp.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))


class GatedDeltaNet(nn.Module):
    """Linear attention: a short convolution, the gated delta rule, and a norm gated by ``z``.

    ``config`` has ``hidden_size``, ``rms_norm_eps``, ``memory`` (:class:`~dflash_jax.recurrence.Sizes`), ``conv_taps``
    and the heads and widths whose names begin with ``linear_``.
    """

    config: Any
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], memory: Recurrence, places: Places) -> tuple[jax.Array, Recurrence]:
        c, sizes, wide = self.config, self.config.memory, accumulation_dtype(self.dtype)
        values = (c.linear_key_heads, sizes.repeat, c.linear_value_dim)
        rows = x @ self._kernel("qkv", sizes.channels)
        taps = self.param("conv", fan_in, (c.conv_taps, sizes.channels), self.dtype)
        state, window = recurrence.resume(memory, places.start)
        path = None if places.tree is None else lineage(places.tree.parent, c.conv_taps)
        mixed = jax.nn.silu(delta.causal_convolution(window, rows, taps, path)).astype(wide)
        keys = c.linear_key_heads * c.linear_key_dim
        q, k = (
            delta.unit(part.reshape(*x.shape[:2], c.linear_key_heads, c.linear_key_dim))
            for part in (mixed[..., :keys], mixed[..., keys : 2 * keys])
        )
        beta = jax.nn.sigmoid(x @ self._kernel("b", c.linear_value_heads)).astype(wide)
        tokens = delta.Tokens(
            q=q * c.linear_key_dim**-0.5,
            k=k,
            v=mixed[..., 2 * keys :].reshape(*x.shape[:2], *values),
            g=self._log_decay(x).reshape(*x.shape[:2], *values[:2]),
            beta=beta.reshape(*x.shape[:2], *values[:2]),
        )
        read = recurrence.hear(memory, state, tokens, places.ancestors)
        memory = recurrence.record(memory, places.start, state, window, rows, tokens, read)
        z = (x @ self._kernel("z", c.linear_value_heads * c.linear_value_dim)).reshape(*x.shape[:2], *values)
        norm = self.param("norm", ones, (c.linear_value_dim,), self.dtype)
        normed = rms_norm(read.out.astype(self.dtype), norm, c.rms_norm_eps)
        gated = (normed.astype(wide) * jax.nn.silu(z.astype(wide))).astype(self.dtype)
        out = self.param("o", fan_in, (c.linear_value_heads * c.linear_value_dim, c.hidden_size), self.dtype)
        return gated.reshape(*x.shape[:2], -1) @ out, memory

    def _kernel(self, name: str, width: int) -> jax.Array:
        return self.param(name, fan_in, (self.config.hidden_size, width), self.dtype)

    def _log_decay(self, x: jax.Array) -> Float[Array, "B T heads"]:
        """``-exp(A_log) * softplus(a + dt_bias)``, float32 or wider."""
        heads, wide = self.config.linear_value_heads, accumulation_dtype(self.dtype)
        a_log = self.param("A_log", _log_of_1_to_16, (heads,), self.dtype).astype(wide)
        bias = self.param("dt_bias", _softplus_of_short_steps, (heads,), self.dtype).astype(wide)
        return -jnp.exp(a_log) * jax.nn.softplus((x @ self._kernel("a", heads)).astype(wide) + bias)
