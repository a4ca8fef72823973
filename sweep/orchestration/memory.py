"""Memory of an experiment: `sweep forecast` predicts it, `sweep probe` measures and proves it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

from sweep.config.gpus import find_gpu
from sweep.config.models import SIZES
from sweep.config.numbers import nearest_multiples, parse_bytes
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.memory.forecast import Forecasts, forecast_stages, largest_forecast
from sweep.memory.limit import usable_memory
from sweep.memory.probe import LEAST_SOAK, OnPoint, Probe, probe
from sweep.memory.search import Forecast, fit_line
from sweep.orchestration.executors.build import AllOverrides
from sweep.orchestration.inputs import identify_inputs
from sweep.orchestration.planning import first_plan
from sweep.orchestration.request import Request, read_request
from sweep.plan.accumulation import common_microbatch
from sweep.plan.course import Course
from sweep.plan.plan import Plan
from sweep.training.device import memory_limit
from sweep.training.process import run_job
from sweep.trial.folder import SweepFolder

HERE = SweepFolder(Path())


def _plan_steps(request: Request, is_elsewhere: bool = False) -> Plan:
    """Plan one trial per batch size, of the experiment's first optimizer.

    Each step is one microbatch, unless the user chose the microbatch.
    """
    if not request.experiment.workload.has_known_model:
        raise SweepError("a command has no steps that can be measured or forecast. Use sweep run.")
    request, inputs = identify_inputs(replace(request, folder=HERE, command=()))
    experiment = request.experiment
    largest = max(experiment.batches)

    # Memory does not depend on the budget, which may be less than a step of these sizes.
    step_tokens = Course(largest, experiment.tokens_per_sequence, steps=1).tokens_at(1)
    changes = {"seeds": 1, "lr": "1e-3", "budget": step_tokens, "optimizers": ()}
    request = replace(request, experiment=experiment.model_copy(update=changes))

    if not request.chooses_microbatch:
        execution = request.execution.model_copy(update={"microbatch": largest})
        request = replace(request, execution=execution)
    return HERE.located(first_plan(request, inputs, is_elsewhere))


def _head(plan: Plan, sizes_in_run: Mapping[str, int] | None) -> dict[str, Any]:
    """Return the keys that the documents of a forecast and of a probe share."""
    return {
        "experiment": plan.experiment,
        "model": plan.model.model_dump(),
        "precision": plan.settings.precision,
        "optimizer": plan.settings.optimizer.name,
        "tokens_per_sequence": plan.tokens_per_sequence,
        "sizes_in_run": sizes_in_run,
        "device_memory_bytes": plan.execution.known_memory_bytes,
        "gpu": plan.execution.gpu,
        "group_size": plan.settings.workload.sequences_per_group,
        "samples": plan.settings.workload.samples,
        "device": plan.execution.device,
    }


def _read_request(
    experiment: str | None, values: Mapping[str, Any]
) -> tuple[Request, dict[str, int] | None]:
    """Parse a command about a model with its own sizes.

    Also return the vocabulary and the context that `sweep run` would use, if they differ.
    """
    request = read_request(experiment, values, keeps_model_sizes=True)
    measured = request.experiment.model
    if request.experiment.init is None:
        lacks_start = values.get("init") is not None or measured.adapter_rank is not None
        if request.experiment.model_source is None or lacks_start:  # `sweep run` would refuse it
            return request, None

    trained = read_request(experiment, values).experiment.model
    sizes = {name: getattr(trained, name) for name in SIZES}
    if all(getattr(measured, name) == size for name, size in sizes.items()):
        return request, None
    return request, sizes


def read_memory_request(
    experiment: str | None, settings: Mapping[str, Any]
) -> tuple[Request, dict[str, int] | None]:
    """Parse the command of a forecast, by default for a CPU; as `_read_request`."""
    values = {**settings}
    if values.get("device") is None and values.get("gpu") is None:
        values["device"] = "cpu"
    return _read_request(experiment, values)


def _configs(plan: Plan) -> dict[int, TrialConfig]:
    return {config.science.batch_size: config for config in plan.distinct_steps()}


def forecast_memory(
    experiment: str | None = None, **settings: Unpack[AllOverrides]
) -> dict[str, Any]:
    """Return the document of `sweep forecast --json`, peak memory at every batch size.

    The arguments are those of `run_sweep`. The device need not exist. With `device_memory` the
    microbatches are those of the plan; with neither it nor `microbatch` the whole batch is one.
    """
    request, sizes_in_run = read_memory_request(experiment, settings)
    plan = _plan_steps(request, is_elsewhere=request.execution.device_type == "cuda")
    # In a child process, because it runs the user's code.
    forecast: dict[str, Any] = run_job(_forecast_plan, plan, request.chooses_microbatch)
    return _head(plan, sizes_in_run) | forecast


def _forecast_plan(plan: Plan, chooses_microbatch: bool) -> dict[str, Any]:
    """Return the keys of a forecast's document that `_head` lacks."""
    devices = plan.execution.devices
    zero = plan.execution.zero
    forecasts = Forecasts(devices, zero)
    whole_steps = _configs(plan)
    last = max(whole_steps)

    limit_bytes = None
    largest = None
    is_capped = False
    if plan.execution.known_memory_bytes is not None:
        limit_bytes = usable_memory(plan.execution)
        largest = forecasts.find_largest(whole_steps[last], limit_bytes, is_accumulated=False)
        is_capped = largest == largest_forecast(whole_steps[last])
        if not chooses_microbatch:
            plan = plan.with_execution(microbatch=None)
            plan = plan.with_execution(**forecasts.bound(plan.distinct_steps(), limit_bytes))

    configs = _configs(plan)
    sized_steps = [
        config.on_one_device(config.sequences_per_device, config.microbatch_size)
        for config in configs.values()
    ]
    points = dict(zip(configs, forecasts.of_all(sized_steps), strict=True))

    largest_step = whole_steps[last]
    if len(forecasts.whole_steps) < 2:
        group = plan.settings.workload.sequences_per_group
        for size in {group, 2 * group, *(point.microbatch_size for point in points.values())}:
            forecasts.of(largest_step.on_one_device(size, size))
    line = fit_line(forecasts.whole_steps)

    stages = []
    if devices > 1:
        sized = largest_step.on_one_device(last // devices, points[last].microbatch_size)
        stages = forecast_stages(sized, devices)

    def row(batch_size: int, point: Forecast) -> dict[str, Any]:
        return asdict(point) | {
            "status": "FORECAST",
            "batch_size": batch_size,
            "gradient_accumulation_steps": batch_size // devices // point.microbatch_size,
            "fits": None if limit_bytes is None else point.needed_bytes <= limit_bytes,
        }

    return {
        "usable_bytes": limit_bytes,  # without the context and the fragmentation of a GPU
        "devices": devices,
        "zero": zero,
        "points": [row(batch_size, point) for batch_size, point in points.items()],
        "stages": [{**row(last, point), "zero": stage} for stage, point in enumerate(stages)],
        "line": None if line is None else asdict(line),
        "largest_microbatch_size": largest,
        "largest_is_capped": is_capped,  # whether larger ones may fit
        "basis": "live tensors of eager steps, on one CPU within 2 % of measured peaks",
    }


def probe_memory(
    experiment: str | None = None,
    *,
    largest: int | None = None,
    multiple: int = 1,
    soak: int | None = None,
    on_point: OnPoint = lambda point: None,
    **settings: Unpack[AllOverrides],
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
    values: dict[str, Any] = {**settings}
    gpu = values.pop("gpu", None)  # only its memory counts: steps are measured here
    if gpu is not None:
        limits = [find_gpu(gpu).memory_bytes]
        if values.get("device_memory") is not None:
            limits.append(parse_bytes(values["device_memory"], "device-memory"))
        values["device_memory"] = min(limits)
    request, sizes_in_run = _read_request(experiment, values)
    is_search = not request.chooses_microbatch
    if not is_search and (largest or multiple != 1 or soak):
        searching = "largest, multiple and soak belong to the search for a microbatch"
        raise SweepError(f"{searching}, got a microbatch. Leave either out.")
    if soak and soak < LEAST_SOAK:
        raise SweepError(f"soak must be 0 or at least {LEAST_SOAK} steps, got {soak}.")
    plan = _plan_steps(request)
    if plan.execution.devices > 1:
        raise SweepError("a probe measures one device. Ask `sweep forecast` about several devices.")

    configs = _configs(plan)
    config = configs[max(configs)]
    device_type = plan.execution.device_type
    if device_type == "cpu":  # counting every tensor needs eager steps
        config = config.with_microbatch(config.microbatch_size, compile=False)
    basis = "live tensors of eager steps"
    if device_type == "cuda":
        basis = "bytes reserved by the allocator, plus the context"

    multiple = math.lcm(multiple, config.sequences_per_group)
    if largest and largest % multiple:
        near = nearest_multiples(largest, multiple)
        raise SweepError(f"largest must be a multiple of {multiple}, got {largest}. Use {near}.")
    if soak is None:
        soak = 20 if plan.settings.workload.samples else 0

    sizes: list[tuple[int, int]] = []  # with their microbatches
    if not is_search:
        sizes = [(size, sized.microbatch_size) for size, sized in configs.items()]
    limit_bytes = memory_limit(plan.execution)
    probed = probe(config, limit_bytes, multiple, largest, on_point, soak, sizes)
    return {
        **_head(plan, sizes_in_run),
        "device_memory_bytes": limit_bytes,
        "multiple": multiple,
        "basis": basis,
        **_results(probed, multiple, is_search, config.sequences_per_group, [*configs]),
    }


def _results(
    probed: Probe, multiple: int, is_search: bool, group: int, batch_sizes: Sequence[int]
) -> dict[str, Any]:
    """Return the keys of a probe's document that hold what was measured and chosen.

    Args:
        probed: the measurements.
        multiple: that sizes had to be of.
        is_search: whether the largest microbatch was searched.
        group: sequences per group.
        batch_sizes: those of the sweep, which the recommended microbatch suits.
    """
    search = probed.search
    safe_size = 0
    soaked = None
    for choice in probed.choices:
        if choice["name"] == "balanced":
            safe_size = choice["microbatch_size"]
            soaked = choice["soak"]

    accumulated = None
    recommended = None
    if probed.accumulated is not None:
        accumulated = probed.accumulated.as_document()
        recommended = probed.accumulated.microbatch_size
        if probed.fast is not None:
            recommended = min(recommended, probed.fast.microbatch_size)
        recommended = common_microbatch(batch_sizes, recommended, group)
    points = sorted(probed.points, key=lambda point: (point.batch_size, point.microbatch_size))
    return {
        "points": [point.as_document() for point in points],
        "line": None if search.line is None else asdict(search.line),
        "largest_microbatch_size": search.largest if is_search else None,
        "verdict": probed.verdict(multiple),
        "search_points": len(search.peaks),
        "safe_microbatch_size": safe_size,
        "accumulated": accumulated,
        "fast": None if probed.fast is None else probed.fast.as_document(),
        "recommended_microbatch_size": recommended,
        "recommendations": probed.choices,
        "soak": soaked,
    }
