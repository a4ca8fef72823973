"""Optimizers, built from their settings, and the average of the weights."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from sweep.config.optimizers import OptimizerSettings
from sweep.errors import user_code
from sweep.models.build import outer_weights
from sweep.usercode.objects import load_object


class MuonAndAdamW(Optimizer):
    """Muon for the matrices between embeddings and output, AdamW for the other weights."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        adamw: Mapping[str, Any],
        outer: Collection[Tensor],  # weights of embeddings and of the output
        **muon: Any,
    ) -> None:
        hidden: list[Tensor] = []
        others: list[dict[str, Any]] = []
        for group in groups:
            others_of_group: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.ndim == 2 and parameter not in outer:
                    hidden.append(parameter)
                else:
                    others_of_group.append(parameter)
            others.append({**group, "params": others_of_group})
        if not hidden:
            raise ValueError("the model has no matrices between embeddings and output")

        # So scaled, Muon's updates are as large as AdamW's, and one rate suits both.
        decay = groups[0]["weight_decay"]
        of_hidden = Muon(hidden, lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw", **muon)
        of_others = AdamW(others, lr, **adamw)
        self.parts: list[Optimizer] = [of_hidden, of_others]
        super().__init__([*of_hidden.param_groups, *of_others.param_groups], {})
        for part in self.parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


# Each class is called with the groups of parameters, `lr`, and the arguments of `_arguments`.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "sgd": SGD,
    "adafactor": Adafactor,
    "muon": MuonAndAdamW,
}


def build_optimizer(
    settings: OptimizerSettings, model: nn.Module, learning_rate: float, is_sharded: bool = False
) -> Optimizer | None:
    """Build the optimizer; None for `none`. With `is_sharded` a process keeps some states only."""
    if settings.name == "none":
        return None
    name = settings.name
    weights = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = settings.options.get(name, {})

    with user_code(f"optimizer {name!r} must be built from parameter groups, lr and {options}"):
        if "weight_decay" in options:
            raise ValueError("weight_decay is set by the groups: use optimizer.weight_decay")
        build: Any = OPTIMIZERS[name] if name in OPTIMIZERS else load_object(name)
        arguments = _arguments(settings, model, weights)
        if is_sharded:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(groups, build, lr=learning_rate, **arguments, **options)
        optimizer = build(groups, lr=learning_rate, **arguments, **options)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
        return optimizer


def _arguments(
    settings: OptimizerSettings, model: nn.Module, weights: Sequence[nn.Parameter]
) -> dict[str, Any]:
    """Return what AdamW and Muon need besides the groups and the rate."""
    if settings.name not in ("adamw", "muon"):
        return {}
    adamw: dict[str, Any] = {
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "fused": all(p.device.type in ("cpu", "cuda") for p in weights),
    }
    if settings.name == "adamw":
        return adamw
    return {"adamw": adamw, "outer": {*outer_weights(model)}}


class WeightAverage:
    """A float32 average of parameters over the steps so far (Karras et al. 2024)."""

    def __init__(self, parameters: Sequence[nn.Parameter], width: float) -> None:
        self.parameters = parameters
        self.power = power_of(width)
        self.values = [p.detach().clone().float() for p in parameters]
        self.steps = 0

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        keep = (1 - 1 / self.steps) ** (self.power + 1)
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.lerp_(parameter.to(value.dtype), 1 - keep)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
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
    """Return γ ≥ 0 of a standard deviation with width² = (γ+1)/((γ+2)²(γ+3)), at most 1/12."""
    polynomial = [1, 7, 16 - width**-2, 12 - width**-2]
    return max(0.0, float(np.roots(polynomial).real.max()))
