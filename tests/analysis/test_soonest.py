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


def at_budget(tokens, noise=0.003, seeds=5, sizes=SIZES, draw=0, step=STEP, loss=loss_at):
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
                    "value": loss(tokens, float(size)) + noise * rng.normal(),
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
    return AtBudget(tokens=tokens, epochs=0.0, comparison=comparison, rates={})


def tokens_to(loss, size):
    """The tokens at which a batch size reaches a loss; infinite if it never does."""
    if loss_at(1e12, size) >= loss:
        return math.inf
    return math.exp(brentq(lambda x: loss_at(math.exp(x), size) - loss, 0.0, math.log(1e12)))


def best_at_middle(budgets=BUDGETS):
    return min(SIZES, key=lambda size: loss_at(budgets[-2], float(size)))


def soonest(budgets, reference):
    return find_soonest_of_budgets(budgets, reference, "tokens").side


@pytest.mark.parametrize("count", [2, 3])
def test_the_tokens_to_a_loss_lie_between_their_bounds(count):
    reference = best_at_middle()
    loss = loss_at(BUDGETS[-2], float(reference))
    sizes = np.array(SIZES, float)
    exact = [loss_at(tokens, sizes) - loss for tokens in BUDGETS]
    positions = np.log(BUDGETS)
    slopes = np.diff(exact, axis=0) / np.diff(positions)[:, None]
    curvature = (slopes[1] - slopes[0]) / (positions[2] - positions[0])
    bounds = Bounded(curvature, curvature, curvature)
    if count == 2:
        unknown = np.full(len(SIZES), math.nan)
        bounds = Bounded(unknown, np.full(len(SIZES), -math.inf), np.full(len(SIZES), math.inf))
    smaller = Bounded(exact[1], exact[1], exact[1])
    larger = Bounded(exact[2], exact[2], exact[2])
    reached = log_tokens_to_loss((positions[1], positions[2]), smaller, larger, bounds)
    truth = np.log([tokens_to(loss, float(size)) for size in SIZES])
    assert (reached.low <= truth + 1e-9).all()
    assert (truth <= reached.high + (positions[2] - positions[1]) / 400).all()
    assert (reached.low <= reached.high).all()
    known = np.isfinite(reached.estimate)
    if count == 3:
        assert known.sum() >= 3
        assert np.abs(reached.estimate - truth)[known] == pytest.approx(0.0, abs=0.08)
    else:
        assert known.sum() == 1  # of the reference


@pytest.mark.parametrize("concave", [False, True])
def test_a_curve_that_is_not_known_to_be_convex_has_the_budgets_as_bounds(concave):
    one = np.ones(1)
    curvature = Bounded(-0.01 * one, -0.02 * one, (-0.005 if concave else 0.01) * one)
    smaller = Bounded(0.1 * one, 0.09 * one, 0.11 * one)
    larger = Bounded(-0.1 * one, -0.11 * one, -0.09 * one)
    reached = log_tokens_to_loss((1.0, 2.0), smaller, larger, curvature)
    assert (reached.low[0], reached.high[0]) == (1.0, 2.0)


SIMULATED = [(0.003, 60.0, 3), (0.003, 300.0, 2), (0.006, 60.0, 3), (0.012, 16.0, 3)]


def simulate(noise, step, count, studies, loss=loss_at, reference=None):
    """Return how often the true soonest is no candidate, and the mean number of candidates.

    If the soonest is not known, all are.
    """
    if reference is None:
        reference = best_at_middle()
    reached = loss(BUDGETS[-2], float(reference))

    def time_of(size):
        grid = np.exp(np.linspace(math.log(BUDGETS[0] / 10), math.log(BUDGETS[-1] * 10), 20_000))
        below = np.flatnonzero([loss(tokens, float(size)) <= reached for tokens in grid])
        tokens = grid[below[0]] if len(below) else math.inf
        return tokens * seconds_per_token(size, step)

    truth = min(SIZES, key=time_of)
    wrong = 0
    candidates = 0
    for draw in range(studies):
        budgets = [
            at_budget(tokens, draw=draw, noise=noise, step=step, loss=loss)
            for tokens in BUDGETS[-count:]
        ]
        side = soonest(budgets, reference)
        remaining = SIZES if side.batch_size is None else side.candidates
        wrong += truth not in remaining
        candidates += len(remaining)
    return wrong / studies, candidates / studies


def test_the_true_soonest_remains_and_slower_batch_sizes_do_not():
    wrong, candidates = simulate(0.001, 300.0, 3, studies=10)
    assert wrong == 0 and candidates < 4


def concave_at(tokens, size):
    """The loss of a batch size that falls late, if it is large: as tanh of ln tokens."""
    late = math.log(BUDGETS[-2]) + 0.6 * math.log(size / 16)
    return 2.5 - 0.5 * math.tanh(0.5 * (math.log(tokens) - late))


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "step", "count"), SIMULATED)
@pytest.mark.parametrize("loss", [loss_at, concave_at])
def test_the_soonest_is_rarely_left_out(noise, step, count, loss):
    reference = None if loss is loss_at else 16
    wrong, candidates = simulate(noise, step, count, 100, loss=loss, reference=reference)
    print(f"{loss.__name__} {noise} {step:g} {count}: {wrong:.3f} wrong, {candidates:.2f}")
    assert wrong <= 0.05


