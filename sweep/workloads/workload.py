"""The base class of workloads, and running means of their metrics."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sweep.config.metrics import check_metric_name
from sweep.config.trial import TrialConfig
from sweep.data.tokens import SequenceStream, TokenizedText
from sweep.errors import SweepError

Batch = tuple[Tensor, ...]  # each (sequences, …), on the device
Floats = NDArray[np.float64]
Metrics = Mapping[str, float]  # results of an evaluation by name


@dataclass(frozen=True)
class FinalEvaluation:
    """An evaluation after the last step, by named metrics or by the losses of documents."""

    metrics: Metrics = field(default_factory=dict)
    valid_losses: Floats | None = None  # (documents, 2): summed loss, tokens; they give `loss`
    train_loss: float | None = None  # mean per token on a fixed set of training sequences
    train_reward: float | None = None  # mean on a fixed set of training prompts
    valid_bytes: int | None = None  # size of the validation text; None if there is no text

    def __post_init__(self) -> None:
        for name in self.metrics:
            check_metric_name(f"valid/{name}")
        if self.valid_losses is not None:
            total, tokens = self.valid_losses.sum(axis=0)
            object.__setattr__(self, "metrics", {**self.metrics, "loss": float(total / tokens)})


class Workload(ABC):
    """A kind of training: its model, its stream of sequences, its loss and its evaluation.

    Derived classes define `build_model`, `build_batch`, `loss_sum` and `evaluate`.
    """

    is_language = False  # whether it trains the experiment's model on the experiment's text
    tokens_per_sequence: int  # by default 1: a sequence is an example without tokens
    objective = "loss"  # the metric of `evaluate` that batch sizes are compared by
    direction = "minimize"  # or maximize
    unit = ""
    tolerance = 0.01  # so far from the best is good enough
    divergence_margin = math.inf  # training losses so far above the first evaluation diverge
    updates_per_step = 1  # optimizer steps on one batch
    is_rehearsal = False  # in a forecast, which skips work that does not affect the peak

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.options: dict[str, Any] = getattr(config.science.model, "options", {})
        self.tokens_per_sequence = config.tokens_per_sequence  # as the class declares it
        self.meter = Meter()  # means of metrics since the last log line
        # Called at the end of each phase of `roll_out`.
        self.on_phase: Callable[[str], None] = lambda name: None

    def check(self, text: TokenizedText | None) -> None:  # noqa: B027
        """Raise SweepError if a trial could not start; `text` is None until it is prepared."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the float32 model on the CPU, from the trial's seed."""

    @abstractmethod
    def build_batch(self, first: int, count: int) -> Batch:
        """Return sequences `first` … `first + count - 1` of the seed's global stream."""

    def random_batch(self, count: int) -> Batch:
        """Return a batch of the right shapes, if possible without any data, to time and probe."""
        return self.build_batch(0, count)

    def start(self, model: nn.Module) -> None:  # noqa: B027
        """Copy the initial weights, if the loss refers to them."""

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return the input of `loss_sum` and `loss_tokens`; GRPO generates it with the model."""
        return batch

    def loss_tokens(self, batch: Batch) -> int | Tensor:
        """Return the number of tokens in `loss_sum`, by which the loss is divided."""
        return len(batch[0]) * self.tokens_per_sequence

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss of a batch, a differentiable scalar in float32 or wider."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float | Metrics:
        """Return the validation loss, or metrics by name, at a milestone."""

    def evaluate_metrics(self, model: nn.Module) -> dict[str, float]:
        metrics = self.evaluate(model)
        named = metrics if isinstance(metrics, Mapping) else {"loss": metrics}
        FinalEvaluation(named)  # checks the names
        objective = self.config.objective_curve.removeprefix("valid/")
        if objective not in named:
            problem = f"evaluate must return its objective {objective!r}, got {', '.join(named)}"
            raise SweepError(f"{problem}. Return it, or correct objective.")
        return {name: float(value) for name, value in named.items()}

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        """Evaluate the whole validation split and a fixed set of training sequences."""
        return FinalEvaluation(self.evaluate_metrics(model))

    @cached_property
    def train_sequences(self) -> int | None:
        """The number of training sequences; None if they never repeat."""
        return None

    @cached_property
    def stream(self) -> SequenceStream:
        """The order of the training sequences, which is the same at every batch size."""
        assert self.train_sequences, "train_sequences must be set"
        return SequenceStream(self.train_sequences, self.config.science.seed)

    def epochs(self) -> float | None:
        """Return how many times the trial sees the training data; None if it never repeats."""
        if not self.train_sequences:
            return None
        sequences = self.config.science.tokens / self.tokens_per_sequence
        return sequences / self.train_sequences


class Meter:
    """Sums and counts by name. Tensors stay on the device until they are read."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float | Tensor, float | Tensor]] = {}
        self.vector_names: Sequence[str] = ()  # names of the values of `add_vector`
        self._vector: Tensor | None = None  # their sums

    def add(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        if name in self.vector_names:
            raise SweepError(f"a workload must not add the metric {name!r} of sweep. Rename it.")
        old_total, old_count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + total, old_count + count)

    def add_vector(self, values: Tensor) -> None:
        """Add one value to each metric of `vector_names`, by a single operation."""
        sums = [self.sums.get(name, (0.0, 0.0)) for name in self.vector_names]
        if self._vector is None:
            dtype = torch.float32 if values.is_mps else torch.float64
            self._vector = torch.zeros(len(sums), dtype=dtype, device=values.device)
            for element, (total, _) in zip(self._vector, sums, strict=True):
                element.fill_(total)  # does not wait for the device
        self._vector += values
        for name, total, (_, count) in zip(self.vector_names, self._vector, sums, strict=True):
            self.sums[name] = (total, count + 1)

    def state(self) -> dict[str, list[float]]:
        """Return sums and counts as numbers; waits for the device."""
        return {name: [float(total), float(count)] for name, (total, count) in self.sums.items()}

    def restore(self, state: dict[str, list[float]]) -> None:
        self.sums = {name: (total, count) for name, (total, count) in state.items()}
        self._vector = None

    def clear(self) -> None:
        self.restore({name: [0.0, 0.0] for name in self.sums})  # names are kept
