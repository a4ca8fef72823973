"""An average of the weights whose width grows with training, so that no horizon is assumed.

The power-function average of Karras et al. 2024 (arXiv:2312.02696, equation 3): the weights of
step τ of t count as (τ/t)^γ. Its width, the standard deviation of τ/t, is the same share of the
training so far at every batch size.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from sweep.training.optimizer import is_part


class WeightAverage:
    """A float32 copy of the parameters that follows them.

    Args:
        parameters: to be averaged.
        width: standard deviation of the averaged steps as a share of the steps so far.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], width: float) -> None:
        self.parameters, self.power = parameters, power_of(width)
        self.values = [p.detach().clone().float() for p in parameters]
        self.steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take note of the parameters after a step."""
        self.steps += 1
        keep = (1 - 1 / self.steps) ** (self.power + 1)
        current = [p.to(value.dtype) for p, value in zip(self.parameters, self.values, strict=True)]
        torch._foreach_lerp_(self.values, current, 1 - keep)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the parameters be their averages meanwhile; copies float32 weights of parts only."""
        are_parts = is_part(self.parameters[0])  # whose storage torch knows
        held = [p.data.clone() if are_parts else p.data for p in self.parameters]
        try:
            self._put(self.values, are_parts)
            yield
        finally:
            self._put(held, are_parts)

    def _put(self, values: Sequence[Tensor], is_copied: bool) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            if is_copied:
                parameter.detach().copy_(value)
            else:
                parameter.data = value.to(parameter.dtype)

    def state(self) -> dict[str, list[Tensor] | int]:
        """Return what a checkpoint keeps."""
        return {"values": self.values, "steps": self.steps}

    def restore(self, state: dict[str, list[Tensor] | int]) -> None:
        """Go on from what a checkpoint kept."""
        assert isinstance(state["values"], list) and isinstance(state["steps"], int)
        for value, kept in zip(self.values, state["values"], strict=True):
            value.copy_(kept)
        self.steps = state["steps"]


def power_of(width: float) -> float:
    """Return γ ≥ 0 with width² = (γ+1)/((γ+2)²(γ+3)); at most √(1/12) = 0.289, a plain mean."""
    low, high = 0.0, 4 / width
    for _ in range(60):
        middle = (low + high) / 2
        is_wide = math.sqrt((middle + 1) / (middle + 3)) / (middle + 2) > width
        low, high = (middle, high) if is_wide else (low, middle)
    return low
