"""The search for a rate, and training to a target loss."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config.experiment import EvaluationSettings
from sweep.plan.rates import (
    EXTENSIONS,
    FINEST,
    GRID,
    Tried,
    best_of,
    crossing_tokens,
    last_step,
    neighbours,
    next_rates,
    rung_steps,
    survivors,
)
from sweep.plan.steps import milestone_steps


def search(loss, grid=GRID, wanted=0, finest=FINEST):
    """Try rates until the search has settled; return them in the order tried."""
    tried = []
    while rates := next_rates(tried, grid, finest, wanted):
        assert not {trial.rate for trial in tried} & set(rates)
        tried += [Tried(rate, loss(rate)) for rate in rates]
        assert len(tried) < 100
    return tried


def bowl(optimum):
    return lambda rate: 1 + math.log(rate / optimum) ** 2


@given(steps=st.floats(-5.4, 5.4))
def test_the_best_is_strictly_inside_with_neighbours_within_a_factor_of_root_two(steps):
    optimum = 2.0**steps
    tried = search(bowl(optimum))
    below, above = neighbours(tried)
    best = best_of(tried).rate
    assert best / below.rate <= FINEST * (1 + 1e-6) >= above.rate / best
    assert abs(math.log2(best / optimum)) <= 0.26
    assert [trial.rate for trial in tried[:5]] == list(GRID)
    assert len(tried) <= 5 + EXTENSIONS + 3


@given(st.lists(st.floats(0, 10), min_size=60, max_size=60), st.integers(0, 30))
def test_on_any_losses_the_search_ends_and_tries_as_many_as_are_wanted(losses, wanted):
    drawn = iter(losses)
    tried = search(lambda _: next(drawn), wanted=wanted)
    assert len(tried) >= max(5, wanted)


def test_it_goes_four_steps_beyond_the_grid_and_no_farther():
    rates = sorted(trial.rate for trial in search(lambda rate: -rate))
    assert rates[-1] == 4 * 2**EXTENSIONS
    rates = sorted(trial.rate for trial in search(lambda rate: rate))
    assert rates[0] == 0.25 / 2**EXTENSIONS


def test_a_diverged_rate_counts_as_infinitely_bad():
    tried = search(lambda rate: math.inf if rate > 1 else 2 - rate)
    assert best_of(tried).rate <= 1 and max(trial.rate for trial in tried) == 4
    everything = search(lambda rate: math.inf)
    assert neighbours(everything) == [] and min(trial.rate for trial in everything) < 0.02


def test_nothing_is_proposed_while_a_trial_is_open():
    tried = [Tried(rate, 1.0) for rate in GRID[:-1]] + [Tried(GRID[-1], None)]
    assert next_rates(tried, GRID) == ()
    assert next_rates(tried[:-1], GRID) == (GRID[-1],)


def test_the_wider_gap_is_halved_and_of_equal_ones_the_upper():
    tried = [Tried(rate, bowl(1.0)(rate)) for rate in GRID]
    assert next_rates(tried, GRID) == (pytest.approx(FINEST),)
    tried.append(Tried(FINEST, 5.0))
    assert next_rates(tried, GRID) == (pytest.approx(1 / FINEST),)


def test_the_better_half_goes_on_and_the_neighbour_above_the_best():
    at_rung = {"a": (1, 3.0), "b": (2, 1.0), "c": (4, 4.0), "d": (8, 5.0), "e": (0.5, 2.0)}
    assert survivors(at_rung) == {"a", "b", "e", "c"}
    assert survivors({"a": (1, math.inf)}) == {"a"}


def test_rungs_are_milestones_of_the_evaluation_before_the_end():
    assert rung_steps(1000, EvaluationSettings(points=20)) == (250, 500)
    assert rung_steps(10, EvaluationSettings(points=20)) == (3, 5)
    assert rung_steps(1000, EvaluationSettings(points=1)) == ()
    assert rung_steps(2, EvaluationSettings(points=20)) == (1,)


def test_a_crossing_is_interpolated_in_log_tokens():
    assert crossing_tokens([100, 10_000], [3.0, 1.0], 2.0) == pytest.approx(1000)
    assert crossing_tokens([1, 2, 4, 8], [4.0, 3.0, 2.0, 1.0], 2.0) == 4.0
    assert crossing_tokens([1, 2, 4, 8], [4.0, 3.0, 2.5, 1.0], 2.75) == pytest.approx(2**1.5)


def test_a_dip_that_does_not_stay_is_no_crossing():
    tokens = [1, 2, 4, 8, 16, 32]
    assert crossing_tokens(tokens, [4, 1, 4, 3, 1, 1], 2) == pytest.approx(8 * 2**0.5)
    assert crossing_tokens(tokens, [4, 1, 4, 1, 4, 3], 2) is None
    assert crossing_tokens(tokens, [4, 1, 4, 1, 1, 4], 2) == pytest.approx(4 * 2 ** (2 / 3))


def test_the_last_evaluation_needs_no_confirmation():
    assert crossing_tokens([1, 4], [3, 1], 2) == pytest.approx(2)
    assert crossing_tokens([1, 4], [3, 2.0001], 2) is None


def test_a_crossing_without_a_point_before_it_is_at_its_evaluation():
    assert crossing_tokens([5, 9], [1, 1], 2) == 5
    assert crossing_tokens([5, 9, 11], [math.nan, 1, 1], 2) == 9
    assert crossing_tokens([5, 9, 11], [3, 1, math.nan], 2) is None
    assert crossing_tokens([], [], 2) is None


def test_a_trial_is_pruned_at_the_first_evaluation_at_twice_the_least_tokens():
    steps, points, step_tokens = 1000, 20, 64  # evaluations every 50 steps, 3,200 tokens
    assert last_step(4000, step_tokens, steps, points) == 150
    assert last_step(3200, step_tokens, steps, points) == 100
    assert last_step(3201, step_tokens, steps, points) == 150
    assert last_step(1e9, step_tokens, steps, points) == steps
    assert last_step(4000, step_tokens, steps, points) in milestone_steps(steps, points)
