"""A number with its 95 % interval."""

from typing import NamedTuple


class Estimate(NamedTuple):
    """A value and its 95 % interval, whose ends are NaN where the data allow none."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float, start: float = 0.0) -> "Estimate":
        """Return start + factor times the number and its interval; the factor is positive."""
        return Estimate(*(start + factor * end for end in self))
