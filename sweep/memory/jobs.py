"""Forecasts for plans, made in a `FreshProcess`; importing this module does not import torch."""

from sweep.config.trial import TrialConfig
from sweep.memory.search import Forecast


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
