"""The soonest batch size by several budgets, on trainings whose losses and times are known."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq

from sweep.analysis.answer import Comparison, build_answer, decide_trials
from sweep.analysis.soonest import AtBudget, find_soonest_of_budgets
from sweep.analysis.times import known_times
from sweep.config.arms import Arm
from sweep.config.experiment import AnswerSettings
from sweep.config.objective import LOSS
from sweep.decision.soonest import Bounded, log_tokens_to_loss
from tests.analysis.test_law import loss_at
from tests.analysis.test_times import HERE, ON_CPU
from tests.fakes.times import timing_of

BUDGETS = (40_000, 160_000, 640_000)  # in sequences, which count as tokens here
SIZES = (8, 16, 32, 64, 128)
STEP = 60.0  # sequences that take as long as what each step takes in addition


def seconds_per_token(size, step=STEP):
    return 1e-4 * (1 + step / size)


def at_budget(tokens, noise=0.003, seeds=5, sizes=SIZES, draw=0, step=STEP):
    rng = np.random.default_rng([tokens, draw])
    rows = []
    for size in sizes:
        for seed in range(seeds):
            rows.append(
                {
                    "label": "tuned",
                    "batch_size": size,
                    "seed": seed,
                    "learning_rate": 1e-3,
                    "value": loss_at(tokens, float(size)) + noise * rng.normal(),
                    "has_looks": False,
                    "device": HERE,
                    "execution": json.dumps(ON_CPU),
                    "microbatch_size": size,
                    "devices": 1,
                    "context_length": 1,
                    "steps": tokens / size,
                    "steps_taken": tokens / size,
                    "tokens_taken": float(tokens),
                    "target": math.nan,
                    "clipped_step_fraction": 0.0,
                    "seconds_training": tokens * seconds_per_token(size, step),
                    "seconds_per_token": seconds_per_token(size, step),
                }
            )
    finals = pd.DataFrame(rows)
    rounds = {}
    for size in sizes:
        noise_of_times = 1 + 0.02 * rng.normal(size=12)
        rounds[Arm(None, size)] = (size * seconds_per_token(size, step) * noise_of_times).tolist()
    timing = timing_of(rounds, device=HERE, rounds_needed=8)
    _, decision = decide_trials(finals, {})
    comparison = Comparison(
        policy="tuned",
        finals=finals,
        decision=decision,
        decision_with_times=decision,
        times=known_times(finals, sizes, None, timing),
        objective=LOSS,
    )
    return AtBudget(tokens=tokens, comparison=comparison, rates={})


def tokens_to(loss, size):
    """The tokens at which a batch size reaches a loss; infinite if it never does."""
    if loss_at(1e12, size) >= loss:
        return math.inf
    return math.exp(brentq(lambda x: loss_at(math.exp(x), size) - loss, 0.0, math.log(1e12)))


def best_at_middle(budgets=BUDGETS):
    return min(SIZES, key=lambda size: loss_at(budgets[-2], float(size)))


@pytest.mark.parametrize("count", [2, 3])
def test_the_tokens_to_a_loss_lie_between_their_bounds(count):
    reference = best_at_middle()
    loss = loss_at(BUDGETS[-2], float(reference))
    sizes = np.array(SIZES, float)
    exact = [loss_at(tokens, sizes) - loss for tokens in BUDGETS]
    positions = np.log(BUDGETS)
    slopes = np.diff(exact, axis=0) / np.diff(positions)[:, None]
    curvature = (slopes[1] - slopes[0]) / (positions[2] - positions[0])
    if count == 2:
        curvature = np.full(len(SIZES), math.nan)
    smaller = Bounded(exact[1], exact[1], exact[1])
    larger = Bounded(exact[2], exact[2], exact[2])
    reached = log_tokens_to_loss((positions[1], positions[2]), smaller, larger, curvature)
    truth = np.log([tokens_to(loss, float(size)) for size in SIZES])
    assert (reached.low <= truth + 1e-9).all()
    assert (truth <= reached.high + (positions[2] - positions[1]) / 400).all()
    if count == 3:
        known = np.isfinite(reached.estimate)
        assert known.sum() >= 3
        assert np.abs(reached.estimate - truth)[known] == pytest.approx(0.0, abs=0.08)


def test_the_bounds_of_noisy_losses_miss_rarely_and_so_does_the_soonest():
    reference = best_at_middle()
    loss = loss_at(BUDGETS[-2], float(reference))
    times = {size: tokens_to(loss, float(size)) * seconds_per_token(size) for size in SIZES}
    truth = min(times, key=times.__getitem__)
    assert truth != reference  # a larger batch size takes more tokens and less time
    wrong = 0
    excluded = 0
    studies = 60
    for draw in range(studies):
        side = find_soonest_of_budgets([at_budget(t, draw=draw) for t in BUDGETS], reference)
        wrong += truth not in side.candidates
        excluded += len(SIZES) - len(side.candidates)
    assert wrong <= 0.05 * studies
    assert excluded > studies  # more than one of five, on average


def test_a_faster_batch_size_is_the_soonest_and_is_recommended_if_time_counts():
    budgets = [at_budget(tokens, noise=1e-3, step=300.0) for tokens in BUDGETS]
    reference = best_at_middle()
    side = find_soonest_of_budgets(budgets, reference)
    assert (side.batch_size, side.candidates) == (128, [64, 128])
    loss = loss_at(BUDGETS[-2], float(reference))
    expected = tokens_to(loss, 128.0) * seconds_per_token(128, 300.0)
    assert side.value == pytest.approx(expected, rel=0.1)
    assert f"batch size {reference} reaches at 160k tokens" in side.basis

    comparison = budgets[-1].comparison
    usual = build_answer(comparison, AnswerSettings(), side)
    assert usual.pursues == "tokens" and usual.soonest == side
    by_time = build_answer(comparison, AnswerSettings(pursues="time"), side)
    assert (by_time.pursues, by_time.recommended) == ("time", 128)
    assert not by_time.decided  # another one may be as soon


def test_two_budgets_give_bounds_only():
    side = find_soonest_of_budgets([at_budget(t) for t in BUDGETS[1:]], best_at_middle())
    assert side.batch_size in side.candidates and len(side.candidates) > 1


def test_without_the_reference_or_its_time_the_soonest_is_not_known():
    reference = best_at_middle()
    others = tuple(size for size in SIZES if size != reference)
    moved = [at_budget(BUDGETS[1]), at_budget(BUDGETS[2], sizes=others)]
    side = find_soonest_of_budgets(moved, reference)
    assert side.batch_size is None and str(reference) in side.reason
    timed = at_budget(BUDGETS[2])
    without_times = timed.comparison.finals.assign(seconds_training=math.nan)
    times = known_times(without_times, SIZES, None, None)
    untimed = replace(timed, comparison=replace(timed.comparison, times=times))
    side = find_soonest_of_budgets([at_budget(BUDGETS[1]), untimed], reference)
    assert side.batch_size is None and "time" in side.reason


def test_one_seed_leaves_every_batch_size_a_candidate():
    side = find_soonest_of_budgets([at_budget(t, seeds=1) for t in BUDGETS], best_at_middle())
    assert side.candidates == [*SIZES]


def test_a_batch_size_that_only_the_largest_budget_has_may_be_the_soonest():
    known = find_soonest_of_budgets([at_budget(t, noise=1e-3) for t in BUDGETS], 16)
    assert 64 in known.candidates and 16 not in known.candidates
    sizes = (8, 16, 32)
    budgets = [at_budget(t, noise=1e-3, sizes=sizes) for t in BUDGETS[:2]]
    side = find_soonest_of_budgets([*budgets, at_budget(BUDGETS[2], noise=1e-3)], 16)
    assert {64, 128} <= {*side.candidates}
