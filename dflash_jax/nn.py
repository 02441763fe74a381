"""Normalisations, rotary embeddings and gated units that the networks share. Pure functions of arrays."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.shapes import Array, Float, Int


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which norms, softmaxes and angles are computed: float32, or float64 where the model is float64."""
    return jnp.promote_types(dtype, jnp.float32)


def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, "D"], eps: float, *, scale_before_cast: bool = False
) -> Float[Array, "*batch D"]:
    """Root-mean-square norm, ``x * rsqrt(mean(x**2) + eps) * scale``, normalised in float32.

    Two roundings are in use and differ in bfloat16 only. Llama, Qwen3 and GLM cast the normalised value back and then
    multiply (``Qwen3RMSNorm``); gpt-oss multiplies in float32 and casts last (``GptOssRMSNorm``).
    """
    wide = x.astype(accumulation_dtype(x.dtype))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if scale_before_cast:
        return (normed * scale.astype(wide.dtype)).astype(x.dtype)
    return normed.astype(x.dtype) * scale


def argmax(logits: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """The id of the largest logit, the lowest of equals; a NaN is the largest, as in ``jnp.argmax``.

    In two reductions over plain numbers, which vectorise; XLA reduces the pairs (value, index) of ``jnp.argmax`` one
    by one on a CPU.
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    largest = (logits == top) | jnp.isnan(logits)
    return jnp.min(jnp.where(largest, ids, logits.shape[-1]), axis=-1)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: angular frequencies of the rotated pairs, and YaRN's factor on cos and sin.

    ``frequencies`` has H/2 entries (radians per position, float64); pairs are the two halves of a head ("rotate half").
    """

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0


def plain_rope(theta: float, head_dim: int) -> Rope:
    """Frequencies ``theta**(-2j / H)`` (RoFormer, arXiv 2104.09864)."""
    return Rope(tuple(float(theta) ** (-2.0 * j / head_dim) for j in range(head_dim // 2)))


def yarn_rope(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    original_max_position: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
) -> Rope:
    """YaRN (arXiv 2309.00071) as transformers' ``_compute_yarn_parameters`` computes it.

    Fast pairs keep their frequency, slow ones are divided by ``factor``, a linear ramp lies between. gpt-oss sets
    ``truncate: false``: the ramp's ends are then not rounded to whole pairs.
    """

    def pair_with_rotations(rotations: float) -> float:
        return head_dim * math.log(original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_rotations(beta_fast), pair_with_rotations(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the reference's guard against an empty ramp
    plain = np.asarray(plain_rope(theta, head_dim).frequencies)
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return Rope(tuple(frequencies.tolist()), attention_factor)


def rope_angles(
    rope: Rope, positions: Int[Array, "B T"], dtype: jnp.dtype
) -> tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]:
    """``(cos, sin)`` of every pair at absolute positions, computed in float32 or wider and cast to ``dtype``."""
    wide = accumulation_dtype(dtype)
    angle = positions.astype(wide)[..., None, None] * jnp.asarray(rope.frequencies, wide)
    factor = jnp.asarray(rope.attention_factor, wide)
    cos, sin = (jnp.cos(angle) * factor).astype(dtype), (jnp.sin(angle) * factor).astype(dtype)
    # Without the barrier XLA computes every angle again inside each fusion that turns a query or a key.
    return jax.lax.optimization_barrier((cos, sin))


def rotate(
    x: Float[Array, "B T N H"], angles: tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]
) -> Float[Array, "B T N H"]:
    """Rotate each head's pairs (j, j + half) by the angle of its position. With fewer angles than H/2 the dimensions
    from ``2 * half`` on stay as they are (config key ``partial_rotary_factor``)."""
    cos, sin = angles
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rotate_interleaved(
    x: Float[Array, "B T N H"], angles: tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]
) -> Float[Array, "B T N H"]:
    """Rotate neighbours (2j, 2j + 1), and leave all first members in the first half: the same permutation of queries
    and keys, so no score changes (transformers' ``apply_rotary_pos_emb_interleave``). Dimensions without an angle
    stay."""
    turned = x[..., : 2 * angles[0].shape[-1]]
    paired = jnp.concatenate([turned[..., 0::2], turned[..., 1::2], x[..., turned.shape[-1] :]], axis=-1)
    return rotate(paired, angles)


def layer_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, "D"], bias: Float[Array, "D"], eps: float
) -> Float[Array, "*batch D"]:
    """LayerNorm, in float32 or wider."""
    wide = x.astype(accumulation_dtype(x.dtype))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * scale + bias).astype(x.dtype)


def swiglu(gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
    """``silu(gate) * up`` (arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


def clamped_swiglu(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"], *, limit: float, alpha: float = 1.702
) -> Float[Array, "*batch F"]:
    """gpt-oss's unit: ``(up + 1) * gate * sigmoid(alpha * gate)``, the gate clamped from above only, ``up`` on both
    sides (``GptOssExperts._apply_gate``; config key ``swiglu_limit``)."""
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
