"""Does it fit, and what is the largest that fits: for an experiment, forecast or measured.

Reached through `sweep forecast` and `sweep probe`, `sweep.forecast_memory` and `probe_memory`.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.config.experiment import Experiment, load_experiment
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.memory.line import Line, fit_line
from sweep.memory.points import Forecast, Measurement
from sweep.memory.probe import Choice, Probed
from sweep.orchestration.execution import Logistics
from sweep.orchestration.planning import make_plan
from sweep.plan.plan import Plan
from sweep.plan.steps import largest_divisor
from sweep.trial.folder import SweepFolder

if TYPE_CHECKING:  # because it imports torch
    from sweep.memory.ablation import Row

SOAK_STEPS = 20  # of GRPO, unless asked otherwise
PROBED = {"cuda": "bytes that the allocator reserved, and the context"}
ERROR_ON_CPU = 0.02  # of a peak: what tests/memory/test_forecast.py holds
ERROR_OF_TRANSFORMERS = 0.03  # which make a causal mask where they see tensors without data
ERROR_ON_CUDA = 0.003  # of a peak: the E1 model's published rows, bytes allocated
NOWHERE = SweepFolder(Path("/dev/null/sweep"))  # a folder that holds no plan


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
    plan = _plan(load_experiment(experiment, overrides), logistics)
    configs, devices, forecasts = _configs(plan), plan.execution.devices, Forecasts(plan.execution)
    limit, largest, config = logistics.device_memory, None, configs[max(configs)]
    if limit is not None and plan.execution.device.startswith("cuda"):
        limit = int(limit * USABLE_SHARE)
    if limit is not None:
        largest = largest_microbatch(config, limit, forecasts).largest
    part = 0  # that fits beside the gradients of the microbatches before it
    if limit is not None and max(configs) // devices > (largest or 0):
        part = largest_microbatch(config, limit, forecasts, largest, is_accumulated=True).largest
    points: dict[int, Forecast] = {}
    for batch, config in configs.items():
        own, size = batch // devices, config.microbatch_size
        if largest is not None and own > largest and not logistics.is_split:
            size = largest_divisor(own, max(1, part), config.group_size)
        points[batch] = forecasts.of(config.sized(own, size))
    line = _line_of(forecasts.made)
    if line is None:  # one size, or steps in several microbatches
        unit = config.group_size
        sizes = sorted({unit, 2 * unit, *(point.microbatch_size for point in points.values())})
        line = _line_of([forecasts.of(configs[max(configs)].sized(n, n)) for n in sizes])
    most = max(points)
    at_most = configs[most].sized(points[most].batch_size, points[most].microbatch_size)
    stages = forecast_stages(at_most, devices) if devices > 1 else []
    return _document(plan, logistics.device_memory) | {
        "device": plan.execution.device,
        "usable_bytes": limit,  # by tensors; on a GPU less than its memory
        "devices": devices,
        "zero": plan.execution.zero,
        "points": [
            {
                **point.as_document(),
                "batch_size": batch,
                "gradient_accumulation_steps": point.batch_size // point.microbatch_size,
                "fits": None if limit is None else point.needed_bytes <= limit,
            }
            for batch, point in points.items()
        ],
        "stages": [
            {
                **stage.as_document(),
                "batch_size": most,
                "zero": number,
                "fits": None if limit is None else stage.needed_bytes <= limit,
            }
            for number, stage in enumerate(stages)
        ],
        "line": line and line.as_document(),
        "largest_microbatch_size": largest,
        **_accuracy(plan),
    }


def _plan(settings: Experiment, logistics: Logistics) -> Plan:
    """Plan each batch size once, on each device in one microbatch unless one is asked for."""
    one = settings.model_copy(update={"seeds": 1, "lr": "1e-3"})
    whole = logistics.microbatch if logistics.is_split else max(settings.batches)
    asked = replace(logistics, microbatch=whole, asks_memory=True)
    return make_plan(one, asked, NOWHERE).plan.located(NOWHERE)


def _configs(plan: Plan) -> dict[int, TrialConfig]:
    return {row.batch_size: plan.trial_config(row, "") for row in plan.trials}


def _line_of(points: list[Forecast]) -> Line | None:
    """Fit steps of one microbatch: accumulation keeps gradients beside the activations."""
    whole = [point for point in points if point.batch_size == point.microbatch_size]
    return fit_line({point.microbatch_size: point.peak_bytes for point in whole})


def _document(plan: Plan, limit: int | None) -> dict[str, Any]:
    return {
        "experiment": plan.experiment,
        "model": plan.model,
        "precision": plan.settings.precision,
        "optimizer": plan.settings.optimizer.name,
        "tokens_per_sequence": plan.tokens_per_sequence,
        "device_memory_bytes": limit,
    }


def _accuracy(plan: Plan) -> dict[str, Any]:
    """Say what kind of step the numbers are of, and their error bar (docs/memory.md)."""
    if plan.execution.compile:
        return {
            "basis": "eager steps' tensors: for this plan's compiled steps, which as a rule keep "
            "less, an upper bound that was not calibrated",
            "error_bar_share": None,
        }
    is_cuda = plan.execution.device.startswith("cuda")
    kind = plan.settings.model.kind
    if kind == "hugging_face" and plan.settings.grpo is not None:
        basis = "eager steps' tensors, with causal masks that transformers makes in a forecast only"
        return {"basis": f"{basis}: a few per cent too much", "error_bar_share": None}
    if is_cuda and kind != "elman":
        basis = "eager steps' tensors, not compared yet with what this model takes on a GPU"
        return {"basis": basis, "error_bar_share": None}
    place = "nine peaks published for a GPU" if is_cuda else "the peaks measured on a CPU"
    share = ERROR_ON_CUDA if is_cuda else ERROR_ON_CPU
    if kind == "hugging_face":
        share = ERROR_OF_TRANSFORMERS
    basis = f"eager steps' tensors, within {100 * share:g} % of {place}"
    return {"basis": basis, "error_bar_share": share}


def probe_memory(
    experiment: str = "tinystories",
    *,
    logistics: Logistics | None = None,
    cap: int | None = None,
    multiple: int = 1,
    soak_steps: int | None = None,
    on_point: Callable[[Measurement], None] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Measure the largest microbatch that fits this machine's device, and prove it.

    Args:
        experiment: a shipped name or the path of a TOML file.
        logistics: device and `device_memory`; on a CPU by default half of what is available.
        cap: the largest size of interest.
        multiple: only multiples of it are legal; for GRPO of whole groups too.
        soak_steps: that each recommended size must get through, or a smaller one is; 0: none;
            None: 20 for GRPO.
        on_point: called after each measured point.
        **overrides: fields of the experiment: batches, model, context, precision, …

    Returns:
        The document that `sweep probe --json` prints (DESIGN.md §5).

    Raises:
        SweepError: for bad input, or steps that fail whatever their size.
    """
    from sweep.memory.probe import probe

    logistics = logistics or Logistics()
    plan = _plan(load_experiment(experiment, overrides), logistics)
    configs = _configs(plan)
    if plan.execution.devices > 1:
        raise SweepError(
            "probe measures what one device holds, got several for each trial. Leave the devices "
            "out, and ask `sweep forecast` what ZeRO saves."
        )
    config, device, limit = _to_probe(configs[max(configs)], logistics.device_memory)
    multiple = math.lcm(multiple, config.group_size)
    _refuse_cap(cap, multiple)
    if soak_steps is None:
        soak_steps = SOAK_STEPS if plan.settings.grpo else 0
    found = probe(config, limit, multiple, cap, on_point, soak_steps)
    points = [point.as_document() for point in found.points]
    line, verdict = found.found.line, _verdict(found)
    document = _document(plan, limit) | {
        "device": device,
        "multiple": multiple,
        "group_size": config.group_size,
        "basis": PROBED.get(device.split(":")[0], "live tensors in eager steps"),
        "points": points,
        "line": line and line.as_document(),
        "largest_microbatch_size": found.found.largest,
        "verdict": verdict,
        "search_points": len(found.found.looks),
        "safe_microbatch_size": found.safe,
        "accumulated": found.accumulated and found.accumulated.as_document(),
    }
    document["recommendations"] = [_recommendation(choice) for choice in found.choices]
    safe = {one["name"]: one["soak"] for one in document["recommendations"]}.get("balanced")
    return document | ({"soak": safe} if safe else {})


