"""What the training loop asks of a workload; nothing in the loop knows about text.

A user's own workload is a class with these methods, named as `module:object` and called with
the trial's config and the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sweep.config.objects import load_object
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.workloads.meter import Meter

Batch = tuple[Tensor, ...]  # each (sequences, …), on the device


@dataclass(frozen=True)
class FinalEvaluation:
    """What is measured once, at the end of a trial."""

    valid_losses: NDArray[np.float64]  # (documents, 2): summed loss, tokens
    train_loss: float  # mean per token on a fixed set of training sequences
    valid_bytes: int | None  # of the validation text; None where there is none

    @property
    def valid_loss(self) -> float:
        """Mean loss per token of the whole validation split."""
        total, tokens = self.valid_losses.sum(axis=0)
        return float(total / tokens)


class Workload(Protocol):
    """One kind of training."""

    tokens_per_sequence: int

    def build_model(self) -> nn.Module:
        """Build the float32 model on the CPU, from the trial's seed."""

    def build_batch(self, first: int, count: int) -> Batch:
        """Return sequences `first` … `first + count - 1` of the seed's global stream."""

    def random_batch(self, count: int) -> Batch:
        """Return a batch of the right shapes without any data, for timing and probing."""

    def loss_tokens(self, batch: Batch) -> int | Tensor:
        """Return how many tokens `loss_sum` sums over: what it is divided by."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss of a batch, a differentiable scalar in float32 or wider."""

    def evaluate(self, model: nn.Module) -> float:
        """Return the mean loss on the fixed milestone set; on the whole split towards a target."""

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        """Measure the whole validation split and a fixed set of training sequences."""

    def epochs(self) -> float | None:
        """Return how often the trial sees the training data; None where it never repeats."""


@runtime_checkable
class OnDevice(Protocol):
    """A workload whose batches can be built on the device alone, from the sequences' numbers."""

    def is_on_device(self) -> bool:
        """Tell whether the data lie there."""

    def sequence_indices(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the numbers of sequences `first` … `first + count - 1` of the stream, (count,)."""

    def batch_at(self, indices: Tensor) -> Batch:
        """Return the sequences of these numbers, given on the device, by operations there."""


@runtime_checkable
class Rollouts(Protocol):
    """A workload that makes its batches with the model itself, such as GRPO."""

    updates_per_step: int  # optimizer steps on one batch
    meter: Meter  # what it watches between log points
    on_phase: Callable[[str], None]  # called behind each phase but the update
    is_rehearsal: bool  # a forecast's: what decides no peak may be left out

    def start(self, model: nn.Module) -> None:
        """See the weights before any training."""

    def frozen_bytes(self) -> int:
        """Return the bytes of weights held beside the model's, such as a reference's."""

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return what `loss_sum` and `loss_tokens` need, of what `build_batch` returned."""


def build_workload(config: TrialConfig, device: torch.device) -> Workload:
    """Build the workload that a trial names. Data is opened on first use, not here.

    Raises:
        SweepError: if the name is not that of a workload.
    """
    name = config.science.workload
    if name == "pretrain":
        from sweep.workloads.pretrain import Pretrain

        return Pretrain(config, device)
    if name == "grpo":
        from sweep.workloads.grpo import Grpo

        return Grpo(config, device)
    if name == "quadratic":
        from sweep.workloads.quadratic import NoisyQuadratic

        return NoisyQuadratic(config, device)
    build = load_object(name)
    if not callable(build):
        raise SweepError(
            f"workload {name!r} must be callable with a trial's config and a device, got an object "
            f"of type {type(build).__name__}. Name a class or a function."
        )
    workload: Workload = build(config, device)
    members = ["tokens_per_sequence", *(member for member in vars(Workload) if member[0] != "_")]
    if lacking := [member for member in members if not hasattr(workload, member)]:
        raise SweepError(
            f"workload {name!r} must have what sweep.workloads.protocol.Workload has, got an "
            f"object of type {type(workload).__name__} without {', '.join(lacking)}. Add it."
        )
    return workload
