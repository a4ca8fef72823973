"""Forecasts that run in a `FreshProcess`, so that the caller does not import torch."""

from collections.abc import Iterable

from sweep.config.trial import TrialConfig
from sweep.memory.points import Forecast
from sweep.memory.presets import choose_preset, describe_remedies
from sweep.training.process import ShouldStop

__all__ = ["choose_preset", "describe_remedies", "forecast_rows", "largest_here"]


def forecast_rows(configs: Iterable[TrialConfig], should_stop: ShouldStop) -> list[Forecast]:
    """Forecast the trials of one plan as planned."""
    from sweep.memory.forecast import Forecasts

    configs = list(configs)
    execution = configs[0].execution
    forecasts = Forecasts(execution.devices, execution.zero)
    return [forecasts.of(config) for config in configs]


def largest_here(config: TrialConfig, should_stop: ShouldStop) -> tuple[int, int]:
    """Return the largest microbatch and evaluation batch that fit this machine by forecast.

    At most those of the config, and at least one sequence or group, even if that does not fit.
    """
    from sweep.memory.forecast import Forecasts
    from sweep.training.device import usable_memory

    limit = usable_memory(config.execution)
    forecasts = Forecasts(config.execution.devices, config.execution.zero)
    cap, evaluation = config.microbatch_size, config.execution.evaluation_batch_size
    if forecasts.of(config).needed_bytes <= limit:
        return cap, evaluation
    found = forecasts.find_largest(config, limit, cap, is_accumulated=True)
    largest = max(config.group_size, found)
    return largest, min(evaluation, largest)
