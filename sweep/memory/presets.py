"""Choose by forecast: the settings of a preset, and remedies if not even one sequence fits.

These functions run in a `FreshProcess`; importing this module does not import torch."""

from collections.abc import Iterable, Iterator
from typing import Any

from sweep.config.numbers import format_bytes
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.memory.search import PRESETS, SHARES, Forecast
from sweep.plan.steps import largest_divisor
from sweep.training.progress import ShouldStop

SAVES_MOST = "memory"  # the preset that always recomputes activations and splits all state
CHUNK_ROWS = 512
PRECISIONS = ("fp32", "bf16", "bf16-pure")  # from wide to narrow


def choose_preset(
    config: TrialConfig, preset: str, fixed: frozenset[str], should_stop: ShouldStop
) -> dict[str, Any]:
    """Choose settings by forecast for the largest step of a plan: the cheapest that fit.

    Args:
        config: with the largest microbatch that the plan would take.
        preset: a key of `PRESETS`.
        fixed: names of the returned settings that the user gave and that must be kept.
    """
    from sweep.memory.forecast import Forecasts
    from sweep.training.device import usable_memory

    usable, share = usable_memory(config.execution), SHARES[PRESETS[preset]]
    limit, devices = int(share * usable), config.execution.devices
    per_device = config.science.batch_size // devices
    is_split = "microbatch_bound" in fixed
    wanted, group, fit = config.microbatch_size, config.group_size, "no microbatch fits"
    for variants in _variants(config, preset, fixed):
        bounds, sizes = [], []  # by ZeRO stage: what fits, and the divisor of the batch that does
        for variant in variants:
            forecasts = Forecasts(devices, variant.execution.zero)
            bounds.append(forecasts.find_largest(variant, limit, wanted, is_accumulated=True))
            size = largest_divisor(per_device, bounds[-1], group) if bounds[-1] else 0
            sizes.append(0 if is_split and size < wanted else size)
        best = sizes.index(max(sizes)) if any(sizes) else -1
        if any(sizes):
            fit = f"microbatches of {sizes[best]} fit"
            break
    chosen, bound = variants[best], max(group, bounds[best])
    reason = f"{preset}: {fit} in {share:.0%} of {format_bytes(usable)} by forecast"
    if devices > 1:
        reason += f", with ZeRO {chosen.execution.zero}"
        reason += f" (at most {sizes[0]} with less)" if best > 0 else ""
    if chosen.execution.activation_checkpointing:
        reason += ", with activation checkpointing"
    if chosen.science.precision != config.science.precision:
        reason += f", in {chosen.science.precision}"
    return {
        "zero": chosen.execution.zero,
        "activation_checkpointing": chosen.execution.activation_checkpointing,
        "microbatch_bound": None if is_split else bound,
        "evaluation_batch_size": min(config.execution.evaluation_batch_size, bound),
        "precision": chosen.science.precision,
        "reason": reason,
    }


def _variants(
    config: TrialConfig, preset: str, fixed: frozenset[str]
) -> Iterator[list[TrialConfig]]:
    """Yield one configuration per ZeRO stage, for each other setting, the cheapest first.

    Stored activations come before recomputed ones, and the given precision before bf16-pure.
    """
    execution, stages = config.execution, (0, 1, 2, 3) if config.execution.devices > 1 else (0,)
    if "zero" in fixed:
        stages = (execution.zero,)
    elif preset == SAVES_MOST:
        stages = stages[-1:]
    recomputing = (True,) if preset == SAVES_MOST else (False, True)
    if "activation_checkpointing" in fixed:
        recomputing = (execution.activation_checkpointing,)
    narrow = () if "precision" in fixed else PRECISIONS[-1:]
    for precision in dict.fromkeys((config.science.precision, *narrow)):
        for recomputes in recomputing:
            update: dict[str, Any] = {"activation_checkpointing": recomputes}
            yield [_changed(config, precision, zero=stage, **update) for stage in stages]


def _changed(config: TrialConfig, precision: str, **execution: Any) -> TrialConfig:
    science = config.science.model_copy(update={"precision": precision})
    changed = config.execution.model_copy(update=execution)
    return config.model_copy(update={"science": science, "execution": changed})


def describe_remedies(config: TrialConfig, should_stop: ShouldStop) -> str:
    """Return one sentence: the forecast of one sequence as planned, and with each remedy."""
    from sweep.memory.forecast import forecast_step

    config = config.sized(config.science.batch_size, 1)
    precision = config.science.precision
    remedies = {
        "--activation-checkpointing": _changed(config, precision, activation_checkpointing=True),
        f"--loss-chunk-rows {CHUNK_ROWS}": _changed(config, precision, loss_chunk_rows=CHUNK_ROWS),
    }
    if config.science.model.supports_half_precision:
        for narrow in PRECISIONS[PRECISIONS.index(precision) + 1 :]:
            remedies[f"--precision {narrow}"] = _changed(config, narrow)
    try:
        planned = forecast_step(config)
    except SweepError as error:
        return str(error)
    sizes = [f"One sequence needs {format_bytes(planned.peak_bytes)} by forecast"]
    for flag, changed in remedies.items():
        if changed == config:
            continue
        try:
            sizes.append(f"{format_bytes(forecast_step(changed).peak_bytes)} with {flag}")
        except SweepError:
            continue  # a user's model that cannot be changed like this
    held = sum(planned.by_category[name] for name in ("weights", "gradients", "optimizer"))
    on_two = format_bytes(planned.peak_bytes - held // 2)
    sizes.append(f"{on_two} with weights, gradients and optimizer split over 2 devices")
    return ", ".join(sizes) + "."


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
