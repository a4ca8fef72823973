"""Where and how fast: what the command line says, what is decided once, and what stays so."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sweep.config.experiment import Experiment
from sweep.config.objects import require_extra
from sweep.config.trial import Execution
from sweep.errors import SweepError, WorkerDied
from sweep.plan.plan import COMPILE_FLOPS, Plan, tokens_at_once, tokens_per_sequence
from sweep.plan.steps import devices_left
from sweep.training.process import FreshProcess
from sweep.trial.folder import SweepFolder

if TYPE_CHECKING:  # because it imports torch
    from sweep.memory.presets import Chosen

FORECAST_SECONDS = 120.0  # at most
UNBOUNDED = (
    "Microbatches are not bounded by a forecast: this machine has no such device, and no "
    "--device-memory says what those of the cluster hold"
)
LOSS_CHUNK_ROWS = {"cuda": 8192, "cpu": 1024, "mps": 1024}  # docs/performance.md


@dataclass(frozen=True)
class Logistics:
    """What the command line decides: where and how fast, never a number."""

    device: str = "auto"
    microbatch: int | None = None
    accumulation: int | None = None  # gradient accumulation steps
    devices: int | None = None  # of each trial; None: what microbatch and accumulation leave, or 1
    zero: int | None = None  # stage, what is split over them; None: 0
    strategy: str | None = None  # torch or deepspeed; None: torch
    preset: str | None = None  # speed, balanced or memory: chooses what is not given, by forecast
    activation_checkpointing: bool = False
    device_memory: int | None = None  # bytes, enforced
    loss_chunk_rows: int | None = None  # None: the default
    is_elsewhere: bool = False  # the device need not be on this machine, as in a forecast
    asks_memory: bool = False  # sizes are as given: what fits is the question
    generation_batch_size: int | None = None  # completions sampled at once; None: by microbatch
    shares_prompts: bool = False  # a prompt's states are computed once for its completions
    keep: str | None = None  # none, weights or checkpoints; None: as decided, else weights

    @property
    def is_split(self) -> bool:
        """Whether it says how batches are split."""
        return self.microbatch is not None or self.accumulation is not None


def refuse_sampling(experiment: Experiment, logistics: Logistics) -> None:
    """Refuse what is said of sampling where nothing is sampled."""
    given = {
        "generation_batch_size": logistics.generation_batch_size,
        "shares_prompts": logistics.shares_prompts,
    }
    for name, value in given.items():
        if value and experiment.grpo is None:
            raise SweepError(f"{name} means nothing but to the workload grpo. Leave it out.")


def refuse_other_execution(old: Plan, logistics: Logistics, folder: SweepFolder) -> None:
    """What plan.json decided stays decided; a flag that differs is not ignored silently."""
    asked = {
        "device": None if logistics.device == "auto" else logistics.device,
        "devices": logistics.devices,
        "zero": logistics.zero,
        "strategy": logistics.strategy,
        "preset": logistics.preset,
        "activation_checkpointing": logistics.activation_checkpointing or None,
        "device_memory_bytes": logistics.device_memory,
        "loss_chunk_rows": logistics.loss_chunk_rows,
        "generation_batch_size": logistics.generation_batch_size,
        "shares_prompts": logistics.shares_prompts or None,
        "keep": logistics.keep,
    }
    found = [(name, "", getattr(old.execution, name), value) for name, value in asked.items()]
    size, parts = logistics.microbatch, logistics.accumulation
    for row in old.trials:
        place = f" for batch size {row.batch_size}"
        most = row.batch_size // row.devices
        found += [
            ("microbatch", place, row.microbatch_size, size and min(size, most)),
            ("accumulation", place, row.gradient_accumulation_steps, parts),
        ]
    for name, place, decided, value in found:
        if value is not None and value != decided:
            raise SweepError(
                f"{name} was decided as {decided!r}{place} when {folder.plan_path} was first "
                f"written, got {value!r}. Leave the flag out, or choose another --out."
            )


def decide_execution(experiment: Experiment, logistics: Logistics) -> Execution:
    """Decide where and how fast, for as long as the sweep lives."""
    from sweep.training.device import available_cores, resolve_device

    device = logistics.device if logistics.is_elsewhere else resolve_device(logistics.device)
    devices = decide_devices(experiment, logistics, device)
    return Execution(
        device=device,
        devices=devices,
        zero=logistics.zero or 0,  # type: ignore[arg-type]
        strategy=logistics.strategy or "torch",  # type: ignore[arg-type]
        preset=logistics.preset,  # type: ignore[arg-type]
        threads=max(1, available_cores() // devices),
        activation_checkpointing=logistics.activation_checkpointing,
        device_memory_bytes=logistics.device_memory,
        loss_chunk_rows=(
            LOSS_CHUNK_ROWS[device.partition(":")[0]]
            if logistics.loss_chunk_rows is None
            else logistics.loss_chunk_rows
        ),
        evaluation_batch_size=max(1, tokens_at_once(device) // tokens_per_sequence(experiment)),
        generation_batch_size=logistics.generation_batch_size,
        shares_prompts=logistics.shares_prompts,
        keep=logistics.keep or "weights",  # type: ignore[arg-type]
    )


def decide_devices(experiment: Experiment, logistics: Logistics, device: str) -> int:
    """Return how many devices each trial runs on: as asked, or as microbatch and accumulation say.

    Raises:
        SweepError: if that is no one number, or this machine or the workload does not have it.
    """
    devices, size, parts = logistics.devices, logistics.microbatch, logistics.accumulation
    if devices is None and size and parts:
        devices = devices_left(experiment.batches, size, parts)
    devices = devices or 1
    if devices == 1:
        if logistics.zero or logistics.strategy == "deepspeed":
            raise SweepError(
                "zero and strategy say how a trial is split over several devices, and it is on "
                "one. Add --devices-per-trial, or leave them out."
            )
        return 1
    if logistics.strategy == "deepspeed":
        _check_deepspeed(experiment, logistics)
    if experiment.grpo is not None:
        raise SweepError("workload grpo runs each trial on one device. Leave the devices out.")
    if device not in ("cpu", "cuda"):
        raise SweepError(f"device must be cpu or cuda for a trial on {devices}, got {device!r}.")
    if device == "cuda" and not logistics.is_elsewhere:
        import torch

        if (count := torch.cuda.device_count()) < devices:
            raise SweepError(
                f"devices-per-trial must be at most what this machine has ({count}), got {devices}."
            )
    return devices


def _check_deepspeed(experiment: Experiment, logistics: Logistics) -> None:
    if not logistics.is_elsewhere:
        require_extra("deepspeed", "deepspeed", "strategy deepspeed")
    lacking = {
        "zero must be 1, 2 or 3": not logistics.zero,
        "the optimizer must be adamw": experiment.optimizer.name != "adamw",
        "precision must be fp32 or bf16": experiment.precision == "bf16-pure",
        "weights must not be averaged": experiment.schedule.average > 0,
    }
    for what, is_lacking in lacking.items():
        if is_lacking:
            raise SweepError(f"with strategy deepspeed {what}. Change that, or leave it out.")


def decide_compile(plan: Plan, is_elsewhere: bool) -> Plan:
    """On CUDA whenever a compiler exists; on CPU only if the plan is also large enough."""
    from sweep.training.device import has_compiler

    device, flops = plan.execution.device, plan.total_flops()
    is_counted = device == "cpu" and plan.execution.device_memory_bytes is not None
    wanted = device.startswith("cuda") or (device == "cpu" and flops >= COMPILE_FLOPS)
    if plan.settings.model.kind == "quadratic":
        compiles, reason = False, "eager: the quadratic's steps are too small to compile"
    elif is_counted:
        compiles, reason = False, "eager: a memory limit on a CPU counts every operation's tensors"
    elif plan.execution.strategy == "deepspeed":
        compiles, reason = False, "eager: DeepSpeed's engine is not compiled"
    elif wanted and not is_elsewhere and not has_compiler(device):
        compiles, reason = False, "eager: no compiler on this machine"
    elif wanted:
        compiles, reason = True, "torch.compile"
    else:
        compiles, reason = False, f"eager: {flops:.1e} training FLOPs are too few to compile for"
    execution = plan.execution.model_copy(update={"compile": compiles, "compile_reason": reason})
    return plan.model_copy(update={"execution": execution})


def within_memory(plan: Plan) -> Execution:
    """Return the execution with the largest microbatch that fits the device by forecast."""
    from sweep.training.device import is_here

    row = max(plan.trials, key=lambda row: (row.microbatch_size, row.batch_size))
    execution = plan.execution
    if execution.device_memory_bytes is None and not is_here(execution.device):
        return execution.model_copy(update={"reason": UNBOUNDED})
    try:
        process = FreshProcess("sweep.memory.forecast:largest_here", plan.sample_config(row))
        bound, evaluation = process.result(timeout=FORECAST_SECONDS)
    except WorkerDied:  # a user's model that fake tensors cannot run
        return execution
    found = {"microbatch_bound": None, "evaluation_batch_size": evaluation}
    if bound < row.microbatch_size:
        found["microbatch_bound"] = bound
    return execution.model_copy(update=found)


def choose_by_preset(plan: Plan, precision: str, logistics: Logistics) -> tuple[Execution, str]:
    """Return the execution and the precision that a preset chooses, with its reason.

    Args:
        plan: as it would be without.
        precision: as given; of `auto` another may be chosen.
        logistics: as given.

    Raises:
        SweepError: if the model cannot be forecast.
    """
    from sweep.memory.presets import Asked
    from sweep.training.device import is_here

    device = plan.execution.device
    if plan.execution.device_memory_bytes is None and not is_here(device):
        raise SweepError(
            f"preset chooses by what a device holds, and this machine has no {device}. Say with "
            "--device-memory what those of the cluster hold, or leave --preset out."
        )
    row = max(plan.trials, key=lambda row: (row.microbatch_size, row.batch_size))
    asked = Asked(
        zero=logistics.zero,
        activation_checkpointing=logistics.activation_checkpointing,
        precision=precision != "auto" or plan.execution.strategy == "deepspeed",
        microbatch=logistics.is_split,
    )
    arguments = (plan.sample_config(row), logistics.preset, asked)
    try:
        process = FreshProcess("sweep.memory.presets:choose", *arguments)
        chosen: Chosen = process.result(timeout=FORECAST_SECONDS)
    except WorkerDied as error:
        raise SweepError(
            f"preset must be of a model whose memory can be forecast, but that failed ({error}). "
            "Leave it out, and give --microbatch."
        ) from error
    settled = {
        "zero": chosen.zero,
        "activation_checkpointing": chosen.activation_checkpointing,
        "microbatch_bound": None if logistics.is_split else chosen.microbatch_size,
        "evaluation_batch_size": min(plan.execution.evaluation_batch_size, chosen.microbatch_size),
        "reason": chosen.reason,
    }
    return plan.execution.model_copy(update=settled), chosen.precision
