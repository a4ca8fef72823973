"""Where a curve reaches its target, and when a trial has gone on for too long."""

import math

import pytest

from sweep.errors import SweepError
from sweep.plan.steps import milestone_steps
from sweep.plan.tuning import crossing_tokens, last_step


def test_a_crossing_is_interpolated_in_log_tokens() -> None:
    assert crossing_tokens([100, 10_000], [3.0, 1.0], 2.0) == pytest.approx(1000)
    assert crossing_tokens([1, 2, 4, 8], [4.0, 3.0, 2.0, 1.0], 2.0) == 4.0
    assert crossing_tokens([1, 2, 4, 8], [4.0, 3.0, 2.5, 1.0], 2.75) == pytest.approx(2**1.5)


def test_a_dip_that_does_not_stay_is_no_crossing() -> None:
    tokens = [1, 2, 4, 8, 16, 32]
    assert crossing_tokens(tokens, [4, 1, 4, 3, 1, 1], 2) == pytest.approx(8 * 2**0.5)
    assert crossing_tokens(tokens, [4, 1, 4, 1, 4, 3], 2) is None
    assert crossing_tokens(tokens, [4, 1, 4, 1, 1, 4], 2) == pytest.approx(4 * 2 ** (2 / 3))


def test_the_last_evaluation_needs_no_confirmation() -> None:
    assert crossing_tokens([1, 4], [3, 1], 2) == pytest.approx(2)
    assert crossing_tokens([1, 4], [3, 2.0001], 2) is None


def test_a_crossing_without_a_point_before_it_is_at_its_evaluation() -> None:
    assert crossing_tokens([5, 9], [1, 1], 2) == 5
    assert crossing_tokens([5, 9, 11], [math.nan, 1, 1], 2) == 9
    assert crossing_tokens([5, 9, 11], [3, 1, math.nan], 2) is None
    assert crossing_tokens([], [], 2) is None


@pytest.mark.parametrize("tokens", [[0, 1], [2, 1], [1, 1], [1, 2, 3]])
def test_tokens_that_do_not_increase_from_above_0_are_refused(tokens: list[int]) -> None:
    with pytest.raises(SweepError, match="tokens must be positive, increasing"):
        crossing_tokens(tokens, [2, 1], 1.5)


def test_a_trial_is_given_up_at_the_first_evaluation_behind_twice_the_least():
    steps, points, step_tokens = 1000, 20, 64  # evaluations every 50 steps, 3,200 tokens
    assert last_step(4000, step_tokens, steps, points) == 150
    assert last_step(3200, step_tokens, steps, points) == 100
    assert last_step(3201, step_tokens, steps, points) == 150
    assert last_step(1e9, step_tokens, steps, points) == steps
    assert last_step(4000, step_tokens, steps, points) in milestone_steps(steps, points)
