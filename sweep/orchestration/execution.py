"""Decide how a plan is executed on this machine: device, threads, compilation, microbatch."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.numbers import format_bytes, format_seconds
from sweep.config.optimizers import OPTIMIZER_FACTS, optimizer_facts
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.plan.plan import Plan, PlannedTrial, stages_of, tokens_at_once
from sweep.training.process import run_job
from sweep.trial.folder import SweepFolder

# Training that shares one compilation, below which compiling on a CPU costs more than it saves
# (docs/performance.md).
COMPILE_FLOPS = 1.5e12
# What compiling saves at a small step, besides its FLOPs, as FLOPs: about 1.5 ms on one core.
STEP_FLOPS = 1e8
COMPILE_SECONDS = 15.0  # training time with about so many FLOPs
# FLOPs of a microbatch up to which trials of one thread each train on more tokens together than one
# trial with all threads. They did at 5e9 and did not at 1e12; between, it was not measured.
AT_ONCE_FLOPS = 1e11
# Exponent of a small step's speed: two threads are 1.2 to 1.45 times as fast as one.
EXPONENT_OF_THREADS = 0.4
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
    gpus: int = 1  # that share the cores; 1 on a CPU, and for other machines


def is_for_elsewhere(chosen: Execution) -> bool:
    """Return True if a plan is for a GPU that is named, or for one where this machine has none."""
    if chosen.gpu is not None:
        return True
    return chosen.device_type == "cuda" and not run_job(_has_device, chosen.device)


def _has_device(name: str) -> bool:
    from sweep.training.device import is_available

    return is_available(name)


def inspect_machine(chosen: Execution, is_elsewhere: bool) -> Machine:
    """Inspect this machine in a child process, which imports torch and may use the device.

    Raises:
        SweepError: the device is missing, or has less memory than the limit that was chosen.
    """
    machine: Machine = run_job(_inspect_machine, chosen, is_elsewhere)
    return machine


def _inspect_machine(chosen: Execution, is_elsewhere: bool) -> Machine:
    from sweep.memory.limit import refuse_memory_limit
    from sweep.training.device import (
        available_cores,
        has_compiler,
        is_available,
        resolve_device,
        visible_gpus,
    )

    device = chosen.device if is_elsewhere else resolve_device(chosen.device)
    execution = chosen.model_copy(update={"device": device})
    if not is_elsewhere:
        refuse_memory_limit(execution)
    can_compile = has_compiler(execution.device_type) or not is_available(device)
    gpus = 1
    if device == "cuda" and not is_elsewhere:  # one trial per GPU, or group of GPUs, runs at a time
        gpus = len(visible_gpus())
    return Machine(device, available_cores(), can_compile, gpus)


def decide_execution(experiment: Experiment, chosen: Execution, machine: Machine) -> Execution:
    device = machine.device
    devices = chosen.devices
    if "devices" not in chosen.model_fields_set and chosen.microbatch and chosen.accumulation:
        sequences = chosen.microbatch * chosen.accumulation
        devices = max(1, min(experiment.batches) // sequences)  # checked in the plan
    _refuse_unsuited(experiment, chosen, device, devices)

    execution = chosen.model_copy(update={"device": device, "devices": devices})
    processes = max(devices, machine.gpus)
    decided: dict[str, Any] = {"threads": max(1, machine.cores // processes), "at_once": 1}
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
    """Return why compiling would cost more than it saves at a batch size; None if it pays at all.

    Each process compiles the steps of a batch size once. Trials of one batch size have one shape.
    With several budgets, those of the largest count, which take most of the time.
    """
    growth = 1.0
    if plan.later_budgets:
        growth = max(plan.later_budgets) / plan.budget_tokens
    rows_by_arm: dict[Arm, list[PlannedTrial]] = {}
    for row in plan.trials:
        rows_by_arm.setdefault(row.arm, []).append(row)

    budget = plan.settings.time_budget_seconds
    for arm, rows in rows_by_arm.items():
        compilations = len(rows)
        if shares_processes:
            compilations = min(compilations, plan.execution.trials_at_once)
        subject = f"at {arm.label} one compilation is for only"
        if budget is not None:
            seconds = budget * len(rows) / compilations
            if seconds < COMPILE_SECONDS:
                return f"{subject} {format_seconds(seconds)} of training"
            continue
        tokens = growth * sum(row.tokens for row in rows) / compilations
        steps = growth * sum(row.steps for row in rows) / compilations
        flops = (plan.model.flops_per_token or 0) * tokens
        if flops + STEP_FLOPS * steps < COMPILE_FLOPS:
            return f"{subject} {flops:.1e} training FLOPs in {steps:,.0f} steps"
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


class Limit(NamedTuple):
    """The most trials that may share a device, and why there are not more."""

    trials: int
    reason: str


def share_device(
    plan: Plan,
    folder: SweepFolder,
    at_once: int | str,
    machine: Machine,
    is_elsewhere: bool = False,
) -> Plan:
    """Return a plan of single trials with as many at once as the user chose: a number, or auto.

    Raises:
        SweepError: so many cannot share the device.
    """
    if at_once == 1:
        return plan
    cores = plan.execution.threads
    limit = _limit_of_device(plan, folder, cores, is_elsewhere)
    if isinstance(at_once, str):
        limit = _decide_trials_at_once(plan, limit, cores, machine.gpus)
        count = limit.trials
        reason = limit.reason
    elif at_once > limit.trials:
        raise SweepError(
            f"at_once must be at most {limit.trials}, as {limit.reason}, got {at_once}. Lower it."
        )
    else:
        count = at_once
        reason = "as chosen"
    return plan.with_execution(
        at_once=count,
        at_once_reason=reason,
        threads=max(1, cores // count),
        threads_alone=cores,
    )


def _limit_of_device(plan: Plan, folder: SweepFolder, cores: int, is_elsewhere: bool) -> Limit:
    """Return how many trials the device has cores and memory for."""
    if plan.settings.time_budget_seconds is not None:
        return Limit(1, "other trials would change what a budget of time buys")
    if plan.settings.target is not None:
        return Limit(1, "with a target, a trial may be given up because of those before it")
    if plan.execution.devices > 1:
        return Limit(1, "a trial has several devices")
    if is_elsewhere:
        return Limit(1, "the executor runs trials on other machines")

    graph_bound = decide_graphs(plan)["graph_bound"]
    configs = folder.located(plan.with_execution(graph_bound=graph_bound)).distinct_steps()
    try:
        count, needed_bytes, usable_bytes = run_job(count_trials_that_fit, configs, cores)
    except SweepError as error:
        return Limit(1, f"memory cannot be forecast ({error})")
    if count == cores:
        of_device = "1 core" if cores == 1 else f"{cores} cores"
        return Limit(cores, f"each device has {of_device}")
    sizes = f"{format_bytes(needed_bytes)} of {format_bytes(usable_bytes)}"
    return Limit(count, f"a trial may take {sizes} by forecast")


def count_trials_that_fit(configs: list[TrialConfig], most: int) -> tuple[int, int, int]:
    """Return how many trials, up to `most`, fit the memory here at once, by forecast.

    The bytes that the largest needs, and those that one alone may use, are returned too. A CUDA
    graph may take as much once more, because its memory serves nothing else.
    """
    from sweep.memory.forecast import Forecasts
    from sweep.memory.limit import usable_memory

    forecasts = Forecasts()
    execution = configs[0].execution
    needed_bytes = 0
    for config in configs:
        has_graph = config.science.batch_size <= execution.graph_bound
        copies = 2 if has_graph else 1
        needed_bytes = max(needed_bytes, copies * forecasts.of(config).needed_bytes)
    count = most
    while count > 1:
        shared = execution.model_copy(update={"at_once": count})
        if needed_bytes <= usable_memory(shared):
            break
        count -= 1
    return count, needed_bytes, usable_memory(execution)


def _decide_trials_at_once(plan: Plan, limit: Limit, cores: int, gpus: int) -> Limit:
    """Return the number of trials per device that train the most tokens, within all limits.

    On a GPU it is the largest, and the size of the steps is no limit: how well trials share it is
    not known.
    """
    most = max(map(len, stages_of(plan.trials)))  # that do not wait for others
    reason = f"at most {most} of the plan's trials can run together"
    if gpus > 1:
        reason += f" on {gpus} devices"
    limits = [limit, Limit(math.ceil(most / gpus), reason)]
    is_on_cpu = plan.execution.device == "cpu"
    if is_on_cpu:
        limits.insert(0, _limit_by_steps(plan, cores))
    least = min(limits, key=lambda limit: limit.trials)
    if not is_on_cpu:
        return least

    def speed(count: int) -> float:
        return float(count * (cores // count) ** EXPONENT_OF_THREADS)

    count = max(range(1, least.trials + 1), key=speed)
    if count == least.trials:
        return least
    return Limit(count, f"{least.reason}, and {count} make better use of {cores} cores")


def _limit_by_steps(plan: Plan, cores: int) -> Limit:
    """Return how many trials train on the most tokens together on a CPU, by their FLOPs."""
    if not plan.model.flops_per_token:
        return Limit(1, "the FLOPs of a step are not known")
    microbatch = max(row.microbatch_size for row in plan.trials)
    flops = microbatch * plan.tokens_per_sequence * plan.model.flops_per_token
    reason = f"a microbatch has up to {flops:.1e} FLOPs"
    if flops > AT_ONCE_FLOPS:
        return Limit(1, f"{reason}, which is taken to be better for one trial with all threads")
    return Limit(cores, f"{reason}, which is taken to be better for trials of one thread")


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
