"""`--strategy deepspeed`: ZeRO 1 to 3 by DeepSpeed's engine, in the same loop (extra deepspeed).

The engine sums gradients, clips and updates. Checkpoints are the same as with torch's own sharding:
full tensors by the same names, so that either strategy continues from the other's.
"""

import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sweep.config.experiment import OptimizerSettings
from sweep.config.trial import TrialConfig
from sweep.training.optimizer import build_optimizer
from sweep.training.parallel import DataParallel, FunctionModule, LossSum, Result

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


class DeepSpeedZero(DataParallel):
    """A part of optimizer states, gradients and weights on each device, as DeepSpeed splits them.

    The model's parameters, their gathered values and states are read and written by the functions
    of DeepSpeed's documentation ("ZeRO: debugging and modifying states").
    """

    shows_gradients = False

    def __init__(self, config: TrialConfig) -> None:
        super().__init__(config)
        self._batch_size = config.science.batch_size // self.devices  # of this device
        self._settings = {
            "train_batch_size": config.science.batch_size,
            "train_micro_batch_size_per_gpu": config.microbatch_size,
            "gradient_accumulation_steps": self._batch_size // config.microbatch_size,
            "gradient_clipping": config.science.optimizer.clip or 0.0,
            "zero_optimization": {"stage": config.execution.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # compiling it takes minutes
            "steps_per_print": sys.maxsize,
        }
        self._is_last = True

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._module = FunctionModule(model.to(device))
        return model

    def build_optimizer(
        self, settings: OptimizerSettings, model: nn.Module, learning_rate: float
    ) -> torch.optim.Optimizer | None:
        os.environ.setdefault("DS_ACCELERATOR", next(model.parameters()).device.type)
        tools = str(Path(sys.executable).parent)  # contains ninja, if its wheel is installed
        os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
        import deepspeed

        backend = dist.get_backend().removeprefix("cpu:gloo,cuda:")
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
        self._optimizer = build_optimizer(settings, model, learning_rate)
        assert self._optimizer is not None
        self._engine, *_ = deepspeed.initialize(
            model=self._module, optimizer=self._optimizer, config=self._settings
        )
        if self._zero < 3:
            self._allocate_states(self._optimizer)
        return self._optimizer

    def _allocate_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Allocate the states of the flat parameters that the engine has put into the optimizer.

        DeepSpeed 0.19 looks for the states of all groups after the first group's first step.
        """
        self._set_rate(0.0)
        parts = [part for group in optimizer.param_groups for part in group["params"]]
        for part in parts:
            part.grad = torch.zeros_like(part)
        optimizer.step()
        for part in parts:
            part.grad = None
            optimizer.state[part]["step"].zero_()

    def compiled(self, loss_sum: LossSum, model: nn.Module) -> LossSum:
        return loss_sum

    def call(self, function: Callable[..., Result], model: nn.Module, *arguments: Any) -> Result:
        results: list[Result] = []  # stage 3 expects a module to return tensors or a dict

        def keep(model: nn.Module, *arguments: Any) -> dict[str, Any]:
            results.append(function(model, *arguments))
            return {}

        if torch.is_grad_enabled():
            return self._engine(function, *arguments)  # type: ignore[no-any-return]
        self._engine.module(keep, *arguments)
        return results[0]

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        self._is_last = is_last
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self.devices, scale_wrt_gas=False)  # it takes the mean
        if not self._is_last:
            self._engine.step()  # counts; `update` takes the last one

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        learning_rate: float,
        max_norm: float,
    ) -> Tensor:
        self._set_rate(learning_rate)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):  # the engine skips such a step, in which the trial diverged
            for parameter in parameters:
                self._write(parameter, torch.full_like(self._read(parameter), math.nan))
        return torch.tensor(norm, device=self._engine.device)

    def _set_rate(self, learning_rate: float) -> None:
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def rest_bytes(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
        """Return the bytes of this device's parts, which DeepSpeed splits evenly."""
        sizes = [int(getattr(p, "ds_numel", p.numel())) for p in model.parameters()]
        width = next(model.parameters()).element_size()
        weights = sum(sizes) * width // (self.devices if self._zero == 3 else 1)
        return weights + 3 * 4 * sum(sizes) // self.devices  # float32 copies and two moments

    @staticmethod
    def _read(parameter: nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        weights: Tensor = safe_get_full_fp32_param(parameter)
        return weights

    def _write(self, parameter: nn.Parameter, value: Tensor) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        safe_set_full_fp32_param(parameter, value)
        is_sharded = self._zero == 3
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=is_sharded):
            parameter.data.copy_(value)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        state: dict[str, Tensor] = dict(model.state_dict())  # for its buffers
        return state | {name: self._read(p) for name, p in model.named_parameters()}

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = next(iter(optimizer.state.values()))["step"]
        tensors = {}
        for name, parameter in model.named_parameters():
            tensors[f"{name}.step"] = torch.as_tensor(steps, dtype=torch.float32).cpu().clone()
            for moment in MOMENTS:
                tensors[f"{name}.{moment}"] = safe_get_full_optimizer_state(parameter, moment)
        return tensors

    def make_states(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        backward: Callable[[int], object],
    ) -> None:
        """Allocate the states by a step on random data at rate 0; they are overwritten next."""
        self._set_rate(0.0)
        backward(self._batch_size)
        self._engine.step()

    def load(self, model: nn.Module, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        assert self._optimizer is not None
        for name, parameter in model.named_parameters():
            self._write(parameter, weights[name])
            for moment in MOMENTS:
                safe_set_full_optimizer_state(parameter, states[f"{name}.{moment}"], moment)
            for state in self._optimizer.state.values():
                state["step"] = states[f"{name}.step"].clone()
