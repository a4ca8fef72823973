"""Gradient noise, from the gradients of equal parts of probe batches.

From K gradients g_k, each the mean over b sequences, with mean ḡ over B = K·b sequences:
trΣ̂ = b/(K-1) · Σ|g_k - ḡ|², Ĝ² = |ḡ|² - trΣ̂/B; both unbiased (McCandlish et al. 2018, A.1).
`sweep.analysis.critical_batch_size` averages both over the training and divides last.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sweep.config.trial import TrialConfig
from sweep.plan.steps import largest_divisor, milestone_steps
from sweep.training.parallel import is_part, own_part
from sweep.training.step import TrainingStep
from sweep.workloads import ranks
from sweep.workloads.protocol import Batch

BEYOND_TRAINING = 1 << 44  # stream position for probes of data that never repeat
LEAST_PROBED, MOST_PROBED = 8, 512  # sequences per noise measurement
LEAST_PART, MOST_PARTS = 4, 16  # smaller parts are far slower than the same sequences in a step


class ProbeSizes(NamedTuple):
    points: int  # measurements, evenly spaced; the same at every batch size of a sweep
    sequences: int  # per measurement; the same at every batch size
    part: int  # sequences per gradient, on each device


def probe_sizes(
    sequences: int, points: int, share: float, microbatch_size: int, devices: int = 1
) -> ProbeSizes:
    """Return the sizes of at most `points` measurements in a `share` of the budget's sequences."""
    points = min(points, int(share * sequences / LEAST_PROBED))
    if not points:
        return ProbeSizes(0, 0, 0)
    count = min(MOST_PROBED, int(share * sequences / points))
    parts = min(MOST_PARTS, count // LEAST_PART)
    part = max(1, count // parts // devices)
    return ProbeSizes(points, parts * part * devices, largest_divisor(part, microbatch_size))


class NoiseProbe:
    """Measures the gradient noise at milestones, on the same sequences at every batch size."""

    def __init__(self, config: TrialConfig, step: TrainingStep) -> None:
        science, length = config.science, config.tokens_per_sequence
        is_possible = step.rollouts is None and step.parallel.shows_gradients
        points = science.evaluation.noise_points if is_possible else 0
        sequences = (config.token_budget or science.tokens) // length
        share = science.evaluation.noise_share
        self._step = step
        self._sizes = probe_sizes(sequences, points, share, step.microbatch_size, ranks.count())
        self.steps = milestone_steps(config.steps, self._sizes.points)
        epochs = step.workload.epochs() if self.steps else None
        self._first = BEYOND_TRAINING
        if epochs:  # the last sequences of the first epoch, which a shorter training does not see
            windows = round(science.tokens // length / epochs)
            self._first = max(0, windows - self._sizes.points * self._sizes.sequences)

    def metrics(self, t: int) -> dict[str, float]:
        sizes = self._sizes
        count = sizes.sequences // ranks.count()
        first = self._first + self.steps.index(t) * sizes.sequences + ranks.rank() * count
        batch = self._step.workload.build_batch(first, count)
        trace, square = measure_noise(self._step, batch, sizes.part)
        return {"noise/trace": trace, "noise/square": square}


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
    return float(ranks.all_reduce_(square) if is_part(gradients[0]) else square)
