"""The training loop: the whole story of one trial, in one function."""

import time
from collections.abc import Callable
from typing import Any

import torch

from sweep.config.trial import TrialConfig
from sweep.plan.steps import milestone_steps
from sweep.training.checkpoint import CheckpointStore
from sweep.training.device import (
    flop_utilisation,
    forget_peak_memory,
    give_back_memory,
    memory_metrics,
    peak_memory_bytes,
)
from sweep.training.noise import NoiseProbe
from sweep.training.progress import Clock, Progress
from sweep.training.step import TrainingStep
from sweep.training.steps import Sums, build_steps
from sweep.workloads import ranks

DUE = "due"  # a checkpoint is


def train(
    config: TrialConfig,
    step: TrainingStep,
    store: CheckpointStore,
    device: torch.device,
    should_stop: Callable[[], str | None],
    started: float,
    pause_step: int | None = None,
) -> tuple[str, Progress, Clock]:
    """Train one trial from its newest checkpoint to its last step, or until told to stop.

    Args:
        config: of the trial.
        step: the step to take; its model and optimizer are restored and trained.
        store: reads and writes the checkpoints.
        device: the trial's.
        should_stop: asked after every step; an answer ends the loop behind a checkpoint.
        started: when the attempt began, by `time.perf_counter`.
        pause_step: the step behind which the loop ends with a checkpoint; None: none.

    Returns:
        `trained`, `diverged`, `paused` or the answer of `should_stop`; and how far and how long.
    """
    science, progress = config.science, Progress()
    log = store.open_log(store.load(step, progress))
    if progress.step and not ranks.rank():
        print(f"goes on from step {progress.step} of {config.steps}", flush=True)
    sums = Sums(progress, device, step.rollouts.meter if step.rollouts else None)
    clock = Clock(progress, started)
    clock.charge("other")
    if config.execution.compile:
        step.warm_up()
        clock.charge("compile")
    train_points = set(milestone_steps(config.steps, science.evaluation.train_points))
    valid_points = set(milestone_steps(config.steps, science.evaluation.points))
    noise, steps = NoiseProbe(config, step), build_steps(config, step, sums)
    noise_points = set(noise.steps)
    step_tokens = science.batch_size * config.tokens_per_sequence
    if progress.step == 0:
        progress.start_loss = step.evaluated(step.workload.evaluate)
        give_back_memory()
        clock.charge("evaluation")
    forget_peak_memory(device)
    saved_at = time.monotonic()
    ending: str | None = None

    while progress.step < config.steps and ending is None:
        t = progress.step + 1
        noise_sums = noise.sums_at(t)
        output = steps.take(t, noise_sums)
        progress.step = t
        if t == 1:
            progress.first_loss = output.loss.item()

        if t in train_points or t in valid_points or t in noise_points:
            sums.store(progress)  # waits for the device
            peak = ranks.largest(steps.peak_memory_bytes())
            progress.see_peak_memory(peak)
            clock.charge("training")
            now = round(time.time(), 3)  # as exactly as MLflow keeps it
            line: dict[str, Any] = {"time": now, "step": t, "tokens": t * step_tokens}
            if t in train_points:
                tokens = (t - progress.log_step) * step_tokens
                line |= progress.interval_metrics() | {"train/lr": steps.rate(t)}
                speed = line["perf/tokens_per_second"] = tokens / progress.interval_seconds()
                if (utilisation := flop_utilisation(config, device, speed)) is not None:
                    line["perf/mfu"] = utilisation
                line |= memory_metrics(device, step.rest_bytes(), peak)
                if step.rollouts:
                    line["perf/completions_per_second"] = speed / config.tokens_per_sequence
                    line |= steps.phase_peaks()
                if progress.is_diverging(line["train/loss"], step.rollouts is None):
                    ending = "diverged"
                progress.start_interval()
                sums.clear()
            if t in valid_points and ending is None:
                loss = line["valid/loss"] = ranks.agreed(step.evaluated(step.workload.evaluate))
                if progress.see_valid_loss(loss):
                    ending = "diverged"
                elif progress.has_reached(science.target, loss, science.evaluation.window):
                    ending = "trained"
                clock.charge("evaluation")
            if t in noise_points and ending is None:
                line |= noise.metrics(t, noise_sums)
                clock.charge("noise")
            if peak_memory_bytes(device) > progress.peak_memory_bytes:  # not by training
                give_back_memory()
                forget_peak_memory(device)
                clock.charge("other")
            log.append(line)

        if ending is None:
            is_due = time.monotonic() - saved_at > config.execution.checkpoint_seconds
            is_pause = pause_step is not None and t >= pause_step
            word = ranks.agreed("paused" if is_pause else should_stop() or (is_due and DUE) or None)
            ending = word if word != DUE else None
            if word:
                sums.store(progress)
                clock.charge("training")
                store.save(step, progress, log)
                clock.charge("checkpoint")
                saved_at = time.monotonic()

    clock.charge("training")
    ending = ending or "trained"
    is_kept = science.stage == "report" and config.execution.keep == "checkpoints"
    if ending == "trained" and is_kept:
        store.save(step, progress, log)
    store.wait()
    clock.charge("checkpoint")
    log.close()
    return ending, progress, clock