def _recommendation(choice: Choice) -> dict[str, Any]:
    soak = choice.soak
    leak = soak and soak.leak and {**asdict(soak.leak), "is_found": soak.leak.is_found}
    return {
        "name": choice.name,
        "share": choice.share,
        "microbatch_size": choice.point.microbatch_size,
        "headroom_bytes": choice.point.headroom_bytes,
        "status": choice.point.status,
        "soak": soak and {"point": soak.point.as_document(), "leak": leak},
    }


def _refuse_cap(cap: int | None, multiple: int) -> None:
    if cap is not None and cap % multiple:
        lower, upper = cap // multiple * multiple, -(-cap // multiple) * multiple
        raise SweepError(
            f"largest must be a multiple of {multiple}, got {cap}. Use "
            f"{f'{lower} or ' if lower else ''}{upper}."
        )


def ablate_memory(
    experiment: str = "grpo-words",
    *,
    logistics: Logistics | None = None,
    on_row: Callable[["Row"], None] = lambda row: None,
    **overrides: Any,
) -> dict[str, Any]:
    """Measure and forecast what each optimisation of a GRPO step saves, undone in turn.

    Args:
        experiment: a shipped name or the path of a TOML file, of the workload grpo.
        logistics: device and `device_memory`; on a CPU by default half of what is available.
        on_row: called after each row.
        **overrides: fields of the experiment; of `batches` the smallest is taken.

    Returns:
        The document that `sweep probe --ablate --json` prints: `rows`, each with `name`, `kind`,
        `status`, `peak_bytes`, `time_ratio`, `time_ratios`, `forecast` and `measured`, and
        `claims`.

    Raises:
        SweepError: for bad input, another workload, or a microbatch: the rows vary it.
    """
    from sweep.memory.ablation import ablate
    from sweep.memory.claims import judge_claims

    logistics = logistics or Logistics()
    if logistics.is_split:
        given = logistics.microbatch or logistics.accumulation
        raise SweepError(
            "microbatch and accumulation must be left out of an ablation, which varies them, got "
            f"{given}. Ask for smaller --batches instead."
        )
    plan = _plan(load_experiment(experiment, overrides), logistics)
    if plan.settings.grpo is None:
        raise SweepError(
            f"ablate must be asked of the workload grpo, got {plan.settings.workload!r}. Name "
            "grpo-words or grpo-chess, or leave --ablate out."
        )
    config, device, limit = _to_probe(
        plan.trial_config(plan.trials[0], ""), logistics.device_memory
    )
    batch = config.science.batch_size
    base = config.sized(batch, batch)
    at_once = min(batch, base.sampled_at_once(batch))  # in every row, whatever its microbatch
    execution = base.execution.model_copy(update={"generation_batch_size": at_once})
    base = base.model_copy(update={"execution": execution})
    rows = ablate(base, limit, on_row)
    return _document(plan, limit) | {
        "device": device,
        "batch_size": batch,
        "basis": PROBED.get(device.split(":")[0], "live tensors in eager steps"),
        "rows": [row.as_document() for row in rows],
        "claims": judge_claims(base, rows),
    }


