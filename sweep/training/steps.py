"""A trial's steps in their order, and sums of what they measure."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sweep.config.trial import TrialConfig
from sweep.plan.steps import learning_rate_at
from sweep.training.device import forget_peak_memory, peak_memory_bytes
from sweep.training.noise import GradientSums
from sweep.training.progress import Progress
from sweep.training.step import StepOutput, TrainingStep
from sweep.workloads.meter import Meter


class Sums:
    """Sums over the steps since the last log point, on the device, so that no step waits.

    On a CPU, where there is nothing to wait for, they are numbers.
    """

    def __init__(
        self, progress: Progress, device: torch.device, meter: Meter | None = None
    ) -> None:
        self._sums: list[float] | Tensor
        self._sums = [progress.loss_sum, progress.norm_sum, progress.clipped_sum]
        self._meter = meter
        if meter is not None:
            meter.restore(progress.watched)
        if device.type != "cpu":
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self._sums = torch.tensor(self._sums, dtype=dtype, device=device)

    def add(self, output: StepOutput) -> None:
        """Add one step."""
        values = (output.loss, output.grad_norm, output.is_clipped)
        if isinstance(self._sums, Tensor):
            self._sums += torch.stack(values).to(self._sums.dtype)
        else:
            self._sums = [one + value.item() for one, value in zip(self._sums, values, strict=True)]

    def store(self, progress: Progress) -> None:
        """Read the sums back; waits for the device."""
        values = self._sums.tolist() if isinstance(self._sums, Tensor) else self._sums
        progress.loss_sum, progress.norm_sum, progress.clipped_sum = values
        progress.watched = self._meter.state() if self._meter else {}

    def clear(self) -> None:
        """Begin a new interval."""
        if self._meter is not None:
            self._meter.clear()
        if isinstance(self._sums, Tensor):
            self._sums.zero_()  # in place: a graph may hold it
        else:
            self._sums = [0.0, 0.0, 0.0]


class Phases:
    """Peak bytes and least seconds of each phase of steps that have several.

    Args:
        take_peak: returns the peak memory since it was last asked.
    """

    def __init__(self, take_peak: Callable[[], int]) -> None:
        self._take_peak = take_peak
        self.peaks: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Begin the first phase of a step, or the next."""
        self._take_peak()
        self._start = time.perf_counter()

    def note(self, name: str) -> None:
        """End a phase, and begin the next."""
        taken = time.perf_counter() - self._start
        self.peaks[name] = max(self.peaks.get(name, 0), self._take_peak())
        self.seconds[name] = min(self.seconds.get(name, math.inf), taken)
        self._start = time.perf_counter()


class Steps:
    """Takes the steps of a trial one by one.

    Args:
        config: of the trial.
        step: to take.
        sums: of what the steps measure.
    """

    def __init__(self, config: TrialConfig, step: TrainingStep, sums: Sums) -> None:
        self._config, self._step, self._sums = config, step, sums
        self._batch_size = config.science.batch_size // step.parallel.devices  # of this device
        self._phases: Phases | None = None
        if step.rollouts is not None:
            self._phases = Phases(self._take_peak)
            step.rollouts.on_phase = self._phases.note

    def take(self, t: int, noise: GradientSums | None) -> StepOutput:
        """Take step t = 1 …, S; `noise` sees its microbatches where it is measured."""
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
        """Return the metrics of the phases' peak memory since this was last asked."""
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
        """Return the peak since it was last forgotten."""
        phases = self._phases.peaks if self._phases else {}
        peaks = [peak_memory_bytes(self._step.device), *phases.values()]
        return max(peaks)

    def _take_peak(self) -> int:
        peak = peak_memory_bytes(self._step.device)
        forget_peak_memory(self._step.device)
        return peak


def build_steps(config: TrialConfig, step: TrainingStep, sums: Sums) -> Steps:
    """Return what takes a trial's steps."""
    return Steps(config, step, sums)
