"""Trials as the decision sees them: how they ended, and the value that is compared."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

from sweep.config.arms import Arm
from sweep.config.objective import Objective
from sweep.plan.plan import PlannedTrial
from sweep.trial.status import Cause, State, is_open
from sweep.trial.timing import Timing, timed_settings


class End(StrEnum):
    """How a trial ended: divergence is data, other failures are not."""

    COMPLETE = "complete"
    DIVERGED = "diverged"
    FAILED = "failed"
    PRUNED = "pruned"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class TrialTime:
    """The training time of a trial, and the facts that it depends on; None if not known."""

    seconds: float
    steps: float
    device: str | None
    settings: Mapping[str, Any] | None  # `timed_settings`
    microbatch_size: int | None


def ran_as_timed(times: Sequence[TrialTime], timing: Timing, arm: Arm) -> bool:
    """Return True if trials of an arm ran on the device and with the settings of its steps."""
    steps = timing.times_of(arm)
    settings = timed_settings(timing.execution)
    return steps is not None and all(
        time.device == timing.device
        and time.settings == settings
        and time.microbatch_size == steps.microbatch_size
        for time in times
    )


@dataclass(frozen=True)
class TrialRecord:
    """A planned trial, and how it ended."""

    row: PlannedTrial
    state: State
    cause: Cause | None
    value: float | None  # `compared_value`; None if the trial has none
    time: TrialTime | None = None
    slope: float | None = None  # `steepest_slope`; needed if tokens differ

    @property
    def is_open(self) -> bool:
        """True if the next command runs the trial, which waits or can be tried again."""
        return is_open(self.state, self.cause)

    @property
    def is_diverged(self) -> bool:
        return self.cause is Cause.DIVERGED


def parse_end(state: Any, cause: Any) -> tuple[State, Cause | None]:
    """Read how a trial ended from the texts of a table; an unknown state counts as waiting."""
    parsed_state = State(state) if state in [*State] else State.WAITING
    parsed_cause = Cause(cause) if cause in [*Cause] else None
    return parsed_state, parsed_cause


def end_of(state: State, cause: Cause | None) -> End:
    """Return how a trial ended."""
    if cause is Cause.DIVERGED:
        return End.DIVERGED
    ends = {State.COMPLETE: End.COMPLETE, State.FAILED: End.FAILED, State.PRUNED: End.PRUNED}
    return ends.get(state, End.UNFINISHED)


def compared_value(
    state: State, cause: Cause | None, metric: float | None, objective: Objective
) -> float | None:
    """Return the value that batch sizes are compared by; less is better.

    It is the logarithm of a ratio. It is infinite if the trial diverged, missed the target or has
    a metric that is not finite, NaN if tuning pruned it, and None if the trial has not ended,
    failed, or has no metric.
    """
    if cause is Cause.DIVERGED:
        return math.inf
    if state is State.PRUNED:
        return math.inf if objective.is_ratio else math.nan
    if state is not State.COMPLETE:
        return None
    if objective.is_ratio:
        if metric is None or not 0 < metric < math.inf:
            return math.inf
        return math.log(metric)
    if metric is None:
        return None
    return objective.sign * metric if math.isfinite(metric) else math.inf


def tuning_records(records: Sequence[TrialRecord], final: PlannedTrial) -> list[TrialRecord]:
    """Return the tuning trials like a final trial, apart from rate and seed."""
    configuration = attrgetter("arm", "beta2", "weight_decay", "policy")
    tuning = []
    for record in records:
        row = record.row
        is_alike = row.stage == "tune" and configuration(row) == configuration(final)
        if is_alike and tells_of_budget(row.tokens, final.tokens, record.is_diverged):
            tuning.append(record)
    return tuning


def tells_of_budget(tokens: Any, budget: Any, is_diverged: Any) -> Any:
    """Return whether a tuning trial tells how its rate does at a budget, also elementwise.

    One that diverged on fewer tokens would have diverged later too.
    """
    return (tokens == budget) | ((tokens < budget) & is_diverged)


def losses_by_rate(
    records: Sequence[TrialRecord], final: PlannedTrial
) -> dict[float, dict[int, float]]:
    losses: dict[float, dict[int, float]] = {}
    for record in tuning_records(records, final):
        rate = record.row.learning_rate
        if record.value is None or rate is None:
            continue
        losses.setdefault(rate, {})[record.row.seed] = record.value
    return losses
