"""The objective: the measured quantity that batch sizes are compared by."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sweep.config.metrics import FINAL_VALID


@dataclass(frozen=True)
class Objective:
    """A column of trials.csv. A tolerance on a ratio is a share of the best value."""

    name: str = "final_valid_loss"
    direction: str = "minimize"  # or maximize
    unit: str = ""
    tolerance: float = 0.01  # so far from the best is good enough
    label: str = ""  # on the axis of a figure, if it is not the unit

    @property
    def title(self) -> str:
        return self.name.replace("_valid_", " validation ").replace("_", " ")

    @property
    def metric(self) -> str:
        """The name of the evaluated metric: a target is one of the loss."""
        return "loss" if self.is_ratio else self.name.removeprefix(FINAL_VALID)

    @property
    def curve(self) -> str:
        """The metric of metrics.jsonl that this is the last value of."""
        return f"valid/{self.metric}"

    @property
    def train_column(self) -> str:
        """The column of the same metric on training sequences, if a workload measures it."""
        return f"final_train_{self.metric}"

    @property
    def is_ratio(self) -> bool:
        """Whether values are logarithms, and gaps are shares of the best value."""
        return self.name == "tokens_to_target"

    @property
    def margin(self) -> float:
        """The tolerance on the scale of the values."""
        return math.log1p(self.tolerance) if self.is_ratio else self.tolerance

    @property
    def sign(self) -> int:
        """1 if less is better, else −1: values are the metric times the sign."""
        return -1 if self.direction == "maximize" else 1

    def value(self, mean: float) -> float:
        """Return the metric for a mean of values."""
        return math.exp(mean) if self.is_ratio else self.sign * mean

    def gap(self, difference: float) -> float:
        """Return a difference of values in the unit of the tolerance."""
        return math.expm1(difference) if self.is_ratio else difference

    @property
    def scale(self) -> tuple[int, str]:
        """The factor and the unit with which gaps are written."""
        return (100, "%") if self.is_ratio else (1, self.unit)

    def write(self, gap: float, rounded: Callable[..., Any] = np.round, sign: str = "") -> str:
        """Write a gap in steps of at most a hundredth of the tolerance."""
        factor, unit = self.scale
        steps = 10.0 ** min(300, 2 - math.floor(math.log10(factor * self.tolerance)))
        return f"{rounded(factor * gap * steps) / steps:{sign}z.10g} {unit}".rstrip()


LOSS = Objective()
REWARD = Objective("final_valid_reward", "maximize", "of reward", label="mean reward")
TOKENS_TO_TARGET = Objective("tokens_to_target", unit="ratio", tolerance=0.05)
