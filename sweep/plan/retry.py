"""The retry table: how an attempt begins, how its end is judged, what follows (DESIGN.md §6)."""

import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from sweep.config.trial import TrialConfig
from sweep.plan.steps import largest_divisor, next_microbatch
from sweep.trial.folder import Cause, State, TrialStatus

UNBOUNDED = 10**9

# Times that one command starts a trial again, by the cause of the failure.
RETRIES_WITHIN_COMMAND = {
    Cause.OUT_OF_MEMORY: UNBOUNDED,  # until a microbatch of 1 fails
    Cause.PREEMPTED: UNBOUNDED,
    Cause.LOST: 1,
    Cause.ERROR: 0,
    Cause.DIVERGED: 0,
}

# Causes that the next command retries without being asked.
RETRIED_BY_NEXT_COMMAND = {Cause.PREEMPTED, Cause.OUT_OF_MEMORY, Cause.LOST, Cause.ERROR}


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: complete, paused, stopped, superseded, or a cause of failure."""

    kind: str
    message: str = ""  # one line for people
    in_evaluation: bool = False  # out of memory during an evaluation
    has_begun: bool = True  # if False, it does not count as an attempt


def begin_attempt(status: TrialStatus) -> TrialStatus:
    """Return the status of a trial whose next attempt is about to start."""
    return status.changed(
        state=State.RUNNING,
        cause=None,
        message="",
        attempts=status.attempts + 1,
        fencing=status.fencing + 1,
        pause_step=None,
    )


def judge_death(exit_code: int, memory_ran_out: bool, log: Path | None) -> Outcome:
    """Judge a worker that ended without reporting an outcome.

    Args:
        exit_code: of the process; negative for a signal.
        memory_ran_out: whether the kernel killed a process of this cgroup for lack of memory.
        log: of the trial, to name in the message; None: no log.
    """
    if memory_ran_out and exit_code == -signal.SIGKILL:
        return Outcome("out_of_memory", "killed by the kernel: the machine's memory ran out")
    names = {number.value: number.name for number in signal.Signals}
    how = f"exit code {exit_code}"
    if exit_code < 0:
        how = f"killed by {names.get(-exit_code, -exit_code)}"
    see = f"; see {log}" if log else ""
    return Outcome("lost", f"the worker ended without reporting: {how}{see}")


def status_after(
    status: TrialStatus,
    outcome: Outcome,
    config: TrialConfig,
    retries: Counter[Cause],
) -> tuple[TrialStatus, bool]:
    """Return the trial's next status, and whether this command starts it again.

    Args:
        status: during the attempt.
        outcome: how the attempt ended.
        config: the trial's.
        retries: of this trial within this command, by cause; incremented here.
    """
    if not outcome.has_begun:
        status = status.changed(attempts=status.attempts - 1)
    if outcome.kind == "complete":
        return status.changed(state=State.COMPLETE, cause=None, message=""), False
    if outcome.kind in ("stopped", "paused"):
        return status.changed(state=State.WAITING, cause=None, message=outcome.message), False
    cause = Cause(outcome.kind)
    failed = status.changed(state=State.FAILED, cause=cause, message=outcome.message)
    if cause is Cause.OUT_OF_MEMORY:
        smaller = _smaller_sizes(status, config, outcome.in_evaluation)
        if smaller is None:
            return failed, False
        failed = failed.changed(**smaller)
    if retries[cause] >= RETRIES_WITHIN_COMMAND[cause]:
        return failed, False
    retries[cause] += 1
    return failed.changed(state=State.WAITING), True


def _smaller_sizes(
    status: TrialStatus, config: TrialConfig, in_evaluation: bool
) -> dict[str, int] | None:
    """Return the size to try after out-of-memory; None if not even one sequence fits."""
    if in_evaluation:
        size = status.evaluation_batch_size or config.execution.evaluation_batch_size
        return {"evaluation_batch_size": size // 2} if size > 1 else None
    per_device = config.science.batch_size // config.execution.devices
    failed = status.microbatch_size or config.microbatch_size
    smaller = next_microbatch(per_device, failed, config.group_size)
    return None if smaller is None else {"microbatch_size": smaller}


@dataclass(frozen=True)
class MemoryBounds:
    """Sizes that later trials of a command must not exceed, after an out-of-memory error."""

    microbatch_size: int | None = None  # None: as planned
    evaluation_batch_size: int | None = None


def within_bounds(status: TrialStatus, config: TrialConfig, bounds: MemoryBounds) -> TrialStatus:
    """Return the status of a trial about to start, with sizes that fitted other trials."""
    planned = status.microbatch_size or config.microbatch_size
    if bounds.microbatch_size and planned > bounds.microbatch_size:
        per_device = config.science.batch_size // config.execution.devices
        size = largest_divisor(per_device, bounds.microbatch_size, config.group_size)
        status = status.changed(microbatch_size=size)
    at_once = status.evaluation_batch_size or config.execution.evaluation_batch_size
    if bounds.evaluation_batch_size and at_once > bounds.evaluation_batch_size:
        status = status.changed(evaluation_batch_size=bounds.evaluation_batch_size)
    return status


def tightened(
    bounds: MemoryBounds, before: TrialStatus, after: TrialStatus, config: TrialConfig
) -> MemoryBounds:
    """Return the bounds after out-of-memory, from the trial's status before and after.

    The bound is half of the microbatch that failed, not the next divisor of this trial's batch
    size, which is 1 for a prime batch size.
    """
    size = after.evaluation_batch_size
    if size is not None and size != before.evaluation_batch_size:
        least = min(size, bounds.evaluation_batch_size or UNBOUNDED)
        return replace(bounds, evaluation_batch_size=least)
    failed = before.microbatch_size or config.microbatch_size
    size = min(failed // 2, bounds.microbatch_size or UNBOUNDED)
    return replace(bounds, microbatch_size=size)


def is_to_run(status: TrialStatus, also: frozenset[Cause] = frozenset()) -> bool:
    """Return True if a command that starts now runs this trial.

    Args:
        status: of a trial without a live worker.
        also: causes that the user asked to retry.
    """
    if status.state is State.FAILED:
        return status.cause in RETRIED_BY_NEXT_COMMAND | also
    return not status.state.is_finished
