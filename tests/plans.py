"""Plans for tests, without identifying any data."""

from typing import Any

from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.plan.plan import Inputs, Plan
from sweep.plan.plan import build_plan as build


def build_plan(
    experiment: Experiment,
    execution: Execution,
    *,
    data: dict[str, Any] | None = None,
    microbatch: int | None = None,
    accumulation: int | None = None,
    other_batches: tuple[int, ...] = (),
    command: tuple[str, ...] = (),
) -> Plan:
    """Build a plan for data of this identity, with the microbatch of the execution replaced."""
    changes = {"microbatch": microbatch, "accumulation": accumulation}
    given = {name: value for name, value in changes.items() if value is not None}
    return build(
        experiment,
        execution.model_copy(update=given),
        Inputs(data=data),
        other_batches=other_batches,
        command=command,
    )
