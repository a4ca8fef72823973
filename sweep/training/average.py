"""An average of the weights that assumes no training length.

The power-function average of Karras et al. 2024 (arXiv:2312.02696, equation 3) weights step τ of t
by (τ/t)^γ. Its width, the standard deviation of τ/t, is the same share of the training so far at
every batch size.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from sweep.training.optimizer import is_part


class WeightAverage:
    """A float32 average of parameters over the steps so far.

    Args:
        parameters: the averaged parameters.
        width: standard deviation of the averaged steps as a share of the steps so far.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], width: float) -> None:
        self.parameters, self.power = parameters, power_of(width)
        self.values = [p.detach().clone().float() for p in parameters]
        self.steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Include the parameters after one more step."""
        self.steps += 1
        keep = (1 - 1 / self.steps) ** (self.power + 1)
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.lerp_(parameter.to(value.dtype), 1 - keep)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the parameters by their averages within this context."""
        is_copied = is_part(self.parameters[0])  # torch keeps references to a DTensor's storage
        weights = [p.data.clone() if is_copied else p.data for p in self.parameters]
        try:
            self._assign(self.values, is_copied)
            yield
        finally:
            self._assign(weights, is_copied)

    def _assign(self, values: Sequence[Tensor], is_copied: bool) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            if is_copied:
                parameter.detach().copy_(value)
            else:
                parameter.data = value.to(parameter.dtype)


def power_of(width: float) -> float:
    """Return γ ≥ 0 with width² = (γ+1)/((γ+2)²(γ+3)); at most √(1/12) = 0.289, a plain mean."""
    low, high = 0.0, 4 / width
    for _ in range(60):
        middle = (low + high) / 2
        is_wide = math.sqrt((middle + 1) / (middle + 3)) / (middle + 2) > width
        low, high = (middle, high) if is_wide else (low, middle)
    return low
