"""Costs of a plan on a cluster: near the makespan that brute force finds."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.errors import SweepError
from sweep.orchestration.estimates import cost_on_cluster
from tests.plans import build_plan


def plan_of(seconds, devices=1, **settings):
    """Return a plan of `quick` with trials of these lengths; the last length repeats."""
    fields = {"precision": "fp32", "batches": "4", "budget": 65536, "seeds": len(seconds)}
    execution = Execution(device="cpu", threads=2, devices=devices)
    experiment = load_experiment("quick", fields | settings)
    plan = build_plan(experiment, execution, data={"name": "synthetic"})
    lengths = [*seconds, *[seconds[-1]] * len(plan.trials)]
    pairs = zip(plan.trials, lengths, strict=False)
    rows = tuple(row.model_copy(update={"forecast_seconds": length}) for row, length in pairs)
    return plan.model_copy(update={"trials": rows})


def best_makespan(seconds, slots):
    assignments = itertools.product(range(slots), repeat=len(seconds))
    return min(np.bincount(assignment, seconds, slots).max() for assignment in assignments)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 3))
def test_the_makespan_is_within_graham_s_bound_of_the_best_assignment(seconds, slots):
    cost = cost_on_cluster(plan_of(seconds), slots, 1)
    best = best_makespan(seconds, slots)
    bound = (4 / 3 - 1 / (3 * slots)) * best
    assert best * (1 - 1e-9) <= cost["makespan_seconds"] <= bound * (1 + 1e-9)
    assert cost["busy_device_hours"] == pytest.approx(sum(seconds) / 3600)
    assert cost["device_hours"] == pytest.approx(slots * cost["makespan_seconds"] / 3600)


def test_trials_of_several_devices_take_whole_slots_of_a_node_and_all_devices_are_paid_for():
    plan = plan_of([3600.0] * 3, devices=2).with_answer(price=2.0)
    cost = cost_on_cluster(plan.model_copy(update={"forecast_factor": 1.5}), 1, 5)
    assert (cost["devices"], cost["makespan_seconds"]) == (5, 7200.0)
    assert (cost["device_hours"], cost["busy_device_hours"], cost["price"]) == (10.0, 6.0, 20.0)
    assert cost["price_range"] == pytest.approx([20.0 / 1.5, 30.0])


def test_reports_start_after_the_tuning_trials():
    tuned = plan_of([10.0], lr="tuned", seeds=3)  # five tuning trials, three reports
    assert cost_on_cluster(tuned, 8, 1)["makespan_seconds"] == 20.0


def test_a_trial_that_does_not_fit_on_a_node_or_has_no_estimate_is_refused():
    with pytest.raises(SweepError, match="must fit on one node"):
        cost_on_cluster(plan_of([1.0], devices=4), 2, 2)
    with pytest.raises(SweepError, match="needs a time estimate at batch size 4"):
        cost_on_cluster(plan_of([None]), 2, 2)
