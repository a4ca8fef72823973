"""The training loop, the same for every workload, and what it measures between log points."""

import math
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from sweep.config.trial import TrialConfig
from sweep.plan.steps import learning_rate_at, milestone_steps, probe_sizes
from sweep.training.checkpoint import CheckpointStore
from sweep.training.device import (
    flop_utilisation,
    forget_peak_memory,
    is_out_of_memory,
    memory_metrics,
    peak_memory_bytes,
)
from sweep.training.noise import GradientSums
from sweep.training.progress import Clock, Progress
from sweep.training.step import StepOutput, TrainingStep
from sweep.workloads import ranks
from sweep.workloads.protocol import Meter


class Sums:
    """Sums of loss, gradient norm and clipped steps since the last log point.

    They stay on the device, so that no step waits for it.
    """

    def __init__(
        self, progress: Progress, device: torch.device, meter: Meter | None = None
    ) -> None:
        sums = [progress.loss_sum, progress.norm_sum, progress.clipped_sum]
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.tensor(sums, dtype=dtype, device=device)
        self._meter = meter
        if meter is not None:
            meter.restore(progress.watched)

    def add(self, output: StepOutput) -> None:
        """Add one step."""
        self._sums += torch.stack([output.loss, output.grad_norm, output.is_clipped])

    def store(self, progress: Progress) -> None:
        """Write the sums to the progress; waits for the device."""
        progress.loss_sum, progress.norm_sum, progress.clipped_sum = self._sums.tolist()
        progress.watched = self._meter.state() if self._meter else {}

    def clear(self) -> None:
        """Start a new interval."""
        if self._meter is not None:
            self._meter.clear()
        self._sums.zero_()


class Phases:
    """Peak bytes and least seconds of each phase of a step.

    Args:
        take_peak: returns the peak memory since its last call.
    """

    def __init__(self, take_peak: Callable[[], int]) -> None:
        self._take_peak = take_peak
        self.peaks: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Start the first phase of a step."""
        self._take_peak()
        self._start = time.perf_counter()

    def note(self, name: str) -> None:
        """End a phase and start the next one."""
        taken = time.perf_counter() - self._start
        self.peaks[name] = max(self.peaks.get(name, 0), self._take_peak())
        self.seconds[name] = min(self.seconds.get(name, math.inf), taken)
        self._start = time.perf_counter()


class Steps:
    """Takes the steps of a trial, with this device's part of each batch."""

    def __init__(self, config: TrialConfig, step: TrainingStep, sums: Sums) -> None:
        self._config, self._step, self._sums = config, step, sums
        self._batch_size = config.science.batch_size // step.parallel.devices
        self._phases: Phases | None = None
        if step.rollouts is not None:
            self._phases = Phases(self._take_peak)
            step.rollouts.on_phase = self._phases.note

    def take(self, t: int, noise: GradientSums | None) -> StepOutput:
        """Take step t = 1 …, S; `noise` receives the microbatches' gradients, if given."""
        if self._phases:
            self._phases.begin()
        parallel = self._step.parallel
        first = ((t - 1) * parallel.devices + parallel.rank) * self._batch_size
        batch = self._step.workload.build_batch(first, self._batch_size)
        output = self._step(batch, self.rate(t), noise)
        self._sums.add(output)
        if self._phases:
            self._phases.note("update")
        return output

    def phase_peaks(self) -> dict[str, int]:
        """Return the peak memory of each phase as metrics, and forget it."""
        if self._phases is None:
            return {}
        peaks, self._phases.peaks = self._phases.peaks, {}
        return {f"perf/{name}_peak_bytes": peak for name, peak in peaks.items()}

    def rate(self, t: int) -> float:
        """Return the learning rate of step t."""
        config, science = self._config, self._config.science
        return learning_rate_at(
            t, science.learning_rate, config.steps, config.warmup_steps, science.schedule
        )

    def peak_memory_bytes(self) -> int:
        """Return the peak memory since it was last reset."""
        phases = self._phases.peaks.values() if self._phases else ()
        return max(peak_memory_bytes(self._step.device), *phases, 0)

    def _take_peak(self) -> int:
        peak = peak_memory_bytes(self._step.device)
        forget_peak_memory(self._step.device)
        return peak


