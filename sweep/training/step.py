"""One optimizer step: shared by training, calibration, probing and benchmarks."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.models.precision import weight_dtype
from sweep.training.average import WeightAverage
from sweep.training.backward import ByAutograd, build_backward
from sweep.training.device import evaluating
from sweep.training.noise import GradientSums
from sweep.training.optimizer import whole
from sweep.training.parallel import build_parallel
from sweep.workloads import build_workload, ranks
from sweep.workloads.protocol import Batch, Rollouts, Workload

Found = TypeVar("Found")


@dataclass(frozen=True)
class StepOutput:
    """What one step measured, still on the device."""

    loss: Tensor  # mean per token over the whole batch, before the update; float32 scalar
    grad_norm: Tensor  # global, before clipping
    is_clipped: Tensor  # float32 0 or 1


def split(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield parts of so many sequences."""
    if batch[0].shape[0] <= size:
        yield batch
        return
    for start in range(0, batch[0].shape[0], size):
        yield tuple(part[start : start + size] for part in batch)


class TrainingStep:
    """Forward, backward, clip, update, in microbatches.

    With the optimizer `none` there is no update, and gradients stay and add up.

    Losses are summed and divided by the whole batch's tokens, so that every split of a batch
    gives the same gradient.

    Args:
        config: of the trial.
        device: the trial's; of a trial on several, this process's.
        microbatch_size: sequences per forward-backward.
        model: on the device and in the precision's dtype; None: the workload's own.
    """

    def __init__(
        self,
        config: TrialConfig,
        device: torch.device,
        microbatch_size: int,
        model: nn.Module | None = None,
    ) -> None:
        self.device, self.parallel = device, build_parallel(config)
        self.workload: Workload = build_workload(config, device)
        if self.workload.tokens_per_sequence != config.tokens_per_sequence:
            raise SweepError(
                f"workload {config.science.workload!r} must have the model's context, "
                f"{config.tokens_per_sequence} tokens per sequence, got "
                f"{self.workload.tokens_per_sequence}. Set context to it."
            )
        if model is None:
            model = self.workload.build_model()
            for parameter in model.parameters():  # not the buffers: rotary tables stay float32
                parameter.data = parameter.data.to(weight_dtype(config.science.precision))
            model = self.parallel.place(model, device)
        self.model = model
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.parallel.build_optimizer(
            config.science.optimizer, self.model, config.science.learning_rate
        )
        width = config.science.schedule.average
        self.average = WeightAverage(self.parameters, width) if width else None
        self.clip = config.science.optimizer.clip or math.inf
        self.microbatch_size = microbatch_size
        self._backward = build_backward(
            config, self.parallel, self.workload.loss_sum, self.model, microbatch_size
        )
        self.model.train()
        self.rollouts = self.workload if isinstance(self.workload, Rollouts) else None
        if self.rollouts is not None and self.parallel.devices > 1:
            raise SweepError(
                f"workload {config.science.workload!r} samples, and such a trial runs on one "
                "device. Leave the devices out."
            )
        if self.rollouts is not None:
            self.rollouts.start(self.model)

    def rest_bytes(self) -> int:
        """Return what is held between steps: weights, gradients, optimizer, frozen weights."""
        frozen = self.rollouts.frozen_bytes() if self.rollouts else 0
        return self.parallel.rest_bytes(self.model, self.optimizer) + frozen

    def warm_up(self) -> float:
        """Compile by running once on random data; return the seconds. Changes no state."""
        start = time.perf_counter()
        cpu, devices = torch.get_rng_state(), list(range(torch.cuda.device_count()))
        watched = self.rollouts.meter.state() if self.rollouts else {}
        with torch.random.fork_rng(devices=devices):
            self.backward(self.rolled_out(self.workload.random_batch(self.microbatch_size)))
            self.model.zero_grad(set_to_none=True)
        if self.rollouts:
            self.rollouts.meter.restore(watched)
        assert torch.equal(cpu, torch.get_rng_state())
        return time.perf_counter() - start

    def backward(self, batch: Batch, sums: GradientSums | None = None) -> Tensor:
        """Add the gradient of the batch's mean loss, in microbatches; return that loss.

        Args:
            batch: of sequences.
            sums: sees each microbatch's gradient, where its noise is measured.
        """
        tokens, left = self.parallel.tokens(self.workload.loss_tokens(batch)), batch[0].shape[0]
        total: Tensor | None = None
        for micro in split(batch, self.microbatch_size):
            left -= micro[0].shape[0]
            with self.parallel.exchanging(is_last=sums is not None or not left):
                loss = self._backward(micro, tokens)
            if sums is not None:
                sums.take(self.parameters)
            total = loss if total is None else total + loss
        if sums is not None:
            sums.give_back(self.parameters)
        assert total is not None
        return ranks.summed(total)

    def measure_noise(self, batch: Batch, size: int) -> tuple[float, float]:
        """Return trΣ̂ and Ĝ² of the gradient over a batch in parts of `size` sequences; eager.

        On several devices the batch and the parts are this one's share.
        """
        sums, tokens = GradientSums(), self.parallel.tokens(self.workload.loss_tokens(batch))
        eager = ByAutograd(self.parallel, self.workload.loss_sum, self.model)
        for micro in split(batch, size):
            eager(micro, tokens)
            sums.take(self.parameters)
        sums.give_back(self.parameters)
        self.model.zero_grad(set_to_none=True)
        return sums.estimates(size * self.parallel.devices)

    def __call__(
        self, batch: Batch, learning_rate: float | Tensor, sums: GradientSums | None = None
    ) -> StepOutput:
        """Take one step at this rate; of a workload with rollouts, all updates on one of them."""
        if self.rollouts is None:
            return self._update(batch, learning_rate, sums)
        batch = self.rolled_out(batch)
        start = time.perf_counter()
        for _ in range(self.rollouts.updates_per_step):
            output = self._update(batch, learning_rate, sums)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.rollouts.meter.add("perf/update_seconds", time.perf_counter() - start, 1)
        return output

    def rolled_out(self, batch: Batch) -> Batch:
        """Return what the loss is of: the batch itself, or what the model makes of it."""
        if self.rollouts is None:
            return batch
        return self.rollouts.roll_out(self.model, batch, self.microbatch_size)

    def _update(
        self, batch: Batch, learning_rate: float | Tensor, sums: GradientSums | None
    ) -> StepOutput:
        loss = self.backward(batch, sums)
        if self.optimizer is None:
            return StepOutput(loss, torch.zeros_like(loss), torch.zeros_like(loss))
        norm = self.parallel.update(self.optimizer, self.parameters, learning_rate, self.clip)
        if self.average is not None:
            self.average.update()
        return StepOutput(loss, norm, (norm > self.clip).float())

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Let the weights be those that are evaluated meanwhile: their average, where one is kept.

        Everything but training steps happens here: evaluation, and the weights that are kept.
        """
        return self.average.in_place() if self.average else contextlib.nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """Return weights and buffers by name, shared ones once, as this process holds them."""
        found = reversed(self.model.state_dict(keep_vars=True).items())
        names = set({id(value): name for name, value in found}.values())  # the first of each
        held = self.parallel.weights(self.model)
        return {name: value for name, value in held.items() if name in names}

    def whole_weights(self) -> dict[str, Tensor]:
        """Return them whole, on the CPU; all processes must ask."""
        held = self.weights().items()
        return {name: whole(value.detach()).cpu().contiguous() for name, value in held}

    def evaluated(self, evaluate: Callable[[nn.Module], Found]) -> Found:
        """Return what an evaluation of the workload says of the weights that are evaluated."""
        with evaluating(), self.averaged(), torch.no_grad():
            return self.parallel.call(evaluate, self.model)

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch without gradients, as evaluations compute it."""
        batch = self.rolled_out(batch)
        self.model.eval()
        with torch.no_grad():
            loss = self.workload.loss_sum(self.model, batch) / self.workload.loss_tokens(batch)
        self.model.train()
        return loss
