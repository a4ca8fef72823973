"""Interleaved rounds: their number, their steps, and their order."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.plan.rounds import LEAST_STEPS, choose_steps, order_of_round, rounds_within

seconds = st.floats(1e-4, 10)
arms = st.lists(seconds, min_size=1, max_size=8)


@given(arms, st.integers(1, 12), st.floats(0, 1000))
def test_no_more_rounds_are_wanted_than_fit_with_the_least_steps(per_step, wanted, available):
    rounds = rounds_within(per_step, wanted, available)
    least = LEAST_STEPS * sum(per_step)
    assert 0 <= rounds <= wanted and rounds * least <= available * (1 + 1e-9)
    if rounds < wanted:
        assert (rounds + 1) * least > available * (1 - 1e-9)


def test_all_rounds_fit_without_a_limit_and_none_after_it_or_if_an_arm_has_no_time():
    assert rounds_within([0.1, 2.0], 7, math.inf) == 7
    assert rounds_within([0.1, 2.0], 7, -1.0) == 0
    assert rounds_within([0.1, math.inf], 7, 60.0) == 0


@given(arms, st.integers(1, 12), seconds, st.floats(1, 100))
def test_the_steps_of_all_rounds_fit_in_the_time_if_the_least_do(per_step, rounds, most, factor):
    available = factor * LEAST_STEPS * rounds * sum(per_step)
    steps = choose_steps(per_step, rounds, most, available)
    assert min(steps) >= LEAST_STEPS
    total = rounds * sum(n * each for n, each in zip(steps, per_step, strict=True))
    assert total <= available * (1 + 1e-9)
    for n, each in zip(steps, per_step, strict=True):
        assert n == LEAST_STEPS or rounds * n * each <= most * (1 + 1e-9)


@pytest.mark.parametrize(
    ("per_step", "available", "steps"),
    [
        ([0.01, 0.02], math.inf, [50, 25]),  # five seconds each in ten rounds
        ([0.01, 0.02], 4.0, [20, 10]),  # two seconds each
        ([0.01, 1.0], 32.0, [20, 3]),  # the slow one needs 30 seconds
        ([1.0, 1.0], 60.0, [3, 3]),
    ],
)
def test_arms_get_equal_times_except_for_the_least_steps(per_step, available, steps):
    assert choose_steps(per_step, 10, 5.0, available) == steps


def test_every_other_round_is_reversed():
    assert [order_of_round(3, number) for number in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]
