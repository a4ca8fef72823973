"""Which trials come next, from records of those that ended."""

import math
from dataclasses import replace

import numpy as np
import pytest

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.config.objective import LOSS, TOKENS_TO_TARGET, Objective
from sweep.decision.decision import LOOKS, decide
from sweep.decision.next import next_look, next_trainings, next_trials
from sweep.decision.rates import RatePoints
from sweep.decision.trials import TrialRecord, compared_value, tuning_records
from sweep.plan.plan import Inputs, build_plan
from sweep.trial.status import Cause, State

CPU = Execution(device="cpu", threads=2)


def planned(lr="0.1", seeds=5):
    settings = {"batches": "4,16", "budget": 3200, "precision": "fp32", "lr": lr}
    experiment = load_experiment("quadratic", {**settings, "seeds": seeds})
    plan = build_plan(experiment, CPU, Inputs())
    return plan, experiment.model_copy(update={"seeds": "auto"})


def ended(row, value):
    return TrialRecord(row, State.COMPLETE, None, value)


VALUES = [
    ((State.COMPLETE, None, 1.5, LOSS), 1.5),
    ((State.COMPLETE, None, 0.9, Objective("final_valid_accuracy", "maximize")), -0.9),
    ((State.COMPLETE, None, 100.0, TOKENS_TO_TARGET), math.log(100)),
    ((State.COMPLETE, None, None, TOKENS_TO_TARGET), math.inf),
    ((State.COMPLETE, None, None, LOSS), None),
    ((State.COMPLETE, None, math.nan, LOSS), math.inf),
    ((State.COMPLETE, None, -math.inf, LOSS), math.inf),
    ((State.COMPLETE, None, math.nan, TOKENS_TO_TARGET), math.inf),
    ((State.FAILED, Cause.DIVERGED, None, LOSS), math.inf),
    ((State.PRUNED, None, 2.0, TOKENS_TO_TARGET), math.inf),
    ((State.FAILED, Cause.LOST, None, LOSS), None),
    ((State.RUNNING, None, 1.0, LOSS), None),
    ((State.WAITING, None, None, LOSS), None),
]


@pytest.mark.parametrize(("trial", "value"), VALUES)
def test_the_compared_value_of_a_trial_is_less_if_it_is_better(trial, value):
    assert compared_value(*trial) == value


def test_a_trial_that_tuning_pruned_has_no_value():
    assert math.isnan(compared_value(State.PRUNED, None, 2.0, LOSS))


def test_open_batch_sizes_get_the_seeds_of_the_next_look():
    plan, experiment = planned(seeds=3)
    records = [ended(row, 1.0 + 0.01 * row.seed * row.batch_size) for row in plan.trials]
    added = next_trials(plan, experiment, records)
    assert {(row.batch_size, row.seed) for row in added} == {(4, 3), (4, 4), (16, 3), (16, 4)}


def test_nothing_follows_while_a_report_is_open_or_unknown():
    plan, experiment = planned(seeds=3)
    records = [ended(row, 1.0 + 0.01 * row.seed * row.batch_size) for row in plan.trials]
    waiting = TrialRecord(records[0].row, State.WAITING, None, None)
    assert next_trials(plan, experiment, [waiting, *records[1:]]) == []
    assert next_trials(plan, experiment, [ended(records[0].row, None), *records[1:]]) == []
    assert next_trials(plan, experiment, records[1:]) == []


def test_seeds_that_repeat_one_result_are_not_followed_by_more():
    plan, experiment = planned(seeds=5)
    assert next_trials(plan, experiment, [ended(row, 1.0) for row in plan.trials]) == []


