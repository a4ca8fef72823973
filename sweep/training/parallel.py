"""One trial on several devices: a process per device, whose gradients are summed (ZeRO 0 to 3).

The stages are those of Rajbhandari et al. 2019 (arXiv:1910.02054).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from sweep.config.experiment import OptimizerSettings
from sweep.config.objects import load_object
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError, user_code
from sweep.models import outer_weights
from sweep.workloads import ranks
from sweep.workloads.workload import Batch

LossSum = Callable[[nn.Module, Batch], Tensor]


class Parallel:
    """A trial on one device: nothing is split or exchanged."""

    model: nn.Module
    optimizer: Optimizer | None
    parameters: list[nn.Parameter]  # those that are trained

    def __init__(self, config: TrialConfig) -> None:
        self._config = config
        self.zero = config.execution.zero if ranks.is_distributed() else 0

    def prepare_model(self, model: nn.Module, device: torch.device) -> None:
        self.model = model.to(device)

    def build_optimizer(self, settings: OptimizerSettings, learning_rate: float) -> None:
        self.optimizer = build_optimizer(settings, self.model, learning_rate, self.zero == 1)

    def compiled(self, loss_sum: LossSum) -> LossSum:
        return torch.compile(loss_sum, dynamic=False)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(model, *arguments)`, which may use the weights in any way."""
        return function(self.model, *arguments)

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        """Enclose a microbatch; after the last one, gradients are those of all devices."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        if ranks.count() > 1:
            loss = loss * ranks.count()  # torch takes the mean over devices
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, learning_rate: float, max_norm: float) -> Tensor:
        """Clip the gradients, update the weights and free the gradients; return the global norm."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = whole(nn.utils.get_total_norm(gradients))
        if max_norm < math.inf:
            nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def rest_bytes(self) -> int:
        """Return the bytes of weights, gradients and optimizer states in this process."""
        weights = list(self.model.parameters())
        gradients = [p.grad for p in weights if p.grad is not None]
        return sum(own_part(t).nbytes for t in (*weights, *gradients, *self.states().values()))

    def weights(self) -> dict[str, Tensor]:
        """Return this process's weights and buffers by name; a tied weight once."""
        tensors = self.model.state_dict(keep_vars=True)
        first_names = {id(value): name for name, value in reversed(tensors.items())}
        kept = set(first_names.values())
        return {name: value.detach() for name, value in tensors.items() if name in kept}

    def states(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for (name, _), state in zip(self.model.named_parameters(), self._states(), strict=True):
            for key, value in state.items():
                if torch.is_tensor(value):
                    tensors[f"{name}.{key}"] = value
                elif value is not None and not isinstance(value, float | int):
                    problem = f"must keep tensors and numbers only, got {type(value).__name__}"
                    raise SweepError(f"the state {key!r} of an optimizer {problem}.")
        return tensors

    def numbers(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups and states, which contain numbers too."""
        return [*(self.optimizer.param_groups if self.optimizer else ()), *self._states()]

    def _states(self) -> list[dict[str, Any]]:
        own = getattr(self.optimizer, "optim", self.optimizer)  # inside a ZeroRedundancyOptimizer
        return [own.state.get(p, {}) if own else {} for p in self.model.parameters()]

    def make_states(self) -> None:
        """Allocate the optimizer states by a step at rate 0."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.update(learning_rate=0.0, max_norm=1.0)


class FunctionModule(nn.Module):
    """Calls functions of a model through `forward`, as torch's wrappers need it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


class DataParallel(Parallel):
    """Stages 0 and 1: full weights on each device."""

    def prepare_model(self, model: nn.Module, device: torch.device) -> None:
        super().prepare_model(model, device)
        self._ddp = DistributedDataParallel(
            FunctionModule(self.model),
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=not self._config.science.model.uses_all_parameters,
        )

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(self.model, *arguments)
        return self._ddp(function, *arguments)

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if is_last else self._ddp.no_sync()

    def rest_bytes(self) -> int:
        buckets = [p.nbytes for p in self.model.parameters() if p.requires_grad and p.grad is None]
        return super().rest_bytes() + sum(buckets)


class FullyShard(Parallel):
    """Stages 2 and 3: each layer is gathered as a whole, and so is everything outside of them.

    Gradients are summed after every microbatch; keeping them would need all of them whole.
    """

    def prepare_model(self, model: nn.Module, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # takes half a second
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh(device.type, (ranks.count(),))
        self._module = FunctionModule(model)
        for part in (*layers_of(model), self._module):
            fully_shard(part, mesh=mesh, reshard_after_forward=self.zero == 3)
        self._sharded = [m for m in self._module.modules() if isinstance(m, FSDPModule)]
        self.model = model.to(device)  # buffers

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = self._module(function, *arguments)
        if not torch.is_grad_enabled():  # no backward pass follows, which would free the weights
            for module in self._sharded:
                module.reshard()
        return result

    def compiled(self, loss_sum: LossSum) -> LossSum:
        for layer in layers_of(self.model):  # weights are gathered between them
            layer.compile(dynamic=False)
        return loss_sum


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the elements of a model's `nn.ModuleList`s, without those of nested lists."""
    layers: list[nn.Module] = []
    for child in model.children():
        layers += list(child) if isinstance(child, nn.ModuleList) else layers_of(child)
    return layers


def build_optimizer(
    settings: OptimizerSettings, model: nn.Module, learning_rate: float, is_sharded: bool = False
) -> Optimizer | None:
    """Build the optimizer; None for `none`. With `is_sharded` a process keeps some states only."""
    if settings.name == "none":
        return None
    name, weights = settings.name, [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adamw: dict[str, Any] = {
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "fused": all(p.device.type in ("cpu", "cuda") for p in weights),
    }
    muon: dict[str, Any] = {"adamw": adamw, "outer": {*outer_weights(model)}}
    more = {"adamw": adamw, "muon": muon}.get(name, {})
    options: dict[str, Any] = settings.options.get(name, {})
    with user_code(f"optimizer {name!r} must be built from parameter groups, lr and {options}"):
        if "weight_decay" in options:
            raise ValueError("weight_decay is set by the groups: use optimizer.weight_decay")
        kind: Any = BUILT_IN.get(name) or load_object(name)
        if is_sharded:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(groups, kind, lr=learning_rate, **more, **options)
        optimizer = kind(groups, lr=learning_rate, **more, **options)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
        return optimizer


BUILT_IN = {"adamw": AdamW, "sgd": SGD, "adafactor": Adafactor}


def is_part(value: Tensor) -> bool:
    """Return True for a DTensor, whose type takes half a second to import."""
    return hasattr(value, "full_tensor")


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if is_part(value) else value  # type: ignore[attr-defined]


def own_part(value: Tensor) -> Tensor:
    return value.to_local() if is_part(value) else value  # type: ignore[attr-defined]


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
