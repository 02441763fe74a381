"""What both trainings share: the state, Muon with a cosine, and an update that skips a gradient that is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from optax import contrib

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


def muon(
    rate: optax.Schedule,
    weight_decay: float,
    tables: tuple[str, ...] = ("embed", "head", "router", "conv", "shared_scale"),
) -> optax.GradientTransformation:
    """Muon for the matrices between hidden states (arXiv 2502.16982, update RMS 0.2 of the rate), AdamW (b2 0.95,
    Nesterov) for everything else, both behind a clip of the global norm at 1.

    ``tables``: names of matrices that AdamW moves too: rows that belong to tokens, experts or taps. Only the
    matrices of Muon decay.
    """

    def dimensions(params: Params) -> Params:
        def visit(path, leaf):
            is_map = leaf.ndim == 2 and getattr(path[-1], "key", None) not in tables
            return contrib.MuonDimensionNumbers(0, 1) if is_map else None

        return jax.tree_util.tree_map_with_path(visit, params)

    rule = contrib.muon(
        rate,
        weight_decay=weight_decay,
        adam_b2=0.95,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=dimensions,
    )
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
