"""Decide how a plan is executed on this machine: device, threads, compilation, microbatch."""

import math
from dataclasses import dataclass
from typing import Any

from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.numbers import format_bytes, format_seconds
from sweep.config.optimizers import OPTIMIZER_FACTS, optimizer_facts
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.plan.plan import Plan, tokens_at_once
from sweep.training.process import run_job
from sweep.trial.folder import SweepFolder

# Training that shares one compilation, below which compiling on a CPU costs more than it saves
# (docs/performance.md).
COMPILE_FLOPS = 1.5e12
COMPILE_SECONDS = 15.0  # training time with about so many FLOPs
# FLOPs of a microbatch up to which trials of one thread each train on more tokens together than one
# trial with all threads (docs/performance.md).
AT_ONCE_FLOPS = 1e11
PROCESS_BYTES = {"cpu": 512 << 20, "cuda": 1 << 30}  # of a process without its tensors
# Size of a step, above which its kernels run for longer than they take to launch.
GRAPH_FLOPS = 10**12  # over 2 ms on an H100 or H200
GRAPH_TOKENS = 16_384  # small models with many tokens wait for memory
LOSS_CHUNK_ROWS = {"cuda": 8192, "cpu": 1024, "mps": 1024}  # docs/performance.md


@dataclass(frozen=True)
class Machine:
    """Properties of this machine on which the execution of a plan depends."""

    device: str  # resolved, unless trials run elsewhere
    cores: int
    can_compile: bool  # for that device; assumed if this machine lacks it


def inspect_machine(chosen: Execution, is_elsewhere: bool) -> Machine:
    """Inspect this machine in a child process, which imports torch and may use the device.

    Raises:
        SweepError: the device is missing, or has less memory than the limit that was chosen.
    """
    machine: Machine = run_job(_inspect_machine, chosen, is_elsewhere)
    return machine


def _inspect_machine(chosen: Execution, is_elsewhere: bool) -> Machine:
    from sweep.memory.limit import refuse_memory_limit
    from sweep.training.device import available_cores, has_compiler, is_available, resolve_device

    device = chosen.device if is_elsewhere else resolve_device(chosen.device)
    execution = chosen.model_copy(update={"device": device})
    if not is_elsewhere:
        refuse_memory_limit(execution)
    can_compile = has_compiler(execution.device_type) or not is_available(device)
    return Machine(device, available_cores(), can_compile)


