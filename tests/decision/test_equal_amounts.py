"""What the errors of times add to the errors of losses that are compared at equal time."""

import math
from dataclasses import replace

import numpy as np
import pytest

from sweep.decision.decision import decide
from sweep.decision.equal_amounts import (
    ERROR,
    bound_time_ratios,
    errors_of_amounts,
    mean_slope,
    steepest_slope,
)

ROUNDS = [[1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 1.03], [1.1, 1.12, 1.08, 1.11, 1.09, 1.1, 1.13]]
TRIALS = [[10.0, 10.1, 9.9], [11.0, 11.1, 10.9]]


def test_bounds_are_those_of_the_rounds_and_include_the_ratio_of_the_trials():
    low, high = bound_time_ratios(TRIALS, ROUNDS)
    ratios = np.log(ROUNDS[0]) - np.log(ROUNDS[1])
    assert low[0, 1] == pytest.approx(ratios.min()) and high[0, 1] == pytest.approx(ratios.max())
    assert low[1, 0] == pytest.approx(-high[0, 1]) and high[1, 0] == pytest.approx(-low[0, 1])
    assert np.diag(low).tolist() == np.diag(high).tolist() == [0, 0]

    slower = [[20.0, 20.0, 20.0], TRIALS[1]]
    _, high = bound_time_ratios(slower, ROUNDS)
    assert high[0, 1] == pytest.approx(math.log(20 / 11))


def test_without_rounds_the_trials_have_a_range_and_without_times_nothing_is_bounded():
    low, high = bound_time_ratios(TRIALS, None)
    assert low[0, 1] == pytest.approx(math.log(9.9 / 11.1))
    assert high[0, 1] == pytest.approx(math.log(10.1 / 10.9))
    low, high = bound_time_ratios([TRIALS[0], []], None)
    assert low[0, 1] == -math.inf and high[1, 0] == math.inf


def test_the_steepest_slope_is_that_of_two_milestones_of_the_second_half():
    tokens = [1, 2, 4, 5, 8]
    values = [9.0, 5.0, 3.0, 2.9, 2.4]
    expected = max(0.1 / math.log(5 / 4), 0.5 / math.log(8 / 5))
    assert steepest_slope(tokens, values) == pytest.approx(expected)
    assert math.isnan(steepest_slope([4, 5, 6], [1.0, 2.0, 3.0]))  # it only rises
    for few in ([], [10], [1, 10]):
        assert math.isnan(steepest_slope(few, [1.0] * len(few)))
    assert math.isnan(mean_slope([0.5, None])) and math.isnan(mean_slope([]))
    assert mean_slope([0.4, 0.6]) == pytest.approx(0.5)


def test_an_error_of_the_times_costs_the_steeper_slope():
    low = np.array([[0.0, -0.1], [-0.02, 0.0]])
    high = -low.T
    below, above = errors_of_amounts(low, high, [0.4, 0.5])
    assert below.tolist() == [[0, pytest.approx(0.05)], [pytest.approx(0.01), 0]]
    assert above.tolist() == [[0, pytest.approx(0.01)], [pytest.approx(0.05), 0]]
    for unknown in ((low, high, [0.4, math.nan]), (low + math.nan, high, [0.4, 0.5])):
        below, above = errors_of_amounts(*unknown)
        assert below[0, 1] == above[0, 1] == math.inf
    below, above = errors_of_amounts(low, high, [0.4, math.nan])
    assert below[0, 0] == above[1, 1] == 0


def test_a_gap_that_the_times_may_explain_is_undecided():
    losses = np.array([[3.0, 3.0001, 2.9999], [3.02, 3.0199, 3.02]])
    exact = decide(losses, None, np.zeros(2), error=ERROR)
    assert exact.is_outside(0.01).tolist() == [False, True]
    low = np.log([[1, 0.95], [0.95, 1]])
    widened = replace(exact, other_errors=errors_of_amounts(low, -low.T, [0.45, 0.45]))
    assert not widened.is_outside(0.01).any() and widened.may_be_best.all()
    assert (widened.gap_low < exact.gap_low).all()
    low, high = widened.reach(without_noise=True, known_rates=False)
    assert low[1] <= 0.01 < high[1]  # more seeds do not decide
    part = widened.of(slice(0, 2))
    np.testing.assert_array_equal(part.gap_low, widened.gap_low)


def test_intervals_at_equal_time_hold_the_true_differences():
    """Trainings on tokens that noisy rounds fixed, on L = 2 + A·D^-0.3, with noisy losses.

    The losses alone, without the errors of the times, miss some difference in most sweeps.
    """
    rng = np.random.default_rng(5)
    scales = np.array([1.0, 1.03, 1.1])  # A of each batch size
    seconds_per_token = np.array([1.0, 0.8, 0.75])
    sweeps = 300
    missed = 0
    missed_by_losses = 0
    for _ in range(sweeps):
        load = rng.lognormal(0, 0.1, (1, 9))  # hits all batch sizes of a round
        rounds = seconds_per_token[:, None] * load * rng.lognormal(0, 0.03, (3, 9))
        tokens = 1000 / np.median(rounds, axis=1)
        seconds = (tokens * seconds_per_token)[:, None] * rng.lognormal(0, 0.02, (3, 5))
        losses = 2 + 4 * (scales * tokens**-0.3)[:, None] + rng.normal(0, 0.001, (3, 5))
        milestones = [count * np.linspace(0.5, 1, 11) for count in tokens]
        curves = [2 + 4 * scale * m**-0.3 for scale, m in zip(scales, milestones, strict=True)]
        slopes = [steepest_slope(m, c) for m, c in zip(milestones, curves, strict=True)]

        per_training = rounds * tokens[:, None]
        ratios = bound_time_ratios(seconds.tolist(), per_training.tolist())
        of_losses = decide(losses, None, np.zeros(3), error=ERROR)
        decision = replace(of_losses, other_errors=errors_of_amounts(*ratios, slopes))
        truth = 2 + 4 * scales * (1000 / seconds_per_token) ** -0.3
        differences = truth[:, None] - truth[None, :]
        low, high = decision.differences
        missed += not ((low <= differences) & (differences <= high)).all()
        low, high = of_losses.differences
        missed_by_losses += not ((low <= differences) & (differences <= high)).all()
    assert missed <= 0.05 * sweeps and missed_by_losses > 0.5 * sweeps
