"""The filters against transformers' own (golden ``warpers``): which tokens are left, and their probabilities."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.sampling import Sampling, distribution

GOLDEN = load_file(Path(__file__).parents[1] / "goldens" / "warpers" / "expected.safetensors")
SETTINGS = ("temperature", "top_k", "top_p", "min_p")


def check_warpers(dtype: str, **changed) -> None:
    settings = Sampling(**{name: jnp.asarray(changed.get(name, GOLDEN[name])) for name in SETTINGS})
    vocabulary = GOLDEN["logits"].shape[1]
    padded = np.arange(vocabulary) >= vocabulary - GOLDEN["padding"][:, None]
    logits = np.where(padded, -np.inf, GOLDEN["logits"]).astype(dtype)
    p = np.asarray(jax.jit(distribution)(jnp.tile(logits, (len(GOLDEN["p"]), 1, 1)), settings))
    np.testing.assert_array_equal(p > 0, GOLDEN["p"] > 0)
    np.testing.assert_allclose(p, GOLDEN["p"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_combination_of_transformers_filters(dtype: str) -> None:
    check_warpers(dtype)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_comparison_can_fail(name: str) -> None:
    with pytest.raises(AssertionError):
        check_warpers("float64", **{name: np.roll(GOLDEN[name], 1)})
