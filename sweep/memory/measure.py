"""Measure one configuration: whole optimizer steps and an evaluation in this process."""

import math
import statistics
import time
import traceback
from dataclasses import replace
from typing import Any

import torch

from sweep.config.numbers import format_bytes
from sweep.config.trial import TrialConfig
from sweep.memory.points import Measurement
from sweep.training.device import forget_peak_memory, is_out_of_memory
from sweep.training.device_memory import DeviceMemory, limited_memory
from sweep.training.noise import GradientSums
from sweep.training.process import ShouldStop
from sweep.training.step import TrainingStep
from sweep.training.steps import Phases

LEARNING_RATE = 1e-6


def measure(
    config: TrialConfig, limit_bytes: int, steps: int, should_stop: ShouldStop
) -> Measurement:
    """Take at least two optimizer steps and evaluate one batch, within an enforced memory limit.

    The first step creates the optimizer states and is not timed.
    """
    device = torch.device(config.execution.device)
    torch.set_num_threads(config.execution.threads)
    sizes = config.science.batch_size, config.microbatch_size
    try:
        with limited_memory(device, limit_bytes) as memory:
            values = _take_steps(config, device, memory, steps, should_stop)
    except Exception as error:
        if is_out_of_memory(error):
            return Measurement(*sizes, "OUT_OF_MEMORY", str(error)[:300], total_bytes=limit_bytes)
        traceback.print_exc()
        return Measurement(*sizes, "ERROR", f"{type(error).__name__}: {str(error)[:300]}")
    point = Measurement(*sizes, "OK", total_bytes=limit_bytes, **values)
    if device.type == "cuda":
        own = (point.device_bytes or 0) - memory.others_bytes
        if max(own, point.held_bytes or 0) > limit_bytes:
            return replace(point, status="SPILLED", message=f"{format_bytes(own)} in use")
    return point


def _take_steps(
    config: TrialConfig,
    device: torch.device,
    memory: DeviceMemory,
    steps: int,
    should_stop: ShouldStop,
) -> dict[str, Any]:
    step = TrainingStep(config, device, config.microbatch_size)
    if config.execution.compile:
        step.warm_up()
        forget_peak_memory(device)
    updates: list[None] = []
    if step.optimizer is not None:
        step.optimizer.register_step_post_hook(lambda *_: updates.append(None))
    seconds, rests, loss = [], [], math.nan
    phases = Phases(memory.take_peak)
    if step.rollouts is not None:
        step.rollouts.on_phase = phases.note
    is_split = config.science.batch_size > config.microbatch_size and step.rollouts is None
    for _ in range(steps):
        start = time.perf_counter()
        phases.begin()
        batch = step.workload.random_batch(config.science.batch_size)
        loss = step(batch, LEARNING_RATE, GradientSums() if is_split else None).loss.item()
        seconds.append(time.perf_counter() - start)
        del batch
        phases.note("update")
        rests.append(memory.allocated_bytes())
        if should_stop():
            break
    expected = len(seconds) * (step.rollouts.updates_per_step if step.rollouts else 1)
    assert step.optimizer is None or len(updates) == expected, "a step without an update"
    step.evaluate(step.workload.random_batch(config.execution.evaluation_batch_size)).item()
    fastest = min(seconds[1:] or seconds)
    return {
        "rest_bytes": int(statistics.median(rests)),
        "peak_bytes": memory.peak_bytes(),
        "reserved_bytes": memory.reserved_bytes(),
        "context_bytes": memory.context_bytes,
        "device_bytes": memory.device_bytes(),
        "allocator_retries": memory.retries(),
        "seconds_per_step": fastest,
        "tokens_per_second": config.science.batch_size * config.tokens_per_sequence / fastest,
        "optimizer_steps": len(updates),
        "loss": loss if math.isfinite(loss) else None,
        "rests": tuple(rests),
        **({"phases": phases.peaks, "phase_seconds": phases.seconds} if step.rollouts else {}),
    }
