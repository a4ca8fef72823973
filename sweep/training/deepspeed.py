"""`--strategy deepspeed`: ZeRO 1 to 3 by DeepSpeed's engine (extra deepspeed).

Checkpoints have the tensors of torch's own sharding: either strategy continues the other's.
"""

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
from sweep.training.parallel import FunctionModule, Parallel, build_optimizer
from sweep.workloads import ranks

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's moments


class DeepSpeedZero(Parallel):
    shows_gradients = False

    def build_optimizer(self, settings: OptimizerSettings, learning_rate: float) -> None:
        os.environ.setdefault("DS_ACCELERATOR", next(self.model.parameters()).device.type)
        tools = str(Path(sys.executable).parent)  # contains ninja, if its wheel is installed
        os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
        import deepspeed

        engine_settings = {  # it derives the accumulation
            "train_batch_size": self._config.science.batch_size,
            "train_micro_batch_size_per_gpu": self._config.microbatch_size,
            "gradient_clipping": settings.clip or 0.0,
            "zero_optimization": {"stage": self.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # compiling it takes minutes
            "steps_per_print": sys.maxsize,
        }
        backend = dist.get_backend().removeprefix("cpu:gloo,cuda:")
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
        self.optimizer = build_optimizer(settings, self.model, learning_rate)
        assert self.optimizer is not None
        self._engine, *_ = deepspeed.initialize(
            model=FunctionModule(self.model), optimizer=self.optimizer, config=engine_settings
        )
        if self.zero < 3:  # after the first group's step, 0.19 looks for the states of all groups
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
                for part in group["params"]:
                    part.grad = torch.zeros_like(part)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for states in self.optimizer.state.values():
                states["step"].zero_()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if torch.is_grad_enabled():
            return self._engine(function, *arguments)
        results: list[Any] = []  # stage 3 expects a module to return tensors or a dict

        def keep(model: nn.Module, *arguments: Any) -> dict[str, Any]:
            results.append(function(model, *arguments))
            return {}

        self._engine.module(keep, *arguments)
        return results[0]

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        self._is_last = is_last
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * ranks.count(), scale_wrt_gas=False)  # it takes the mean
        if not self._is_last:
            self._engine.step()  # counts; `update` takes the last one

    def update(self, learning_rate: float, max_norm: float) -> Tensor:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        return torch.tensor(float(self._engine.get_global_grad_norm()), device=self._engine.device)

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param as read

        whole = {name: read(parameter) for name, parameter in self.model.named_parameters()}
        return super().weights() | whole  # and the model's buffers

    def states(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state as read

        assert self.optimizer is not None
        steps = next(iter(self.optimizer.state.values()))["step"]
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"{name}.step"] = torch.as_tensor(steps, dtype=torch.float32).cpu().clone()
            tensors |= {f"{name}.{moment}": read(parameter, moment) for moment in MOMENTS}
        return tensors

    def make_states(self, backward: Callable[[int], object]) -> None:
        backward(self._config.science.batch_size // ranks.count())
        self.update(learning_rate=0.0, max_norm=1.0)

    def load(self, tensors: dict[str, Tensor]) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        assert self.optimizer is not None
        is_sharded = self.zero == 3
        for name, weight in self.model.named_parameters():
            value = tensors[f"model.{name}"]
            safe_set_full_fp32_param(weight, value)
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0, enabled=is_sharded):
                weight.data.copy_(value)
            for moment in MOMENTS:
                state = tensors[f"optimizer.{name}.{moment}"]
                safe_set_full_optimizer_state(weight, state, moment)
            for states in self.optimizer.state.values():
                states["step"] = tensors[f"optimizer.{name}.step"].clone()
