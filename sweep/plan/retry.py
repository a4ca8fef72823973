"""What happens after an attempt: one table, used by every executor (DESIGN.md §6, Retry)."""

from collections import Counter
from dataclasses import dataclass

from sweep.plan.steps import next_microbatch
from sweep.trial.folder import Cause, State, TrialStatus

UNBOUNDED = 10**9

# How often one command starts a trial again, by why the attempt ended.
RETRIES_WITHIN_COMMAND = {
    Cause.OUT_OF_MEMORY: UNBOUNDED,  # until a microbatch of 1 fails
    Cause.PREEMPTED: UNBOUNDED,
    Cause.LOST: 1,
    Cause.ERROR: 0,
    Cause.DIVERGED: 0,
}

# What the next command starts again without being asked.
RETRIED_BY_NEXT_COMMAND = {Cause.PREEMPTED, Cause.OUT_OF_MEMORY, Cause.LOST, Cause.ERROR}


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: `complete`, `stopped`, `superseded`, or a cause of failure."""

    kind: str
    message: str = ""  # one line for people


def status_after(
    status: TrialStatus,
    outcome: Outcome,
    microbatch_size: int,
    per_device: int,
    retries: Counter[Cause],
) -> tuple[TrialStatus, bool]:
    """Return the trial's next status, and whether this command starts it again.

    Args:
        status: while the attempt was RUNNING.
        outcome: of the attempt.
        microbatch_size: that the attempt ran with.
        per_device: sequences of one step on one device.
        retries: of this trial within this command, by cause; counted up here.
    """
    if outcome.kind == "complete":
        return status.changed(state=State.COMPLETE, cause=None, message=""), False
    if outcome.kind == "stopped":
        return status.changed(state=State.WAITING, cause=None, message=outcome.message), False
    cause = Cause(outcome.kind)
    failed = status.changed(state=State.FAILED, cause=cause, message=outcome.message)
    if cause is Cause.OUT_OF_MEMORY:
        smaller = next_microbatch(per_device, microbatch_size)
        if smaller is None:
            return failed, False
        failed = failed.changed(microbatch_size=smaller)
    if retries[cause] >= RETRIES_WITHIN_COMMAND[cause]:
        return failed, False
    retries[cause] += 1
    return failed.changed(state=State.WAITING), True


def is_to_run(status: TrialStatus, also: frozenset[Cause] = frozenset()) -> bool:
    """Tell whether a command that starts now runs this trial.

    Args:
        status: of a trial that no live worker holds.
        also: causes that the user asked to retry.
    """
    if status.state is State.FAILED:
        return status.cause in RETRIED_BY_NEXT_COMMAND | also
    return not status.state.is_finished
