"""The training loop, the same for every workload, and its measurements between log points."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from sweep.config.metrics import SECONDS
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.plan.course import Course
from sweep.plan.learning_rate import learning_rate_at
from sweep.training.checkpoint import CheckpointStore, Progress
from sweep.training.device import (
    flop_utilization,
    forget_peak_memory,
    instruction_set,
    peak_memory_bytes,
)
from sweep.training.noise import NoiseProbe
from sweep.training.process import ShouldStop
from sweep.training.step import TrainingStep
from sweep.trial.files import POSITION, MetricsLog
from sweep.workloads import ranks


class Steps:
    """Takes the steps of a trial, and reads their metrics from the workload's meter."""

    def __init__(self, config: TrialConfig, step: TrainingStep, progress: Progress) -> None:
        self.config = config
        self.course = Course.of_trial(config)
        self.step = step
        self.progress = progress
        step.workload.meter.restore(progress.watched)

    def take(self, t: int) -> Tensor:
        """Take step t = 1 … S, with this device's part of the batch; return the loss."""
        config = self.config
        science = config.science
        count = self.course.batch_at(t) // ranks.count()
        first = self.course.first_sequence(t) + ranks.rank() * count
        batch = self.step.workload.build_batch(first, count)
        self._learning_rate = learning_rate_at(
            t, science.learning_rate, config.steps, config.warmup_steps, science.schedule
        )
        return self.step(batch, self._learning_rate)

    def store(self) -> None:
        """Write the sums and the peak memory to the progress; waits for the device."""
        progress = self.progress
        progress.watched = self.step.workload.meter.state()
        self._peak_bytes = max(ranks.all_gather(peak_memory_bytes(self.step.device)))
        progress.peak_memory_bytes = max(progress.peak_memory_bytes, self._peak_bytes)

    def end_interval(self) -> dict[str, Any]:
        """Return the metrics since the last log point, and start a new interval, after `store`."""
        config = self.config
        progress = self.progress
        device = self.step.device

        tokens = self.course.tokens_at(progress.step) - self.course.tokens_at(progress.log_step)
        seconds = max(progress.seconds_training - progress.log_seconds, 1e-9)
        rate = tokens / seconds
        measured: dict[str, Any] = {
            "train/lr": self._learning_rate,
            "perf/tokens_per_second": rate,
        }
        utilization = flop_utilization(config, device, rate)
        if utilization is not None:
            measured["perf/mfu"] = utilization
        if device.type == "cuda":
            measured["memory/allocated_bytes"] = torch.cuda.memory_allocated(device)
            measured["memory/reserved_bytes"] = torch.cuda.memory_reserved(device)
            measured["memory/peak_bytes"] = self._peak_bytes
        else:  # no statistics
            measured["memory/allocated_bytes"] = self.step.parallel.rest_bytes()

        means = {name: total / count for name, (total, count) in progress.watched.items() if count}
        for name in means.keys() & {*measured, *POSITION}:
            raise SweepError(f"a workload must not add the metric {name!r} of sweep. Rename it.")

        line = means | measured
        self.step.workload.meter.clear()
        progress.clipped_steps += progress.watched["train/clipped"][0]
        progress.log_step = progress.step
        progress.log_seconds = progress.seconds_training
        return line


def train(
    config: TrialConfig,
    step: TrainingStep,
    store: CheckpointStore,
    should_stop: ShouldStop,
    started: float,  # start of the attempt, by `time.perf_counter`
    pause_step: int | None = None,
) -> tuple[str, Progress, str]:
    """Train; return the ending, the progress, and the sha256 of metrics.jsonl on rank 0.

    The ending is `trained`, `diverged`, `paused`, or what `should_stop` answered.
    """
    science = config.science
    progress = Progress()
    length = store.load(step, progress)
    if step.device.type == "cpu":
        progress.record_instructions(instruction_set())
    path = store.folder.metrics_path
    log = None if ranks.rank() else MetricsLog(path, length, store.fence)
    progress.charged_at = started
    progress.charge("other")
    if progress.step and log:
        print(f"continues from step {progress.step} of {config.steps}", flush=True)
    if config.execution.compile:
        step.warm_up()
        progress.charge("compile")
    steps = Steps(config, step, progress)
    noise = NoiseProbe(config, step, progress)
    course = steps.course
    train_points = frozenset(course.milestones(science.evaluation.train_points))
    valid_points = frozenset(course.milestones(science.evaluation.points))
    if progress.step == 0:
        start = step.run_evaluation(step.workload.evaluate_metrics)
        progress.start_loss = start.get("loss", math.nan)
        progress.start_reward = start.get("reward", math.nan)
        progress.charge("evaluation")
    forget_peak_memory(step.device)
    saved_at = time.monotonic()
    ending = None

    while progress.step < config.steps and ending is None:
        t = progress.step + 1
        loss = steps.take(t)
        progress.step = t
        if t == 1:
            progress.first_loss = loss.item()

        if t in train_points or t in valid_points or t in noise.steps:
            steps.store()  # waits for the device
            progress.charge("training")
            # Milliseconds, as in MLflow; never before the last line, even if the clock is set back.
            progress.logged_at = now = max(progress.logged_at, round(time.time(), 3))
            line: dict[str, Any] = {"time": now, "step": t, "tokens": course.tokens_at(t)}
            if t in train_points:
                line |= steps.end_interval()
                if progress.is_diverging(line["train/loss"], step.workload.divergence_margin):
                    ending = "diverged"
            if t in valid_points and ending is None:
                metrics = ranks.broadcast(step.run_evaluation(step.workload.evaluate_metrics))
                line |= {f"valid/{name}": value for name, value in metrics.items()}
                ending = progress.record_evaluation(
                    metrics, science.target, science.evaluation.window
                )
                progress.charge("evaluation")
            if t in noise.steps and ending is None:
                line |= noise.metrics(t)
                progress.charge("noise")
            if peak_memory_bytes(step.device) > progress.peak_memory_bytes:  # evaluations raise it
                forget_peak_memory(step.device)
                progress.charge("other")
            if log:
                log.append(line | {SECONDS: progress.seconds_total})

        if ending is None:
            is_due = time.monotonic() - saved_at > config.execution.checkpoint_seconds
            ending = "paused" if pause_step is not None and t >= pause_step else should_stop()
            ending, is_due = ranks.broadcast((ending, is_due))
            if ending or is_due:
                steps.store()
                progress.charge("training")
                store.save(step, progress, log)
                progress.charge("checkpoint")
                saved_at = time.monotonic()

    progress.charge("training")
    if ending is None:
        ending = "trained"
    keep = config.execution.kept_of(science.stage)
    if keep == "checkpoints" and ending == "trained":
        store.save(step, progress, log)
    progress.charge("checkpoint")
    if log:
        log.close()
    return ending, progress, log.sha256 if log else ""
