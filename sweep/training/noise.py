"""Gradient noise, from the gradients of equal parts of probe batches.

From K gradients g_k, each the mean over b sequences, with mean ḡ over B = K·b sequences:
trΣ̂ = b/(K-1) · Σ|g_k - ḡ|², Ĝ² = |ḡ|² - trΣ̂/B; both unbiased (McCandlish et al. 2018, A.1).
`sweep.analysis.noise_scale` averages both over the training and divides last. The size of a
measurement depends on those before it, never on its own gradients, so that it stays unbiased.
"""

import contextlib
import math
import random
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sweep.config.trial import TrialConfig
from sweep.plan.accumulation import largest_divisor
from sweep.plan.course import Course
from sweep.training.checkpoint import Progress
from sweep.training.parallel import is_part, own_part
from sweep.training.step import TrainingStep
from sweep.workloads import ranks
from sweep.workloads.workload import Batch

BEYOND_TRAINING = 1 << 44  # stream position for probes of data that never repeat
LEAST_PROBED = 8  # sequences of a measurement
MOST_PROBED = 4096
LEAST_PART = 4  # sequences of a gradient; smaller parts are far slower than a step with as many
MOST_PARTS = 16
GROWTH = 16  # the last measurement may be this much larger than the first
RESOLVED = 3  # standard errors of the mean Ĝ²


def probe_sizes(sequences: int, points: int, share: float) -> tuple[int, int]:
    """Return how many measurements fit into a `share` of the sequences, and the largest's size."""
    points = min(points, int(share * sequences / LEAST_PROBED))
    if not points:
        return 0, 0
    return points, min(MOST_PROBED, int(share * sequences / points))


def growing_size(largest: int, squares: Sequence[float]) -> int:
    """Return the size of a measurement after those with Ĝ² `squares`: double while unresolved."""
    unresolved = sum(not _is_resolved(squares[: n + 1]) for n in range(len(squares)))
    smallest = max(LEAST_PROBED, largest / GROWTH)
    return int(min(largest, smallest * 2**unresolved))


def _is_resolved(squares: Sequence[float]) -> bool:
    if len(squares) < 3:
        return False
    error = statistics.stdev(squares) / math.sqrt(len(squares))
    return statistics.fmean(squares) > RESOLVED * error


def part_size(sequences: int, microbatch_size: int, devices: int) -> tuple[int, int]:
    """Return the sequences of each device in a measurement, and how many give one gradient."""
    parts = min(MOST_PARTS, sequences // LEAST_PART)
    size = max(1, sequences // parts // devices)
    return parts * size, largest_divisor(size, microbatch_size)


class NoiseProbe:
    """Measures the gradient noise at milestones, on nested sequences at all batch sizes."""

    def __init__(self, config: TrialConfig, step: TrainingStep, progress: Progress) -> None:
        settings = config.noise_scale
        tokens = config.science.tokens
        length = config.tokens_per_sequence
        sequences = (config.token_budget or tokens) // length
        points = settings.points if settings.measure else 0
        self._points, self._largest = probe_sizes(sequences, points, settings.share)
        self._step = step
        self._squares = progress.noise_squares
        self.steps = Course.of_trial(config).milestones(self._points)

        # On many devices the least measurement takes more than its share.
        self._stride = max(self._largest, 2 * ranks.count())
        self._first = BEYOND_TRAINING
        epochs = step.workload.epochs() if self.steps else None
        if epochs:  # the last sequences of the first epoch, which a shorter training does not see
            windows = round(tokens // length / epochs)
            self._first = max(0, windows - self._points * self._stride)

    def metrics(self, t: int) -> dict[str, float]:
        """Measure at step t; the training continues as if there had been no measurement."""
        step = self._step
        sequences = growing_size(self._largest, ranks.broadcast(self._squares))
        count, size = part_size(sequences, step.microbatch_size, ranks.count())

        first = self._first + self.steps.index(t) * self._stride
        first_here = first + ranks.rank() * count
        with preserving_state(step):
            batch = step.workload.build_batch(first_here, count)
            trace, square = measure_noise(step, batch, size)

        self._squares.append(square)
        return {"noise/trace": trace, "noise/square": square}


@contextlib.contextmanager
def preserving_state(step: TrainingStep) -> Iterator[None]:
    """Restore afterwards what forward passes change: random states, buffers and metrics."""
    gpus = [step.device] if step.device.type == "cuda" else []
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    sums = dict(step.workload.meter.sums)
    buffers = [(buffer, buffer.clone()) for buffer in step.model.buffers()]

    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        step.workload.meter.sums = sums
        for buffer, value in buffers:
            buffer.copy_(value)


def measure_noise(step: TrainingStep, batch: Batch, size: int) -> tuple[float, float]:
    """Return trΣ̂ and Ĝ² over this device's batch, in parts of `size` ≤ microbatch sequences."""
    sums = [torch.zeros_like(parameter) for parameter in step.parameters]
    squares = 0.0
    count = len(batch[0]) // size

    for first in range(0, count * size, size):
        step.backward(tuple(part[first : first + size] for part in batch), is_eager=True)
        squares += _square([p.grad for p in step.parameters if p.grad is not None])
        for total, parameter in zip(sums, step.parameters, strict=True):
            if parameter.grad is not None:
                total += parameter.grad
                parameter.grad = None

    square = _square(sums) / count**2
    return noise_estimates(squares, square, count, size * ranks.count())


def noise_estimates(squares: float, square: float, count: int, size: int) -> tuple[float, float]:
    """Return trΣ̂ and Ĝ² from Σ|g_k|², |ḡ|², K ≥ 2 gradients, and b sequences per gradient."""
    trace = size / (count - 1) * (squares - count * square)
    return trace, square - trace / (count * size)


def _square(gradients: Sequence[Tensor]) -> float:
    wide = torch.float32 if gradients[0].device.type == "mps" else torch.float64
    norms = [torch.linalg.vector_norm(own_part(part), dtype=wide) for part in gradients]
    square = torch.stack(norms).square().sum()
    if is_part(gradients[0]):
        square = ranks.all_reduce_(square)
    return float(square)
