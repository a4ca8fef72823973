"""The noisy quadratic model: a training whose expected loss is known in closed form.

The loss is ½ Σ h_i w_i², the gradient noise has the covariance diag(c)/B. By default h_i = c_i =
1/i (Zhang et al. 2019, "Which Algorithmic Choices Matter at Which Batch Sizes?").
"""

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sweep.workloads.workload import Batch, FinalEvaluation, Workload

SEQUENCES = 1 << 48  # length of the walk, a power of two


@functools.lru_cache(maxsize=256)
def random_walk(t: int, seed: int, dimensions: int) -> NDArray[np.float64]:
    """Return the sum of the first `t` of independent standard normal vectors, (dimensions,)."""
    assert 0 <= t <= SEQUENCES, t
    if t == 0:
        return np.zeros(dimensions)
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, t, 0, 0]))
    noise = generator.standard_normal(dimensions)
    if t == SEQUENCES:
        return math.sqrt(SEQUENCES) * noise
    # Lévy's construction: t is the middle of a dyadic interval, and drawn between its two ends.
    half = t & -t  # the lowest bit of t is half the length of its interval
    start = random_walk(t - half, seed, dimensions)
    end = random_walk(t + half, seed, dimensions)
    return (start + end) / 2 + math.sqrt(2 * half) / 2 * noise


@torch.library.custom_op("sweep::noise_sum", mutates_args=())
def noise_sum(indices: Tensor, seed: int, dimensions: int) -> Tensor:
    """Return the summed noise of consecutive sequences, (dimensions,) in float32; not traced."""
    ends = indices[:: max(1, len(indices) - 1)].tolist()  # one read from the device
    assert ends[-1] - ends[0] == len(indices) - 1, "sequences of a batch must be consecutive"
    start = random_walk(ends[0], seed, dimensions)
    total = random_walk(ends[-1] + 1, seed, dimensions) - start
    return torch.from_numpy(total.astype(np.float32)).to(indices.device)


@noise_sum.register_fake
def _(indices: Tensor, seed: int, dimensions: int) -> Tensor:
    return indices.new_empty(dimensions, dtype=torch.float32)


class Quadratic(nn.Module):
    """Weights that start at random signs; curvature and noise fall as powers of i."""

    curvature: Tensor
    noise_scale: Tensor

    def __init__(
        self,
        seed: int,
        dimensions: int = 1000,
        curvature_power: float = 1.0,
        noise_power: float = 1.0,
        noise: float = 1.0,  # variance of w_1's gradient
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (dimensions,), generator=generator) * 2 - 1
        self.weights = nn.Parameter(signs.float())
        index = torch.arange(1.0, dimensions + 1)
        self.register_buffer("curvature", 1 / index**curvature_power)
        self.register_buffer("noise_scale", (noise / index**noise_power).sqrt(), persistent=False)

    def expected_loss(self) -> Tensor:
        return 0.5 * (self.curvature * self.weights.square()).sum()

    def forward(self, noise: Tensor, count: int) -> Tensor:
        """Return the loss, of gradient count·h·w + √c·noise, with summed noise (dimensions,)."""
        scaled = noise * self.noise_scale
        slope = torch.addcmul(scaled, self.curvature, self.weights, value=count / 2)
        return slope @ self.weights


class NoisyQuadratic(Workload):
    divergence_margin = 1.0

    def build_model(self) -> nn.Module:
        return Quadratic(self.config.science.seed, **self.options)

    def build_batch(self, first: int, count: int) -> Batch:
        return (torch.arange(first, first + count, device=self.device),)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        noise = noise_sum(batch[0], self.config.science.seed, len(next(model.parameters())))
        return model(noise, len(batch[0]))  # type: ignore[no-any-return]

    def evaluate(self, model: nn.Module) -> float:
        assert isinstance(model, Quadratic)
        return model.expected_loss().item()

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        loss = self.evaluate(model)
        return FinalEvaluation({}, np.array([[loss, 1.0]]), loss)  # one document of one token
