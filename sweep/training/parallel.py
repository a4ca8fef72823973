"""One trial on several devices: a process for each, whose gradients are summed (ZeRO 0 to 3).

| stage | split over the devices | by torch's |
| --: | :-- | :-- |
| 0 | nothing | DistributedDataParallel |
| 1 | optimizer states | ZeroRedundancyOptimizer beside it |
| 2 | and gradients | fully_shard, weights gathered from the forward to the backward |
| 3 | and weights | fully_shard, weights gathered layer by layer |

Rajbhandari et al. 2019 (arXiv:1910.02054). Each device takes a contiguous part of every
batch.
"""

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sweep.config.experiment import OptimizerSettings
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.training.optimizer import (
    build_optimizer,
    clip_in_step,
    set_learning_rate,
    state_bytes,
    states_of,
    total_norm,
)
from sweep.workloads import ranks
from sweep.workloads.protocol import Batch

OWN_MODELS = ("transformer", "elman", "quadratic")  # that use all of their parameters
Found = TypeVar("Found")
LossSum = Callable[[nn.Module, Batch], Tensor]


class Parallel:
    """A trial on one device: nothing is split and nothing is sent."""

    rank, devices = 0, 1
    shows_gradients = True  # behind a microbatch, to what measures their noise

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Bring the weights, or this process's part of them, to the device."""
        return model.to(device)

    def build_optimizer(
        self, settings: OptimizerSettings, model: nn.Module, learning_rate: float
    ) -> torch.optim.Optimizer | None:
        """Build the optimizer of the weights."""
        return build_optimizer(settings, model, learning_rate)

    def compiled(self, loss_sum: LossSum, model: nn.Module, options: dict[str, Any]) -> LossSum:
        """Compile what a training step computes, as far as it can be; `options` are Inductor's."""
        compiled: LossSum = torch.compile(loss_sum, dynamic=False, options=options)
        return compiled

    def call(self, function: Callable[..., Found], model: nn.Module, *arguments: Any) -> Found:
        """Return `function(model, *arguments)`; whatever it computes with the weights, it can."""
        return function(model, *arguments)

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        """Enclose a microbatch: behind the last of a batch gradients are those of all devices."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this device's share of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def tokens(self, own: int | Tensor) -> int | Tensor:
        """Return the tokens of all devices."""
        return own

    def rest_bytes(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
        """Return what this process holds between steps: weights, gradients, optimizer."""
        return state_bytes(model, optimizer)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return weights and buffers by name, as this process holds them."""
        found: dict[str, Tensor] = model.state_dict()
        return found

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the optimizer's states by name of parameter and state, likewise."""
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        return {
            f"{names[parameter]}.{key}": value
            for parameter, state in states_of(optimizer).items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def make_states(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], most: float
    ) -> None:
        """Let the optimizer make its states, by a step that changes no weight."""
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.update(optimizer, parameters, 0.0, most)

    def put(self, model: nn.Module, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        """Go on from weights and states as they were returned, and filled in place."""

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        learning_rate: float | Tensor,
        most: float,
    ) -> Tensor:
        """Clip the gradients to a norm of at most so much, and update the weights.

        Returns:
            The norm of all gradients before, a scalar on the device.
        """
        set_learning_rate(optimizer, learning_rate)
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
        if most < math.inf:
            clip_in_step(optimizer, parameters, norm, most)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        return norm


class Through(nn.Module):
    """Calls functions of a model as torch's wrappers want it: by a module's forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Found], *arguments: Any) -> Found:
        """Return `function(model, *arguments)`."""
        return function(self.model, *arguments)


class DataParallel(Parallel):
    """Whole weights on each device; the optimizer's states too (stage 0) or a part (stage 1)."""

    def __init__(self, config: TrialConfig) -> None:
        self.rank, self.devices = ranks.rank(), ranks.count()
        self._zero, self._is_own = config.execution.zero, config.science.model.kind in OWN_MODELS
        self._module: DistributedDataParallel | None = None

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._module = DistributedDataParallel(
            Through(model.to(device)),
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=not self._is_own,
        )
        return model

    def build_optimizer(
        self, settings: OptimizerSettings, model: nn.Module, learning_rate: float
    ) -> torch.optim.Optimizer | None:
        return build_optimizer(settings, model, learning_rate, is_split=self._zero == 1)

    def call(self, function: Callable[..., Found], model: nn.Module, *arguments: Any) -> Found:
        if not torch.is_grad_enabled():
            return function(model, *arguments)
        assert self._module is not None
        found: Found = self._module(function, *arguments)
        return found

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        assert self._module is not None
        return contextlib.nullcontext() if is_last else self._module.no_sync()

    def backward(self, loss: Tensor) -> None:
        (loss * self.devices).backward()  # type: ignore[no-untyped-call]  # torch takes the mean

    def tokens(self, own: int | Tensor) -> int | Tensor:
        return ranks.summed(torch.as_tensor(own).clone())

    def rest_bytes(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
        buckets = [p for p in model.parameters() if p.requires_grad and p.grad is None]
        return super().rest_bytes(model, optimizer) + sum(p.nbytes for p in buckets)


class FullyShard(DataParallel):
    """A part of weights, gradients and optimizer states on each device.

    Each element of a list of layers is gathered as a whole, and so is what lies outside of them.
    Gradients are summed behind every microbatch: to keep them until the last takes them whole.
    """

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh(device.type, (self.devices,))
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=self._zero == 3)
        self._root = Through(model)
        fully_shard(self._root, mesh=mesh, reshard_after_forward=self._zero == 3)
        self._sharded = [m for m in self._root.modules() if isinstance(m, FSDPModule)]
        return model.to(device)  # buffers

    def call(self, function: Callable[..., Found], model: nn.Module, *arguments: Any) -> Found:
        found: Found = self._root(function, *arguments)
        if not torch.is_grad_enabled():  # no backward follows, which would let weights go
            for module in self._sharded:
                module.reshard()
        return found

    def rest_bytes(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
        return state_bytes(model, optimizer)

    def compiled(self, loss_sum: LossSum, model: nn.Module, options: dict[str, Any]) -> LossSum:
        for layer in layers_of(model):  # weights are gathered between them
            layer.compile(dynamic=False, options=options)
        return loss_sum

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the elements of a model's lists of layers; not of lists within them."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else layers_of(child)
    return found


def build_parallel(config: TrialConfig) -> Parallel:
    """Return what this process does as one of a trial's."""
    execution = config.execution
    if not ranks.are_many():
        return Parallel()
    if ranks.count() != execution.devices:
        raise SweepError(
            f"a trial on {execution.devices} devices must have as many processes, got "
            f"{ranks.count()}. Start it by its worker."
        )
    if execution.strategy == "deepspeed":
        from sweep.training.deepspeed import DeepSpeedZero

        return DeepSpeedZero(config)
    return (FullyShard if execution.zero >= 2 else DataParallel)(config)
