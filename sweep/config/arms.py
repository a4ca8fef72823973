"""Arms, which a sweep compares: their labels, their order, and their colors everywhere."""

from collections.abc import Iterable
from typing import NamedTuple

from sweep.config.numbers import format_count

# Evenly spaced in hue; each has a contrast of at least 3 with white and with a dark page.
STOPS = ("#3b74d8", "#1c8fb5", "#1a9468", "#7b8c17", "#c07a00", "#d5502f", "#b8458f")


class Arm(NamedTuple):
    """An optimizer, a batch size and a budget. The order is that of the plan."""

    optimizer: str | None  # None: the sweep has only one
    batch_size: int
    budget: int | None = None  # in tokens; None: the sweep has only one

    @property
    def label(self) -> str:
        """Such as `batch size 64`, `muon batch size 64` and `batch size 64, 4M`."""
        label = f"batch size {self.batch_size}"
        if self.optimizer is not None:
            label = f"{self.optimizer} {label}"
        if self.budget is not None:
            label += f", {format_count(self.budget)}"
        return label


def arm_colors(arms: Iterable[Arm]) -> dict[Arm, str]:
    """Return the color (#rrggbb) of each arm, which is that of its batch size."""
    listed = list(arms)
    colors = batch_colors(arm.batch_size for arm in listed)
    return {arm: colors[arm.batch_size] for arm in listed}


def batch_colors(batch_sizes: Iterable[int]) -> dict[int, str]:
    """Return a color (#rrggbb) for each batch size, blue for the smallest to purple."""
    import numpy as np

    sizes = sorted(set(batch_sizes))
    stops = np.array([[*bytes.fromhex(stop.removeprefix("#"))] for stop in STOPS])
    numbers = np.arange(len(stops))
    positions = np.linspace(0, len(stops) - 1, len(sizes))
    reds, greens, blues = (np.interp(positions, numbers, part).round() for part in stops.T)

    colors = {}
    for size, red, green, blue in zip(sizes, reds, greens, blues, strict=True):
        colors[size] = f"#{int(red):02x}{int(green):02x}{int(blue):02x}"
    return colors
