"""A budget of time: tokens that measured steps fix once, and that later commands keep."""

import statistics

import pytest

from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.config.numbers import parse_budget, seconds_of
from sweep.errors import SweepError
from sweep.plan.growth import grow_plan
from sweep.plan.plan import parse_plan
from sweep.plan.time_budget import tokens_in_time
from tests.fakes.times import timing_of
from tests.plans import build_plan

DATA = {"name": "synthetic", "grammar_version": 1, "seed": 0}
CPU = Execution(device="cpu", threads=2)
FOUR, EIGHT, SIXTEEN = (Arm(None, size) for size in (4, 8, 16))
CONTEXT = 64  # of the experiment quick
SECONDS = {FOUR: [0.1, 0.1, 0.9], EIGHT: [0.15, 0.16, 0.14], SIXTEEN: [0.3, 0.3, 0.3]}


def make(old=None, **overrides):
    settings = {"precision": "fp32", "batches": "4,8", "budget": "10min", **overrides}
    return build_plan(load_experiment("quick", settings), CPU, data=DATA, old=old)


def timed(plan, seconds=SECONDS):
    arms = {row.arm: seconds[row.arm] for row in plan.trials}
    return plan.with_tokens(tokens_in_time(plan, timing_of(arms)))


@pytest.mark.parametrize(
    ("written", "budget", "seconds"),
    [
        ("10min", "10min", 600),
        ("600 s", "10min", 600),
        ("1.5h", "90min", 5400),
        ("24h", "1d", 86400),
        ("2.5s", "2.5s", 2.5),
        ("10M", 10_000_000, None),
        ("3e8", 300_000_000, None),
    ],
)
def test_a_budget_is_tokens_or_a_time_in_its_largest_whole_unit(written, budget, seconds):
    assert parse_budget(written) == parse_budget(budget) == budget
    assert seconds_of(budget) == seconds


@pytest.mark.parametrize("written", ["10m", "0s", "-5min", "99d", "1..5h", "min", "10 minutes"])
def test_another_text_is_refused_with_both_examples_or_the_range(written):
    with pytest.raises(SweepError, match=r"such as (327.68M or 10min|10min or 2h)\."):
        parse_budget(written)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"target": 3.0}, "budget must be tokens with a target"),
        ({"lr": "tuned", "tune_budget": "8k"}, "tuning.budget does not apply"),
    ],
)
def test_what_needs_equal_tokens_refuses_a_budget_of_time(settings, problem):
    with pytest.raises(SweepError, match=problem):
        make(**settings)


def test_a_plan_has_no_counts_before_steps_are_timed_and_json_has_null():
    plan = make(lr="tuned")
    assert plan.awaits_times and plan.token_budget is None and not plan.known_trials
    rows = plan.model_dump(mode="json")["trials"]
    for name in ("id", "tokens", "steps", "warmup_steps"):
        assert {row[name] for row in rows} == {None}
    assert plan.settings.evaluation.sequences is None
    config = plan.trial_config(plan.trials[0])  # of one step, which can be timed
    assert (config.steps, config.science.tokens) == (1, plan.trials[0].batch_size * CONTEXT)


def test_each_batch_size_trains_for_the_whole_steps_of_the_median_round():
    plan = timed(make(seeds=2))
    assert not plan.awaits_times and not plan.tokens_are_common
    for row in plan.trials:
        median = statistics.median(SECONDS[row.arm])
        assert row.steps == int(600 / median)
        assert row.tokens == row.steps * row.batch_size * CONTEXT
        assert row.steps * median <= 600 < (row.steps + 1) * median
        assert row.warmup_steps == round(0.01 * row.steps)
    assert len({row.id for row in plan.trials}) == 4 and None not in {r.id for r in plan.trials}
    most = max(row.tokens for row in plan.trials)
    assert plan.settings.evaluation.sequences == -(-(most // 100) // CONTEXT)


def test_tuned_trials_have_the_tokens_of_the_final_ones():
    plan = timed(make(lr="tuned"))
    for size in (4, 8):
        assert len({row.tokens for row in plan.trials if row.batch_size == size}) == 1
    assert {row.stage for row in plan.known_trials} == {"tune"} and plan.awaits_rates


def test_a_time_that_is_less_than_a_step_is_refused():
    with pytest.raises(SweepError, match=r"step of batch size 8, which takes 11\.7 min"):
        timed(make(), {FOUR: [1.0], EIGHT: [700.0]})


def test_times_that_lack_a_batch_size_are_refused():
    plan = make(budget="2min")
    with pytest.raises(SweepError, match="the times must be those of all batch sizes"):
        tokens_in_time(plan, timing_of({FOUR: [0.1]}))


def test_added_seeds_keep_the_tokens_and_added_batch_sizes_get_the_time_of_the_others():
    first = timed(make())
    seeds = make(old=first, seeds=3)
    assert not seeds.awaits_times
    grown = grow_plan(first, seeds)
    assert {row.arm: row.steps for row in grown.trials} == {FOUR: 6000, EIGHT: 4000}

    wider = make(old=grown, batches="4,8,16")
    assert {row.arm for row in wider.trials if not row.tokens} == {SIXTEEN}
    grown = grow_plan(grown, wider)
    rows = (*grown.trials, *(row for row in wider.trials if not row.tokens))
    twice_as_slow = {arm: [2 * second for second in times] for arm, times in SECONDS.items()}
    wider = timed(grown.model_copy(update={"trials": rows}), twice_as_slow)
    steps = {row.arm: row.steps for row in wider.trials}
    assert steps == {FOUR: 6000, EIGHT: 4000, SIXTEEN: 2000}
    assert wider.settings.evaluation == first.settings.evaluation


def test_another_measurement_of_the_same_batch_sizes_is_refused():
    stored = timed(make())
    other = timed(make(), {FOUR: [0.2], EIGHT: [0.2]})
    with pytest.raises(SweepError, match="another command has timed these batch sizes"):
        grow_plan(stored, other)


def test_the_time_is_a_setting_that_all_trials_of_a_folder_share():
    stored = timed(make())
    with pytest.raises(SweepError, match="budget would change from '10min' to '5min'"):
        grow_plan(stored, make(old=stored, budget="5min"))


def test_a_plan_with_a_budget_of_time_is_read_again():
    plan = timed(make())
    again = parse_plan(plan.model_dump(mode="json"), "the plan")
    assert (again.trials, again.settings.budget) == (plan.trials, "10min")
