"""Peak memory as a line: peak = fixed + per_sequence · microbatch_size."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

ROUNDING = 1e-6  # of a sequence, that a fit's arithmetic may cost


@dataclass(frozen=True)
class Line:
    """A least-squares line through measured or forecast peaks."""

    fixed_bytes: float
    bytes_per_sequence: float
    r_squared: float  # 1 through two points
    largest_residual_bytes: float

    def at(self, size: float) -> float:
        """Return the peak at a microbatch size."""
        return self.fixed_bytes + self.bytes_per_sequence * size

    def largest(self, limit_bytes: float) -> int:
        """Return the largest size whose peak is within the limit; 0 for none."""
        if self.bytes_per_sequence <= 0:
            return 0 if self.fixed_bytes > limit_bytes else 2**40
        size = (limit_bytes - self.fixed_bytes) / self.bytes_per_sequence
        return max(0, math.floor(size + ROUNDING))

    def as_document(self) -> dict[str, float]:
        """Return it as `forecast` and `probe` print it."""
        return asdict(self)


def fit_line(peaks: Mapping[int, float]) -> Line | None:
    """Fit a line to peaks in bytes by size; None with fewer than two sizes."""
    if len(peaks) < 2:
        return None
    sizes, values = np.array(list(peaks), float), np.array(list(peaks.values()), float)
    slope, fixed = np.polyfit(sizes, values, 1)
    residuals = values - (fixed + slope * sizes)
    spread = float(((values - values.mean()) ** 2).sum())
    r_squared = 1 - float((residuals**2).sum()) / spread if spread else 1.0
    return Line(float(fixed), float(slope), r_squared, float(np.abs(residuals).max()))
