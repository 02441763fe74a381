"""The train step of the small targets that this project ships: next-token cross-entropy and router balance."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dflash_jax.protocols import Params
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.training.optimize import TrainState, apply_gradients
from kernels_pallas.fp8 import round_to_fp8
from kernels_pallas.mxfp4.rounding import round_to_mxfp4

BALANCE_WEIGHT = 0.01
"""Weight of the router balance loss (Switch Transformer, arXiv 2101.03961, section 2.2)."""

EXPERT_MATRICES = ("gate_up", "down")
FP8_MATRICES = (*EXPERT_MATRICES, *"qkvo", "q_a", "q_b", "kv_a", "kv_b", "gate", "up")

Rounding = Callable[[Params], Params]
"""Parameters to what the storage of the checkpoint can hold; gradients pass straight through (arXiv 1308.3432)."""


def round_experts_to_mxfp4(params: Params) -> Params:
    """Expert matrices ``[I, O]`` rounded to MXFP4, as gpt-oss stores them."""
    return _round_matrices(params, EXPERT_MATRICES, lambda matrix, _: round_to_mxfp4(matrix, axis=-2))


def round_matrices_to_fp8(params: Params) -> Params:
    """Every matrix but embedding, head and routers rounded to FP8 in blocks of 128 x 128, as GLM stores them; the two
    halves of a joined ``gate_up`` have blocks of their own."""
    return _round_matrices(
        params, FP8_MATRICES, lambda matrix, name: round_to_fp8(matrix, 2 if name == "gate_up" else 1)
    )


def _round_matrices(params: Params, names: tuple[str, ...], rounded: Callable[[jax.Array, str], jax.Array]) -> Params:
    def visit(path, leaf):
        name = getattr(path[-1], "key", None)
        return leaf + jax.lax.stop_gradient(rounded(leaf, name) - leaf) if name in names else leaf

    return jax.tree_util.tree_map_with_path(visit, params)


def cross_entropy(logits: Float[Array, "B T V"], labels: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Nats per token, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def balance_loss(router_logits: Float[Array, "T E"], experts_per_token: int) -> Float[Array, ""]:
    """Load times probability, summed over experts (arXiv 2101.03961, equation 4): 1 at perfect balance."""
    _, chosen = jax.lax.top_k(router_logits, experts_per_token)
    count = router_logits.shape[-1]
    load = jax.nn.one_hot(chosen, count).sum(1).mean(0) / experts_per_token
    return count * jnp.sum(load * jax.nn.softmax(router_logits).mean(0))


def make_update(
    forward: Callable[[Params, jax.Array], tuple[jax.Array, list[jax.Array]]],
    optimizer: optax.GradientTransformation,
    *,
    experts_per_token: int,
    rounding: Rounding | None,
) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """The jitted update on a batch of int32 ``[B, T+1]`` tokens.

    Args:
        forward: ``(params, tokens [B T]) -> (logits [B T V], router logits, one [B*T E] per layer)``.
        rounding: train through rounded parameters, so that storing them later changes nothing.

    Returns:
        ``update(state, batch) -> (state, {"loss", "balance", "grad_norm"})``; loss in nats per token. An update whose
        gradient is not finite is skipped (``grad_norm`` shows it).
    """

    def objective(params, batch):
        used = rounding(params) if rounding else params
        logits, routers = forward(used, batch[:, :-1])
        loss = cross_entropy(logits, batch[:, 1:]).mean()
        balance = jnp.mean(jnp.stack([balance_loss(r, experts_per_token) for r in routers])) if routers else 0.0
        return loss + BALANCE_WEIGHT * balance, {"loss": loss, "balance": balance}

    @jax.jit
    def update(state, batch):
        grads, report = jax.grad(objective, has_aux=True)(state.params, batch)
        state, norm = apply_gradients(state, grads, optimizer)
        return state, report | {"grad_norm": norm}

    return update
