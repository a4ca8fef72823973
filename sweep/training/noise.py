"""Gradient noise, from the gradients of single microbatches (SCIENCE.md §3).

From K gradients g_k, each the mean over b sequences, with mean ḡ over B = K·b sequences:
trΣ̂ = b/(K-1) · Σ|g_k - ḡ|², Ĝ² = |ḡ|² - trΣ̂/B; both unbiased (McCandlish et al. 2018, A.1).
`sweep.analysis.critical_batch_size` averages both over the training and divides last.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sweep.training.optimizer import is_part, own_part
from sweep.workloads import ranks


def noise_estimates(squares: float, square: float, count: int, size: int) -> tuple[float, float]:
    """Return trΣ̂ and Ĝ² from Σ|g_k|², |ḡ|², K ≥ 2 gradients, and b sequences per gradient."""
    trace = size / (count - 1) * (squares - count * square)
    return trace, square - trace / (count * size)


class GradientSums:
    """Sums gradients of equal microbatches' shares of the batch's loss, and their squared norms."""

    def __init__(self) -> None:
        self.count = 0
        self._squares: Tensor | float = 0.0  # Σ|g_k|²
        self._square: Tensor | float = 0.0  # |Σg_k|²
        self._total: list[Tensor | None] = []

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the parameters' gradients to the sum and remove them from the parameters."""
        self._squares = self._squares + _square([parameter.grad for parameter in parameters])
        self._total = self._total or [None] * len(parameters)
        for i, parameter in enumerate(parameters):
            total, gradient = self._total[i], parameter.grad
            if total is not None and gradient is not None:
                total += gradient
            elif gradient is not None:  # the next backward pass overwrites buckets of several ranks
                self._total[i] = gradient.clone() if ranks.are_many() else gradient
            parameter.grad = None
        self.count += 1

    def give_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the parameters' gradients to the sum, and keep its squared norm only."""
        self._square = _square(self._total)
        for parameter, gradient in zip(parameters, self._total, strict=True):
            parameter.grad = gradient
        self._total = []

    def estimates(self, size: int) -> tuple[float, float]:
        """Return trΣ̂ and Ĝ², for microbatches of `size` sequences."""
        squares = float(self._squares) * self.count**2  # squares of microbatch means
        return noise_estimates(squares, float(self._square), self.count, size)


def _square(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return the squared norm of all gradients together, in float64 (float32 on MPS)."""
    parts = [gradient for gradient in gradients if gradient is not None]
    wide = torch.float32 if parts[0].device.type == "mps" else torch.float64
    norms = [torch.linalg.vector_norm(own_part(part), dtype=wide) for part in parts]
    square = torch.stack(norms).square().sum()
    return ranks.summed(square) if is_part(parts[0]) else square
