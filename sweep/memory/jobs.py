"""Memory forecasts that run in a child process, so that the caller never imports torch."""

from typing import Any

from sweep.config.trial import TrialConfig


def largest_here(config: TrialConfig, should_stop: Any) -> tuple[int, int]:
    """See `sweep.memory.forecast.largest_here`."""
    from sweep.memory.forecast import largest_here

    return largest_here(config, should_stop)


def forecast_rows(configs: list[TrialConfig], should_stop: Any) -> list[Any]:
    """See `sweep.memory.forecast.forecast_rows`."""
    from sweep.memory.forecast import forecast_rows

    return forecast_rows(configs, should_stop)


def describe_remedies(config: TrialConfig, should_stop: Any) -> str:
    """See `sweep.memory.remedies.describe_remedies`."""
    from sweep.memory.remedies import describe_remedies

    return describe_remedies(config, should_stop)


def choose_preset(
    config: TrialConfig, preset: str, fixed: frozenset[str], should_stop: Any
) -> dict[str, Any]:
    """See `sweep.memory.presets.choose`."""
    from sweep.memory.presets import Asked, choose

    asked = Asked(
        zero=config.execution.zero if "zero" in fixed else None,
        activation_checkpointing=config.execution.activation_checkpointing,
        precision="precision" in fixed,
        microbatch="microbatch_bound" in fixed,
    )
    chosen = choose(config, preset, asked, should_stop)
    at_once = min(config.execution.evaluation_batch_size, chosen.microbatch_size)
    return {
        "zero": chosen.zero,
        "activation_checkpointing": chosen.activation_checkpointing,
        "microbatch_bound": None if "microbatch_bound" in fixed else chosen.microbatch_size,
        "evaluation_batch_size": at_once,
        "precision": chosen.precision,
        "reason": chosen.reason,
    }
