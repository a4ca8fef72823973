"""A plan on a cluster: near the least time that brute force finds, and paid for as held."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.errors import SweepError
from sweep.plan.cluster import (
    NEAR,
    Cluster,
    fewest_slots,
    longest_first,
    makespan,
    parse_cluster,
    schedule_plan,
)
from sweep.plan.estimates import with_estimates
from sweep.plan.plan import build_plan

SECONDS = st.floats(0.01, 100)
SLOTS = st.integers(1, 3)
ROUNDS = st.lists(SECONDS, max_size=6).flatmap(
    lambda jobs: st.tuples(st.just(jobs), st.integers(0, len(jobs)))
)


def numbered(*rounds):
    """Give the jobs of several rounds their numbers."""
    count = itertools.count()
    return [{next(count): seconds for seconds in jobs} for jobs in rounds]


def least_makespan(rounds, slots):
    """Try every assignment of every round's jobs to slots."""
    return sum(
        min(
            max(
                sum(second for second, where in zip(jobs, places, strict=True) if where == slot)
                for slot in range(slots)
            )
            for places in itertools.product(range(slots), repeat=len(jobs))
        )
        for jobs in (list(one.values()) for one in rounds)
    )


def check_kept(placed, rounds, slots):
    """Each job runs once for its seconds, no two on a slot at a time, rounds one after another."""
    assert {one.job: one.seconds for one in placed} == dict(
        item for one in rounds for item in one.items()
    )
    assert len(placed) == sum(map(len, rounds))
    for slot in {one.slot for one in placed}:
        assert 0 <= slot < slots
        mine = sorted((one.start_seconds, one.end_seconds) for one in placed if one.slot == slot)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(mine))
    spans = [[one for one in placed if one.job in jobs] for jobs in rounds if jobs]
    for before, after in itertools.pairwise(spans):
        first = min(one.start_seconds for one in after)
        assert first == max(one.end_seconds for one in before)


@given(st.lists(SECONDS, min_size=1, max_size=7), SLOTS)
def test_longest_first_is_within_graham_s_bound_of_the_best_assignment(jobs, slots):
    rounds = numbered(jobs)
    placed = longest_first(rounds, slots)
    check_kept(placed, rounds, slots)
    span, best = makespan(placed), least_makespan(rounds, slots)
    assert best * (1 - 1e-9) <= span <= (4 / 3 - 1 / (3 * slots)) * best * (1 + 1e-9)
    assert span * (1 + 1e-9) >= max(max(jobs), sum(jobs) / slots)


@given(ROUNDS, SLOTS)
def test_rounds_follow_each_other_and_are_near_the_best_too(jobs, slots):
    seconds, cut = jobs
    rounds = numbered(seconds[:cut], seconds[cut:])
    placed = longest_first(rounds, slots)
    check_kept(placed, rounds, slots)
    span, best = makespan(placed), least_makespan(rounds, slots)
    assert best * (1 - 1e-9) <= span <= (4 / 3 - 1 / (3 * slots)) * best * (1 + 1e-9)
    assert span * (1 + 1e-9) >= sum(max(one.values(), default=0.0) for one in rounds)


def test_the_case_that_shows_the_bound_is_reached():
    assert makespan(longest_first(numbered([5, 5, 4, 4, 3, 3, 3]), 3)) == 11  # Graham 1969
    assert least_makespan(numbered([5, 5, 4, 4, 3, 3, 3]), 3) == 9


class Counted(float):
    """A duration that counts how often it is compared."""

    compared = 0

    def __lt__(self, other):
        Counted.compared += 1
        return float(self) < float(other)

    def __eq__(self, other):
        Counted.compared += 1
        return float(self) == float(other)

    __hash__ = float.__hash__

    def __add__(self, other):
        return Counted(float(self) + float(other))

    __radd__ = __add__


@pytest.mark.parametrize("slots", [128, 5000])
def test_ten_thousand_trials_take_n_log_n_comparisons(slots):
    draw, count = random.Random(0), 10_000
    jobs = {job: Counted(draw.uniform(1, 100)) for job in range(count)}
    Counted.compared = 0
    placed = longest_first([jobs], slots)
    assert len(placed) == count and makespan(placed) >= sum(jobs.values()) / slots
    assert count < Counted.compared < 6 * count * math.log2(count)


@given(st.lists(SECONDS, min_size=1, max_size=30), st.integers(1, 40))
def test_the_fewest_slots_do_as_well_and_one_fewer_would_not(jobs, slots):
    rounds = numbered(jobs)
    few, most = fewest_slots(rounds, slots), NEAR * makespan(longest_first(rounds, slots))
    assert 1 <= few <= slots
    assert makespan(longest_first(rounds, few)) <= most
    assert few == 1 or makespan(longest_first(rounds, few - 1)) > most


