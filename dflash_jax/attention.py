"""Grouped-query attention over a cache, with windows and sinks."""

import jax
import jax.numpy as jnp

from dflash_jax.nn import accumulation_dtype
from dflash_jax.shapes import Array, Bool, Float


def masked_softmax(
    scores: Float[Array, "B G Q S"], seen: Bool[Array, "B 1 Q S"], sinks: Float[Array, "G Q"] | None = None
) -> Float[Array, "B G Q S"]:
    """Softmax over the visible keys; a query that sees none gets all zeros, never NaN.

    ``sinks`` are gpt-oss's learned logits (``self_attn.sinks``): they join the denominator and are then dropped.
    """
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(scores.dtype)[None, :, :, None]
        top = jnp.maximum(top, sink)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    return weights / jnp.where(total == 0, 1, total)


Segment = tuple[jax.Array, jax.Array, jax.Array]
"""Keys ``[B G S H]``, values ``[B G S H]``, and which of them each query sees, bool ``[B T S]``.

Keys and values of five axes, ``[B G n S H]``, are in n groups: the queries fall into n equal runs, each of which sees
the keys of its own group only.
"""


def attend(
    q: Float[Array, "B T N H"], segments: list[Segment], *, scale: float, sinks: Float[Array, "N"] | None = None
) -> Float[Array, "B T N H"]:
    """``softmax(q k^T * scale) v`` over the union of the segments; query head n reads key/value head ``n // R``.

    The softmax runs in float32 or wider. Heads and tokens of the query are folded into one axis and the scores, not
    the keys, are concatenated: every product is a plain batched matmul over a cache as it lies, and no copy of it is
    made.
    """
    batch, tokens, heads, width = q.shape
    groups = segments[0][0].shape[1]
    repeat = heads // groups
    folded = q.reshape(batch, tokens, groups, repeat, width).transpose(0, 2, 1, 3, 4)
    folded = folded.reshape(batch, groups, tokens * repeat, width)
    scores = [_grouped("BG...QH,BG...SH->BG...QS", folded, k) for k, _, _ in segments]
    scores = jnp.concatenate(scores, axis=-1).astype(accumulation_dtype(q.dtype)) * scale
    seen = jnp.repeat(jnp.concatenate([seen for _, _, seen in segments], axis=-1), repeat, axis=1)[:, None]
    # Fused into the softmax, the mask would be worked out anew by each of its passes (a CPU: 55 us, so 44, per layer).
    seen = jax.lax.optimization_barrier(seen)
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(groups, repeat), (1, tokens))
    weights = masked_softmax(scores, seen, sinks)
    mixed, start = 0, 0
    for _, v, _ in segments:
        part = weights[..., start : start + v.shape[-2]].astype(v.dtype)
        mixed, start = mixed + _grouped("BG...QS,BG...SH->BG...QH", part, v), start + v.shape[-2]
    mixed = mixed.reshape(batch, groups, tokens, repeat, width).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(batch, tokens, heads, width)


def _grouped(spec: str, rows: Float[Array, "B G Q X"], memory: jax.Array) -> Float[Array, "B G Q Y"]:
    """A batched matmul of folded query rows with keys or values that may be in groups."""
    shaped = rows if memory.ndim == 4 else rows.reshape(*memory.shape[:3], -1, rows.shape[-1])
    out = jnp.einsum(spec, shaped, memory)
    return out.reshape(*rows.shape[:3], out.shape[-1])


def attend_latent(
    q_latent: Float[Array, "B T N M"],
    q_rope: Float[Array, "B T N H"],
    latent: Float[Array, "B 1 S M"],
    k_rope: Float[Array, "B 1 S H"],
    seen: Bool[Array, "B T S"],
    *,
    scale: float,
) -> Float[Array, "B T N M"]:
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): every head
    attends to the latents themselves and to one shared rotated key; what comes out is a mean of latents per head."""
    batch, tokens, heads, _ = q_latent.shape
    folded = (part.reshape(batch, 1, tokens * heads, -1) for part in (q_latent, q_rope))
    scores = sum(_grouped("BG...QH,BG...SH->BG...QS", q, k) for q, k in zip(folded, (latent, k_rope), strict=True))
    scores = scores.astype(accumulation_dtype(q_latent.dtype)) * scale
    weights = masked_softmax(scores, jax.lax.optimization_barrier(jnp.repeat(seen, heads, axis=1)[:, None]))
    mixed = _grouped("BG...QS,BG...SH->BG...QH", weights.astype(latent.dtype), latent)
    return mixed.reshape(batch, tokens, heads, -1)


def select_keys(scores: Float[Array, "B T S"], seen: Bool[Array, "B T S"], count: int) -> Bool[Array, "B T S"]:
    """The ``count`` visible keys of each query with the highest index scores (DeepSeek sparse attention,
    arXiv 2512.02556); all of them where there are no more. Equal scores: the lower slot first."""
    if count >= scores.shape[-1]:
        return seen
    best = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), count)[1]
    rows, columns = jnp.arange(scores.shape[0])[:, None, None], jnp.arange(scores.shape[1])[None, :, None]
    return jnp.zeros(scores.shape, bool).at[rows, columns, best].set(True) & seen
