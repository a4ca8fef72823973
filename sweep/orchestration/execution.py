"""Decide where and how fast trials run: once, when plan.json is first written."""

from typing import Any

from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.objects import require_extra
from sweep.errors import SweepError
from sweep.memory.presets import choose_preset, largest_here
from sweep.plan.plan import Plan, tokens_at_once
from sweep.training.process import run_job
from sweep.trial.folder import SweepFolder

COMPILE_FLOPS = 10**13  # of the whole plan; below, compiling on a CPU costs more than it saves
UNBOUNDED = (
    "No forecast bounds the microbatch: this machine has no such device, and no --device-memory "
    "gives the memory of the cluster's."
)
LOSS_CHUNK_ROWS = {"cuda": 8192, "cpu": 1024, "mps": 1024}  # docs/performance.md


def refuse_other_execution(old: Plan, chosen: Execution, folder: SweepFolder) -> None:
    """Refuse settings that differ from those decided when the plan was first written."""
    for name in sorted(chosen.model_fields_set):
        decided, value = getattr(old.execution, name), getattr(chosen, name)
        if value != decided:
            raise SweepError(
                f"{name} was decided as {decided!r} when {folder.plan_path} was first written, "
                f"got {value!r}. Leave the flag out, or choose another --out."
            )


def decide_execution(experiment: Experiment, chosen: Execution, is_elsewhere: bool) -> Execution:
    """Complete the settings that the user chose.

    Args:
        experiment: to run.
        chosen: with the user's choices in `model_fields_set`.
        is_elsewhere: whether the device may be on another machine.

    Raises:
        SweepError: if settings do not go together, or this machine lacks what they need.
    """
    from sweep.training.device import available_cores, resolve_device

    for name in ("generation_batch_size", "shares_prompts"):
        if getattr(chosen, name) and not experiment.traits.samples:
            raise SweepError(f"{name} applies only to the workload grpo. Leave it out.")
    is_named = chosen.device != "auto"
    device = chosen.device if is_elsewhere and is_named else resolve_device(chosen.device)
    execution = chosen.model_copy(update={"device": device})
    devices = _decide_devices(experiment, execution, is_elsewhere)
    sequence = experiment.traits.tokens_per_sequence
    decided: dict[str, Any] = {
        "devices": devices,
        "threads": max(1, available_cores() // devices),
        "evaluation_batch_size": max(1, tokens_at_once(device) // sequence),
    }
    if "loss_chunk_rows" not in chosen.model_fields_set:
        decided["loss_chunk_rows"] = LOSS_CHUNK_ROWS[execution.device_type]
    return execution.model_copy(update=decided)


def _decide_devices(experiment: Experiment, execution: Execution, is_elsewhere: bool) -> int:
    """Return the devices per trial: as chosen, or as microbatch and accumulation imply."""
    devices, size, parts = execution.devices, execution.microbatch, execution.accumulation
    if "devices" not in execution.model_fields_set and size and parts:
        devices = max(1, min(experiment.batches) // (size * parts))  # checked in the plan
    if devices == 1:
        if execution.zero or execution.strategy == "deepspeed":
            raise SweepError(
                "zero and strategy need several devices per trial, got 1. Add "
                "--devices-per-trial, or leave them out."
            )
        return 1
    if execution.strategy == "deepspeed":
        _check_deepspeed(experiment, execution, is_elsewhere)
    if experiment.traits.samples:
        raise SweepError(
            f"workload {experiment.workload} must run on one device per trial, got {devices}. "
            "Leave the devices out."
        )
    if execution.device not in ("cpu", "cuda"):
        raise SweepError(
            f"device must be cpu or cuda with {devices} devices per trial, got "
            f"{execution.device!r}."
        )
    if execution.device == "cuda" and not is_elsewhere:
        import torch

        if (count := torch.cuda.device_count()) < devices:
            raise SweepError(
                f"devices-per-trial must be at most this machine's ({count}), got {devices}."
            )
    return devices


def _check_deepspeed(experiment: Experiment, execution: Execution, is_elsewhere: bool) -> None:
    if not is_elsewhere:
        require_extra("deepspeed", "deepspeed", "strategy deepspeed")
    conditions = {
        "zero must be 1, 2 or 3": execution.zero > 0,
        "the optimizer must be adamw": experiment.optimizer.name == "adamw",
        "precision must be fp32 or bf16": experiment.precision != "bf16-pure",
        "schedule.average must be 0": experiment.schedule.average == 0,
    }
    for condition, holds in conditions.items():
        if not holds:
            raise SweepError(f"with strategy deepspeed {condition}. Change it.")


def decide_compile(plan: Plan, is_elsewhere: bool) -> Plan:
    """Compile on CUDA if there is a compiler; on a CPU only if the plan is large enough."""
    from sweep.training.device import has_compiler

    execution, tokens = plan.execution, sum(row.tokens for row in plan.trials)
    flops = (plan.settings.model.flops_per_token or 0) * tokens
    is_cpu = execution.device == "cpu"
    reasons = {
        "the model's steps are too small to compile": not plan.settings.model.is_worth_compiling,
        "a memory limit on a CPU counts the tensors of every operation": is_cpu
        and execution.device_memory_bytes is not None,
        "DeepSpeed's engine is not compiled": execution.strategy == "deepspeed",
        f"compiling is not supported on {execution.device}": execution.device_type == "mps",
        f"{flops:.1e} training FLOPs are too few to compile for": is_cpu and flops < COMPILE_FLOPS,
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    if reason is None and not is_elsewhere and not has_compiler(execution.device_type):
        reason = "no compiler on this machine"
    text = f"eager: {reason}" if reason else "torch.compile"
    decided = {"compile": reason is None, "compile_reason": text}
    return plan.model_copy(update={"execution": execution.model_copy(update=decided)})


def bound_by_memory(plan: Plan) -> dict[str, Any]:
    """Return changes of the execution so that steps fit the device by forecast."""
    from sweep.training.device import is_here

    execution, row = plan.execution, plan.largest_step
    if execution.device_memory_bytes is None and not is_here(execution.device):
        return {"reason": UNBOUNDED}
    try:
        bound, evaluation = run_job(largest_here, plan.trial_config(row))
    except SweepError:  # a user's model that fake tensors cannot run
        return {}
    fits = bound >= row.microbatch_size
    return {
        "microbatch_bound": None if fits else bound,
        "evaluation_batch_size": evaluation,
    }


def choose_by_preset(plan: Plan, chosen: Execution, is_precision_open: bool) -> dict[str, Any]:
    """Return changes of the execution, and `precision`, that a preset chooses.

    Args:
        plan: as it would be without the preset.
        chosen: with the user's choices in `model_fields_set`.
        is_precision_open: whether the preset may choose the precision.

    Raises:
        SweepError: if the model cannot be forecast.
    """
    from sweep.training.device import is_here

    execution = plan.execution
    if execution.device_memory_bytes is None and not is_here(execution.device):
        raise SweepError(
            f"preset must know the memory of the device, and this machine has no "
            f"{execution.device}. Give it with --device-memory, or leave --preset out."
        )
    fixed = chosen.model_fields_set & {"zero", "activation_checkpointing"}
    if execution.microbatch or execution.accumulation:
        fixed |= {"microbatch_bound"}
    if not is_precision_open or execution.strategy == "deepspeed":
        fixed |= {"precision"}
    config = plan.trial_config(plan.largest_step)
    try:
        changes = run_job(choose_preset, config, execution.preset, frozenset(fixed))
    except SweepError as error:
        raise SweepError(
            f"preset needs a model whose memory can be forecast, but that failed ({error}). "
            "Leave it out, and give --microbatch."
        ) from error
    return dict(changes)
