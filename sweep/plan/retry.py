"""Retry rules: begin an attempt, judge how it ended, decide whether to try again."""

import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sweep.config.trial import TrialConfig
from sweep.plan.accumulation import largest_divisor
from sweep.trial.status import Cause, State, TrialStatus, is_open
from sweep.trial.watchdog import has_stalled


@dataclass(frozen=True)
class Outcome:
    kind: str  # complete, paused, stopped, storage, superseded, or a cause of failure
    message: str = ""  # one line for people
    has_begun: bool = True  # if False, it does not count as an attempt
    leaves_process_usable: bool = True  # if False, its process cannot run another one


def begin_attempt(status: TrialStatus) -> TrialStatus:
    status = status.changed(attempts=status.attempts + 1, fencing=status.fencing + 1)
    return status.changed(state=State.RUNNING, cause=None, message="", pause_step=None)


def judge_death(exit_code: int, oom_killed: bool, log: Path | None) -> Outcome:
    """Judge a worker that ended without an outcome; `exit_code` is negative for a signal."""
    if oom_killed and exit_code == -signal.SIGKILL:
        return Outcome("out_of_memory", "killed by the kernel: the machine's memory ran out")
    if log and has_stalled(exit_code, log):
        return Outcome("lost", f"no step for --stall-minutes; {log} shows where it was")

    names = {-number.value: f"killed by {number.name}" for number in signal.Signals}
    how = names.get(exit_code, f"exit code {exit_code}")
    if log:
        how += f"; see {log}"
    return Outcome("lost", f"the worker ended without reporting: {how}")


def status_after(
    status: TrialStatus, outcome: Outcome, config: TrialConfig, failures: Counter[Cause]
) -> tuple[TrialStatus, bool]:
    """Return the next status, and whether this command starts the trial again; count failures."""
    if not outcome.has_begun:
        status = status.changed(attempts=status.attempts - 1)
    if outcome.kind == "complete":
        return status.changed(state=State.COMPLETE, cause=None, message=""), False
    if outcome.kind in ("stopped", "paused", "storage"):
        return status.changed(state=State.WAITING, cause=None, message=outcome.message), False

    cause = Cause(outcome.kind)
    status = status.changed(state=State.FAILED, cause=cause, message=outcome.message)
    is_retried = False
    if cause is Cause.PREEMPTED:
        is_retried = True
    elif cause is Cause.LOST:
        is_retried = failures[cause] == 0
    elif cause is Cause.OUT_OF_MEMORY:
        failed = status.microbatch_size or config.microbatch_size
        # If the plan's microbatch is 1, its evaluations may still be too large.
        evaluated = status.microbatch_size or config.execution.evaluation_batch_size
        is_split = config.science.workload.splits_batches
        is_retried = is_split and max(failed, evaluated) > 1
        bound = bound_after_out_of_memory(failed)
        status = status.changed(microbatch_size=microbatch_within(bound, config))
    failures[cause] += 1

    if is_retried:
        status = status.changed(state=State.WAITING)
    return status, is_retried


def bound_after_out_of_memory(microbatch_size: int) -> int:
    """Return the largest microbatch to try after one of this size ran out of memory."""
    return max(1, microbatch_size // 2)


def microbatch_within(bound: int, config: TrialConfig) -> int:
    """Return a trial's largest legal microbatch size that is at most `bound`, and at least 1."""
    return largest_divisor(config.sequences_per_device, bound, config.sequences_per_group)


def is_to_run(status: TrialStatus, retried_causes: frozenset[Cause] = frozenset()) -> bool:
    """Return True if a new command runs this trial; the user asks for `retried_causes`."""
    return is_open(status.state, status.cause) or status.cause in retried_causes
