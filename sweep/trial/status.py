"""State and cause of a trial, and state.json, in which the runner records them."""

from collections.abc import Collection
from dataclasses import replace
from enum import StrEnum
from typing import Any

from pydantic.dataclasses import dataclass

from sweep.config.execution import STALL_MINUTES

MESSAGE_CHARACTERS = 1000  # kept of a message by reports and tracking stores


class State(StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"

    @property
    def is_finished(self) -> bool:  # no attempt is running or to be started
        return self not in (State.WAITING, State.RUNNING)


class Cause(StrEnum):  # why a trial FAILED
    OUT_OF_MEMORY = "out_of_memory"
    DIVERGED = "diverged"
    PREEMPTED = "preempted"
    LOST = "lost"  # killed, segmentation fault, no heartbeat
    ERROR = "error"


def has_failed(state: str | None, cause: str | None) -> bool:
    """Return True for a failure that can be tried again; a divergence is a result."""
    return state == State.FAILED and cause != Cause.DIVERGED


def is_open(state: State, cause: Cause | None) -> bool:
    """Return True for a trial that the next command runs: it waits or can be tried again."""
    return not state.is_finished or has_failed(state, cause)


def overall_state(ends: Collection[tuple[State, Cause | None]]) -> State:
    """Return WAITING, FAILED or COMPLETE for trials of which none is running, by their ends."""
    if not all(state.is_finished for state, _ in ends):
        return State.WAITING
    return State.FAILED if any(has_failed(*end) for end in ends) else State.COMPLETE


@dataclass(frozen=True)
class TrialStatus:  # state.json, which only the runner writes
    state: State = State.WAITING
    cause: Cause | None = None
    message: str = ""  # one line for people
    attempts: int = 0
    fencing: int = 0  # number of the newest attempt
    microbatch_size: int | None = None  # None: as planned
    pause_step: int | None = None  # step at which the attempt checkpoints and ends
    stall_minutes: float = STALL_MINUTES  # without a step, after which an attempt is ended

    def changed(self, **fields: Any) -> "TrialStatus":
        return replace(self, **fields)
