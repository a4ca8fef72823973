"""Extrapolate best rates and best batch sizes in logarithms, with a prior for the slopes."""

import numpy as np

from sweep.decision.curves import Floats

SCATTER = 0.2  # standard deviation of best log rates, and of best log batch sizes, about their line
SLOPE_DEVIATION = 0.25  # standard deviation of a slope about its usual value


def extrapolate(columns: Floats, values: Floats, point: Floats) -> float:
    """Return a value on a plane through some points, whose slopes have normal priors around 0.

    A few points, or some that lie close together, hardly tell a slope.

    Args:
        columns: positions of the points, (points, slopes).
        values: those of the points, without their usual slopes, (points,).
        point: where the plane is evaluated, (slopes,).
    """
    means = columns.mean(0)
    distance = columns - means
    precision = (SCATTER / SLOPE_DEVIATION) ** 2 * np.eye(columns.shape[1])
    slopes = np.linalg.solve(distance.T @ distance + precision, distance.T @ values)
    return float(values.mean() + (point - means) @ slopes)