def test_more_devices_than_the_longest_trial_needs_do_not_help():
    rounds = numbered([60, 20, 20, 20])
    assert fewest_slots(rounds, 10**9) == 2
    assert makespan(longest_first(rounds, 2)) == 60


# ---------------------------------------------------------------- plans


def plan_of(seconds, devices=1, **settings):
    """Plan `quick` with these seconds by batch size."""
    fields = {"precision": "fp32", "batches": list(seconds), "budget": 65536, **settings}
    execution = Execution(device="cpu", threads=2, devices=devices)
    plan = build_plan(load_experiment("quick", fields), execution, data={"name": "synthetic"})
    by_tokens = {(row.batch_size, row.tokens): seconds[row.batch_size] for row in plan.trials}
    return with_estimates(plan, by_tokens, {}, None, False, 1)


def test_what_is_paid_for_is_every_device_until_the_end():
    plan = plan_of({4: 7200.0, 8: 3600.0, 16: 1800.0})
    found = schedule_plan(plan, Cluster(nodes=1, gpus=2), price=2.5).as_document()
    assert found["makespan_seconds"] == 7200 and found["devices"] == found["slots"] == 2
    assert found["device_hours"] == 4 and found["busy_device_hours"] == 3.5
    assert found["idle_share"] == pytest.approx(0.125) and found["cost"] == 10
    assert [(one["trial"], one["slot"], one["start_seconds"]) for one in found["schedule"]] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 1, 3600),
    ]
    wide = schedule_plan(plan, Cluster(nodes=16, gpus=8), price=2.5).as_document()
    assert wide["makespan_seconds"] == 7200 and wide["device_hours"] == 256
    assert wide["fewest"] == {k: found[k] for k in wide["fewest"]}  # two devices do as well
    assert schedule_plan(plan, Cluster(1, 2)).as_document()["cost"] is None


def test_a_trial_stays_on_one_node_and_what_is_left_of_a_node_is_idle_and_paid():
    plan = plan_of({4: 3600.0, 8: 3600.0, 12: 3600.0}, devices=2)
    found = schedule_plan(plan, Cluster(nodes=2, gpus=5), price=1.0).as_document()
    assert found["slots"] == 4 and found["unused_gpus_per_node"] == 1
    assert [one["node"] for one in found["schedule"]] == [0, 0, 1]
    assert found["device_hours"] == found["cost"] == 10 and found["busy_device_hours"] == 6
    assert found["idle_share"] == pytest.approx(0.4) and found["fewest"]["devices"] == 6
    with pytest.raises(SweepError, match="2 devices per trial and gpus=1"):
        schedule_plan(plan, Cluster(nodes=8, gpus=1))


def test_reports_await_all_rates_that_are_tuned():
    plan = plan_of({4: 100.0, 8: 10.0}, lr="tuned")
    found = schedule_plan(plan, Cluster(nodes=1, gpus=10))
    ends = {"tune": [], "report": []}
    for one in found.placed:
        ends[plan.trials[one.job].stage].append((one.start_seconds, one.end_seconds))
    assert len(ends["tune"]) == 10 and len(ends["report"]) == 6
    assert min(start for start, _ in ends["report"]) == max(end for _, end in ends["tune"]) == 100
    assert found.cost.makespan_seconds == 200 and "come on top" in found.assumption


def test_a_rate_that_is_known_awaits_nothing_and_what_is_finished_is_left_out():
    plan = plan_of({4: 100.0, 8: 10.0})
    assert schedule_plan(plan, Cluster(1, 2)).cost.makespan_seconds == 100
    assert schedule_plan(plan, Cluster(1, 2)).assumption == ""
    slow, fast = plan.trials
    found = schedule_plan(plan, Cluster(1, 2), 2.5, finished={slow.id})
    assert [one.job for one in found.placed] == [1] and found.finished == 1
    assert found.cost.makespan_seconds == 10 and found.cost.idle_share == 0.5
    nothing = schedule_plan(plan, Cluster(1, 2), 2.5, finished={slow.id, fast.id})
    assert nothing.placed == () and nothing.cost.amount == nothing.cost.idle_share == 0


def test_a_trial_without_a_time_is_refused_unless_it_is_finished():
    plan = plan_of({4: 100.0, 8: None})
    with pytest.raises(SweepError, match=r"got none at batch size 8\. Run one"):
        schedule_plan(plan, Cluster(1, 2))
    found = schedule_plan(plan, Cluster(1, 2), finished={plan.trials[1].id})
    assert found.cost.makespan_seconds == 100


def test_a_cluster_is_read_as_written():
    assert parse_cluster("nodes=16,gpus=8") == parse_cluster(" gpus=8, nodes=16") == Cluster(16, 8)
    assert parse_cluster("gpus=8") == Cluster(1, 8)
