"""What may be asked for, what is refused and in which words, and the seeds of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import sampling
from dflash_jax.sampling import Dice, seed_keys
from dflash_jax.settings import GREEDY, REFUSED, SEEDS, SamplingParams, derived_seed, packed, per_row

BAD = [
    *(("temperature", value, "0 to 1e+30") for value in (-0.1, 1e39, float("inf"), float("nan"), "1", None, True)),
    *(("top_p", value, "0 to 1") for value in (-1e-9, 1.001, float("nan"), float("inf"), "0.9", None, False)),
    *(("min_p", value, "0 to 1") for value in (-0.5, 1.5, float("nan"), [0.1], None, np.True_)),
    *(("top_k", value, "1 or more, or 0 or -1") for value in (-2, 2**31, 5.0, "5", None, True, np.False_)),
    *(("seed", value, "0 to 2**64 - 1") for value in (-1, 2**64, 7.0, "7", True, np.True_, np.int64(-1))),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD, ids=[f"{name}={value!r}" for name, value, _ in BAD])
def test_B15_bad_values_are_refused_with_field_value_and_range(name: str, value, expected: str) -> None:
    with pytest.raises(ValueError, match=name) as refusal:
        SamplingParams(**{name: value})
    assert str(refusal.value).startswith(f"{name} {value!r}: expected ")
    assert expected in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (0, 1, 0.7, 5, 1e30, np.float32(0.5), np.int64(2))),
        *(("top_k", value) for value in (-1, 0, 1, 2**31 - 1, np.int32(40), np.uint8(3))),
        *((name, value) for name in ("top_p", "min_p") for value in (0, 1, 0.5, 1e-9, np.float64(0.1), np.int32(1))),
        *(("seed", value) for value in (None, 0, 2**32, 2**64 - 1, np.uint64(2**64 - 1), np.int32(7))),
    ],
)
def test_good_values_arrive_as_they_are(name: str, value) -> None:
    settings, seeds = packed(per_row([SamplingParams(**{name: value})], 1))
    if name != "seed":
        assert getattr(settings, name).item() == pytest.approx(value, rel=1e-7)
    elif value is not None:
        assert seeds.tolist() == [[int(value) >> 32, int(value) % 2**32]]


def test_the_dtypes_do_not_depend_on_how_a_number_was_written() -> None:
    settings, seeds = packed(per_row([SamplingParams(1, 5, 1, 0, 3), SamplingParams(np.float32(1), np.int8(5))], 2))
    dtypes = [each.dtype.name for each in (settings.temperature, settings.top_k, settings.top_p, settings.min_p, seeds)]
    assert dtypes == ["float32", "int32", "float32", "float32", "uint32"]


def test_the_greedy_settings_are_the_defaults() -> None:
    assert SamplingParams() == GREEDY and GREEDY.greedy
    assert [SamplingParams(t).greedy for t in (0, 1e-6, 1.1e-6, 1e-3)] == [True, True, False, False]
    settings, _ = packed(per_row([SamplingParams(t) for t in (0, 1e-6, 1.1e-6, 1e-3)], 4))
    assert jax.tree.map(jnp.asarray, settings).greedy.tolist() == [True, True, False, False]


class TestRequests:
    """Parameters by name, as a server's request has them."""

    def test_B15_those_that_are_honoured(self) -> None:
        request = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "seed": 5}
        assert SamplingParams.from_request(request) == SamplingParams(0.7, 20, 0.9, 0.05, 5)
        assert SamplingParams.from_request({"temperature": 0.0}) == GREEDY
        assert SamplingParams.from_request({"temperature": None, "seed": None}) == SamplingParams(1.0)
        with pytest.raises(ValueError, match=r"min_p 2: expected a number from 0 to 1"):
            SamplingParams.from_request({"min_p": 2})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("repetition_penalty", value) for value in (1.1, 0.9, 0)),
            *(("presence_penalty", 0.5), ("frequency_penalty", -0.5), ("no_repeat_ngram_size", 3)),
            *(("logit_bias", {5: 1.0}), ("bad_words", ["no"]), ("allowed_token_ids", [1]), ("suppress_tokens", [0])),
            *(("min_tokens", 4), ("typical_p", 0.9), ("typical_p", 0), ("response_format", {"type": "json_object"})),
            *(("forced_eos_token_id", 0), ("forced_eos_token_id", [2]), ("guided_regex", "a*"), ("eta_cutoff", 1e-4)),
        ],
    )
    def test_B15_what_no_position_honours_is_refused_by_name(self, name: str, value) -> None:
        assert name in REFUSED
        with pytest.raises(ValueError, match=name) as refusal:
            SamplingParams.from_request({"temperature": 1.0, name: value})
        assert repr(value) in str(refusal.value) and "leave it out" in str(refusal.value)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("repetition_penalty", 1), ("repetition_penalty", 1.0), ("typical_p", 1.0), ("presence_penalty", 0)),
            *(("frequency_penalty", 0.0), ("logit_bias", {}), ("bad_words", []), ("min_tokens", 0)),
            *(
                ("guided_regex", ""),
                ("epsilon_cutoff", 0.0),
                ("response_format", {"type": "text"}),
                *((name, None) for name in REFUSED),
            ),
        ],
    )
    def test_B15_values_that_ask_for_nothing_are_ignored(self, name: str, value) -> None:
        assert SamplingParams.from_request({"top_k": 3, name: value}) == SamplingParams(1.0, top_k=3)

    def test_B15_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match=r"unknown sampling parameter 'temprature'; known: min_p, seed, temperature"
        ):
            SamplingParams.from_request({"temprature": 0.7})


