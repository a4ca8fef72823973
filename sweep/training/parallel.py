"""One trial on several devices: a process per device, whose gradients are summed (ZeRO 0 to 3).

The stages are those of Rajbhandari et al. 2019 (arXiv:1910.02054).
"""

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sweep.config.optimizers import OptimizerSettings
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.training.optimizer import build_optimizer
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

    def build_optimizer(
        self, settings: OptimizerSettings, learning_rate: float, is_captured: bool = False
    ) -> None:
        is_sharded = self.zero == 1
        self.optimizer = build_optimizer(
            settings, self.model, learning_rate, is_sharded, is_captured
        )

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

    def update(self, learning_rate: float | Tensor, max_norm: float) -> Tensor:
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
        # A ZeroRedundancyOptimizer contains the optimizer of this process.
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        return [optimizer.state.get(p, {}) if optimizer else {} for p in self.model.parameters()]

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


def is_part(value: Tensor) -> bool:
    """Return True for a DTensor, whose type takes half a second to import."""
    return hasattr(value, "full_tensor")


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if is_part(value) else value  # type: ignore[attr-defined]


def own_part(value: Tensor) -> Tensor:
    return value.to_local() if is_part(value) else value  # type: ignore[attr-defined]