def decide_execution(experiment: Experiment, chosen: Execution, machine: Machine) -> Execution:
    device = machine.device
    devices = chosen.devices
    if "devices" not in chosen.model_fields_set and chosen.microbatch and chosen.accumulation:
        sequences = chosen.microbatch * chosen.accumulation
        devices = max(1, min(experiment.batches) // sequences)  # checked in the plan
    _refuse_unsuited(experiment, chosen, device, devices)

    execution = chosen.model_copy(update={"device": device, "devices": devices})
    decided: dict[str, Any] = {"threads": max(1, machine.cores // devices), "at_once": 1}
    if experiment.workload.has_known_model:
        sequences = tokens_at_once(device) // experiment.tokens_per_sequence
        decided["evaluation_batch_size"] = max(1, sequences)
    else:
        decided["evaluation_batch_size"] = 1
    if chosen.loss_chunk_rows is None:
        decided["loss_chunk_rows"] = LOSS_CHUNK_ROWS[execution.device_type]
    return execution.model_copy(update=decided)


def _refuse_unsuited(experiment: Experiment, chosen: Execution, device: str, devices: int) -> None:
    """Refuse choices that the experiment's workload, its optimizers or the device cannot have."""
    experiment.workload.refuse_execution(chosen.model_fields_set)
    samples = experiment.workload.samples
    names = experiment.optimizer_names
    if chosen.zero and not all(optimizer_facts(name)["shards"] for name in names):
        sharded = [name for name, facts in OPTIMIZER_FACTS.items() if facts["shards"]]
        problem = f"zero shards the optimizers {' and '.join(sharded)}, got {' and '.join(names)}"
        raise SweepError(f"{problem}. Leave it out.")
    if chosen.generation_batch_size and not samples:
        raise SweepError("generation_batch_size applies only to the workload grpo. Leave it out.")
    if devices == 1 and chosen.zero:
        raise SweepError("zero needs several devices. Add --devices-per-trial, or leave it out.")
    subject = f"{devices} devices per trial need"
    if devices > 1 and samples:
        name = experiment.workload.name
        raise SweepError(
            f"{subject} a workload that does not sample, got {name!r}. Use one device per trial."
        )
    if devices > 1 and device not in ("cpu", "cuda"):
        raise SweepError(
            f"{subject} the device cpu or cuda, got {device!r}. Use one device per trial."
        )


def reason_for_eager_steps(plan: Plan, machine: Machine, shares_processes: bool) -> str | None:
    """Return why steps are not compiled; None if they are.

    `shares_processes`: whether trials run one after the other in a process, if they can.
    """
    reason = _reason_against_compiling(plan, machine)
    if reason is None and plan.execution.device == "cpu":
        can_share = plan.trial_config(plan.trials[0]).may_share_process
        reason = _reason_by_length(plan, shares_processes and can_share)
    return reason


def compile_as_timed(plan: Plan, is_compiled: bool, is_elsewhere: bool) -> Plan:
    """Return the plan with steps that are compiled, or not, as those whose times it takes.

    Whether compiling pays then does not count, but whether it is possible here does.
    """
    if is_compiled == plan.execution.compile:
        return plan
    if is_compiled:
        machine = inspect_machine(plan.execution, is_elsewhere)
        if _reason_against_compiling(plan, machine):
            return plan
    text = "torch.compile" if is_compiled else "eager"
    reason = f"{text}: as the steps were timed"
    return plan.with_execution(compile=is_compiled, compile_reason=reason)


def _reason_against_compiling(plan: Plan, machine: Machine) -> str | None:
    """Return why steps cannot be compiled; None if they can."""
    execution = plan.execution
    device = execution.device
    if device == "cpu" and execution.device_memory_bytes is not None:
        return "a memory limit on a CPU counts the tensors of every operation"
    if device == "mps":
        return f"compiling is not supported on {device}"
    if not machine.can_compile:
        return "no compiler on this machine"
    return None


def _reason_by_length(plan: Plan, shares_processes: bool) -> str | None:
    """Return why compiling would cost more than it saves; None if it pays.

    The trials of a batch size share one compilation if they share a process.
    """
    compilations = len(plan.trials)
    if shares_processes:
        compilations = len({row.arm for row in plan.trials})
    subject = "one compilation is for only"
    budget = plan.settings.time_budget_seconds
    if budget is not None:
        seconds = budget * len(plan.trials) / compilations
        if seconds < COMPILE_SECONDS:
            return f"{subject} {format_seconds(seconds)} of training"
        return None
    tokens = sum(row.tokens for row in plan.trials) / compilations
    flops = (plan.model.flops_per_token or 0) * tokens
    if flops < COMPILE_FLOPS:
        return f"{subject} {flops:.1e} training FLOPs"
    return None


def decide_graphs(plan: Plan) -> dict[str, Any]:
    """Return changes of the execution so that updates bound by launches are CUDA graphs."""
    if plan.execution.device_type != "cuda":
        return {"graph_bound": 0, "graph_reason": ""}
    reason = _reason_against_graphs(plan)
    if reason:
        return {"graph_bound": 0, "graph_reason": f"none: {reason}"}
    bound = _largest_bound_by_launches(plan)
    if bound == 0:
        return {"graph_bound": 0, "graph_reason": "none: launches do not bound even one sequence"}
    text = f"up to batch size {bound}; launches do not bound larger steps"
    return {"graph_bound": bound, "graph_reason": text}


def _largest_bound_by_launches(plan: Plan) -> int:
    """Return the largest batch size whose kernels take longer to launch than to run, roughly."""
    flops_per_token = plan.model.flops_per_token or math.inf  # unknown: none
    tokens = min(GRAPH_FLOPS / flops_per_token, GRAPH_TOKENS)
    return int(tokens // plan.tokens_per_sequence)


def _reason_against_graphs(plan: Plan) -> str | None:
    """Return why a CUDA graph cannot contain the update of a step; None if it can."""
    settings = plan.settings
    if plan.execution.devices > 1:
        return "a trial has several devices"
    if not settings.workload.has_fixed_kernels:
        return f"batches of {settings.workload.name} may differ in their kernels"
    if not settings.model.has_fixed_kernels:
        return f"batches may differ in the kernels of {settings.model.name}"
    if plan.execution.activation_checkpointing:
        return "activation checkpointing reads the random state"
    if not any(optimizer_facts(name)["captured"] for name in settings.optimizer_names):
        return f"{' and '.join(settings.optimizer_names)} cannot be captured"
    return None


def share_device(plan: Plan, folder: SweepFolder, asked: Any, is_elsewhere: bool) -> Plan:
    """Return the plan with as many trials at once as the user asked for: a number, or auto.

    Raises:
        SweepError: so many cannot share the device.
    """
    if asked == 1:
        return plan
    cores = plan.execution.threads
    reason = _reason_against_sharing(plan, is_elsewhere)
    if reason:
        most = 1
    else:
        most, reason = _most_by_memory(plan, folder, cores)

    if asked != "auto":
        if asked > most:
            raise SweepError(f"at_once must be at most {most}, as {reason}, got {asked}. Lower it.")
        count = asked
        reason = "as chosen"
    elif most > 1:
        paying, why = _count_that_pays(plan, cores)
        count = min(most, paying, len(plan.trials))
        reason = reason if most < paying else why
    else:
        count = 1
    threads = max(1, cores // count)
    return plan.with_execution(at_once=count, threads=threads, at_once_reason=reason)


def _reason_against_sharing(plan: Plan, is_elsewhere: bool) -> str:
    """Return why each trial has a device of its own; "" if it does not need one."""
    if plan.settings.time_budget_seconds is not None:
        return "other trials would change what a budget of time buys"
    if plan.execution.devices > 1:
        return "a trial has several devices"
    if is_elsewhere:
        return "the executor runs trials on other machines"
    return ""


def _most_by_memory(plan: Plan, folder: SweepFolder, cores: int) -> tuple[int, str]:
    """Return how many trials have a core each and fit the memory by forecast, and the reason."""
    by_cores = cores, f"the machine has {cores} cores"
    if not plan.settings.workload.has_known_model:
        return by_cores
    configs = folder.located(plan).distinct_steps()
    try:
        needed, usable = run_job(forecast_largest, configs)
    except SweepError as error:
        return 1, f"memory cannot be forecast ({error})"
    needed += PROCESS_BYTES.get(plan.execution.device_type, 0)
    if cores * needed <= usable:
        return by_cores
    sizes = f"{format_bytes(needed)} of {format_bytes(usable)}"
    return max(1, usable // needed), f"a trial may take {sizes} by forecast"


def forecast_largest(configs: list[TrialConfig]) -> tuple[int, int]:
    """Return the bytes that the largest of some trials needs, and those that are usable here."""
    from sweep.memory.forecast import Forecasts
    from sweep.memory.limit import usable_memory

    forecasts = Forecasts()
    needed = max(forecasts.of(config).needed_bytes for config in configs)
    return needed, usable_memory(configs[0].execution)


def _count_that_pays(plan: Plan, cores: int) -> tuple[int, str]:
    """Return how many trials at once the steps suggest, and why."""
    if plan.execution.device_type != "cpu":
        return cores, "one process leaves a GPU idle between kernels"
    if not plan.model.flops_per_token:
        return 1, "the FLOPs of a step are not known"
    microbatch = max(row.microbatch_size for row in plan.trials)
    flops = microbatch * plan.tokens_per_sequence * plan.model.flops_per_token
    reason = f"a microbatch has up to {flops:.1e} FLOPs"
    if flops > AT_ONCE_FLOPS:
        return 1, f"{reason}, which several threads speed up"
    return cores, f"{reason}, for which one thread is enough"


def bound_by_memory(plan: Plan, folder: SweepFolder) -> dict[str, Any]:
    """Return changes of the execution so that steps fit the device by forecast."""
    if not plan.settings.workload.has_known_model:
        return {}
    try:
        configs = folder.located(plan).distinct_steps()
        bounds: dict[str, Any] = run_job(bound_on_this_machine, configs)
        return bounds
    except SweepError as error:
        return {"reason": f"The microbatch is not limited by a memory forecast ({error})."}


def bound_on_this_machine(configs: list[TrialConfig]) -> dict[str, Any]:
    """Return changes of the execution with which all planned steps fit here by forecast."""
    from sweep.memory.forecast import Forecasts
    from sweep.memory.limit import usable_memory

    execution = configs[0].execution
    forecasts = Forecasts(execution.devices, execution.zero)
    return forecasts.bound(configs, usable_memory(execution))
