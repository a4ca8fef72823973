"""Gradient noise in training: sums over microbatches' gradients (SCIENCE.md §3).

From K gradients g_k, each the mean over b sequences, with mean ḡ over B = K·b sequences:
trΣ̂ = b/(K-1) · Σ|g_k - ḡ|², Ĝ² = |ḡ|² - trΣ̂/B; both unbiased (McCandlish et al. 2018, A.1).
The analysis averages them apart and divides last: `sweep.analysis.noise_scale`.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.plan.steps import first_probed, milestone_steps, probe_sizes
from sweep.training.device import is_out_of_memory
from sweep.training.optimizer import norms_of, whole
from sweep.workloads import ranks

if TYPE_CHECKING:
    from sweep.training.step import TrainingStep


def noise_estimates(squares: float, square: float, count: int, size: int) -> tuple[float, float]:
    """Return trΣ̂ and Ĝ².

    Args:
        squares: Σ|g_k|².
        square: |ḡ|².
        count: K, two at least.
        size: b, sequences of each gradient.
    """
    trace = size / (count - 1) * (squares - count * square)
    return trace, square - trace / (count * size)


class GradientSums:
    """Takes the gradients of one microbatch after another, and gives back their sum.

    Microbatches are of equal size, and their losses divided by the whole batch's tokens.
    """

    def __init__(self) -> None:
        self.count = 0
        self._squares: Tensor | float = 0.0  # Σ|g_k|²
        self._square: Tensor | float = 0.0  # |Σg_k|²
        self._total: list[Tensor | None] = []

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move the gradients away, adding them to those before."""
        gradients = [parameter.grad for parameter in parameters]
        self._squares = self._squares + _square(gradients)
        if not self.count:
            are_views = ranks.are_many()  # of what the next backward fills again
            self._total = [g.clone() if are_views and g is not None else g for g in gradients]
        else:
            for place, gradient in enumerate(gradients):
                known = self._total[place]
                if known is None or gradient is None:
                    self._total[place] = gradient if known is None else known
                else:
                    known += gradient
        for parameter in parameters:
            parameter.grad = None
        self.count += 1

    def give_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put the sum in place as the gradient, and keep its norm only."""
        self._square = _square(self._total)
        for parameter, gradient in zip(parameters, self._total, strict=True):
            parameter.grad = gradient
        self._total = []

    def estimates(self, size: int) -> tuple[float, float]:
        """Return trΣ̂ and Ĝ², for microbatches of `size` sequences."""
        squares = float(self._squares) * self.count**2  # of means over a microbatch
        return noise_estimates(squares, float(self._square), self.count, size)


def _square(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return the squared norm of them all, summed in float32 or wider."""
    found = [gradient for gradient in gradients if gradient is not None]
    norms = norms_of(found, _wide(found[0].dtype))
    return whole(torch.stack(norms).double().square().sum())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


class NoiseProbe:
    """Measures the gradient's noise at milestones; nothing is updated.

    The sequences are the same at every batch size, the last of the data's first epoch: no step
    trains on them, unless training and probes together are more than one epoch.
    """

    def __init__(self, config: TrialConfig, step: "TrainingStep") -> None:
        science = config.science
        self._step, self._devices = step, step.parallel.devices
        own = science.batch_size // self._devices
        self._trained = science.tokens // config.tokens_per_sequence
        budget = (config.token_budget or science.tokens) // config.tokens_per_sequence
        points, share = science.evaluation.noise_points, science.evaluation.noise_share
        if step.rollouts is not None or not step.parallel.shows_gradients:  # or of a group
            points = 0
        sizes = probe_sizes(budget, points, share, step.microbatch_size, self._devices)
        self._count, self._part = sizes.sequences, sizes.part
        self._probed = sizes.points * sizes.sequences
        self._probes = milestone_steps(config.steps, sizes.points) if sizes.points else ()
        is_split = points > 0 and own > step.microbatch_size
        self._split = frozenset(milestone_steps(config.steps, points) if is_split else ())
        self.steps = tuple(sorted(self._split.union(self._probes)))

    @cached_property
    def _first(self) -> int:
        epochs = self._step.workload.epochs()
        return first_probed(self._probed, round(self._trained / epochs) if epochs else None)

    def sums_at(self, step: int) -> GradientSums | None:
        """Return what is to see a training step's microbatches; None where it is not to."""
        return GradientSums() if step in self._split else None

    def metrics(self, step: int, sums: GradientSums | None) -> dict[str, float]:
        """Return `noise/trace` and `noise/square` of the probe, and those of the step's own."""
        found: dict[str, float] = {}
        if sums is not None:
            trace, square = sums.estimates(self._step.microbatch_size * self._devices)
            found |= {"noise/train_trace": trace, "noise/train_square": square}
        if not self._count or step not in self._probes:
            return found
        own = self._count // self._devices
        first = (
            self._first + self._probes.index(step) * self._count + self._step.parallel.rank * own
        )
        try:
            batch = self._step.workload.build_batch(first, own)
            trace, square = self._step.measure_noise(batch, self._part)
        except Exception as error:
            if not is_out_of_memory(error) or self._devices > 1:  # others would wait for this one
                raise
            self._count = 0  # it goes on without
            print(f"gradient noise is not probed any more: {error}", flush=True)
            self._step.model.zero_grad(set_to_none=True)
            return found
        return found | {"noise/trace": trace, "noise/square": square}
