"""Build what a plan names once, in a child process, before anything is written."""

import contextlib
from collections.abc import Sequence
from typing import Any

from sweep.config.optimizers import OptimizerSettings
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError, user_code
from sweep.plan.course import Course
from sweep.plan.learning_rate import learning_rate_at
from sweep.plan.plan import Plan, PlannedModel
from sweep.training.process import run_job
from sweep.trial.folder import SweepFolder


def inspect_plan(plan: Plan, folder: SweepFolder) -> PlannedModel:
    """Build the workload and its model once in a child process; return what was built."""
    config = folder.located(plan).trial_config(plan.trials[0])
    optimizers = [plan.settings.optimizer.of(name) for name in plan.settings.optimizer_names]
    return plan.model.model_copy(update=run_job(inspect_trial, config, optimizers))


def inspect_trial(config: TrialConfig, optimizers: Sequence[OptimizerSettings]) -> dict[str, Any]:
    """Check that a trial's workload, optimizers and schedule can be built and called.

    Return the numbers of parameters, and FLOPs per token.
    """
    from sweep.data.tokens import find_prepared
    from sweep.memory.forecast import forecast_flops
    from sweep.training.device import is_out_of_memory
    from sweep.training.optimizer import build_optimizer
    from sweep.workloads.build import inspect_workload

    data = config.science.data
    tokenizer = config.science.tokenizer
    text = find_prepared(data, tokenizer) if data and tokenizer else None
    try:
        counted, model = inspect_workload(config, text)
    except SweepError as error:
        if not is_out_of_memory(error):  # the trials may have more
            raise
        return {}

    for settings in optimizers:
        optimizer = build_optimizer(settings, model, learning_rate=1e-3)
        if ":" in settings.name and optimizer:
            with user_code(f"optimizer {settings.name!r} must take a step"):
                optimizer.step()

    for step in Course.of_trial(config).milestones(100):
        learning_rate_at(step, 1.0, config.steps, config.warmup_steps, config.science.schedule)
    if "flops_per_token" not in counted and config.science.optimizer.name != "none":
        ignored = (Exception,) if config.science.code else ()  # tensors have no values
        with contextlib.suppress(*ignored):
            counted["flops_per_token"] = forecast_flops(config)
    return counted