class TestRows:
    def test_one_setting_for_all_gives_each_row_a_seed_made_of_it(self) -> None:
        rows = per_row(SamplingParams(1.0, seed=7), 3)
        assert [row.seed for row in rows] == [7, derived_seed(7, 1), derived_seed(7, 2)]
        assert len({row.seed for row in rows}) == 3
        assert per_row(SamplingParams(1.0, seed=7), 3) == rows, "and the same ones again"

    def test_a_list_keeps_every_seed(self) -> None:
        given = [SamplingParams(1.2, seed=7), SamplingParams(1.2), SamplingParams(1.2, seed=7), GREEDY]
        rows = per_row(given, 4)
        assert rows[0] == rows[2] == given[0]
        fresh = [row.seed for again in range(50) for row in per_row(given, 4)[1::2]]
        assert len(set(fresh)) == 100 and max(fresh) > 2**60, "64 bits, never the same"

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_as_many_settings_as_rows(self, count: int) -> None:
        with pytest.raises(ValueError, match=f"{count} sampling settings for 2 rows; give one for all"):
            per_row([GREEDY] * count, 2)

    def test_derived_seeds(self) -> None:
        assert derived_seed(None, 5) is None and derived_seed(7, 0) == 7
        derived = [derived_seed(seed, index) for seed in (0, 1, 2**32, 2**64 - 1) for index in range(1, 500)]
        assert len(set(derived)) == len(derived)
        assert all(type(seed) is int and 0 <= seed < SEEDS for seed in derived)
        assert derived_seed(np.uint64(7), 3) == derived_seed(7, 3)


SEEDS_ALIKE = (0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**32 + 7, 7 << 32, (7 << 32) + 7, 2**63, 2**63 + 7, 2**64 - 1)
"""Some differ in the low half only, some in the high half only, some have their halves swapped."""


def check_distinct_keys(dtype: str) -> None:
    _, seeds = packed(per_row([SamplingParams(1.0, seed=seed) for seed in SEEDS_ALIKE], len(SEEDS_ALIKE)))
    key = sampling.seed_keys(jnp.asarray(seeds))
    data = np.asarray(jax.random.key_data(key))
    assert len({tuple(row) for row in data.tolist()}) == len(SEEDS_ALIKE)
    dice = Dice(key, jnp.full(len(SEEDS_ALIKE), 9, jnp.int32))
    coins = np.asarray(dice.coins(2, jnp.dtype(dtype)))
    assert coins.dtype == dtype and len(np.unique(coins)) == coins.size
    assert data.tolist() == seeds.tolist(), "the seed can be read back from the key"


@pytest.mark.parametrize("wide", [True, False])
def test_B13_distinct_seeds_are_distinct_keys_with_and_without_64_bit_integers(wide: bool) -> None:
    with jax.enable_x64(wide):
        assert jnp.arange(1).dtype == (jnp.int64 if wide else jnp.int32)
        check_distinct_keys("float64" if wide else "float32")


@pytest.mark.parametrize("half", [0, 1])
def test_this_can_fail_by_seeds_of_32_bits(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "seed_keys", lambda seeds: seed_keys(seeds.at[:, half].set(0)))
    with pytest.raises(AssertionError):
        check_distinct_keys("float64")


def test_B13_a_seed_means_the_same_with_and_without_64_bit_integers() -> None:
    def bits(wide: bool) -> list:
        with jax.enable_x64(wide):
            _, seeds = packed([SamplingParams(1.0, seed=(7 << 32) + 3)])
            dice = Dice(seed_keys(jnp.asarray(seeds)), jnp.asarray([5], jnp.int32))
            return np.asarray(dice.coins(3, jnp.dtype("float32"))).tolist()

    assert bits(True) == bits(False)
