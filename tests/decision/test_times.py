"""Intervals of times: coverage on simulated times with outliers, and the number of rounds."""

import itertools
import math

import numpy as np
import pytest

from sweep.decision.times import (
    RATIO_ERROR,
    estimate_time,
    interval_rank,
    ratio_of_rounds,
    ratio_of_trials,
    rounds_needed,
    trials_needed,
)

SWEEPS = 4000
ERROR_OF_SIMULATION = 3 * math.sqrt(0.05 * 0.95 / SWEEPS)  # three standard deviations


def skewed(rng, shape):
    """Times with a long tail, of which one in ten is up to six times too long."""
    times = np.exp(0.1 * rng.standard_normal(shape) + 0.3 * rng.exponential(size=shape))
    slowed = rng.random(shape) < 0.1
    return np.where(slowed, times * rng.uniform(1, 6, shape), times)


@pytest.fixture(scope="module")
def true_median():
    return float(np.median(skewed(np.random.default_rng(1), 2_000_000)))


@pytest.mark.parametrize("count", [6, 9, 20, 51])
def test_intervals_of_medians_hold_the_median_of_times_with_outliers(true_median, count):
    rng = np.random.default_rng(count)
    estimates = [estimate_time(times) for times in skewed(rng, (SWEEPS, count))]
    assert all(estimate.is_interval for estimate in estimates)
    covered = np.mean([estimate.low <= true_median <= estimate.high for estimate in estimates])
    assert covered >= 0.95 - ERROR_OF_SIMULATION


def test_intervals_narrow_with_the_number_of_times():
    rng = np.random.default_rng(0)
    widths = []
    for count in (6, 12, 24, 48, 96):
        estimates = [estimate_time(times) for times in skewed(rng, (500, count))]
        widths.append(np.median([estimate.high - estimate.low for estimate in estimates]))
    assert all(later < earlier for earlier, later in itertools.pairwise(widths))
    assert widths[-1] < widths[0] / 4


def test_an_interval_is_the_innermost_pair_of_order_statistics_that_is_wide_enough():
    estimate = estimate_time([float(n) for n in range(20, 0, -1)])
    assert (estimate.low, estimate.median, estimate.high, estimate.count) == (6.0, 10.5, 15.0, 20)
    for count in range(1, 60):
        rank = interval_rank(count, 0.05)
        outside = [
            2 * sum(math.comb(count, n) for n in range(k)) / 2**count for k in range(rank + 2)
        ]
        assert outside[rank] <= 0.05
        assert outside[rank + 1] > 0.05 or 2 * rank + 2 > count


@pytest.mark.parametrize("times", [[3.0], [3.0, 1.0], [5.0, 1.0, 2.0, 3.0, 4.0]])
def test_fewer_than_six_times_give_their_range_which_is_no_interval(times):
    estimate = estimate_time(times)
    assert not estimate.is_interval and estimate.count == len(times)
    assert (estimate.low, estimate.high) == (min(times), max(times))
    assert estimate.median == np.median(times)


def test_the_rounds_needed_are_those_of_the_binomial_bound():
    needed = [rounds_needed(k) for k in (2, 3, 4, 5, 6, 8)]
    assert needed == [7, 8, 9, 10, 11, 12]
    for k in range(2, 20):
        pairs = k * (k - 1) / 2
        n = rounds_needed(k)
        assert 2.0 ** (1 - n) <= RATIO_ERROR / pairs < 2.0 ** (2 - n)
    assert rounds_needed(1) == 6  # for the interval of its time


@pytest.mark.parametrize("k", [3, 5])
def test_ratios_of_rounds_hold_together_and_cancel_what_slows_a_whole_round(k):
    rng = np.random.default_rng(k)
    true = 2.0 ** np.arange(k)
    rounds = rounds_needed(k)
    missed = 0
    for _ in range(SWEEPS):
        load = rng.uniform(1, 10, rounds)  # the same for all batch sizes of a round
        times = true[:, None] * load * skewed(rng, (k, rounds))
        estimates = {
            (i, j): ratio_of_rounds(times[i], times[j], k) for i in range(k) for j in range(i)
        }
        assert all(estimate.is_interval for estimate in estimates.values())
        missed += any(
            not estimate.low <= true[i] / true[j] <= estimate.high
            for (i, j), estimate in estimates.items()
        )
    assert missed / SWEEPS <= RATIO_ERROR + ERROR_OF_SIMULATION


def test_too_few_rounds_give_the_range_of_their_ratios():
    estimate = ratio_of_rounds([2.0, 6.0, 9.0], [1.0, 2.0, 3.0], 5)
    assert not estimate.is_interval
    assert (estimate.low, estimate.median, estimate.high) == pytest.approx((2.0, 3.0, 3.0))
    assert ratio_of_rounds([4.0], [2.0], 2).median == pytest.approx(2.0)


def test_a_ratio_of_rounds_is_the_reciprocal_of_the_other_one():
    rng = np.random.default_rng(2)
    times, other_times = skewed(rng, (2, 10))
    ratio = ratio_of_rounds(times, other_times, 3)
    other = ratio_of_rounds(other_times, times, 3)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx(
        (1 / other.high, 1 / other.median, 1 / other.low)
    )


def test_ratios_of_trials_hold_together_and_narrow_with_more_trials(true_median):
    rng = np.random.default_rng(3)
    true = np.array([1.0, 2.0, 4.0])
    widths = {}
    for count in (9, 40):
        missed, logs = 0, []
        for _ in range(1000):
            times = true[:, None] * skewed(rng, (3, count))
            for i, j in ((1, 0), (2, 0), (2, 1)):
                ratio = ratio_of_trials(times[i], times[j], 3)
                assert ratio.is_interval
                logs.append(math.log(ratio.high / ratio.low))
                missed += not ratio.low <= true[i] / true[j] <= ratio.high
        assert missed / 1000 <= RATIO_ERROR
        widths[count] = np.median(logs)
    assert widths[40] < widths[9] / 1.5


@pytest.mark.parametrize("sizes", [2, 3, 5, 8])
def test_the_trials_needed_are_the_fewest_that_give_intervals(sizes):
    needed = trials_needed(sizes)
    times = [1.0 + 0.01 * place for place in range(needed)]
    assert ratio_of_trials(times, times, sizes).is_interval
    assert not ratio_of_trials(times[:-1], times, sizes).is_interval


def test_ratios_of_few_trials_are_a_range():
    ratio = ratio_of_trials([4.0, 6.0], [1.0, 2.0, 3.0], 2)
    assert not ratio.is_interval and ratio.count == 2
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((4 / 3, 2.5, 6.0))
