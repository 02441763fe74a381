"""Whether said tokens are draws from known distributions: the mass of the likelier tokens, and of a random part of a
token's own, is then uniform in [0, 1)."""

import jax
import numpy as np


def mass_of(p: np.ndarray, said: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Of every token ``[...]``, drawn from ``p [... V]`` if all is right."""
    own = np.take_along_axis(p, said[..., None], axis=-1)
    before = (p > own) | ((p == own) & (np.arange(p.shape[-1]) < said[..., None]))
    return (np.where(before, p, 0).sum(-1) + rng.random(said.shape) * own[..., 0]) / p.sum(-1)


def chance(mass: np.ndarray, parts: int) -> float:
    """Of so uneven a spread, if all parts of [0, 1) are equally likely: chi-square."""
    counts, expected = np.histogram(mass, parts, (0, 1))[0], mass.size / parts
    return float(jax.scipy.stats.chi2.sf(((counts - expected) ** 2).sum() / expected, parts - 1))
