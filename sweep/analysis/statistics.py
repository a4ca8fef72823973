"""Values with 95 % intervals, and the mean of paired differences."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from sweep.plan.decision import ALPHA


class Estimate(NamedTuple):
    """A value and its 95 % interval, whose ends are NaN if the data allow none."""

    value: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        """Write `1.5 [1.4, 1.6]`, or the value alone."""
        ends = f" [{self.low:{form}}, {self.high:{form}}]" if math.isfinite(self.low) else ""
        return f"{self.value:{form}}{ends}"


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with its t interval; there is none for one value."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Estimate(mean, math.nan, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    half = float(stdtrit(count - 1, 1 - ALPHA / 2)) * error
    return Estimate(mean, mean - half, mean + half)
