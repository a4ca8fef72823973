"""Which trials come next, from records of those that ended."""

import math

import pytest

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.config.objective import LOSS, TOKENS_TO_TARGET, Objective
from sweep.decision.next import next_trials
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
