"""Mixture of experts: routing formulas, and the sum over experts for every form their weights may take.

An *expert* is a dict of its weights: matrices ``[I, O]`` or packed ``[O, I]`` (:class:`~kernels_pallas.mxfp4.Mxfp4`,
:class:`~kernels_pallas.fp8.Fp8`), and biases ``[O]``. The experts of a layer come in one of two layouts, and no logit
depends on which:

* **stacked**: one dict whose leaves have a leading axis E. A loop visits the experts in use. The only layout for
  packed weights (MXFP4, FP8), whose decoding reads the slice directly.
* **split**: a tuple of E dicts. Each expert is a buffer of its own that a conditional multiplies in place; a slice
  of a stacked float matrix must first be copied (measured 2.7x slower for one token on a CPU).

Contributions are always added in ascending expert id, so that layouts and neighbours change a sum by rounding at most
(``tests/laws/test_store.py`` says where it is equal bit for bit).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.shapes import Array, Float, Int
from kernels_pallas import fp8, mxfp4

Expert = dict
ExpertMlp = Callable[[jax.Array, Expert], jax.Array]

LAYOUTS = ("split", "stacked", "packed", "fp8")
"""The last two are stacked in MXFP4 and in FP8."""


def route_topk_softmax(
    logits: Float[Array, "T E"], experts_per_token: int
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """gpt-oss: the K largest logits, and a softmax over those K (``GptOssTopKRouter``)."""
    top, chosen = jax.lax.top_k(logits, experts_per_token)
    return chosen, jax.nn.softmax(top, axis=-1)


def route_softmax_topk(
    logits: Float[Array, "T E"], experts_per_token: int
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Qwen3.5: the K largest of a softmax over all experts, in float32, made to sum to 1 (``Qwen3_5MoeTopKRouter``)."""
    chances = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=-1)
    top, chosen = jax.lax.top_k(chances, experts_per_token)
    return chosen, (top / top.sum(axis=-1, keepdims=True)).astype(logits.dtype)


def route_sigmoid_topk(
    logits: Float[Array, "T E"],
    bias: Float[Array, "E"],
    experts_per_token: int,
    *,
    groups: int = 1,
    groups_per_token: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """GLM (after DeepSeek-V3, arXiv 2412.19437, section 2.1.2): scores are sigmoids; ``bias``
    (``e_score_correction_bias``) takes part in the choice alone, never in the weights.

    Of several ``groups`` of experts those are kept whose two best biased scores sum highest.
    """
    scores = jax.nn.sigmoid(logits)
    biased = scores + bias
    if groups > 1:
        grouped = biased.reshape(biased.shape[0], groups, -1)
        best = jax.lax.top_k(grouped, 2)[0].sum(-1)
        kept = jax.nn.one_hot(jax.lax.top_k(best, groups_per_token)[1], groups, dtype=bool).any(1)
        biased = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(biased.shape)
    chosen = jax.lax.top_k(biased, experts_per_token)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * scale


PACKED = {mxfp4.Mxfp4: mxfp4.matmul, fp8.Fp8: fp8.matmul}
"""Type of a packed weight -> its matmul."""


def matmul(x: Float[Array, "T I"], weight: Float[Array, "I O"] | mxfp4.Mxfp4 | fp8.Fp8) -> Float[Array, "T O"]:
    """``x @ W`` for a weight in any form."""
    return PACKED[type(weight)](x, weight) if type(weight) in PACKED else x @ weight


def mix_experts(
    x: Float[Array, "T D"],
    chosen: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    experts: Expert | tuple[Expert, ...],
    mlp: ExpertMlp,
) -> Float[Array, "T D"]:
    """``sum_k weights[t, k] * mlp(x[t], experts[chosen[t, k]])``: dropless, no expert has a capacity.

    Every visited expert computes all T rows, those it was not chosen for with weight 0: a decode step is bound by the
    bytes of the weights, not by rows.
    """
    count = len(experts) if isinstance(experts, tuple) else jax.tree.leaves(experts)[0].shape[0]
    one_hot = jax.nn.one_hot(chosen, count, dtype=weights.dtype)
    share = jnp.einsum("TKE,TK->TE", one_hot, weights)
    used = one_hot.sum((0, 1)) > 0
    if not isinstance(experts, tuple):
        return _loop_over_used(x, share, used, experts, mlp)
    if chosen.size >= 3 * count:  # measured at E=4, K=2: below, skipping the unused saves 12-25% of a step
        return _all_experts(x, share, experts, mlp)
    return _used_experts(x, share, used, experts, mlp)


def _all_experts(x, share, experts, mlp):
    """Every expert, used or not: no conditionals, so XLA may run them side by side. For steps that use nearly all;
    also the differentiable form."""
    total = jnp.zeros_like(x)
    for index, expert in enumerate(experts):
        total = total + _weighed(share[:, index], mlp(x, expert))
    return total


def _used_experts(x, share, used, experts, mlp):
    """One conditional per expert."""
    total = jnp.zeros_like(x)
    for index, expert in enumerate(experts):
        visit = lambda total, expert, index=index: total + _weighed(share[:, index], mlp(x, expert))  # noqa: E731
        total = jax.lax.cond(used[index], visit, lambda total, expert: total, total, expert)
    return total


def _weighed(share: Float[Array, "T"], out: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """The product in the wider dtype of the two (GLM's weights are float32), then in that of ``out``."""
    return (share[:, None] * out).astype(out.dtype)


def _loop_over_used(x, share, used, experts, mlp):
    """A loop over the used experts of a stack, in ascending id."""
    order = jnp.argsort(~used, stable=True)

    def visit(i, total):
        index = order[i]
        expert = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), experts)
        return total + _weighed(jnp.take(share, index, axis=1), mlp(x, expert))

    return jax.lax.fori_loop(0, used.sum(), visit, jnp.zeros_like(x))