def _to_probe(config: TrialConfig, limit: int | None) -> tuple[TrialConfig, str, int]:
    """Return what to measure with, on which device, and within how many bytes."""
    from sweep.training.device import device_memory

    import torch  # isort: skip

    device = torch.device(config.execution.device)
    limit = limit or device_memory(device)
    if device.type == "cuda":
        limit = min(limit, device_memory(device))
    elif device.type == "cpu":  # counting every tensor needs eager steps
        eager = config.execution.model_copy(update={"compile": False})
        config = config.model_copy(update={"execution": eager})
    return config, str(device), limit


def _verdict(probed: Probed) -> str:
    """Say what the search showed.

    Raises:
        SweepError: if steps failed for another reason than memory, whatever their size.
    """
    found, points = probed.found, {p.microbatch_size: p for p in reversed(probed.points)}
    if not found.largest:
        smallest = points[min(points)]
        if smallest.status in ("ERROR", "TIMEOUT"):
            raise SweepError(
                f"steps must run to be measured, but one of {smallest.microbatch_size} sequences "
                f"ended {smallest.status} ({smallest.message}). Mend that first."
            )
        return "not even one sequence fits"
    how = "; memory was no line, found by bisection" if found.is_bisected else ""
    if found.is_capped:
        return f"{found.largest} fits, and no larger size was asked for{how}"
    following = points[min(size for size in found.looks if size > found.largest)]
    return (
        f"{found.largest} fits and {following.microbatch_size} does not ({following.status}), "
        f"both measured{how}"
    )
