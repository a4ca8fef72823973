"""Build what a plan names once, in a child process, before anything is written."""

from collections.abc import Sequence
from typing import Any

from sweep.config.optimizers import OptimizerSettings, optimizer_facts
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError, user_code
from sweep.plan.course import Course
from sweep.plan.learning_rate import learning_rate_at
from sweep.plan.plan import Plan, PlannedModel
from sweep.training.process import run_job
from sweep.trial.folder import SweepFolder


def inspect_plan(plan: Plan, folder: SweepFolder) -> PlannedModel:
    """Build the workload and its model in a child process; return what was built."""
    config = folder.located(plan).trial_config(plan.trials[0])
    optimizers = [plan.settings.optimizer.of(name) for name in plan.settings.optimizer_names]
    names = [*config.science.workload.code, *(settings.name for settings in optimizers)]
    needs_weights = any(":" in name for name in names)  # the user's code takes a step
    facts = run_job(inspect_trial, config, optimizers, needs_weights)
    if facts is None:
        facts = run_job(inspect_trial, config, optimizers, True)
    return plan.model.model_copy(update=facts)


def inspect_trial(
    config: TrialConfig, optimizers: Sequence[OptimizerSettings], with_weights: bool
) -> dict[str, Any] | None:
    """Check that a trial's workload, optimizers and schedule can be built and called.

    Return the numbers of parameters, and FLOPs per token; None without weights if the user's model
    cannot compute a loss on tensors without values.
    """
    from sweep.data.tokens import find_prepared
    from sweep.memory.forecast import forecast_flops
    from sweep.training.device import is_out_of_memory
    from sweep.training.optimizer import build_optimizer
    from sweep.workloads.build import inspect_workload

    science = config.science
    text = None
    if science.data and science.tokenizer:
        text = find_prepared(science.data, science.tokenizer)
    try:
        counted, model = inspect_workload(config, text, with_weights)
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
        learning_rate_at(step, 1.0, config.steps, config.warmup_steps, science.schedule)

    if "flops_per_token" in counted or not optimizer_facts(science.optimizer.name)["trains"]:
        return counted
    try:
        counted["flops_per_token"] = forecast_flops(config)
    except Exception:
        if science.code is None:
            raise
        if not with_weights:
            return None
    return counted
