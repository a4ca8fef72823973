"""Rates by batch size, the search for them, and training to a target loss."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config.experiment import EvaluationSettings
from sweep.config.optimizers import OptimizerSettings
from sweep.errors import SweepError
from sweep.plan.course import Course
from sweep.plan.policies import SquareRoot, describe_policy, parse_policy
from sweep.plan.rate_search import (
    EXTENSIONS,
    FINEST,
    GRID,
    RateTrial,
    best_of,
    neighbours,
    next_rates,
    rung_steps,
    survivors,
)
from sweep.plan.target import crossing_tokens, last_step

ADAMW = OptimizerSettings()


def test_a_number_keeps_everything_everywhere():
    policy = parse_policy("3e-4")
    assert (policy.name, policy.rate_at(1), policy.rate_at(256)) == ("fixed", 3e-4, 3e-4)
    assert policy.optimizer_at(256, 256, ADAMW) == ADAMW


def test_sqrt_is_short_for_its_default_and_holds_half_life_and_time_scale():
    assert parse_policy("sqrt") == parse_policy("sqrt:1e-3@32") == SquareRoot(1e-3, 32)
    policy = parse_policy("sqrt")
    assert policy.rate_at(128) == pytest.approx(2e-3)
    for batch in (1, 32, 256):
        optimizer = policy.optimizer_at(batch, 256, ADAMW)
        assert optimizer.beta2 == pytest.approx(0.999 ** (batch / 32))
        time_scale = batch / (policy.rate_at(batch) * optimizer.weight_decay)
        assert time_scale == pytest.approx(32 / (1e-3 * 0.1))


def test_linear_scales_the_rate_and_leaves_weight_decay():
    policy = parse_policy("linear:1e-3@32")
    assert policy.rate_at(64) == pytest.approx(2e-3)
    assert policy.optimizer_at(64, 256, ADAMW).weight_decay == 0.1
    half_context = policy.optimizer_at(64, 128, ADAMW)
    assert half_context.beta2 == policy.optimizer_at(32, 256, ADAMW).beta2


def test_the_rule_of_a_policy_is_its_text_and_only_that_of_tuning_names_dimensions():
    class CubeRoot(SquareRoot):
        rate_rule = "rate ∝ B^{1/3}"

    assert CubeRoot.describe(["lr"], is_rate_only=True) == "rate ∝ B^{1/3}"
    assert ": lr, beta2 (" in describe_policy("tuned", ["lr", "beta2"])


def test_the_centre_of_tuning_grows_and_then_stays():
    policy = parse_policy("tuned")
    assert policy.rate_at(32) == 1e-3
    assert policy.rate_at(1) == pytest.approx(1e-3 * (1 / 32) ** 0.125)
    assert policy.rate_at(128) == pytest.approx(2e-3)
    assert policy.rate_at(256) == policy.rate_at(1024) == pytest.approx(1e-3 * 8**0.5)


NONSENSE = ["", "x", "-1", "0", "nan", "inf", "sqrt:1e-3", "1e-3@32", "linear", "linear:0@32"]


@pytest.mark.parametrize("text", [*NONSENSE, "sqrt:1@0", f"sqrt:1e-3@{'9' * 5000}"])
def test_nonsense_is_refused_in_one_sentence(text):
    with pytest.raises(SweepError, match="lr must be"):
        parse_policy(text)


def search(loss):
    """Try rates until the search has settled; return them in the order tried."""
    tried = []
    while rates := next_rates(tried, GRID):
        assert not {trial.rate for trial in tried} & set(rates)
        tried += [RateTrial(rate, loss(rate)) for rate in rates]
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


@given(st.lists(st.floats(0, 10), min_size=60, max_size=60))
def test_on_any_losses_the_search_ends(losses):
    drawn = iter(losses)
    assert 5 <= len(search(lambda _: next(drawn))) < 60


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


def test_nothing_is_proposed_while_a_trial_is_open_then_the_wider_or_upper_gap_is_halved():
    tried = [RateTrial(rate, 1.0) for rate in GRID[:-1]] + [RateTrial(GRID[-1], None)]
    assert next_rates(tried, GRID) == ()
    assert next_rates(tried[:-1], GRID) == (GRID[-1],)
    tried = [RateTrial(rate, bowl(1.0)(rate)) for rate in GRID]
    assert next_rates(tried, GRID) == (pytest.approx(FINEST),)
    tried.append(RateTrial(FINEST, 5.0))
    assert next_rates(tried, GRID) == (pytest.approx(1 / FINEST),)


def test_the_better_half_goes_on_and_the_neighbour_above_the_best():
    at_rung = {"a": (1, 3.0), "b": (2, 1.0), "c": (4, 4.0), "d": (8, 5.0), "e": (0.5, 2.0)}
    assert survivors(at_rung) == {"a", "b", "e", "c"}
    assert survivors({"a": (1, math.inf)}) == {"a"}


def course(steps):
    return Course(batch_size=8, tokens_per_sequence=64, steps=steps)


def test_rungs_are_milestones_of_the_evaluation_before_the_end():
    assert rung_steps(course(1000), EvaluationSettings(points=20)) == (250, 500)
    assert rung_steps(course(10), EvaluationSettings(points=20)) == (3, 5)
    assert rung_steps(course(1000), EvaluationSettings(points=1)) == ()
    assert rung_steps(course(2), EvaluationSettings(points=20)) == (1,)


CROSSINGS = [  # tokens, losses, and the tokens at which they reach 2 to stay
    ([100, 10_000], [3, 1], 1000),  # interpolated in log tokens
    ([1, 2, 4, 8], [4, 3, 2, 1], 4),
    ([1, 2, 4, 8], [3.25, 2.25, 1.75, 0.25], 2**1.5),
    ([1, 2, 4, 8, 16, 32], [4, 1, 4, 3, 1, 1], 8 * 2**0.5),  # a dip that does not stay
    ([1, 2, 4, 8, 16, 32], [4, 1, 4, 1, 4, 3], None),
    ([1, 2, 4, 8, 16, 32], [4, 1, 4, 1, 1, 4], 4 * 2 ** (2 / 3)),
    ([1, 4], [3, 1], 2),  # the last evaluation needs no confirmation
    ([1, 4], [3, 2.0001], None),
    ([5, 9], [1, 1], 5),  # without a point before, the crossing is at its evaluation
    ([5, 9, 11], [math.nan, 1, 1], 9),
    ([5, 9, 11], [3, 1, math.nan], None),
    ([], [], None),
]


@pytest.mark.parametrize(("tokens", "losses", "crossing"), CROSSINGS)
def test_a_crossing_is_where_a_curve_reaches_the_target_to_stay(tokens, losses, crossing):
    assert crossing_tokens(tokens, losses, 2) == pytest.approx(crossing)


def test_a_trial_is_pruned_at_the_first_evaluation_at_twice_the_least_tokens():
    own = Course(batch_size=4, tokens_per_sequence=16, steps=1000)
    points = 20  # evaluations every 50 steps, 3,200 tokens
    assert last_step(4000, own, points) == 150
    assert last_step(3200, own, points) == 100
    assert last_step(3201, own, points) == 150
    assert last_step(1e9, own, points) is None  # its end decides
    assert last_step(4000, own, points) in own.milestones(points)


def test_the_search_goes_beyond_a_highest_rate_that_is_as_good_as_the_best():
    losses = {0.25: 0.3, 0.5: 0.2, 1.0: 0.1, 2.0: 0.02, 4.0: 0.02}
    tried = [RateTrial(rate, losses[rate]) for rate in GRID]
    assert next_rates(tried, GRID) == (8.0,)
    lost = [RateTrial(rate, math.inf) for rate in GRID]
    assert next_rates(lost, GRID) == (0.125,)
