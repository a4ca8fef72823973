"""The noisy quadratic model: loss ½ Σ h_i w_i², gradient noise of covariance diag(c)/B.

h_i = c_i = 1/i (Zhang et al. 2019, "Which Algorithmic Choices Matter at Which Batch Sizes?").
"""

import torch
from torch import Tensor, nn

from sweep.config.models import QuadraticSettings


class Quadratic(nn.Module):
    """The summed noise of sequences to their summed loss.

    The weights start at ±1, signs from the seed, so that the loss starts at ½ Σ h_i.
    """

    def __init__(self, settings: QuadraticSettings, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (settings.dimensions,), generator=generator) * 2 - 1
        self.weights = nn.Parameter(signs.float())
        curvature = 1 / torch.arange(1.0, settings.dimensions + 1)
        self.register_buffer("curvature", curvature)
        self.register_buffer("noise_scale", curvature.sqrt(), persistent=False)

    def expected_loss(self) -> Tensor:
        """Return ½ Σ h_i w_i²."""
        return 0.5 * (self.get_buffer("curvature") * self.weights.square()).sum()

    def forward(self, noise: Tensor, count: int) -> Tensor:
        """Return the loss of `count` sequences; its gradient is count·h·w + √c·noise.

        Args:
            noise: (dimensions), a sum of standard normals, one for each sequence.
            count: of sequences.
        """
        curvature, scale = self.get_buffer("curvature"), self.get_buffer("noise_scale")
        slope = torch.addcmul(noise * scale, curvature, self.weights, value=count / 2)
        return slope @ self.weights  # in one product: half the operations
