"""A trial's steps in their order: one by one, or replayed as one CUDA graph.

A graph holds a whole step: gather from tokens on the device, forward, backward, clip, AdamW, sums.
What differs from step to step, sequences and rate, is sent for many steps at once, so that between
log points nothing waits for the host.
"""

import math
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sweep.config.trial import Science, TrialConfig
from sweep.plan.steps import learning_rate_at
from sweep.training.device import forget_peak_memory, peak_memory_bytes
from sweep.training.noise import GradientSums
from sweep.training.progress import Progress
from sweep.training.step import StepOutput, TrainingStep
from sweep.workloads.meter import Meter
from sweep.workloads.protocol import OnDevice

GRAPH_TOKENS = 32_768  # of the largest step worth a graph: beyond, kernels outlast their launches
FED_STEPS = 512  # sent to the device at a time
WARM_UP = 3  # steps before the capture, on its stream, in which libraries allocate what they keep
SWITCH = "SWEEP_CUDA_GRAPHS"  # 0: none


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


class GraphedSteps(Steps):
    """Replays one graph for every step but the first few and those whose noise is measured.

    On a CPU, where there are no graphs, each step runs the same operations: for tests.
    """

    def __init__(self, config: TrialConfig, step: TrainingStep, sums: Sums) -> None:
        super().__init__(config, step, sums)
        assert isinstance(step.workload, OnDevice)
        self._workload, device = step.workload, step.device
        self._indices = torch.zeros(FED_STEPS, self._batch_size, dtype=torch.int64, device=device)
        self._rates = torch.zeros(FED_STEPS, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)  # of the next step, in them
        self._next: int | None = None  # the step that `_place` points to
        self._fed = range(0)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._warm = 0  # steps taken to warm up
        self._replay: Callable[[], object] | None = None
        self._output: StepOutput | None = None
        self._peak_bytes = 0  # of the graph's own memory, which no replay asks for again

    def take(self, t: int, noise: GradientSums | None) -> StepOutput:
        """Take step t."""
        if noise is not None:
            return super().take(t, noise)
        if t not in self._fed:
            self._feed(t)
        elif t != self._next:
            self._place.fill_(t - self._fed.start)
        if self._stream is None:
            self._body()
        elif self._warm < WARM_UP:
            self._warm += 1
            self._warm_up(self._stream)
        else:
            self._replay = self._replay or self._capture(self._stream)
            self._replay()
        self._next = t + 1
        assert self._output is not None
        return self._output

    def peak_memory_bytes(self) -> int:
        """Return the peak since it was last forgotten, at least that of the captured step."""
        return max(super().peak_memory_bytes(), self._peak_bytes)

    def _feed(self, t: int) -> None:
        """Send the sequences and rates of the steps from t on."""
        self._fed = range(t, min(t + FED_STEPS, self._config.steps + 1))
        size, count = self._batch_size, len(self._fed)
        found = self._workload.sequence_indices((t - 1) * size, count * size)
        indices = torch.from_numpy(found).view(count, size)
        rates = torch.tensor([self.rate(step) for step in self._fed])
        if self._step.device.type == "cuda":
            indices, rates = indices.pin_memory(), rates.pin_memory()
        self._indices[:count].copy_(indices, non_blocking=True)
        self._rates[:count].copy_(rates, non_blocking=True)
        self._place.zero_()

    def _body(self) -> None:
        batch = self._workload.batch_at(self._indices.index_select(0, self._place)[0])
        self._output = self._step(batch, self._rates.index_select(0, self._place)[0])
        self._sums.add(self._output)
        self._place += 1

    def _warm_up(self, stream: torch.cuda.Stream) -> None:
        """Take a step with the operations, and on the stream, that are captured."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._body()
        torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _capture(self, stream: torch.cuda.Stream) -> Callable[[], object]:
        """Record one step, without taking it; return what replays it."""
        torch.cuda.synchronize(self._step.device)
        graph, cause = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.graph(graph, stream=stream):
                try:
                    self._body()
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:  # ending a capture that failed raises again, and says less
            raise cause or error from None
        self._peak_bytes = torch.cuda.max_memory_allocated(self._step.device)
        return graph.replay


def build_steps(config: TrialConfig, step: TrainingStep, sums: Sums) -> Steps:
    """Return what takes a trial's steps: as a graph where that is possible and worth it."""
    tokens = config.science.batch_size * config.tokens_per_sequence
    is_one = config.science.batch_size == step.microbatch_size and config.execution.devices == 1
    is_wanted = step.device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"
    if is_wanted and is_one and tokens <= GRAPH_TOKENS and can_be_graphed(step, config.science):
        return GraphedSteps(config, step, sums)
    return Steps(config, step, sums)


def can_be_graphed(step: TrainingStep, science: Science) -> bool:
    """Tell whether nothing in a step depends on the host: our own model and loss, fused AdamW."""
    workload, optimizer = step.workload, step.optimizer
    if science.workload != "pretrain" or science.model.kind not in ("transformer", "elman"):
        return False  # a model of somebody's may read from the device, which ends a capture
    is_on_device = isinstance(workload, OnDevice) and workload.is_on_device()
    is_fused = optimizer is not None and bool(optimizer.defaults.get("fused"))
    return is_on_device and is_fused and step.average is None
