"""`--strategy deepspeed`: ZeRO 1 to 3 by DeepSpeed's engine, in the same loop (extra deepspeed).

The engine sums gradients, clips, and updates; the rest of a trial is as with torch's own sharding.
Checkpoints are too: whole tensors, gathered, by the same names, so that either goes on from the
other's.
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
from sweep.training.parallel import DataParallel, Found, LossSum, Through

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


class DeepSpeedZero(DataParallel):
    """Parts of optimizer states, gradients and weights on each device, as DeepSpeed splits them."""

    shows_gradients = False

    def __init__(self, config: TrialConfig) -> None:
        super().__init__(config)
        own = config.science.batch_size // self.devices
        self._settings = {
            "train_batch_size": config.science.batch_size,
            "train_micro_batch_size_per_gpu": config.microbatch_size,
            "gradient_accumulation_steps": own // config.microbatch_size,
            "gradient_clipping": config.science.optimizer.clip or 0.0,
            "zero_optimization": {"stage": config.execution.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # it would be compiled for minutes
            "steps_per_print": sys.maxsize,
        }
        self._is_last = True

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._through = Through(model.to(device))
        return model

    def build_optimizer(
        self, settings: OptimizerSettings, model: nn.Module, learning_rate: float
    ) -> torch.optim.Optimizer | None:
        os.environ.setdefault("DS_ACCELERATOR", next(model.parameters()).device.type)
        tools = str(Path(sys.executable).parent)  # ninja's, where its wheel is installed
        os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
        import deepspeed

        backend = dist.get_backend().removeprefix("cpu:gloo,cuda:")
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
        optimizer = build_optimizer(settings, model, learning_rate, is_plain=True)
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=self._through, optimizer=optimizer, config=self._settings
        )
        found: torch.optim.Optimizer = self._optimizer
        return found

    def compiled(self, loss_sum: LossSum, model: nn.Module, options: dict[str, Any]) -> LossSum:
        return loss_sum

    def call(self, function: Callable[..., Found], model: nn.Module, *arguments: Any) -> Found:
        found: list[Found] = []  # stage 3 looks into what a module returns: tensors or a dict

        def kept(model: nn.Module, *arguments: Any) -> dict[str, Any]:
            found.append(function(model, *arguments))
            return {}

        if torch.is_grad_enabled():
            return self._engine(function, *arguments)  # type: ignore[no-any-return]
        self._engine.module(kept, *arguments)
        return found[0]

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        self._is_last = is_last
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self.devices, scale_wrt_gas=False)  # it takes the mean
        if not self._is_last:
            self._engine.step()  # counts; the last is `update`'s

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        learning_rate: float | Tensor,
        most: float,
    ) -> Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = float(learning_rate)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):  # the engine leaves such a step out; it is one that diverged
            for parameter in parameters:
                getattr(parameter, "ds_tensor", parameter.data).fill_(math.nan)
        return torch.tensor(norm, device=parameters[0].device)

    def rest_bytes(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
        inner = self._optimizer.optimizer
        held = [getattr(p, "ds_tensor", p) for p in model.parameters()] + self._parts()
        held += [v for s in inner.state.values() for v in s.values() if isinstance(v, Tensor)]
        return sum(tensor.nbytes for tensor in held)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        found: dict[str, Tensor] = dict(model.state_dict())  # for its buffers
        return found | {n: safe_get_full_fp32_param(p) for n, p in model.named_parameters()}

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_states()
        steps = next(iter(self._optimizer.optimizer.state.values()))["step"]
        found = {}
        for name, parameter in model.named_parameters():
            found[f"{name}.step"] = torch.as_tensor(steps, dtype=torch.float32).cpu().clone()
            for moment in MOMENTS:
                found[f"{name}.{moment}"] = safe_get_full_optimizer_state(parameter, moment)
        return found

    def make_states(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], most: float
    ) -> None:
        """Let it make its states, by a step of all parts that changes no weight."""
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        for place, part in enumerate(self._parts()):
            part.grad = torch.zeros_like(part)
            self._optimizer._optimizer_step(place)
            part.grad = None

    def _parts(self) -> list[Tensor]:
        """Return this process's flat parts of the weights, in float32."""
        name = (
            "fp32_partitioned_groups_flat" if self._zero == 3 else "single_partition_of_fp32_groups"
        )
        parts: list[Tensor] = getattr(self._optimizer, name)
        return parts

    def _link_states(self) -> None:
        """Let parameters find their states: DeepSpeed 0.19 does it before all groups have any."""
        from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

        for place, part in enumerate(self._parts() if self._zero < 3 else ()):
            group, states = self._optimizer.bit16_groups[place], self._optimizer.optimizer.state
            lazy_init_hp_params_optimizer_state(group, part, states)

    def put(self, model: nn.Module, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        self._link_states()
        for name, parameter in model.named_parameters():
            safe_set_full_fp32_param(parameter, weights[name])
            for moment in MOMENTS:
                safe_set_full_optimizer_state(parameter, states[f"{name}.{moment}"], moment)
            with GatheredParameters([parameter], modifier_rank=0, enabled=self._zero == 3):
                parameter.data.copy_(weights[name])
            for state in self._optimizer.optimizer.state.values():
                state["step"] = torch.as_tensor(states[f"{name}.step"]).clone()
