"""The noisy quadratic model: a training whose expected loss is known in closed form.

A batch holds the numbers of its sequences. The loss sums their noise with a random walk, so a step
costs the same at every batch size.
"""

import numpy as np
import torch
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.models import build_model
from sweep.models.quadratic import Quadratic
from sweep.workloads.protocol import Batch, FinalEvaluation
from sweep.workloads.random_walk import noise_sum


class NoisyQuadratic:
    """One token per sequence; evaluations are exact, gradients are noisy."""

    tokens_per_sequence = 1

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        assert config.science.model.kind == "quadratic"
        self.config, self.device = config, device
        self.seed, self.dimensions = config.science.seed, config.science.model.dimensions

    def build_model(self) -> nn.Module:
        """Build the model, whose weights are ±1."""
        return build_model(self.config.science.model, self.seed)

    def build_batch(self, first: int, count: int) -> Batch:
        """Return the numbers of the sequences, (count,)."""
        return (torch.arange(first, first + count, device=self.device),)

    def random_batch(self, count: int) -> Batch:
        """Return the first sequences, which cost as much as any others."""
        return self.build_batch(0, count)

    def loss_tokens(self, batch: Batch) -> int:
        """Return the number of sequences."""
        return batch[0].shape[0]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed noisy loss."""
        noise = noise_sum(batch[0], self.seed, self.dimensions)
        return model(noise, self.loss_tokens(batch))  # type: ignore[no-any-return]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the expected loss."""
        assert isinstance(model, Quadratic)
        return model.expected_loss().item()

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        """Return the expected loss as that of one document of one token."""
        loss = self.evaluate(model)
        return FinalEvaluation(np.array([[loss, 1.0]]), loss, None)

    def epochs(self) -> None:
        """Return None: the noise never repeats."""
        return