def test_a_faster_batch_size_is_the_soonest_and_is_recommended_if_time_counts():
    budgets = [at_budget(tokens, noise=3e-4, step=2000.0) for tokens in BUDGETS]
    reference = best_at_middle()
    found = find_soonest_of_budgets(budgets, reference, "tokens")
    side = found.side
    assert side.candidates == [128] and found.is_decided and not found.reasons
    loss = loss_at(BUDGETS[-2], float(reference))
    expected = tokens_to(loss, 128.0) * seconds_per_token(128, 2000.0)
    assert side.value == pytest.approx(expected, rel=0.1)
    assert side.basis.startswith("the soonest to a loss of")
    assert f"batch size {reference} reaches at 160k tokens" in side.basis

    comparison = budgets[-1].comparison
    usual = build_answer(comparison, AnswerSettings(), found)
    assert usual.pursues == "tokens" and usual.soonest == side
    by_time = build_answer(comparison, AnswerSettings(pursues="time"), found)
    assert (by_time.pursues, by_time.recommended, by_time.decided) == ("time", 128, True)


def test_reasons_of_every_budget_make_a_recommendation_of_time_provisional():
    budgets = [at_budget(tokens, noise=1e-3, step=300.0) for tokens in BUDGETS]
    weak = replace(budgets[0].comparison, reasons=["The rate is fixed."])
    budgets[0] = replace(budgets[0], comparison=weak)
    found = find_soonest_of_budgets(budgets, best_at_middle(), "tokens")
    by_time = build_answer(budgets[-1].comparison, AnswerSettings(pursues="time"), found)
    assert by_time.provisional and not by_time.decided
    assert by_time.reasons == ["At a budget of 40k: The rate is fixed."]


def test_two_budgets_give_bounds_only():
    side = soonest([at_budget(t) for t in BUDGETS[1:]], best_at_middle())
    assert side.batch_size in side.candidates and len(side.candidates) > 1
    assert "in the worst case" in side.basis


def test_without_the_reference_or_its_time_the_soonest_is_not_known():
    reference = best_at_middle()
    others = tuple(size for size in SIZES if size != reference)
    side = soonest([at_budget(BUDGETS[1]), at_budget(BUDGETS[2], sizes=others)], reference)
    assert side.batch_size is None and str(reference) in side.reason
    timed = at_budget(BUDGETS[2])
    without_times = timed.comparison.finals.assign(seconds_training=math.nan)
    times = known_times(without_times, SIZES, None, None)
    untimed = replace(timed, comparison=replace(timed.comparison, times=times))
    side = soonest([at_budget(BUDGETS[1]), untimed], reference)
    assert side.batch_size is None and "time" in side.reason


def rising_at(tokens, size):
    return loss_at(tokens, size) + 0.3 * (tokens == BUDGETS[-1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seeds": 1}, "error of the loss"),
        ({"loss": rising_at}, "may not fall"),
        ({"epochs": 4.5}, "epochs"),
    ],
)
def test_weak_evidence_names_no_batch_size(change, says):
    epochs = change.pop("epochs", 0.0)
    budgets = [replace(at_budget(t, **change), epochs=epochs) for t in BUDGETS]
    side = soonest(budgets, best_at_middle())
    assert side.batch_size is None and says in side.reason


def test_a_batch_size_that_only_some_budgets_have_leaves_the_answer_open():
    known = [at_budget(t, noise=3e-4, step=2000.0) for t in BUDGETS]
    few = [at_budget(t, noise=3e-4, step=2000.0, sizes=SIZES[:3]) for t in BUDGETS]
    reference = best_at_middle()
    larger_only = soonest([*few[:2], known[2]], reference)
    assert {64, 128} <= {*larger_only.candidates}
    smaller_only = find_soonest_of_budgets([*known[:2], few[2]], reference, "tokens")
    assert not smaller_only.is_decided
    assert "of those compared at the largest budget" in smaller_only.side.basis


def test_a_batch_size_that_reached_the_loss_before_its_own_rose_stays_a_candidate():
    one = np.ones(1)
    unknown = Bounded(math.nan * one, -math.inf * one, math.inf * one)
    smaller = Bounded(-0.15 * one, -0.2 * one, -0.1 * one)
    larger = Bounded(0.15 * one, 0.1 * one, 0.2 * one)
    reached = log_tokens_to_loss((1.0, 2.0), smaller, larger, unknown)
    assert (reached.low[0], reached.high[0]) == (-math.inf, 1.0)


def test_an_unbounded_end_leaves_the_bounds_of_the_budgets():
    one = np.ones(1)
    convex = Bounded(0.01 * one, 0.005 * one, 0.02 * one)
    smaller = Bounded(0.1 * one, 0.09 * one, 0.11 * one)
    larger = Bounded(-0.1 * one, -math.inf * one, -0.09 * one)
    reached = log_tokens_to_loss((1.0, 2.0), smaller, larger, convex)
    assert (reached.low[0], reached.high[0]) == (1.0, 2.0)


def test_the_order_of_all_is_not_decided_while_several_may_be_the_soonest():
    budgets = [at_budget(tokens, noise=1e-3, step=300.0) for tokens in BUDGETS]
    found = find_soonest_of_budgets(budgets, best_at_middle(), "tokens")
    assert len(found.side.candidates) > 1
    settings = AnswerSettings(pursues="time", question="order")
    assert not build_answer(budgets[-1].comparison, settings, found).decided
