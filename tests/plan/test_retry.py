"""The retry table."""

from collections import Counter
from pathlib import Path

import pytest

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.plan.retry import (
    Outcome,
    begin_attempt,
    is_to_run,
    judge_death,
    microbatch_within,
    status_after,
)
from sweep.trial.status import Cause, State, TrialStatus
from tests.plans import build_plan

RUNNING = TrialStatus(state=State.RUNNING, attempts=1, fencing=1)


def trial_config(batch_size):
    experiment = load_experiment("quadratic", {"batches": [batch_size], "precision": "fp32"})
    plan = build_plan(experiment, Execution(device="cpu", threads=1), data=None)
    return plan.trial_config(plan.trials[0], "sweep")


def after(kind, failures, microbatch=8, per_device=8):
    status = RUNNING.changed(microbatch_size=microbatch)
    return status_after(status, Outcome(kind, "why"), trial_config(per_device), failures)


def test_an_attempt_has_its_own_number_and_forgets_how_the_last_one_ended():
    failed = TrialStatus(State.FAILED, Cause.LOST, "why", attempts=2, fencing=5)
    assert begin_attempt(failed) == TrialStatus(State.RUNNING, attempts=3, fencing=6)


DEATHS = [(-9, True, "out_of_memory", "memory"), (-9, False, "lost", "SIGKILL")]
DEATHS += [(-11, True, "lost", "SIGSEGV"), (3, False, "lost", "exit code 3; see log.txt")]


@pytest.mark.parametrize(("exit_code", "oom_killed", "kind", "words"), DEATHS)
def test_a_kill_is_out_of_memory_only_if_the_kernel_ran_out_of_it(
    exit_code, oom_killed, kind, words
):
    outcome = judge_death(exit_code, oom_killed, Path("log.txt"))
    assert outcome.kind == kind and words in outcome.message


@pytest.mark.parametrize(("microbatch", "smaller"), [(12, 6), (6, 3), (3, 1)])
def test_out_of_memory_keeps_the_batch_size_and_halves_the_microbatch(microbatch, smaller):
    status, again = after("out_of_memory", Counter(), microbatch, per_device=12)
    assert again and (status.state, status.microbatch_size) == (State.WAITING, smaller)


RETRIED = [("lost", 1), ("error", 0), ("diverged", 0), ("preempted", 9)]


@pytest.mark.parametrize(("kind", "retried"), RETRIED)
def test_a_command_retries_lost_workers_once_and_preempted_ones_always(kind, retried):
    failures = Counter()
    ends = [after(kind, failures) for _ in range(9)]
    assert [again for _, again in ends] == [number < retried for number in range(9)]
    state = State.WAITING if retried == 9 else State.FAILED
    assert (ends[-1][0].state, ends[-1][0].cause) == (state, kind)


def test_the_next_command_runs_all_but_complete_and_diverged():
    to_run = {cause: is_to_run(TrialStatus(state=State.FAILED, cause=cause)) for cause in Cause}
    assert to_run == {cause: cause is not Cause.DIVERGED for cause in Cause}
    diverged = TrialStatus(state=State.FAILED, cause=Cause.DIVERGED)
    assert is_to_run(diverged, frozenset({Cause.DIVERGED}))
    assert is_to_run(TrialStatus()) and is_to_run(RUNNING)
    status, is_started_again = after("stopped", Counter())
    assert status.state is State.WAITING and not is_started_again
    finished = (State.COMPLETE, State.PRUNED)
    assert not any(is_to_run(TrialStatus(state=state)) for state in finished)


def test_a_bound_on_the_microbatch_is_rounded_down_to_a_divisor():
    assert [microbatch_within(3, trial_config(size)) for size in (7, 8, 12)] == [1, 2, 3]
    assert microbatch_within(0, trial_config(7)) == 1


def test_evaluations_that_exceed_memory_at_a_microbatch_of_one_are_tried_one_at_a_time():
    config, full = trial_config(1), Outcome("out_of_memory", "why")
    again, is_retried = status_after(RUNNING, full, config, Counter())
    assert is_retried and config.for_attempt(1).execution.evaluation_batch_size == 1
    final, is_retried = status_after(again, full, config, Counter())
    assert not is_retried and (final.state, final.cause) == (State.FAILED, "out_of_memory")
