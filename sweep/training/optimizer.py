"""Optimizers, built from their settings, and the average of the weights."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from sweep.config.optimizers import OptimizerSettings, optimizer_facts
from sweep.errors import user_code
from sweep.models.build import HasStackedWeights, StackedWeight, outer_weights
from sweep.usercode.objects import load_object


class MuonOfProjections(Muon):
    """Muon that updates each projection of a stacked weight as a weight of its own.

    Muon makes all directions of an update equally large. In a stacked weight the projection with
    the largest gradient would take most of them. Between steps, groups and states are those of
    whole weights.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        lr: float,
        stacked: Iterable[StackedWeight],
        **options: Any,
    ) -> None:
        super().__init__(weights, lr, **options)
        self.splits = {weight: (sizes, dim) for weight, sizes, dim in stacked}
        for weight in weights:
            self._split(weight, weight)  # raises if the sizes do not fit

    def _split(self, weight: Tensor, values: Tensor) -> Sequence[Tensor]:
        """Return views of the projections of a weight in a tensor of its shape."""
        sizes, dim = self.splits.get(weight, ([len(weight)], 0))
        return torch.split(values.detach(), sizes, dim)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        weights = group["params"]
        projections: list[Tensor] = []
        for weight in weights:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight.grad)
            gradients = self._split(weight, weight.grad)
            momenta = self._split(weight, state["momentum_buffer"])
            views = zip(self._split(weight, weight), gradients, momenta, strict=True)
            for projection, gradient, momentum in views:
                projection.grad = gradient
                self.state[projection] = {"momentum_buffer": momentum}
                projections.append(projection)

        group["params"] = projections
        try:
            super().step()  # type: ignore[no-untyped-call]
        finally:
            group["params"] = weights
            for projection in projections:
                del self.state[projection]


class MuonAndAdamW(Optimizer):
    """Muon for the matrices between embeddings and output, AdamW for the other weights."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        adamw: Mapping[str, Any],
        outer: Collection[Tensor],  # weights of embeddings and of the output
        stacked: Iterable[StackedWeight],
        split_projections: bool = False,  # earlier trials have no such option
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
        of_hidden = MuonOfProjections(
            hidden,
            lr,
            stacked if split_projections else (),
            weight_decay=decay,
            adjust_lr_fn="match_rms_adamw",
            **muon,
        )
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
    settings: OptimizerSettings,
    model: nn.Module,
    learning_rate: float,
    is_sharded: bool = False,
    is_captured: bool = False,
) -> Optimizer | None:
    """Build the optimizer; None for `none`.

    With `is_sharded` a process keeps some states only; with `is_captured` a CUDA graph may contain
    the update.
    """
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
    if is_captured:
        options = {**optimizer_facts(name)["captured"], **options}

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
    stacked = model.stacked_weights() if isinstance(model, HasStackedWeights) else ()
    return {"adamw": adamw, "outer": {*outer_weights(model)}, "stacked": stacked}


class WeightAverage:
    """A float32 average of parameters over the steps so far (Karras et al. 2024)."""

    def __init__(self, parameters: Sequence[nn.Parameter], width: float) -> None:
        self.parameters = parameters
        self.power = power_of(width)
        self.values = [p.detach().clone().float() for p in parameters]
        self.steps = 0

    def count_step(self) -> float:
        """Count a step; return the weight that its parameters have in the average."""
        self.steps += 1
        return 1 - (1 - 1 / self.steps) ** (self.power + 1)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self, weight: float | Tensor) -> None:
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.lerp_(parameter.to(value.dtype), weight)

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