def test_a_rate_on_fewer_tokens_counts_only_if_it_diverged():
    plan, _ = planned(lr="tuned", seeds=3)
    tuning = [row for row in plan.trials if row.stage == "tune" and row.batch_size == 4]
    early = [row.model_copy(update={"tokens": row.tokens // 2}) for row in tuning[:2]]
    records = [
        ended(early[0], 1.0),
        TrialRecord(early[1], State.FAILED, Cause.DIVERGED, math.inf),
        ended(tuning[2], 1.0),
    ]
    report = next(row for row in plan.trials if row.stage == "final" and row.batch_size == 4)
    assert tuning_records(records, report) == records[1:]


@pytest.mark.parametrize(
    ("seeds", "most", "expected"),
    [(1, 20, 3), (3, 20, 5), (5, 20, 8), (12, 20, 20), (20, 20, 20), (8, 10, 10), (20, 50, 50)],
)
def test_looks_follow_each_other_up_to_the_most_seeds(seeds, most, expected):
    assert next_look(seeds, most) == expected


def next_of(losses, tolerance, points=None, most=20, tuning=1):
    k, seeds = losses.shape
    decision = decide(losses, points, np.zeros(k), LOOKS)
    counts = np.full(k, seeds), np.full(k, tuning)
    return next_trainings(
        decision, *counts, np.zeros(k, bool), tolerance, most, question="order", pursues="tokens"
    )


def test_seeds_go_to_the_undecided_and_the_best_only():
    rng = np.random.default_rng(1)
    losses = np.array([[0.0], [0.01], [5.0]]) + 0.01 * rng.normal(size=(3, 5))
    more, tuning, rates = next_of(losses, 0.01)
    assert list(more) == [8, 8, 5] and list(tuning) == [1, 1, 1] and not rates.any()


def test_nothing_follows_once_all_is_decided_or_the_most_seeds_are_reached():
    rng = np.random.default_rng(1)
    clear = np.array([[0.0], [3.0], [5.0]]) + 0.01 * rng.normal(size=(3, 8))
    assert list(next_of(clear, 0.5)[0]) == [8, 8, 8]
    close = np.array([[0.0], [0.01], [0.01]]) + rng.normal(size=(3, 8))
    assert list(next_of(close, 0.01, most=8)[0]) == [8, 8, 8]


def test_an_uncertain_rate_gets_tuning_seeds_once_they_may_decide_and_before_more_seeds():
    logs = np.log([5e-4, 1e-3, 2e-3])
    losses = np.array([[1.003, 1.0, 1.003], [1.003, 1.0, 1.003]])
    points = RatePoints(
        np.tile(logs, (2, 1)), losses, np.tile(logs[[0, 2]], (2, 1)), np.ones(2), np.zeros(2)
    )
    finals = 0.01 * np.array([[0.0, 1.0, 2.0, 1.5, 0.5], [1.0, 0.0, 2.1, 1.0, 0.9]])

    def following(seeds, tuning_seeds):
        decision = decide(finals[:, :seeds], points, np.log([1e-3] * 2), LOOKS)
        assert (decision.rates.regret_high - decision.rates.regret_low > 0.005).all()
        counts = np.full(2, seeds), np.full(2, tuning_seeds)
        more, tuning, _ = next_trainings(
            decision, *counts, np.zeros(2, bool), 0.01, 20, question="order", pursues="tokens"
        )
        return list(more), list(tuning)

    assert following(seeds=3, tuning_seeds=1) == ([5, 5], [1, 1])  # noise alone keeps it open
    assert following(seeds=5, tuning_seeds=1) == ([5, 5], [2, 2])
    assert following(seeds=5, tuning_seeds=4) == ([8, 8], [4, 4])


def test_seeds_follow_where_only_they_and_tuning_together_may_decide():
    logs = np.tile(np.log([5e-4, 1e-3, 2e-3]), (3, 1))
    losses = 1.0 + np.array([[0.05], [0.05], [1.6]]) * np.square(logs - logs[:, 1:2])
    points = RatePoints(logs, losses, logs[:, [0, 2]], np.ones(3), np.zeros(3))
    noise = np.array([[2, -2, 0, 1, -1], [-2, 0, 2, 1, -1], [0, 2, -2, -1, 1]])
    finals = np.array([[0.0], [0.0], [0.005]]) + 0.0025 * noise
    decision = decide(finals, points, logs[:, 1], LOOKS)

    def may_be_within(**known):
        return bool((decision.reach(**known)[1] <= 0.01)[0])

    def seeds_after(tuning_seeds):
        counts = np.full(3, 5), np.full(3, tuning_seeds)
        more, tuning, _ = next_trainings(
            decision, *counts, np.zeros(3, bool), 0.01, 20, question="which", pursues="tokens"
        )
        assert list(tuning) == [tuning_seeds] * 3
        return list(more)

    assert not may_be_within(without_noise=True, known_rates=False)
    assert not may_be_within(without_noise=False, known_rates=True)
    assert may_be_within(without_noise=True, known_rates=True)
    assert seeds_after(tuning_seeds=1) == [8, 8, 8]


def test_rates_that_are_exact_gain_at_most_what_their_bounds_allow():
    rng = np.random.default_rng(2)
    logs = np.tile(np.log([5e-4, 1e-3, 2e-3]), (3, 1))
    losses = 1.0 + 0.1 * np.square(logs - logs[:, 1:2])
    points = RatePoints(logs, losses, logs[:, [0, 2]], np.ones(3), np.zeros(3))
    finals = np.array([[0.0], [0.01], [0.02]]) + 0.003 * rng.normal(size=(3, 5))
    decision = decide(finals, points, logs[:, 1], LOOKS)
    low, high = decision.reach(without_noise=False, known_rates=True)
    assert (low >= decision.gap_low).all() and (high <= decision.gap_high).all()
    exact = replace(
        decision.rates, regret_low=decision.rates.regret, regret_high=decision.rates.regret
    )
    known = replace(decision, rates=exact)
    assert (low >= known.gap_low).all() and (high <= known.gap_high).all()
    np.testing.assert_array_equal(known.reach(without_noise=False, known_rates=True), known.gaps)
    untuned = replace(decision, rates=None)
    np.testing.assert_array_equal(
        untuned.reach(without_noise=False, known_rates=True), untuned.gaps
    )


def test_no_seeds_follow_where_the_best_rates_lie_at_ends_of_their_grids():
    logs = np.log([0.5, 1.0, 2.0])
    rates = np.array([[1.02, 1.01, 1.0], [1.02, 1.01, 1.0], [1.01, 1.0, 1.01]])
    ends = np.array([[np.nan, np.nan], [np.nan, np.nan], logs[[0, 2]]])
    noise = np.random.default_rng(1).normal(size=(3, 3))
    losses = np.array([[1.0], [1.005], [1.01]]) + 0.01 * (noise - noise.mean(-1, keepdims=True))
    all_at_ends = RatePoints(
        np.tile(logs, (3, 1)), rates, np.full((3, 2), np.nan), np.ones(3), np.zeros(3)
    )
    assert list(next_of(losses, 0.01, all_at_ends)[0]) == [3, 3, 3]
    one_at_end = RatePoints(np.tile(logs, (3, 1)), rates, ends[[2, 2, 0]], np.ones(3), np.zeros(3))
    close = np.array([[1.0], [1.0], [1.5]]) + 1e-4 * (noise - noise.mean(-1, keepdims=True))
    assert list(next_of(close, 0.01, one_at_end)[0]) == [3, 3, 3]  # without it 1 and 2 are within
    two_at_ends = RatePoints(np.tile(logs, (3, 1)), rates, ends, np.ones(3), np.zeros(3))
    assert list(next_of(losses, 0.01, two_at_ends, tuning=4)[0]) == [5, 3, 5]  # 2 may be outside
