"""How tests compile the loop: traced anew for a mutation, lightly where a test compiles much and runs little."""

from collections.abc import Iterator

import jax
import pytest

from dflash_jax import generate, speculate
from tests.support.families import fresh


def trace_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give :mod:`dflash_jax.generate` programs that have compiled nothing yet."""
    hear = jax.jit(fresh(speculate.hear_prompt), static_argnames=("target", "drafter"), donate_argnames="heard")
    begin = jax.jit(
        fresh(speculate.first_token),
        static_argnames=("target", "rule", "room", "alternatives"),
        donate_argnames=("cache", "draft_cache"),
    )
    rounds = jax.jit(fresh(generate.run_rounds), static_argnames=("target", "drafter", "rule"), donate_argnames="state")
    for name, program in {"hear": hear, "begin": begin, "run_rounds": rounds}.items():
        monkeypatch.setattr(generate, name, program)


@pytest.fixture(scope="module", autouse=True)
def lightly_compiled() -> Iterator[None]:
    """A module that imports this compiles in half the time; its programs run a few times slower."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
