"""Does it fit, and what is the largest that fits: for an experiment, measured.

Reached through `sweep probe`, `sweep.probe_memory` and `ablate_memory`; its forecast is in
`sweep.orchestration.forecast`.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.config.experiment import Experiment, load_experiment
from sweep.config.grpo import GrpoSettings, least_size
from sweep.config.numbers import nearest_multiples
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.memory.points import Measurement
from sweep.memory.probe import Choice, Probed
from sweep.orchestration.execution import Logistics
from sweep.orchestration.planning import make_plan
from sweep.plan.plan import Plan
from sweep.trial.folder import SweepFolder

if TYPE_CHECKING:  # because it imports torch
    from sweep.memory.ablation import Row

SOAK_STEPS = 20  # of GRPO, unless asked otherwise
PROBED = {"cuda": "bytes that the allocator reserved, and the context"}
NOWHERE = SweepFolder(Path("/dev/null/sweep"))  # a folder that holds no plan


def plan_steps(settings: Experiment, logistics: Logistics) -> Plan:
    """Plan each batch size once, on each device in one microbatch unless one is asked for."""
    one = settings.model_copy(update={"seeds": 1, "lr": "1e-3"})
    whole = logistics.microbatch if logistics.is_split else max(settings.batches)
    asked = replace(logistics, microbatch=whole, asks_memory=True)
    return make_plan(one, asked, NOWHERE).plan.located(NOWHERE)


def configs_of(plan: Plan) -> dict[int, TrialConfig]:
    """Return the trial of each batch size."""
    return {row.batch_size: plan.trial_config(row, "") for row in plan.trials}


def head_of(plan: Plan, limit: int | None) -> dict[str, Any]:
    """Return what a document says first: what was asked."""
    return {
        "experiment": plan.experiment,
        "model": plan.model,
        "precision": plan.settings.precision,
        "optimizer": plan.settings.optimizer.name,
        "tokens_per_sequence": plan.tokens_per_sequence,
        "device_memory_bytes": limit,
    }


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
    plan = plan_steps(load_experiment(experiment, overrides), logistics)
    configs = configs_of(plan)
    config, device, limit = _to_probe(configs[max(configs)], logistics.device_memory)
    multiple = math.lcm(multiple, config.group_size)
    _refuse_cap(cap, multiple)
    if soak_steps is None:
        soak_steps = SOAK_STEPS if plan.settings.grpo else 0
    found = probe(config, limit, multiple, cap, on_point, soak_steps)
    points = [point.as_document() for point in found.points]
    line, verdict = found.found.line, _verdict(found, config.group_size, multiple)
    document = head_of(plan, limit) | {
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
        raise SweepError(
            f"largest must be a multiple of {multiple}, got {cap}. "
            f"Use {nearest_multiples(cap, multiple)}."
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
        `claims`. A step without a reference gets one, since its pass is among what is claimed.

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
    plan = plan_steps(load_experiment(experiment, overrides), logistics)
    if plan.settings.grpo is None:
        raise SweepError(
            f"ablate must be asked of the workload grpo, got {plan.settings.workload!r}. Name "
            "grpo-words or grpo-chess, or leave --ablate out."
        )
    config, device, limit = _to_probe(
        plan.trial_config(plan.trials[0], ""), logistics.device_memory
    )
    batch, asked = config.science.batch_size, plan.settings.grpo
    base = config.sized(batch, batch)
    if not asked.kl:
        grpo = asked.model_copy(update={"init": None, "kl": GrpoSettings().kl})
        base = base.model_copy(update={"science": base.science.model_copy(update={"grpo": grpo})})
    at_once = min(batch, base.sampled_at_once(batch))  # in every row, whatever its microbatch
    execution = base.execution.model_copy(update={"generation_batch_size": at_once})
    base = base.model_copy(update={"execution": execution})
    rows = ablate(base, limit, on_row)
    return head_of(plan, limit) | {
        "device": device,
        "batch_size": batch,
        "reference_added": not asked.kl,
        "basis": PROBED.get(device.split(":")[0], "live tensors in eager steps"),
        "rows": [row.as_document() for row in rows],
        "claims": judge_claims(base, rows),
    }


def _to_probe(config: TrialConfig, limit: int | None) -> tuple[TrialConfig, str, int]:
    """Return what to measure with, on which device, and within how many bytes."""
    from sweep.training.device import device_memory

    import torch  # isort: skip

    if config.execution.devices > 1:
        raise SweepError(
            "probe measures what one device holds, got several for each trial. Leave the devices "
            "out, and ask `sweep forecast` what ZeRO saves."
        )
    device = torch.device(config.execution.device)
    limit = limit or device_memory(device)
    if device.type == "cuda":
        limit = min(limit, device_memory(device))
    elif device.type == "cpu":  # counting every tensor needs eager steps
        eager = config.execution.model_copy(update={"compile": False})
        config = config.model_copy(update={"execution": eager})
    return config, str(device), limit


def _verdict(probed: Probed, group_size: int, multiple: int) -> str:
    """Say what the search of multiples showed.

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
        return f"not even {least_size(group_size, multiple)} fits"
    how = "; memory was no line, found by bisection" if found.is_bisected else ""
    if found.is_capped:
        return f"{found.largest} fits, and no larger size was asked for{how}"
    following = points[min(size for size in found.looks if size > found.largest)]
    return (
        f"{found.largest} fits and {following.microbatch_size} does not ({following.status}), "
        f"both measured{how}"
    )
