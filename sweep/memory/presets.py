"""Choices by forecast, made in a `FreshProcess`; importing this module does not import torch."""

import itertools
from typing import Any, get_args

from sweep.config.numbers import format_bytes
from sweep.config.trial import Science, TrialConfig
from sweep.memory.search import PRESETS, SHARES, Forecast
from sweep.plan.steps import largest_divisor

PRECISIONS = get_args(Science.model_fields["precision"].annotation)  # from wide to narrow


def forecast_rows(configs: list[TrialConfig]) -> list[Forecast]:
    from sweep.memory.forecast import Forecasts

    forecasts = Forecasts(configs[0].execution.devices, configs[0].execution.zero)
    return [forecasts.of(config) for config in configs]


def largest_on_this_machine(config: TrialConfig) -> tuple[int, int]:
    """Return the largest microbatch, at least one group, and evaluation batch that fit here."""
    from sweep.memory.forecast import Forecasts
    from sweep.training.device import usable_memory

    limit = usable_memory(config.execution)
    forecasts = Forecasts(config.execution.devices, config.execution.zero)
    if forecasts.of(config).needed_bytes <= limit:
        return config.microbatch_size, config.execution.evaluation_batch_size
    largest = forecasts.find_largest(config, limit, config.microbatch_size) or config.group_size
    return largest, min(config.execution.evaluation_batch_size, largest)


def choose_preset(config: TrialConfig, preset: str, fixed: frozenset[str]) -> dict[str, Any]:
    """Choose the cheapest settings that fit the largest step of a plan, except those in `fixed`."""
    from sweep.memory.forecast import STAGES, Forecasts
    from sweep.training.device import usable_memory

    execution, planned = config.execution, config.science.precision
    usable = usable_memory(execution)
    share = SHARES[PRESETS[preset]]
    stages = STAGES[-1:] if preset == "memory" else STAGES
    if execution.devices == 1 or "zero" in fixed:
        stages = (execution.zero,)
    recomputing = [True] if preset == "memory" else [False, True]
    if "activation_checkpointing" in fixed:
        recomputing = [execution.activation_checkpointing]
    is_open = "precision" not in fixed and config.science.model.supports_half_precision
    precisions = dict.fromkeys((planned, PRECISIONS[-1] if is_open else planned))
    size = bound = 0
    for precision, recomputes in itertools.product(precisions, recomputing):
        for stage in stages:
            saving = {"zero": stage, "activation_checkpointing": recomputes}
            variant = config.with_microbatch(config.microbatch_size, **saving)
            science = config.science.model_copy(update={"precision": precision})
            variant = variant.model_copy(update={"science": science})
            forecasts = Forecasts(execution.devices, stage)
            largest = forecasts.find_largest(variant, int(share * usable), config.microbatch_size)
            part = config.science.batch_size // execution.devices
            divisor = largest_divisor(part, largest, config.group_size) if largest else 0
            if "microbatch_bound" in fixed and divisor < config.microbatch_size:
                divisor = 0
            if not size or divisor > size:
                chosen = variant.execution
                size = divisor
                bound = largest or config.group_size
        if size:
            break
    fits = f"microbatches of {size} fit" if size else "no microbatch fits"
    parts = [
        f"{preset}: {fits} in {share:.0%} of {format_bytes(usable)} by forecast",
        f"with ZeRO {chosen.zero}" if execution.devices > 1 else "",
        "with activation checkpointing" if chosen.activation_checkpointing else "",
        f"in {precision}" if precision != planned else "",
    ]
    return {
        "zero": chosen.zero,
        "activation_checkpointing": chosen.activation_checkpointing,
        "microbatch_bound": None if "microbatch_bound" in fixed else bound,
        "evaluation_batch_size": min(execution.evaluation_batch_size, bound),
        "precision": precision,
        "reason": ", ".join(filter(None, parts)),
    }
