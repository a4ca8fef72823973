"""The search for a rate, and training to a target loss."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config.experiment import EvaluationSettings
from sweep.plan.tuning import (
    EXTENSIONS,
    FINEST,
    GRID,
    TuningResult,
    best_index,
    crossing_tokens,
    last_step,
    neighbours,
    next_rates,
    rung_steps,
    survivors,
)


def result(rate, loss):
    return TuningResult({"learning_rate": rate}, loss)


def search(loss, grid=GRID, wanted=0, finest=FINEST):
    """Try rates until the search has settled; return them in the order tried."""
    tried = []
    while rates := next_rates(tried, grid, finest, wanted):
        assert not {trial.rate for trial in tried} & set(rates)
        tried += [result(rate, loss(rate)) for rate in rates]
        assert len(tried) < 100
    return tried


def bowl(optimum):
    return lambda rate: 1 + math.log(rate / optimum) ** 2


@given(steps=st.floats(-5.4, 5.4))
def test_the_best_is_strictly_inside_with_neighbours_within_a_factor_of_root_two(steps):
    optimum = 2.0**steps
    tried = search(bowl(optimum))
    ordered = sorted(tried, key=lambda trial: trial.rate)
    best = best_index(ordered)
    assert 0 < best < len(ordered) - 1
    for index in (best, best + 1):
        assert ordered[index].rate / ordered[index - 1].rate <= FINEST * (1 + 1e-6)
    assert abs(math.log2(ordered[best].rate / optimum)) <= 0.26
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
    assert tried[best_index(tried)].rate <= 1 and max(trial.rate for trial in tried) == 4
    everything = sorted(search(lambda rate: math.inf), key=lambda trial: trial.rate)
    assert neighbours(everything) == () and everything[0].rate < 0.02


def test_nothing_is_proposed_while_a_trial_is_open():
    tried = [result(rate, 1.0) for rate in GRID[:-1]] + [result(GRID[-1], None)]
    assert next_rates(tried, GRID, FINEST, 0) == ()
    assert next_rates(tried[:-1], GRID, FINEST, 0) == (GRID[-1],)


def test_the_wider_gap_is_halved_and_of_equal_ones_the_upper():
    tried = [result(rate, bowl(1.0)(rate)) for rate in GRID]
    assert next_rates(tried, GRID, FINEST, 0) == (pytest.approx(FINEST),)
    tried.append(result(FINEST, 5.0))
    assert next_rates(tried, GRID, FINEST, 0) == (pytest.approx(1 / FINEST),)


def test_the_better_half_goes_on_and_the_neighbour_above_the_best():
    at_rung = {"a": (1, 3.0), "b": (2, 1.0), "c": (4, 4.0), "d": (8, 5.0), "e": (0.5, 2.0)}
    assert survivors(at_rung) == {"a", "b", "e", "c"}
    assert survivors({"a": (1, math.inf)}) == {"a"}


def test_rungs_are_milestones_of_the_evaluation_before_the_end():
    cases = [(1000, 20, (250, 500)), (10, 20, (3, 5)), (1000, 1, ()), (2, 20, (1,))]
    for steps, points, rungs in cases:
        assert rung_steps(steps, EvaluationSettings(points=points)) == rungs


CROSSINGS = [  # tokens, losses, target, crossing
    ([100, 10_000], [3.0, 1.0], 2.0, 1000),
    ([1, 2, 4, 8], [4.0, 3.0, 2.0, 1.0], 2.0, 4),
    ([1, 2, 4, 8], [4.0, 3.0, 2.5, 1.0], 2.75, 2**1.5),
    # A dip that does not stay is no crossing; the last evaluation needs no confirmation.
    ([1, 2, 4, 8, 16, 32], [4, 1, 4, 3, 1, 1], 2, 8 * 2**0.5),
    ([1, 2, 4, 8, 16, 32], [4, 1, 4, 1, 4, 3], 2, None),
    ([1, 2, 4, 8, 16, 32], [4, 1, 4, 1, 1, 4], 2, 4 * 2 ** (2 / 3)),
    ([1, 4], [3, 1], 2, 2),
    ([1, 4], [3, 2.0001], 2, None),
    # Without a point before it, a crossing is at its evaluation.
    ([5, 9], [1, 1], 2, 5),
    ([5, 9, 11], [math.nan, 1, 1], 2, 9),
    ([5, 9, 11], [3, 1, math.nan], 2, None),
    ([], [], 2, None),
]


@pytest.mark.parametrize(("tokens", "losses", "target", "crossing"), CROSSINGS)
def test_a_crossing_stays_and_is_interpolated_in_log_tokens(tokens, losses, target, crossing):
    assert crossing_tokens(tokens, losses, target) == (crossing and pytest.approx(crossing))


def test_a_trial_is_pruned_at_the_first_evaluation_at_twice_the_least_tokens():
    for least, last in [(4000, 150), (3200, 100), (3201, 150), (1e9, 1000)]:
        assert last_step(least, 64, 1000, 20) == last  # evaluations every 50 steps, 3,200 tokens
