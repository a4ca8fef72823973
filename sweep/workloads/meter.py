"""Means of what a workload watches, since the last log point."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Meter:
    """Sums and counts by name; tensors stay on the device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float | Tensor, float | Tensor]] = {}

    def add(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add a sum over so many values."""
        known = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (known[0] + total, known[1] + count)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def add_means(self, values: Mapping[str, Tensor | None], mask: Tensor) -> None:
        """Add values (B, N) by name where the mask (B, N) is 1; None is left out."""
        count = mask.sum()
        for name, value in values.items():
            if value is not None:
                self.add(name, (value.detach() * mask).sum(), count)

    def state(self) -> dict[str, list[float]]:
        """Return plain numbers, for a checkpoint; waits for the device."""
        return {name: [float(total), float(count)] for name, (total, count) in self._sums.items()}

    def restore(self, state: dict[str, list[float]]) -> None:
        """Go on from what `state` returned."""
        self._sums = {name: (total, count) for name, (total, count) in state.items()}

    def clear(self) -> None:
        """Begin a new interval."""
        self._sums.clear()