def split(experts: Expert) -> tuple[Expert, ...]:
    """Stacked experts as a tuple of single ones."""
    count = jax.tree.leaves(experts)[0].shape[0]
    return tuple(jax.tree.map(lambda leaf, index=index: leaf[index], experts) for index in range(count))


def init_experts(
    key: jax.Array,
    *,
    count: int,
    matrices: dict[str, tuple[int, int]],
    biases: dict[str, int],
    layout: str,
    dtype: jnp.dtype,
) -> Expert | tuple[Expert, ...]:
    """Random experts in a layout: what a module declares, and what the shape of a checkpoint is held against.

    Args:
        matrices: name -> (inputs, outputs).
        biases: name -> outputs.
        layout: one of :data:`LAYOUTS`.

    Raises:
        ValueError: unknown layout, or MXFP4 with an inner size that is not a multiple of 32.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown expert layout {layout!r}; known: {', '.join(LAYOUTS)}")
    zeros = {name: jnp.zeros((count, outputs), dtype) for name, outputs in biases.items()}
    if layout not in ("split", "stacked"):
        return {name: _packed_zeros(layout, count, *shape) for name, shape in matrices.items()} | zeros
    fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-2, out_axis=-1, batch_axis=0)
    keys = jax.random.split(key, len(matrices))
    stacked = {name: fan_in(k, (count, *shape), dtype) for k, (name, shape) in zip(keys, matrices.items(), strict=True)}
    stacked |= zeros
    return split(stacked) if layout == "split" else stacked


def _packed_zeros(layout: str, count: int, inputs: int, outputs: int) -> mxfp4.Mxfp4 | fp8.Fp8:
    if layout == "fp8":
        return fp8.Fp8(
            codes=jnp.zeros((count, outputs, inputs), jnp.float8_e4m3fn),
            scales=jnp.zeros((count, outputs, -(-inputs // fp8.BLOCK)), jnp.float32),
        )
    if inputs % mxfp4.BLOCK:
        raise ValueError(f"packed experts need inputs in multiples of {mxfp4.BLOCK}, got {inputs}")
    return mxfp4.Mxfp4(
        codes=jnp.zeros((count, outputs, inputs // 2), jnp.uint8),
        scales=jnp.zeros((count, outputs, inputs // mxfp4.BLOCK), jnp.uint8),
    )
