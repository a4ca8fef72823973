"""Memory of an experiment: `sweep forecast` predicts it, `sweep probe` measures and proves it."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sweep.config.numbers import nearest_multiples
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.memory.forecast import Forecasts, forecast_stages
from sweep.memory.probe import OnPoint, Probe, probe
from sweep.memory.search import Forecast, fit_line
from sweep.orchestration import planning
from sweep.plan.plan import Plan
from sweep.plan.steps import largest_divisor
from sweep.training.device import USABLE_SHARE, device_memory
from sweep.trial.folder import SweepFolder

if TYPE_CHECKING:
    from typing import Unpack

    from sweep.config.overrides import Overrides

HERE = SweepFolder(Path())


def _plan_steps(
    request: planning.Request, is_elsewhere: bool = False
) -> tuple[Plan, dict[int, TrialConfig], dict[str, Any]]:
    """Plan one trial per batch size; return the plan, these trials and the common head."""
    if request.experiment.command is not None:
        raise SweepError("a command has no steps that can be measured or forecast. Use sweep run.")
    experiment = request.experiment.model_copy(update={"seeds": 1, "lr": "1e-3"})
    execution = request.execution
    if not request.chooses_microbatch:
        execution = execution.model_copy(update={"microbatch": max(experiment.batches)})
    whole = replace(request, experiment=experiment, execution=execution, folder=HERE, command=())
    plan = HERE.located(planning.first_plan(*planning.identify_inputs(whole), is_elsewhere))
    head = {
        "experiment": plan.experiment,
        "model": plan.model.model_dump(),
        "precision": plan.settings.precision,
        "optimizer": plan.settings.optimizer.name,
        "tokens_per_sequence": plan.tokens_per_sequence,
        "device_memory_bytes": execution.device_memory_bytes,
        "group_size": plan.settings.traits.group_size,
        "samples": plan.settings.traits.samples,
        "device": plan.execution.device,
    }
    return plan, {row.batch_size: plan.trial_config(row) for row in plan.trials}, head


def forecast_memory(
    experiment: str | None = None, **settings: "Unpack[Overrides]"
) -> dict[str, Any]:
    """Return the document of `sweep forecast --json`, peak memory at every batch size.

    The arguments are those of `run_sweep`. The device need not exist. With `device_memory` the
    largest microbatch that fits is used; with neither it nor `microbatch` the whole batch is one.
    """
    request = planning.read_request(experiment, {"device": "cpu", **settings})
    is_elsewhere = request.execution.device_type == "cuda"
    plan, configs, head = _plan_steps(request, is_elsewhere)
    devices, zero, limit = plan.execution.devices, plan.execution.zero, head["device_memory_bytes"]
    forecasts, last, group = Forecasts(devices, zero), max(configs), head["group_size"]
    most, largest, part = configs[last], None, last  # largest that fits, alone and accumulated
    if limit is not None:
        limit = int(limit * USABLE_SHARE) if plan.execution.device_type == "cuda" else limit
        largest = forecasts.find_largest(most, limit, is_accumulated=False)
        if last // devices > largest:
            part = forecasts.find_largest(most, limit, largest)
    points: dict[int, Forecast] = {}
    for batch_size, config in configs.items():
        own, size = batch_size // devices, config.microbatch_size
        if largest is not None and own > largest and not request.chooses_microbatch:
            size = largest_divisor(own, part, group)
        points[batch_size] = forecasts.of(config.on_one_device(own, size))
    if len(forecasts.whole_steps) < 2:
        for size in {group, 2 * group, *(point.microbatch_size for point in points.values())}:
            forecasts.of(most.on_one_device(size, size))
    line, point = fit_line(forecasts.whole_steps), points[last]
    sized = most.on_one_device(last // devices, point.microbatch_size)
    stages = forecast_stages(sized, devices) if devices > 1 else []

    def row(batch_size: int, point: Forecast) -> dict[str, Any]:
        return asdict(point) | {
            "status": "FORECAST",
            "batch_size": batch_size,
            "gradient_accumulation_steps": batch_size // devices // point.microbatch_size,
            "fits": None if limit is None else point.needed_bytes <= limit,
        }

    return head | {
        "usable_bytes": limit,  # without the context and the fragmentation of a GPU
        "devices": devices,
        "zero": zero,
        "points": [row(batch_size, point) for batch_size, point in points.items()],
        "stages": [{**row(last, point), "zero": stage} for stage, point in enumerate(stages)],
        "line": line and asdict(line),
        "largest_microbatch_size": largest,
        "basis": "live tensors of eager steps, on one CPU within 2 % of measured peaks",
    }


def probe_memory(
    experiment: str | None = None,
    *,
    largest: int | None = None,
    multiple: int = 1,
    soak: int | None = None,
    on_point: OnPoint = lambda point: None,
    **settings: "Unpack[Overrides]",
) -> dict[str, Any]:
    """Measure the largest microbatch that fits; return the document of `sweep probe --json`.

    Args, in addition to those of `run_sweep`:
        largest: the largest size of interest.
        multiple: sizes must be multiples of it; GRPO adds its group size.
        soak: steps that each recommended size must complete; by default 20 for GRPO, else 0.
        on_point: called after each measured point.

    On a CPU `device_memory` is half of the available memory by default. With a `microbatch`
    nothing is searched.
    """
    request = planning.read_request(experiment, {**settings})
    plan, configs, head = _plan_steps(request)
    if plan.execution.devices > 1:
        raise SweepError("a probe measures one device. Ask `sweep forecast` about several devices.")
    config, device = configs[max(configs)], torch.device(plan.execution.device)
    limit = head["device_memory_bytes"] or device_memory(device)
    basis = "live tensors of eager steps"
    if device.type == "cuda":
        basis = "bytes reserved by the allocator, plus the context"
        limit = min(limit, device_memory(device))
    elif device.type == "cpu":  # counting every tensor needs eager steps
        config = config.with_microbatch(config.microbatch_size, compile=False)
    multiple = math.lcm(multiple, config.group_size)
    if largest and largest % multiple:
        near = nearest_multiples(largest, multiple)
        raise SweepError(f"largest must be a multiple of {multiple}, got {largest}. Use {near}.")
    if soak is None:
        soak = 20 if plan.settings.traits.samples else 0
    sizes = [(size, sized.microbatch_size) for size, sized in configs.items()]
    sizes = sizes if request.chooses_microbatch else []
    probed = probe(config, limit, multiple, largest, on_point, soak, sizes)
    search, choices = probed.search, probed.choices
    balanced = next((choice for choice in choices if choice["name"] == "balanced"), None)
    return head | {
        "device_memory_bytes": limit,
        "multiple": multiple,
        "basis": basis,
        "points": [point.as_document() for point in probed.points],
        "line": search.line and asdict(search.line),
        "largest_microbatch_size": None if request.chooses_microbatch else search.largest,
        "verdict": _verdict(probed, multiple),
        "search_points": len(search.peaks),
        "safe_microbatch_size": balanced["microbatch_size"] if balanced else 0,
        "accumulated": probed.accumulated and probed.accumulated.as_document(),
        "recommendations": choices,
        "soak": balanced and balanced["soak"],
    }


def _verdict(probed: Probe, multiple: int) -> str:
    """Describe the result of a search; refuse it if not even the smallest step can run."""
    search, by_size = probed.search, {p.microbatch_size: p for p in reversed(probed.points)}
    if not search.peaks:
        return "measured as asked, without a search"
    if not search.largest:
        smallest = by_size[min(by_size)]
        if smallest.status in ("ERROR", "TIMEOUT"):
            raise SweepError(
                f"steps must run to be measured, got {smallest.status} with a microbatch of "
                f"{smallest.microbatch_size} ({smallest.message}). Fix that first."
            )
        return f"a microbatch of {multiple} does not fit"
    how = "; memory was not linear, so the search bisected" if search.is_bisected else ""
    if search.is_capped:
        return f"{search.largest} fits, and no larger size was asked for{how}"
    following = min(size for size in search.peaks if size > search.largest)
    status = by_size[following].status
    return f"{search.largest} fits and {following} does not ({status}), both measured{how}"
