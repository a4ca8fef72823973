"""Decide where and how fast trials run: once, when plan.json is first written."""

from typing import Any

from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.objects import require_extra
from sweep.errors import SweepError
from sweep.memory.presets import choose_preset, largest_here
from sweep.plan.plan import Plan, tokens_at_once
from sweep.training.process import run_job

COMPILE_FLOPS = 10**13  # of the whole plan; below, compiling on a CPU costs more than it saves
UNBOUNDED = (
    "No forecast bounds the microbatch: the model cannot be forecast, or this machine has no such "
    "device and no --device-memory gives the memory of the cluster's."
)
LOSS_CHUNK_ROWS = {"cuda": 8192, "cpu": 1024, "mps": 1024}  # docs/performance.md


def decide_execution(experiment: Experiment, chosen: Execution, is_elsewhere: bool) -> Execution:
    """Check and complete the settings that the user chose, which are in `model_fields_set`.

    Args:
        is_elsewhere: whether the device may be on another machine.
    """
    from sweep.training.device import available_cores, resolve_device

    device = chosen.device if is_elsewhere else resolve_device(chosen.device)
    devices, size, parts = chosen.devices, chosen.microbatch, chosen.accumulation
    if "devices" not in chosen.model_fields_set and size and parts:
        devices = max(1, min(experiment.batches) // (size * parts))  # checked in the plan
    samples, is_split = experiment.traits.samples, devices > 1
    is_deepspeed = chosen.strategy == "deepspeed"
    is_unsupported = (
        experiment.optimizer.name != "adamw"
        or experiment.precision == "bf16-pure"
        or experiment.schedule.average != 0
    )
    refusals = (
        (
            not samples and chosen.generation_batch_size,
            "generation_batch_size applies only to the workload grpo. Leave it out.",
        ),
        (
            not is_split and (chosen.zero or is_deepspeed),
            "zero and strategy need several devices per trial, got 1. Add --devices-per-trial, "
            "or leave them out.",
        ),
        (
            is_split and samples,
            f"workload {experiment.workload} must run on one device per trial, got {devices}. "
            "Leave the devices out.",
        ),
        (
            is_split and device not in ("cpu", "cuda"),
            f"device must be cpu or cuda with {devices} devices per trial, got {device!r}.",
        ),
        (
            is_deepspeed and (is_unsupported or not chosen.zero),
            "strategy deepspeed needs zero 1, 2 or 3, the optimizer adamw, a precision other "
            "than bf16-pure, and schedule.average = 0. Change them, or leave it out.",
        ),
    )
    for applies, message in refusals:
        if applies:
            raise SweepError(message)
    if is_deepspeed and not is_elsewhere:
        require_extra("deepspeed", "deepspeed", "strategy deepspeed")
    sequence = experiment.traits.tokens_per_sequence
    decided: dict[str, Any] = {
        "device": device,
        "devices": devices,
        "threads": max(1, available_cores() // devices),
        "evaluation_batch_size": max(1, tokens_at_once(device) // sequence),
    }
    if "loss_chunk_rows" not in chosen.model_fields_set:
        decided["loss_chunk_rows"] = LOSS_CHUNK_ROWS[device.partition(":")[0]]
    return chosen.model_copy(update=decided)


def decide_compile(plan: Plan) -> Plan:
    """Compile on CUDA if there is a compiler; on a CPU only if the plan is large enough."""
    from sweep.training.device import has_compiler, is_here

    execution, tokens = plan.execution, sum(row.tokens for row in plan.trials)
    flops = (plan.settings.model.flops_per_token or 0) * tokens
    is_cpu, kind = execution.device == "cpu", execution.device_type
    reasons = {
        "the model's steps are too small to compile": not plan.settings.model.is_worth_compiling,
        "a memory limit on a CPU counts the tensors of every operation": is_cpu
        and execution.device_memory_bytes is not None,
        "DeepSpeed's engine is not compiled": execution.strategy == "deepspeed",
        f"compiling is not supported on {execution.device}": kind == "mps",
        f"{flops:.1e} training FLOPs are too few to compile for": is_cpu and flops < COMPILE_FLOPS,
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    if reason is None and is_here(execution.device) and not has_compiler(kind):
        reason = "no compiler on this machine"
    text = f"eager: {reason}" if reason else "torch.compile"
    decided = {"compile": reason is None, "compile_reason": text}
    return plan.model_copy(update={"execution": execution.model_copy(update=decided)})


def bound_by_memory(plan: Plan) -> dict[str, Any]:
    """Return changes of the execution so that steps fit the device by forecast."""
    row = plan.largest_step
    try:
        bound, evaluation = run_job(largest_here, plan.trial_config(row))
    except SweepError:
        return {"reason": UNBOUNDED}
    bound = None if bound >= row.microbatch_size else bound
    return {"microbatch_bound": bound, "evaluation_batch_size": evaluation}


def choose_by_preset(plan: Plan, chosen: Execution, is_precision_open: bool) -> dict[str, Any]:
    """Return changes of the execution, and the `precision`, that a preset chooses.

    Args:
        plan: as it would be without the preset.
        chosen: with the user's choices in `model_fields_set`.
        is_precision_open: whether the preset may choose the precision.
    """
    execution = plan.execution
    fixed = chosen.model_fields_set & {"zero", "activation_checkpointing"}
    if execution.microbatch or execution.accumulation:
        fixed |= {"microbatch_bound"}
    if not is_precision_open or execution.strategy == "deepspeed":
        fixed |= {"precision"}
    config = plan.trial_config(plan.largest_step)
    try:
        return dict(run_job(choose_preset, config, execution.preset, frozenset(fixed)))
    except SweepError as error:
        raise SweepError(
            f"preset needs a model whose memory can be forecast, but that failed ({error}). Leave "
            "it out and give --microbatch. For a device of another machine, add --device-memory."
        ) from error
