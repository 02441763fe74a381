"""What both trainings share: the state, AdamW with a cosine, and an update that skips a gradient that is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from dflash_jax.protocols import Params


@struct.dataclass
class TrainState:
    """Parameters, optimiser state and the count of updates done."""

    step: jax.Array
    params: Params
    optimizer: Any


def cosine_schedule(updates: int, peak: float, warmup: int) -> optax.Schedule:
    """Linear warm-up over ``warmup`` updates, then a cosine down to 2% of the peak."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, updates, end_value=0.02 * peak)


def adamw(rate: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """AdamW (b2 0.95) behind a clip of the global norm at 1. Matrices decay, vectors do not."""

    def decays(params: Params) -> Params:
        return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)

    rule = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, optimizer=optimizer.init(params))


def apply_gradients(
    state: TrainState, grads: Params, optimizer: optax.GradientTransformation
) -> tuple[TrainState, jax.Array]:
    """One optimiser step, and the gradient's norm. A gradient that is not finite changes nothing but the count."""
    norm = optax.tree.norm(grads)
    changes, moved = optimizer.update(grads, state.optimizer, state.params)
    stepped = TrainState(state.step + 1, optax.apply_updates(state.params, changes), moved)
    kept = state.replace(step=state.step + 1)
    return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), stepped, kept), norm
