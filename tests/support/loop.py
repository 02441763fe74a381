"""The loop traced anew, for a mutation."""

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
