"""The retry table: how an attempt begins, how its end is judged, what follows (DESIGN.md §6)."""

import signal
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from sweep.config.trial import TrialConfig
from sweep.plan.steps import largest_divisor
from sweep.trial.folder import Cause, State, TrialStatus

UNBOUNDED = 10**9

# Number of times that one command starts a trial again, by the cause of the failure.
RETRIES_WITHIN_COMMAND = {
    Cause.OUT_OF_MEMORY: UNBOUNDED,  # until a microbatch of 1 fails
    Cause.PREEMPTED: UNBOUNDED,
    Cause.LOST: 1,
    Cause.ERROR: 0,
    Cause.DIVERGED: 0,
}


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt."""

    kind: str  # complete, paused, stopped, superseded, or a cause of failure
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
        exit_code: negative for a signal.
        memory_ran_out: whether the kernel killed a process of this cgroup for lack of memory.
        log: named in the message.
    """
    if memory_ran_out and exit_code == -signal.SIGKILL:
        return Outcome("out_of_memory", "killed by the kernel: the machine's memory ran out")
    names = {-number.value: f"killed by {number.name}" for number in signal.Signals}
    how = names.get(exit_code, f"exit code {exit_code}")
    see = f"; see {log}" if log else ""
    return Outcome("lost", f"the worker ended without reporting: {how}{see}")


def status_after(
    status: TrialStatus, outcome: Outcome, config: TrialConfig, retries: Counter[Cause]
) -> tuple[TrialStatus, bool]:
    """Return the trial's next status, and whether this command starts it again.

    `retries` counts the retries of this trial within this command by cause; it is incremented.
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
        microbatch, evaluation_batch = _sizes(status, config)
        if (evaluation_batch if outcome.in_evaluation else microbatch) <= 1:
            return failed, False
        if outcome.in_evaluation:
            failed = failed.changed(evaluation_batch_size=evaluation_batch // 2)
        else:
            failed = failed.changed(microbatch_size=_microbatch(config, microbatch // 2))
    if retries[cause] >= RETRIES_WITHIN_COMMAND[cause]:
        return failed, False
    retries[cause] += 1
    return failed.changed(state=State.WAITING), True


@dataclass(frozen=True)
class MemoryBounds:
    """Sizes that later trials of a command must not exceed, after an out-of-memory error."""

    microbatch_size: int | None = None  # None: as planned
    evaluation_batch_size: int | None = None


def within_bounds(status: TrialStatus, config: TrialConfig, bounds: MemoryBounds) -> TrialStatus:
    """Return the status of a trial about to start, with sizes that fitted other trials."""
    microbatch, evaluation_batch = _sizes(status, config)
    if bounds.microbatch_size and microbatch > bounds.microbatch_size:
        status = status.changed(microbatch_size=_microbatch(config, bounds.microbatch_size))
    if bounds.evaluation_batch_size and evaluation_batch > bounds.evaluation_batch_size:
        status = status.changed(evaluation_batch_size=bounds.evaluation_batch_size)
    return status


def tightened(
    bounds: MemoryBounds, before: TrialStatus, after: TrialStatus, config: TrialConfig
) -> MemoryBounds:
    """Return the bounds after out-of-memory, from the trial's status before and after.

    The bound is half of the microbatch that failed, not the next divisor of this trial's batch
    size, which is 1 for a prime batch size.
    """
    microbatch, evaluation_batch = _sizes(before, config)
    if after.evaluation_batch_size != before.evaluation_batch_size:
        lowest = min(evaluation_batch // 2, bounds.evaluation_batch_size or UNBOUNDED)
        return replace(bounds, evaluation_batch_size=lowest)
    lowest = min(microbatch // 2, bounds.microbatch_size or UNBOUNDED)
    return replace(bounds, microbatch_size=lowest)


def is_to_run(status: TrialStatus, also: frozenset[Cause] = frozenset()) -> bool:
    """Return True if a command that starts now runs this trial, which has no live worker.

    Diverged trials run again only if the user asks for them with `also`.
    """
    if status.state is State.FAILED:
        return status.cause is not Cause.DIVERGED or status.cause in also
    return not status.state.is_finished


def _sizes(status: TrialStatus, config: TrialConfig) -> tuple[int, int]:
    """Return the microbatch and the evaluation batch size of an attempt."""
    evaluation_batch = status.evaluation_batch_size or config.execution.evaluation_batch_size
    return status.microbatch_size or config.microbatch_size, evaluation_batch


def _microbatch(config: TrialConfig, at_most: int) -> int:
    per_device = config.science.batch_size // config.execution.devices
    return largest_divisor(per_device, at_most, config.group_size)
