"""The one distribution against a reference written from its definition, with a sort, row by row in numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import sampling
from dflash_jax.sampling import Dice, Sampling, distribution, heaviest, seed_keys

VOCABULARY, PADDING = 37, 4
TEMPERATURES = (0.0, 1e-6, 1e-3, 0.7, 1.0, 5.0)
TOP_KS = (0, -1, 1, 3, VOCABULARY, 10 * VOCABULARY)
TOP_PS = (0.0, 1e-9, 0.31, 0.9, 1.0)
MIN_PS = (0.0, 0.03, 0.6, 1.0)
COMBINATIONS = list(itertools.product(TEMPERATURES, TOP_KS, TOP_PS, MIN_PS))
"""Every setting beside every other: the rows of one batch."""

BOUND = {"float32": 1e-6, "float64": 1e-14}


def settings(rows) -> Sampling:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    floats = [jnp.asarray(column, jnp.float32) for column in (temperature, top_p, min_p)]
    return Sampling(temperature=floats[0], top_k=jnp.asarray(top_k, jnp.int32), top_p=floats[1], min_p=floats[2])


run = jax.jit(lambda logits, rows: distribution(logits, rows))


def positions(dtype: str) -> np.ndarray:
    """Logits ``[T V]``: none alike; few levels, so many alike; all alike; one far ahead; padding at -inf."""
    rng = np.random.default_rng(11)
    spread = 3 * rng.standard_normal(VOCABULARY)
    levels = rng.integers(-3, 3, VOCABULARY).astype(float)
    ahead = np.where(np.arange(VOCABULARY) == 20, 50.0, spread)
    padded = [np.where(np.arange(VOCABULARY) < VOCABULARY - PADDING, row, -np.inf) for row in (spread, levels)]
    return np.stack([spread, levels, np.full(VOCABULARY, -2.5), ahead, *padded]).astype(dtype)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def kept_by_definition(scaled: np.ndarray, top_k: int, top_p: np.float32, min_p: np.float32) -> tuple[list[int], float]:
    """The ids that stay, likeliest first and of equals the lower one; and how near to a limit the nearest one was."""
    order = np.argsort(-scaled, kind="stable")
    if 1 <= top_k < len(order):
        order = order[:top_k]
    near = np.inf
    if top_p < 1:
        mass = softmax(scaled[order])
        before = np.cumsum(mass) - mass
        near = np.abs(before[1:] - top_p).min(initial=np.inf)
        order = order[(before < top_p) | (np.arange(len(order)) == 0)]
    likelihood = np.exp(scaled[order])
    if 0 < min_p < 1:
        near = min(near, np.abs(likelihood - min_p).min())
    return order[likelihood >= min_p].tolist(), near


def by_definition(logits: np.ndarray, temperature, top_k, top_p, min_p) -> tuple[np.ndarray, float]:
    p = np.zeros_like(logits)
    if temperature <= 1e-6:
        p[np.flatnonzero(logits == logits.max())[0]] = 1
        return p, np.inf
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) / np.float32(temperature)
    kept, near = kept_by_definition(scaled, top_k, np.float32(top_p), np.float32(min_p))
    p[kept] = softmax(scaled[kept])
    return p, near


def check_distribution(rows, dtype: str, run=run) -> None:
    """Every row at every position: the same tokens left, and their probabilities."""
    logits = positions(dtype)
    found = np.asarray(run(jnp.tile(logits, (len(rows), 1, 1)), settings(rows)))
    assert found.dtype == dtype
    for row, at in itertools.product(range(len(rows)), range(len(logits))):
        wanted, near = by_definition(logits[at], *rows[row])
        assert near > 1e-6, f"{rows[row]} at {at}: a token stands on the line, where rounding decides"
        np.testing.assert_array_equal(found[row, at] > 0, wanted > 0, err_msg=f"{rows[row]} at {at}")
        np.testing.assert_allclose(found[row, at], wanted, rtol=0, atol=BOUND[dtype], err_msg=f"{rows[row]} at {at}")


@pytest.mark.parametrize("dtype", BOUND)
def test_every_combination_of_settings(dtype: str) -> None:
    check_distribution(COMBINATIONS, dtype)


def test_bfloat16_logits_are_widened_first() -> None:
    rows = settings(COMBINATIONS)
    logits = jnp.tile(jnp.asarray(positions("float32"), jnp.bfloat16), (len(COMBINATIONS), 1, 1))
    narrow, wide = (run(each, rows) for each in (logits, logits.astype(jnp.float32)))
    assert narrow.dtype == jnp.float32
    np.testing.assert_array_equal(narrow, wide)


def mutants():
    """name -> (function of ``sampling`` to replace, by what)."""
    right, cut = sampling.heaviest, sampling._kept

    def higher_ids_first(scores, weights, wanted):
        return right(scores[..., ::-1], weights[..., ::-1], wanted)[..., ::-1]

    def all_equals_stay(scores, weights, wanted):
        return scores >= jnp.min(jnp.where(right(scores, weights, wanted), scores, jnp.inf), -1, keepdims=True)

    def one_row_for_all(scaled, settings):
        return cut(scaled, jax.tree.map(lambda each: jnp.broadcast_to(each[:1], each.shape), settings))

    def min_p_forgotten(scaled, settings):
        return cut(scaled, settings.replace(min_p=jnp.zeros_like(settings.min_p)))

    def top_p_of_the_whole_mass(scaled, settings):
        whole = cut(scaled, settings.replace(top_k=jnp.zeros_like(settings.top_k)))
        return whole & cut(scaled, settings.replace(top_p=jnp.ones_like(settings.top_p)))

    return {
        "higher ids first": ("heaviest", higher_ids_first),
        "all equals stay": ("heaviest", all_equals_stay),
        "filters batch-wide": ("_kept", one_row_for_all),
        "min_p forgotten": ("_kept", min_p_forgotten),
        "top_p before top_k": ("_kept", top_p_of_the_whole_mass),
    }


@pytest.mark.parametrize("fault", mutants())
def test_the_comparison_can_fail(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, *mutants()[fault])
    rows = [(1.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.0), (0.7, 3, 0.31, 0.0), (1.0, 3, 1.0, 0.6)]
    with pytest.raises(AssertionError, match="at "):
        check_distribution(rows, "float64", jax.jit(lambda logits, rows: distribution(logits, rows)))


@pytest.mark.parametrize("dtype", BOUND)
def test_heaviest_is_the_shortest_head_of_the_sorted_list(dtype: str) -> None:
    rng = np.random.default_rng(3)
    scores = rng.integers(-4, 5, (50, 6, VOCABULARY)) / 4
    scores[:, 1] = rng.standard_normal((50, VOCABULARY))
    scores[:, 2, ::3] = -np.inf
    scores[:, 3] *= np.float64(1e30)
    scores[:, 4] = np.where(scores[:, 4] > 0, 0.0, -0.0)
    weights = rng.integers(0, 5, scores.shape).astype(dtype)  # whole numbers: no sum is rounded
    wanted = np.concatenate([rng.integers(0, 150, 45), [0, 1, 1e6, np.inf, 0.5]])[:, None].astype(dtype)
    found = np.asarray(jax.jit(heaviest)(jnp.asarray(scores, dtype), jnp.asarray(weights), jnp.asarray(wanted)))
    for row, at in itertools.product(range(50), range(6)):
        order = np.argsort(-scores[row, at].astype(dtype), kind="stable")
        before = np.cumsum(weights[row, at][order]) - weights[row, at][order]
        assert np.flatnonzero(found[row, at]).tolist() == sorted(order[before < wanted[row]].tolist()), (row, at)


class TestARowIsItsOwn:
    ROWS = ((1.3, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.2), (0.7, 3, 0.9, 0.0), (5.0, 0, 1.0, 0.03))
    PLAIN = ((1.3, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (5.0, -1, 1.0, 0.0))

    def test_B15_bit_for_bit_whatever_its_neighbours_ask_for(self) -> None:
        """Without a filter in the whole batch their passes are left out; a row must not show which it was."""
        assert_each_row_is_its_own(self.ROWS, self.PLAIN)

    def test_this_can_fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sampling, *mutants()["filters batch-wide"])
        with pytest.raises(AssertionError):
            assert_each_row_is_its_own(self.ROWS[::-1], self.PLAIN[::-1])


def assert_each_row_is_its_own(filtered, plain) -> None:
    logits = np.random.default_rng(1).standard_normal((4, 5, VOCABULARY)).astype(np.float32) * 3
    run = jax.jit(lambda logits, rows: distribution(logits, rows))
    batches = [list(choice) for choice in itertools.product(*zip(filtered, plain, strict=True))]
    found = {tuple(batch): np.asarray(run(logits, settings(batch))).view(np.uint32) for batch in batches}
    for row in range(4):
        for setting in (filtered[row], plain[row]):
            alike = [p[row] for batch, p in found.items() if batch[row] == setting]
            assert len(alike) >= 4
            assert all((p == alike[0]).all() for p in alike), setting


class TestB15Extremes:
    @pytest.mark.parametrize("dtype", BOUND)
    def test_B15_every_extreme_is_a_distribution(self, dtype: str) -> None:
        rows = list(
            itertools.product((0, 1e-6, 1e-3, 5), (0, -1, 1, VOCABULARY, 10 * VOCABULARY), (0, 1e-9, 1), (0, 1))
        )
        logits = positions(dtype)
        p = np.asarray(run(jnp.tile(logits, (len(rows), 1, 1)), settings(rows)))
        assert np.isfinite(p).all() and (p >= 0).all()
        np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)
        best = np.arange(VOCABULARY) == logits.argmax(-1)[:, None]
        by_row = dict(zip(rows, p, strict=True))
        for (temperature, top_k, top_p, min_p), found in by_row.items():
            if temperature <= 1e-6 or top_k == 1 or top_p < 1:
                np.testing.assert_array_equal(found, best)
            elif top_k != 0:
                np.testing.assert_array_equal(found, by_row[temperature, 0, top_p, min_p], err_msg=f"top_k {top_k}")

    def test_B15_padding_is_never_left(self) -> None:
        p = run(jnp.tile(positions("float32"), (len(COMBINATIONS), 1, 1)), settings(COMBINATIONS))
        assert (np.asarray(p)[:, -2:, -PADDING:] == 0).all()

    def test_B15_the_defaults_leave_every_token(self) -> None:
        p = run(jnp.zeros((1, 1, 4096), jnp.float32), settings([(1.5, 0, 1.0, 0.0)]))
        np.testing.assert_array_equal(p, np.full((1, 1, 4096), 1 / 4096, np.float32))

    def test_B15_ties_at_the_limit_go_to_the_lower_ids(self) -> None:
        """Eight equals: half their mass are the first four, three are the first three."""
        rows = [(1.0, 0, 0.5, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 4, 0.5, 0.0), (1.0, 0, 1.0, 1.0), (1.0, 0, 0.0, 0.0)]
        p = np.asarray(run(jnp.zeros((5, 1, 8)), settings(rows)))[:, 0]
        assert [np.flatnonzero(row).tolist() for row in p] == [[0, 1, 2, 3], [0, 1, 2], [0, 1], list(range(8)), [0]]

    @pytest.mark.parametrize("sick", [np.nan, np.inf])
    def test_B15_sick_logits_show(self, sick: float) -> None:
        rows = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 0.5, 0.1)]
        logits = np.zeros((3, 3, VOCABULARY))
        logits[:, 0, 5] = sick
        logits[:, 1] = -np.inf
        p = np.asarray(run(jnp.asarray(logits), settings(rows)))
        assert np.isnan(p[:, :2]).any(-1).all(), "a position without a distribution says so"
        assert np.isfinite(p[:, 2]).all(), "and says nothing of others"


class TestDice:
    """That exactness of one round is exactness of a text rests on this: nothing thrown is thrown twice."""

    ROWS = 4096

    def thrown(self, position: int) -> dict[str, np.ndarray]:
        """Coins, drafts and own tokens of two places at a position, as numbers in [0, 1)."""
        seeds = np.stack([np.zeros(self.ROWS, np.uint32), np.arange(self.ROWS, dtype=np.uint32)], axis=1)
        dice = Dice(seed_keys(jnp.asarray(seeds)), jnp.full(self.ROWS, position, jnp.int32))
        even = jnp.full((self.ROWS, 2, 64), 1 / 64)
        found = {
            "coin": dice.coins(2, jnp.dtype("float32")),
            "draft": dice.drafts(even) / 64,
            "token": dice.tokens(even) / 64,
        }
        return {
            f"{name} {place} at {position}": np.asarray(x[:, place]) for name, x in found.items() for place in (0, 1)
        }

    def test_every_throw_is_new_in_every_round(self) -> None:
        """But the own token of a position, whichever round says it."""
        thrown = self.thrown(5) | self.thrown(6) | self.thrown(9)
        for (one, mine), (other, theirs) in itertools.combinations(thrown.items(), 2):
            if {one, other} == {"token 1 at 5", "token 0 at 6"}:
                np.testing.assert_array_equal(mine, theirs)
            else:
                assert abs(np.corrcoef(mine, theirs)[0, 1]) < 5 / np.sqrt(self.ROWS), (one, other)

    def test_it_can_fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = Dice._in_round
        alike = lambda dice, stream, count: right(dice.replace(position=dice.position * 0), stream, count)  # noqa: E731
        monkeypatch.setattr(Dice, "_in_round", alike)
        with pytest.raises(AssertionError, match="coin 0 at 5"):
            self.test_every_throw_is_new_in_every_round()
