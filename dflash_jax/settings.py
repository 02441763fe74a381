"""How a user asks for a row to be sampled: one :class:`SamplingParams` per row, checked before anything runs."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from dflash_jax.sampling import GREEDY_BELOW, Sampling

SEEDS = 2**64
HOTTEST = 1e30
"""Far enough from what float32 takes for infinity (-inf / inf is no number), and all tokens are equally likely long
before."""

REFUSED = (
    *(
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram_size",
        "encoder_repetition_penalty",
    ),
    *("logit_bias", "bad_words", "allowed_token_ids", "suppress_tokens", "min_tokens", "forced_eos_token_id"),
    *(
        "guided_json",
        "guided_regex",
        "structured_outputs",
        "response_format",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
    ),
)
"""Parameters of vLLM, SGLang and transformers that change the distribution and that no position here honours."""

NEUTRAL = {
    **dict.fromkeys(("repetition_penalty", "typical_p", "encoder_repetition_penalty"), (1.0,)),
    "forced_eos_token_id": (),
    "response_format": ({"type": "text"},),
}
"""The values that ask for nothing where that is not 0; None and empty ones always do."""


@dataclass(frozen=True)
class SamplingParams:
    """One row's settings. The defaults are greedy; the names are vLLM's.

    Attributes:
        temperature: 0 (to 1e-6): the argmax.
        top_k: likeliest tokens that are kept; 0 or -1: all.
        top_p: mass of the likeliest tokens that are kept; 1: all, 0: only the best.
        min_p: least probability of a kept token, as a share of the best one's; 0: all are kept.
        seed: any integer in [0, 2**64); None: fresh randomness, different for every row and run.

    Raises:
        ValueError: naming the field, its value and the range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        real = {"temperature": HOTTEST, "top_p": 1.0, "min_p": 1.0}
        for name, most in real.items():
            value = getattr(self, name)
            if not _is(value, Real) or not 0 <= value <= most:
                raise ValueError(f"{name} {value!r}: expected a number from 0 to {most:g}")
        if not _is(self.top_k, Integral) or not -1 <= self.top_k < 2**31:
            raise ValueError(f"top_k {self.top_k!r}: expected an integer, 1 or more, or 0 or -1 for all tokens")
        if self.seed is not None and (not _is(self.seed, Integral) or not 0 <= self.seed < SEEDS):
            raise ValueError(f"seed {self.seed!r}: expected an integer from 0 to 2**64 - 1, or None")

    @property
    def greedy(self) -> bool:
        return bool(self.temperature <= GREEDY_BELOW)

    @classmethod
    def from_request(cls, request: Mapping[str, Any]) -> "SamplingParams":
        """From sampling parameters by name, as vLLM's ``SamplingParams`` and OpenAI's requests have them: there the
        temperature is 1 unless it is given.

        Raises:
            ValueError: for one that is not honoured at every position of a block, or is not known, by its name.
        """
        known = {field.name for field in fields(cls)}
        for name, value in request.items():
            if name in known or value is None:
                continue
            if name not in REFUSED:
                raise ValueError(f"unknown sampling parameter {name!r}; known: {', '.join(sorted(known))}")
            if (isinstance(value, list | dict | tuple | str) and not value) or (
                (_is(value, Real) or isinstance(value, dict)) and value in NEUTRAL.get(name, (0,))
            ):
                continue
            raise ValueError(
                f"{name} {value!r} is not supported: it would have to hold at every position of a block; leave it out"
            )
        given = {name: value for name, value in request.items() if name in known and value is not None}
        return cls(**{"temperature": 1.0} | given)


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool | np.bool_)


GREEDY = SamplingParams()


def per_row(params: SamplingParams | Sequence[SamplingParams], rows: int) -> list[SamplingParams]:
    """One setting per row, each with a seed.

    Rows that share one ``SamplingParams`` with a seed would be one stream told several times: row r > 0 gets a seed
    that is made of the given one and r. Rows without one get a seed of their own from the system.

    Raises:
        ValueError: if there are more or fewer settings than rows.
    """
    if isinstance(params, SamplingParams):
        each = [replace(params, seed=derived_seed(params.seed, row)) for row in range(rows)]
    else:
        each = list(params)
    if len(each) != rows:
        raise ValueError(f"{len(each)} sampling settings for {rows} rows; give one for all, or one for each")
    return [replace(one, seed=secrets.randbits(64)) if one.seed is None else one for one in each]


def derived_seed(seed: Integral | None, index: int) -> Integral | None:
    """The seed itself for index 0, for others one made of both; None stays None."""
    if seed is None or index == 0:
        return seed
    return int(np.random.SeedSequence([int(seed), index]).generate_state(1, np.uint64)[0])


def packed(rows: Sequence[SamplingParams]) -> tuple[Sampling, np.ndarray]:
    """The settings as arrays, and the high and low half of every seed, uint32 ``[B 2]``."""
    dtypes = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    columns = {name: np.array([getattr(row, name) for row in rows], dtype) for name, dtype in dtypes.items()}
    seeds = [[int(row.seed) >> 32, int(row.seed) & 0xFFFFFFFF] for row in rows]
    return Sampling(**columns), np.array(seeds, np.uint32)
