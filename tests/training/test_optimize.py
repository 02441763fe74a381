"""What the optimiser does to which parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_jax.training.optimize import apply_gradients, cosine_schedule, init_state, muon

RATE = 0.01


def first_update(shapes: dict[str, tuple[int, ...]], weight_decay: float = 0.0) -> dict[str, np.ndarray]:
    """The change of every parameter by one update with a random gradient."""
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    params = {name: jnp.full(shape, 2.0) for name, shape in shapes.items()}
    grads = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    optimizer = muon(optax.constant_schedule(RATE), weight_decay)
    state, _ = apply_gradients(init_state(params, optimizer), grads, optimizer)
    return {name: np.asarray(state.params[name] - params[name]) for name in shapes}


def test_a_matrix_moves_in_all_directions_alike_and_by_a_fifth_of_the_rate():
    moved = first_update({"q": (48, 32)})["q"]
    strengths = np.linalg.svd(moved, compute_uv=False)
    assert strengths.max() < 2 * strengths.min(), "the momentum was not orthogonalised"
    np.testing.assert_allclose(np.sqrt(np.mean(moved**2)), 0.2 * RATE, rtol=0.2)


def test_every_entry_of_tables_and_vectors_moves_alike_whatever_its_gradient():
    """Adam's first update: the sign of the gradient times one size (1.5 times the rate, for Nesterov's look ahead)."""
    for name, moved in first_update({"embed": (40, 8), "head": (8, 40), "router": (8, 4), "bias": (8,)}).items():
        np.testing.assert_allclose(np.abs(moved), np.abs(moved).max(), rtol=1e-3, err_msg=name)
        np.testing.assert_allclose(np.abs(moved).max(), RATE, rtol=0.5, err_msg=name)


def test_only_matrices_between_hidden_states_decay():
    shapes = {"q": (48, 32), "embed": (40, 8), "bias": (8,)}
    plain, decayed = first_update(shapes), first_update(shapes, weight_decay=0.5)
    np.testing.assert_allclose(decayed["q"], plain["q"] - RATE * 0.5 * 2.0, atol=1e-6)
    np.testing.assert_array_equal(decayed["embed"], plain["embed"])
    np.testing.assert_array_equal(decayed["bias"], plain["bias"])


def test_the_schedule_warms_up_and_falls_to_two_percent():
    rate = cosine_schedule(100, RATE, warmup=10)
    assert rate(0) == 0
    np.testing.assert_allclose([rate(10), rate(100)], [RATE, 0.02 * RATE], rtol=1e-6)
