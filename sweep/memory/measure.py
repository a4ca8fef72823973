"""One measured point: whole optimizer steps and an evaluation, in a process of its own."""

import math
import os
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

STEPS = 3  # the first makes the optimizer's states; all later ones are timed
LEARNING_RATE = 1e-6


def measure(
    config: TrialConfig, limit_bytes: int, steps: int, should_stop: ShouldStop
) -> Measurement:
    """Take whole optimizer steps and evaluate one batch, within a memory limit.

    Args:
        config: of the trial, with the batch size and the microbatch size to measure.
        limit_bytes: of the device; enforced.
        steps: optimizer steps, two at least.
        should_stop: asked between steps.
    """
    device = torch.device(config.execution.device)
    if device.type == "cuda" and (settings := os.environ.get("PYTORCH_ALLOC_CONF")):
        # torch was imported, and read the variable, before this process was forked and got it
        torch.cuda.memory._set_allocator_settings(settings)
    torch.set_num_threads(config.execution.threads)
    sizes = config.science.batch_size, config.microbatch_size
    try:
        with limited_memory(device, limit_bytes) as memory:
            taken = _take_steps(config, device, memory, steps, should_stop)
    except Exception as error:
        if is_out_of_memory(error):
            return Measurement(*sizes, "OUT_OF_MEMORY", str(error)[:300], total_bytes=limit_bytes)
        traceback.print_exc()
        return Measurement(*sizes, "ERROR", f"{type(error).__name__}: {str(error)[:300]}")
    point = Measurement(*sizes, "OK", total_bytes=limit_bytes, **taken)
    if device.type == "cuda":
        own = (point.device_bytes or 0) - memory.others_bytes
        if max(own, point.held_bytes or 0) > limit_bytes:
            return replace(point, status="SPILLED", message=f"{format_bytes(own)} of the device")
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
    updates = _count_updates(step)
    seconds, rests, loss = [], [], math.nan
    phases = Phases(memory.take_peak)
    if step.rollouts is not None:
        step.rollouts.on_phase = phases.note
    for _ in range(steps):
        start = time.perf_counter()
        phases.begin()
        batch = step.workload.random_batch(config.science.batch_size)
        is_split = config.science.batch_size > config.microbatch_size and step.rollouts is None
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
    tokens = config.science.batch_size * config.tokens_per_sequence
    return {
        "rest_bytes": int(statistics.median(rests)),
        "peak_bytes": memory.peak_bytes(),
        "reserved_bytes": memory.reserved_bytes(),
        "context_bytes": memory.context_bytes,
        "device_bytes": memory.device_bytes(),
        "allocator_retries": memory.retries(),
        "seconds_per_step": fastest,
        "tokens_per_second": tokens / fastest,
        "optimizer_steps": len(updates),
        "loss": loss if math.isfinite(loss) else None,
        "rests": tuple(rests),
        **({"phases": phases.peaks, "phase_seconds": phases.seconds} if step.rollouts else {}),
    }


def _count_updates(step: TrainingStep) -> list[None]:
    """Return a list that grows by one whenever the optimizer has updated the weights."""
    updates: list[None] = []
    if step.optimizer is not None:
        step.optimizer.register_step_post_hook(lambda *_: updates.append(None))
    return updates
