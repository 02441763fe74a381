"""The train step of the small targets that this project ships: next-token cross-entropy and router balance."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dflash_jax.protocols import Params
from dflash_jax.shapes import Array, Float, Int
from dflash_jax.training.optimize import TrainState, apply_gradients
from kernels_pallas.mxfp4.rounding import round_to_mxfp4

BALANCE_WEIGHT = 0.01
"""Weight of the router balance loss (Switch Transformer, arXiv 2101.03961, section 2.2)."""


def round_experts_to_mxfp4(params: Params, matrices: tuple[str, ...] = ("gate_up", "down")) -> Params:
    """Expert matrices ``[I, O]`` rounded to what MXFP4 can hold; gradients pass straight through (arXiv 1308.3432)."""

    def visit(path, leaf):
        if getattr(path[-1], "key", None) not in matrices:
            return leaf
        return leaf + jax.lax.stop_gradient(round_to_mxfp4(leaf, axis=-2) - leaf)

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
    quantized: bool,
) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """The jitted update on a batch of int32 ``[B, T+1]`` tokens.

    Args:
        forward: ``(params, tokens [B T]) -> (logits [B T V], router logits, one [B*T E] per layer)``.
        quantized: train through MXFP4-rounded experts, so that packing them later changes nothing.

    Returns:
        ``update(state, batch) -> (state, {"loss", "balance", "grad_norm"})``; loss in nats per token. An update whose
        gradient is not finite is skipped (``grad_norm`` shows it).
    """

    def objective(params, batch):
        used = round_experts_to_mxfp4(params) if quantized else params
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