class NoiseProbe:
    """Measures the gradient noise at milestones, without updates.

    All batch sizes use the same sequences, the last of the data's first epoch. No step trains on
    them unless training and probes together exceed one epoch.
    """

    def __init__(self, config: TrialConfig, step: TrainingStep) -> None:
        science = config.science
        self._step, self._devices = step, step.parallel.devices
        self._trained = science.tokens // config.tokens_per_sequence
        budget = (config.token_budget or science.tokens) // config.tokens_per_sequence
        points = science.evaluation.noise_points
        if step.rollouts is not None or not step.parallel.shows_gradients:
            points = 0
        share = science.evaluation.noise_share
        self._sizes = probe_sizes(budget, points, share, step.microbatch_size, self._devices)
        count = self._sizes.points
        self._probes = milestone_steps(config.steps, count) if count else ()
        is_split = points > 0 and science.batch_size // self._devices > step.microbatch_size
        self._splits = frozenset(milestone_steps(config.steps, points) if is_split else ())
        self._is_on = True
        self.steps = tuple(sorted(self._splits.union(self._probes)))

    @cached_property
    def _first(self) -> int:
        epochs = self._step.workload.epochs()
        if not epochs:  # the data never repeat: a position beyond any training
            return 1 << 44
        # The last sequences of the first epoch, which a shorter training does not see.
        return max(0, round(self._trained / epochs) - self._sizes.points * self._sizes.sequences)

    def sums_at(self, step: int) -> GradientSums | None:
        """Return sums for the microbatches of this training step, if their noise is measured."""
        return GradientSums() if step in self._splits else None

    def metrics(self, step: int, sums: GradientSums | None) -> dict[str, float]:
        """Return `noise/trace` and `noise/square` of the probe, and those of the training step."""
        metrics: dict[str, float] = {}
        if sums is not None:
            trace, square = sums.estimates(self._step.microbatch_size * self._devices)
            metrics |= {"noise/train_trace": trace, "noise/train_square": square}
        if not self._is_on or step not in self._probes:
            return metrics
        count = self._sizes.sequences // self._devices
        first = self._first + self._probes.index(step) * self._sizes.sequences
        try:
            batch = self._step.workload.build_batch(first + self._step.parallel.rank * count, count)
            trace, square = self._step.measure_noise(batch, self._sizes.part)
        except Exception as error:
            if not is_out_of_memory(error) or self._devices > 1:  # the other processes would wait
                raise
            self._is_on = False
            print(f"gradient noise is no longer probed: {error}", flush=True)
            self._step.model.zero_grad(set_to_none=True)
            return metrics
        return metrics | {"noise/trace": trace, "noise/square": square}


DUE = "due"  # for a checkpoint


def train(
    config: TrialConfig,
    step: TrainingStep,
    store: CheckpointStore,
    device: torch.device,
    should_stop: Callable[[], str | None],
    started: float,
    pause_step: int | None = None,
) -> tuple[str, Progress, Clock]:
    """Train one trial from its newest checkpoint to its last step, or until it is stopped.

    Args:
        config: the trial.
        step: takes the steps; its model and optimizer are restored and trained.
        store: reads and writes the checkpoints.
        device: this process's device.
        should_stop: polled after every step; an answer ends the loop after a checkpoint.
        started: start of the attempt, by `time.perf_counter`.
        pause_step: the step after which the loop ends with a checkpoint; None: no pause.

    Returns:
        `trained`, `diverged`, `paused` or the answer of `should_stop`; progress and clock.
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
    noise, steps = NoiseProbe(config, step), Steps(config, step, sums)
    noise_points = set(noise.steps)
    step_tokens = science.batch_size * config.tokens_per_sequence
    if progress.step == 0:
        progress.start_loss = step.evaluated(step.workload.evaluate)
        clock.charge("evaluation")
    forget_peak_memory(device)
    saved_at, ending = time.monotonic(), None

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
            progress.peak_memory_bytes = max(progress.peak_memory_bytes, peak)
            clock.charge("training")
            now = round(time.time(), 3)  # MLflow keeps milliseconds
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
    clock.charge("checkpoint")
    log.close()
    return ending, progress, clock
