"""The noisy quadratic model as a workload: a training whose truth is known in closed form.

Its stream is random access: sequence i is the i-th block of a counter-based generator, so that
every batch size sees the same noise in the same order.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.models import build_model
from sweep.models.quadratic import Quadratic
from sweep.workloads.protocol import Batch, FinalEvaluation

WORDS_PER_COUNT = 4  # 64-bit words per counter value of Philox4x64


class NoisyQuadratic:
    """One token per sequence; the loss is exact, the gradients are noisy."""

    tokens_per_sequence = 1

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        assert config.science.model.kind == "quadratic"
        self.config, self.device = config, device
        self.dimensions = config.science.model.dimensions
        self._words = -(-self.dimensions // WORDS_PER_COUNT) * WORDS_PER_COUNT  # per sequence

    def build_model(self) -> nn.Module:
        """Build the weights, ±1 by the seed."""
        return build_model(self.config.science.model, self.config.science.seed)

    def build_batch(self, first: int, count: int) -> Batch:
        """Return standard normal noise, (count, dimensions), by Box and Muller's transform."""
        generator = np.random.Philox(key=self.config.science.seed)
        generator.advance(first * self._words // WORDS_PER_COUNT)
        words = generator.random_raw(count * self._words).reshape(count, self._words)
        uniform = ((words >> np.uint64(11)) + 0.5) * 2.0**-53  # in (0, 1)
        radius = np.sqrt(-2 * np.log(uniform[:, 0::2]))
        angle = 2 * math.pi * uniform[:, 1::2]
        normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        noise = torch.from_numpy(normal[:, : self.dimensions].astype(np.float32))
        return (noise.to(self.device),)

    def random_batch(self, count: int) -> Batch:
        """Return noise of the right shape."""
        return (torch.randn(count, self.dimensions, device=self.device),)

    def loss_tokens(self, batch: Batch) -> int:
        """One token per sequence."""
        return batch[0].shape[0]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed noisy loss."""
        return model(batch[0]).sum()  # type: ignore[no-any-return]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the exact loss."""
        assert isinstance(model, Quadratic)
        return model.expected_loss().item()

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        """Return the exact loss as that of one document of one token."""
        loss = self.evaluate(model)
        return FinalEvaluation(np.array([[loss, 1.0]]), loss, None)

    def epochs(self) -> None:
        """The noise never repeats."""
        return
