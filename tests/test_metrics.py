"""Metrics against figures worked out by hand."""

import numpy as np
import pytest

from dflash_jax import metrics

# Two rounds, block 8, drafts accepted 3 and 7.
FULL = dict(counts=np.array([[4, 8]]), accepted=np.array([[3, 7]]))
# Block 6, one verify of [d1, d2, EOS, d4, d5, bonus]: all five drafts match, the third ends the text.
STOPPED = dict(counts=np.array([[3]]), accepted=np.array([[5]]))


def test_two_whole_rounds():
    assert metrics.verifies(FULL["counts"]) == 2
    assert metrics.acceptance_length(FULL["counts"]) == 6.0
    assert metrics.acceptance_ratio(**FULL, block_size=8) == pytest.approx(10 / 14)
    assert metrics.histogram(FULL["counts"], 8).tolist() == [0, 0, 0, 1, 0, 0, 0, 1]
    assert metrics.position_rates(**FULL, block_size=8).tolist() == [1, 1, 1, 0.5, 0.5, 0.5, 0.5]
    assert metrics.conditional_rates(**FULL, block_size=8).tolist() == [1, 1, 1, 0.5, 1, 1, 1]
    assert metrics.speedup_bound([FULL["counts"]]) == 6.0


def test_tokens_behind_a_stop_count_nowhere():
    assert metrics.acceptance_length(STOPPED["counts"]) == 3.0
    assert metrics.acceptance_ratio(**STOPPED, block_size=6) == pytest.approx(3 / 5)
    assert metrics.histogram(STOPPED["counts"], 6).tolist() == [0, 0, 1, 0, 0, 0]
    rates = metrics.conditional_rates(**STOPPED, block_size=6)
    assert rates[:3].tolist() == [1, 1, 1]
    assert np.isnan(rates[3:]).all()


def test_a_cut_before_the_own_token_is_no_rejection():
    """Budget cut after the accepted drafts: draft 3 was never on trial; an uncut round with 2 accepted rejects it."""
    cut = metrics.conditional_rates(np.array([2]), np.array([2]), 4)
    assert cut[:2].tolist() == [1, 1]
    assert np.isnan(cut[2])
    assert metrics.conditional_rates(np.array([3]), np.array([2]), 4).tolist() == [1, 1, 0]


def test_rows_that_are_done_count_nowhere():
    counts, accepted = np.array([[2, 3], [1, 0]]), np.array([[1, 2], [0, -1]])
    assert metrics.verifies(counts) == 3
    assert metrics.acceptance_length(counts) == 2.0
    assert metrics.acceptance_ratio(counts, accepted, 4) == pytest.approx(3 / 9)
    assert metrics.position_rates(counts, accepted, 4).tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert metrics.speedup_bound([counts]) == 2.5  # 5 plain rounds for the longer row, 2 rounds here


def test_rates_never_rise_and_the_histogram_means_the_length():
    rng = np.random.default_rng(0)
    accepted = rng.integers(0, 8, 200)
    counts = np.minimum(accepted + 1, rng.integers(1, 9, 200))
    rates = metrics.position_rates(counts, accepted, 8)
    assert (np.diff(rates) <= 0).all()
    histogram = metrics.histogram(counts, 8)
    assert (histogram * np.arange(1, 9)).sum() / histogram.sum() == pytest.approx(metrics.acceptance_length(counts))


def test_expected_length_of_uncut_rounds_is_the_measured_one():
    counts = np.array([1, 2, 4, 4, 3])
    rates = metrics.conditional_rates(counts, counts - 1, 4)
    assert metrics.expected_length(rates, 4) == pytest.approx(metrics.acceptance_length(counts))
    assert metrics.expected_length(rates, 2) == pytest.approx(1 + 4 / 5)
    assert metrics.expected_length(np.array([0.5, np.nan, np.nan]), 4) == 1.5


def test_joined_generations():
    joined = metrics.join([np.array([[4, 8]]), np.array([[2], [0]])])
    assert joined.tolist() == [4, 8, 2, 0]
    assert metrics.acceptance_length(joined) == pytest.approx(14 / 3)
    assert metrics.join([]).shape == (0,)


def test_without_a_round_nothing_is_claimed():
    empty = np.zeros((1, 0), int)
    assert np.isnan(metrics.acceptance_length(empty))
    assert np.isnan(metrics.acceptance_ratio(empty, empty, 4))
    assert np.isnan(metrics.speedup_bound([empty]))
    assert np.isnan(metrics.position_rates(empty, empty, 4)).all()
    assert metrics.histogram(empty, 4).tolist() == [0, 0, 0, 0]


def test_uniform_union():
    assert metrics.uniform_union(128, 4, 1) == pytest.approx(4)
    assert metrics.uniform_union(128, 4, 10) == pytest.approx(34.8, abs=0.05)
    assert metrics.uniform_union(256, 8, 16) == pytest.approx(102, abs=0.2)
    assert metrics.uniform_union(0, 0, 8) == 0.0


def test_break_even():
    assert metrics.break_even(round_s=0.012, step_s=0.004) == pytest.approx(3.0)
