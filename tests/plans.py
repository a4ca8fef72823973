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
    **options: Any,
) -> Plan:
    """Build a plan for data of this identity; `microbatch` replaces the execution's, if given."""
    if microbatch is not None:
        execution = execution.model_copy(update={"microbatch": microbatch})
    code_path = experiment.code_folder if experiment.user_code else None
    inputs = Inputs(data=data, code_path=code_path)
    return build(experiment, execution, inputs, **options)


def build_plan_of_grids(
    experiment: Experiment, execution: Execution, inputs: Inputs, **options: Any
) -> Plan:
    """Plan the five rates of a grid at each batch size, if the experiment tunes them."""
    by_rule = experiment.tuning.model_copy(update={"centred_by": "rule"})
    planned = experiment.model_copy(update={"tuning": by_rule})
    plan = build(planned, execution, inputs, **options)
    settings = plan.settings.model_copy(update={"tuning": experiment.tuning})
    return plan.model_copy(update={"settings": settings})
