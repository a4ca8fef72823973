"""One optimizer step, shared by training, time estimates, probing and benchmarks."""

import contextlib
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sweep.config.optimizers import optimizer_facts
from sweep.config.trial import TrialConfig
from sweep.models.build import weight_dtype
from sweep.training.graph import WARM_UP, CudaRecorder, GraphedUpdate, Recorder
from sweep.training.optimizer import WeightAverage
from sweep.training.parallel import DataParallel, FullyShard, Parallel
from sweep.workloads import ranks
from sweep.workloads.build import build_workload
from sweep.workloads.workload import Batch, Workload

METRICS = ("train/loss", "train/grad_norm", "train/clipped")


class TrainingStep:
    """Forward, backward, clip and update; the gradient is the same for every microbatch size."""

    def __init__(
        self, config: TrialConfig, device: torch.device, model: nn.Module | None = None
    ) -> None:
        """Build it on a device; a given `model` must be there, in the precision's dtype."""
        science = config.science
        execution = config.execution
        self.device = device

        kind = Parallel
        if ranks.is_distributed():
            assert ranks.count() == execution.devices, "a trial has a process for each device"
            kind = FullyShard if execution.zero >= 2 else DataParallel
        self.parallel = kind(config)

        self.workload: Workload = build_workload(config, device)
        self.workload.meter.vector_names = METRICS
        self.model = self.workload.build_model() if model is None else model
        self.parameter_count = sum(p.numel() for p in self.model.parameters())  # before sharding
        if model is None:
            for parameter in self.model.parameters():  # not the buffers: rotary tables stay float32
                parameter.data = parameter.data.to(weight_dtype(science.precision))
            self.parallel.prepare_model(self.model, device)
        self.parallel.model = self.model

        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.parallel.parameters = self.parameters
        # Graphs of updates, by batch size. They use the tensors of model, optimizer and average.
        self.graphs: dict[int, GraphedUpdate] = {}
        self.graph_bound = execution.graph_bound
        self.recorder: Recorder | None = None  # None: updates are not graphs
        can_capture = bool(optimizer_facts(science.optimizer.name)["captured"])
        if device.type == "cuda" and self.graph_bound and can_capture:
            self.recorder = CudaRecorder(device)
        is_captured = self.recorder is not None
        self.parallel.build_optimizer(science.optimizer, science.learning_rate, is_captured)
        self.optimizer = self.parallel.optimizer
        self.clip = science.optimizer.clip or math.inf
        width = science.schedule.average
        self.average = WeightAverage(self.parameters, width) if width else None

        self.microbatch_size = config.microbatch_size
        loss_sum = self.workload.loss_sum
        self._loss_sum = self.parallel.compiled(loss_sum) if execution.compile else loss_sum

        self.model.train()
        self.samples = science.workload.samples
        assert ranks.count() == 1 or not self.samples, "a workload that samples runs on one device"
        self.workload.start(self.model)

    def __call__(self, batch: Batch, learning_rate: float) -> Tensor:
        """Take one step: update `updates_per_step` times on the same batch.

        Return the mean loss per token before the last update, a scalar on the device that the next
        step may overwrite. The meter also gets the global norm of the gradient before clipping,
        and whether it was clipped.
        """
        batch = self.rolled_out(batch)
        start = time.perf_counter()
        update = self._choose_update(batch)
        for _ in range(self.workload.updates_per_step):
            if self.average is None:
                metrics = update(batch, learning_rate)
            else:
                metrics = update(batch, learning_rate, self.average.count_step())

        if self.samples:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.workload.meter.add("perf/update_seconds", time.perf_counter() - start, 1)
        self.workload.meter.add_vector(metrics)
        return metrics[0]

    def _choose_update(self, batch: Batch) -> Callable[..., Tensor]:
        """Return `update`, as a graph if the batch is small and a single microbatch."""
        size = len(batch[0])
        if self.recorder is None or size > min(self.graph_bound, self.microbatch_size):
            return self.update
        if size not in self.graphs:
            self.graphs[size] = GraphedUpdate(self._update_afresh, batch, self.recorder)
        return self.graphs[size]

    @property
    def warm_up_steps(self) -> int:
        """The first steps of a batch size, which may take longer than later ones."""
        return 1 if self.recorder is None else WARM_UP + 1

    def update(
        self, batch: Batch, learning_rate: float | Tensor, average_weight: float | Tensor = 0.0
    ) -> Tensor:
        """Update the weights and their average once; return the values of METRICS."""
        loss = self.backward(batch)
        if self.optimizer is None:  # gradients accumulate
            norm = torch.zeros_like(loss)
        else:
            norm = self.parallel.update(learning_rate, self.clip)
            if self.average is not None:
                self.average.update(average_weight)
        return torch.stack([loss, norm, (norm > self.clip).float()])

    def _update_afresh(self, *arguments: Any) -> Tensor:
        self.model.zero_grad(set_to_none=True)  # drops the gradients of a capture that failed
        return self.update(*arguments)

    def rolled_out(self, batch: Batch) -> Batch:
        return self.workload.roll_out(self.model, batch, self.microbatch_size)

    def backward(self, batch: Batch, is_eager: bool = False) -> Tensor:
        """Add the gradient of the batch's mean loss, in microbatches; return that loss."""
        loss_sum = self.workload.loss_sum if is_eager else self._loss_sum
        tokens = self.workload.loss_tokens(batch)  # summed over devices below
        if ranks.is_distributed():
            tokens = ranks.all_reduce_(torch.as_tensor(tokens).clone())

        losses: list[Tensor] = []
        starts = range(0, len(batch[0]), self.microbatch_size)
        for first in starts:
            micro = tuple(part[first : first + self.microbatch_size] for part in batch)
            with self.parallel.exchanging(is_last=first == starts[-1]):
                loss = self.parallel.call(loss_sum, micro) / tokens
                self.parallel.backward(loss)
            losses.append(loss.detach())

        return ranks.all_reduce_(sum(losses[1:], losses[0]))

    def warm_up(self) -> None:
        """Compile by running once on random data; changes nothing but a workload's metrics."""
        gpus = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            self.backward(self.rolled_out(self.workload.random_batch(self.microbatch_size)))
            self.model.zero_grad(set_to_none=True)

    def averaged(self) -> AbstractContextManager[None]:
        return self.average.in_place() if self.average else contextlib.nullcontext()

    def run_evaluation(self, evaluate: Callable[[nn.Module], Any]) -> Any:
        """Return `evaluate(model)`, in evaluation mode, without gradients, of averaged weights."""
        self.model.eval()
        with self.averaged(), torch.no_grad():
            result = self.parallel.call(evaluate)
        self.model.train()
        return result

    def evaluate(self, batch: Batch) -> Tensor:
        def mean_loss(model: nn.Module) -> Any:
            rollouts = self.rolled_out(batch)
            return self.workload.loss_sum(model, rollouts) / self.workload.loss_tokens(rollouts)

        return self.run_evaluation(mean_loss)  # type: ignore[no-any-return]
