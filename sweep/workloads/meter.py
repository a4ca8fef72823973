"""Means of what a workload watches, since the last log point."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sweep.config.grpo import REWARD_STATISTICS


class Meter:
    """Sums and counts by name; tensors stay on the device until they are read.

    A name that was seen once stays, with nothing in it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float | Tensor, float | Tensor]] = {}

    def add(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add a sum over so many values."""
        known = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (known[0] + total, known[1] + count)

    def names(self) -> list[str]:
        """Return what was seen so far, in this interval or before it."""
        return list(self._sums)

    def add_parts(self, totals: Mapping[str, float], whole: str) -> None:
        """Add sums over all that another name has been summed over in this interval."""
        count = self._sums[whole][1]
        for name, total in totals.items():
            self._sums[name] = (self._sums.get(name, (0.0, 0.0))[0] + total, count)

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
        self._sums = dict.fromkeys(self._sums, (0.0, 0.0))


def watch_rewards(
    meter: Meter,
    rewards: NDArray[np.float64],
    parts: Mapping[str, NDArray[np.float64]],
    group_size: int,
) -> None:
    """Add a step's rewards (B), and their components by name; one that is missing is 0.

    Args:
        meter: of the workload.
        rewards: the completions of a prompt side by side.
        parts: components, (B) each.
        group_size: completions of a prompt.
    """
    groups = rewards.reshape(-1, group_size)
    meter.add("reward/mean", rewards.sum(), rewards.size)
    meter.add("reward/std", rewards.std(), 1)
    meter.add("reward/group_std", groups.std(axis=1).sum(), len(groups))
    own = {f"reward/{name}" for name in REWARD_STATISTICS}
    others = [name for name in meter.names() if name.startswith("reward/") and name not in own]
    sums = {f"reward/{name}": values.sum() for name, values in parts.items()}
    meter.add_parts({**dict.fromkeys(others, 0.0), **sums}, "reward/mean")
