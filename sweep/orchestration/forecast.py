"""What memory an experiment would take, without its device: `sweep forecast`, `forecast_memory`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sweep.config.experiment import load_experiment
from sweep.config.trial import TrialConfig
from sweep.memory.line import Line, fit_line
from sweep.memory.points import Forecast
from sweep.orchestration.execution import Logistics
from sweep.orchestration.memory import configs_of, head_of, plan_steps
from sweep.plan.plan import Plan
from sweep.plan.steps import largest_divisor

if TYPE_CHECKING:  # because it imports torch
    from sweep.memory.forecast import Forecasts

ERROR_ON_CPU = 0.02  # of a peak: what tests/memory/test_forecast.py holds
ERROR_ON_CUDA = 0.003  # of a peak: the E1 model's published rows, bytes allocated


def forecast_memory(
    experiment: str = "tinystories", *, logistics: Logistics | None = None, **overrides: Any
) -> dict[str, Any]:
    """Forecast peak memory at every batch size of an experiment, without its device.

    Args:
        experiment: a shipped name or the path of a TOML file.
        logistics: `device_memory` asks for the microbatch that fits, `microbatch` sets it; with
            neither a step is taken in one. A `device` of `cuda` need not be there.
        **overrides: fields of the experiment: batches, model, context, precision, …

    Returns:
        The document that `sweep forecast --json` prints (DESIGN.md §5).

    Raises:
        SweepError: for bad input, or a model that fake tensors cannot run.
    """
    from sweep.memory.forecast import Forecasts, forecast_stages, largest_microbatch
    from sweep.training.device import USABLE_SHARE

    logistics = logistics or Logistics(device="cpu")
    logistics = replace(logistics, is_elsewhere=logistics.device.startswith("cuda"))
    plan = plan_steps(load_experiment(experiment, overrides), logistics)
    configs, devices = configs_of(plan), plan.execution.devices
    forecasts, limit, largest = Forecasts(plan.execution), logistics.device_memory, None
    if limit is not None and plan.execution.device.startswith("cuda"):
        limit = int(limit * USABLE_SHARE)
    if limit is not None:
        largest = largest_microbatch(configs[max(configs)], limit, forecasts).largest
    part = 0  # that fits beside the gradients of the microbatches before it
    if limit is not None and max(configs) // devices > (largest or 0):
        step = configs[max(configs)]
        part = largest_microbatch(step, limit, forecasts, largest, is_accumulated=True).largest
    points: dict[int, Forecast] = {}
    for batch, config in configs.items():
        own, size = batch // devices, config.microbatch_size
        if largest is not None and own > largest and not logistics.is_split:
            size = largest_divisor(own, max(1, part), config.group_size)
        points[batch] = forecasts.of(config.sized(own, size))
    most = max(points)
    at_most = configs[most].sized(points[most].batch_size, points[most].microbatch_size)
    stages = forecast_stages(at_most, devices) if devices > 1 else []
    line = _line(configs[most], forecasts, points)

    return head_of(plan, logistics.device_memory) | {
        "device": plan.execution.device,
        "usable_bytes": limit,  # by tensors; on a GPU less than its memory
        "group_size": configs[most].group_size,
        "devices": devices,
        "zero": plan.execution.zero,
        "points": [_point(batch, point, limit) for batch, point in points.items()],
        "stages": [{**_point(most, one, limit), "zero": n} for n, one in enumerate(stages)],
        "line": line and line.as_document(),
        "largest_microbatch_size": largest,
        **_accuracy(plan),
    }


def _point(batch: int, found: Forecast, limit: int | None) -> dict[str, Any]:
    """Return the document of a whole batch, from the forecast of a device's share of it."""
    return {
        **found.as_document(),
        "batch_size": batch,
        "gradient_accumulation_steps": found.batch_size // found.microbatch_size,
        "fits": None if limit is None else found.needed_bytes <= limit,
    }


def _line(
    config: TrialConfig, forecasts: "Forecasts", points: Mapping[int, Forecast]
) -> Line | None:
    """Fit peaks of steps of one microbatch; two more are forecast where they are too few."""
    if (line := _fitted(forecasts.made)) is not None:
        return line
    unit = config.group_size
    sizes = sorted({unit, 2 * unit, *(point.microbatch_size for point in points.values())})
    return _fitted([forecasts.of(config.sized(n, n)) for n in sizes])


def _fitted(points: list[Forecast]) -> Line | None:
    """Fit steps of one microbatch: accumulation keeps gradients beside the activations."""
    whole = [point for point in points if point.batch_size == point.microbatch_size]
    return fit_line({point.microbatch_size: point.peak_bytes for point in whole})


def _accuracy(plan: Plan) -> dict[str, Any]:
    """Say what kind of step the numbers are of, and their error bar (docs/memory.md)."""
    if plan.execution.compile:
        return {
            "basis": "eager steps' tensors: for this plan's compiled steps, which as a rule keep "
            "less, an upper bound that was not calibrated",
            "error_bar_share": None,
        }
    if plan.execution.devices > 1:
        basis = "eager steps' tensors on one device, less what ZeRO splits and with what it gathers"
        return {"basis": f"{basis}: by formula, peaks not measured", "error_bar_share": None}
    is_cuda = plan.execution.device.startswith("cuda")
    if is_cuda and plan.settings.model.kind != "elman":
        basis = "eager steps' tensors, not compared yet with what this model takes on a GPU"
        return {"basis": basis, "error_bar_share": None}
    place = "nine peaks published for a GPU" if is_cuda else "the peaks measured on a CPU"
    share = ERROR_ON_CUDA if is_cuda else ERROR_ON_CPU
    basis = f"eager steps' tensors, within {100 * share:g} % of {place}"
    return {"basis": basis, "error_bar_share": share}
