"""The noisy quadratic model: loss ½ Σ h_i w_i², gradient noise of covariance diag(c)/B.

By default h_i = c_i = 1/i (Zhang et al. 2019, "Which Algorithmic Choices Matter at Which Batch
Sizes?").
"""

import torch
from torch import Tensor, nn

from sweep.config.models import QuadraticSettings


class Quadratic(nn.Module):
    curvature: Tensor
    noise_scale: Tensor

    def __init__(self, settings: QuadraticSettings, seed: int, recomputes: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (settings.dimensions,), generator=generator) * 2 - 1
        self.weights = nn.Parameter(signs.float())
        index = torch.arange(1.0, settings.dimensions + 1)
        noise = settings.noise / index**settings.noise_power
        self.register_buffer("curvature", 1 / index**settings.curvature_power)
        self.register_buffer("noise_scale", noise.sqrt(), persistent=False)

    def expected_loss(self) -> Tensor:
        return 0.5 * (self.curvature * self.weights.square()).sum()

    def forward(self, noise: Tensor, count: int) -> Tensor:
        """Return the loss, of gradient count·h·w + √c·noise, with summed noise (dimensions,)."""
        scaled = noise * self.noise_scale
        slope = torch.addcmul(scaled, self.curvature, self.weights, value=count / 2)
        return slope @ self.weights
