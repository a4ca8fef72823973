"""Running means of a workload's metrics between two log lines."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sweep.config.grpo import OF_REWARDS


class Meter:
    """Sums and counts by name. Tensors stay on the device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float | Tensor, float | Tensor]] = {}

    def add(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add a sum of `count` values."""
        old = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old[0] + total, old[1] + count)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def add_means(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add values (B, N) by name where the mask (B, N) is 1."""
        count = mask.sum()
        for name, value in values.items():
            self.add(name, (value.detach() * mask).sum(), count)

    def add_rewards(
        self,
        rewards: NDArray[np.float64],
        components: Mapping[str, NDArray[np.float64]],
        group_size: int,
    ) -> None:
        """Add the rewards (B,) of whole groups, and their components, (B,) each.

        A component counts 0 for every completion that lacks it, also before it first appears.
        """
        groups = rewards.reshape(-1, group_size)
        self.add("reward/mean", rewards.sum(), rewards.size)
        self.add("reward/std", rewards.std(), 1)
        self.add("reward/group_std", groups.std(axis=1).sum(), len(groups))
        count = self._sums["reward/mean"][1]
        totals = {f"reward/{name}": values.sum() for name, values in components.items()}
        reserved = {f"reward/{name}" for name in OF_REWARDS}
        earlier = {name for name in self._sums if name.startswith("reward/")} - reserved
        for name in sorted(earlier | totals.keys()):
            total = self._sums.get(name, (0.0, 0.0))[0] + totals.get(name, 0.0)
            self._sums[name] = (total, count)

    def state(self) -> dict[str, list[float]]:
        """Return sums and counts as numbers, for a checkpoint; waits for the device."""
        return {name: [float(total), float(count)] for name, (total, count) in self._sums.items()}

    def restore(self, state: dict[str, list[float]]) -> None:
        """Continue from the result of `state`."""
        self._sums = {name: (total, count) for name, (total, count) in state.items()}

    def clear(self) -> None:
        """Start a new interval; names are kept."""
        self._sums = dict.fromkeys(self._sums, (0.0, 0.0))
