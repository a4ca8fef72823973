"""torch's optimizers, built from settings, parts of tensors, and the average of weights."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sweep.config.experiment import OptimizerSettings


def build_optimizer(
    settings: OptimizerSettings, model: nn.Module, learning_rate: float, is_split: bool = False
) -> torch.optim.Optimizer | None:
    """Build AdamW or SGD; None for `none`. With `is_split` each process keeps some states only."""
    if settings.name == "none":
        return None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    kind: type[torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = {"lr": learning_rate}
    if settings.name == "adamw":
        kind = torch.optim.AdamW
        options |= {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
        options["fused"] = parameters[0].device.type in ("cpu", "cuda")
    if is_split:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, kind, **options)
    return kind(groups, **options)


def is_part(value: Tensor) -> bool:
    """Return True for a DTensor, whose type takes half a second to import."""
    return hasattr(value, "full_tensor")


def whole(value: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, and any other tensor as it is."""
    return value.full_tensor() if is_part(value) else value  # type: ignore[attr-defined]


def own_part(value: Tensor) -> Tensor:
    """Return this process's part of a DTensor, and any other tensor as it is."""
    return value.to_local() if is_part(value) else value  # type: ignore[attr-defined]


class WeightAverage:
    """A float32 average of parameters over the steps so far (Karras et al. 2024).

    `width` is the standard deviation of the averaged steps as a share of the steps so far.
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
        weights = [parameter.detach().clone() for parameter in self.parameters]
        try:
            self._assign(self.values)
            yield
        finally:
            self._assign(weights)

    @torch.no_grad()
    def _assign(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


def power_of(width: float) -> float:
    """Return γ ≥ 0 with width² = (γ+1)/((γ+2)²(γ+3)); at most √(1/12) = 0.289, a plain mean."""
    polynomial = [1, 7, 16 - width**-2, 12 - width**-2]
    return max(0.0, float(np.roots(polynomial).real.max()))
