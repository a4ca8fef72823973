"""The best learning rate of one batch size, how well it is known, and whether its grid shows it.

A quadratic in log η by least squares; the interval of its vertex is Fieller's (1954), which is
unbounded, here None, where the noise could hide the curvature. See docs/statistics.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from sweep.analysis.statistics import ALPHA
from sweep.errors import SweepError

NEIGHBOURS = 2  # finite points on each side of the best that the quadratic is fitted to

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LearningRateOptimum:
    """What the losses over a grid of rates say of the best rate."""

    best: float | None  # the measured rate of the least loss; None where every trial diverged
    is_inside: bool  # whether it is strictly inside its grid
    rate: float | None  # η*, the vertex
    interval: tuple[float, float] | None  # of η*, 95 %; None without σ or where it is unbounded
    plateau: tuple[float, float] | None  # measured rates beside the best within one σ of its loss
    no_rate: str = ""  # why there is no η*


def is_inside(rates: Sequence[float], losses: Sequence[float]) -> bool:
    """Tell whether the best rate has a worse one on both sides; a diverged trial counts as +∞."""
    _, values = _sorted(rates, losses)
    least = values.min(initial=math.inf)
    return bool(math.isfinite(least) and values[0] > least and values[-1] > least)


def learning_rate_optimum(
    rates: Sequence[float],
    losses: Sequence[float],
    sigma: float | None = None,
    degrees_of_freedom: float = math.inf,
) -> LearningRateOptimum:
    """Fit a quadratic in log η through the best rate and up to two finite points on each side.

    The interval holds the noise of seeds alone, not that the curve is no parabola.

    Args:
        rates: of the grid, distinct, in any order.
        losses: one for each rate; not finite where the trial diverged.
        sigma: standard deviation of one of the losses.
        degrees_of_freedom: with which σ was estimated; infinite where it is known.

    Raises:
        SweepError: if the rates are not positive and distinct, one for each loss.
    """
    inside = is_inside(rates, losses)
    grid, values = _sorted(rates, losses)
    is_finite = np.isfinite(values)
    grid, values = grid[is_finite], values[is_finite]
    if not len(values):
        return LearningRateOptimum(None, inside, None, None, None, "every trial diverged")
    place = int(np.argmin(values))
    near = slice(max(0, place - NEIGHBOURS), place + NEIGHBOURS + 1)
    log_rates, near_values = np.log(grid[near]), values[near]
    if sigma is None:
        plateau, reach = None, None
    else:
        plateau = _plateau(grid, values, place, sigma)
        reach = sigma * float(stdtrit(degrees_of_freedom, 1 - ALPHA / 2))
    rate, interval, no_rate = _vertex(log_rates, near_values, reach)
    return LearningRateOptimum(float(grid[place]), inside, rate, interval, plateau, no_rate)


def _sorted(rates: Sequence[float], losses: Sequence[float]) -> tuple[Floats, Floats]:
    """Return rates and losses by ascending rate, +∞ for every loss that is not finite."""
    grid, values = np.array(rates, dtype=float), np.array(losses, dtype=float)
    is_grid = bool((grid > 0).all()) and len(set(grid.tolist())) == len(grid)
    if not is_grid or grid.shape != values.shape:
        raise SweepError(
            f"Rates must be positive and distinct, one for each of {len(values)} losses, got "
            f"{grid.tolist()}. Give the mean loss of a rate with several seeds."
        )
    order = np.argsort(grid)
    return grid[order], np.where(np.isfinite(values), values, math.inf)[order]


def _plateau(grid: Floats, values: Floats, place: int, sigma: float) -> tuple[float, float]:
    is_far = values > values[place] + sigma
    low = place - int(np.argmax(np.append(is_far[place::-1], True))) + 1
    high = place + int(np.argmax(np.append(is_far[place:], True))) - 1
    return float(grid[low]), float(grid[high])


def _vertex(
    log_rates: Floats, values: Floats, reach: float | None
) -> tuple[float | None, tuple[float, float] | None, str]:
    """Return η*, its interval and, where there is none, why.

    Args:
        log_rates: ascending.
        values: finite.
        reach: σ times the quantile of the interval.
    """
    if len(log_rates) < 3:
        return None, None, "fewer than three rates have a finite loss"
    centre = float(log_rates.mean())
    slope, curvature, covariance = _parabola(log_rates - centre, values)
    if curvature <= 0:
        return None, None, "the curvature is not positive"
    vertex = centre - slope / (2 * curvature)
    if not log_rates[0] <= vertex <= log_rates[-1]:
        return None, None, "the vertex lies outside the fitted rates"
    roots = None if reach is None else _fieller(slope, curvature, reach**2 * covariance)
    interval = roots and (math.exp(centre + roots[0]), math.exp(centre + roots[1]))
    return math.exp(vertex), interval, ""


def _parabola(x: Floats, y: Floats) -> tuple[float, float, Floats]:
    """Return slope and curvature of y = c + b·x + a·x², and their covariance over σ²."""
    design = np.stack([np.ones_like(x), x, x**2], axis=1)
    inverse = np.linalg.pinv(design)  # (3, points)
    _, slope, curvature = (inverse @ y).tolist()
    return slope, curvature, (inverse @ inverse.T)[1:, 1:]


def _fieller(slope: float, curvature: float, spread: Floats) -> tuple[float, float] | None:
    """Return where b + 2a·x could be 0: (b + 2a·x)² ≤ q²·Var(b + 2a·x); None if unbounded.

    Args:
        slope: b.
        curvature: a.
        spread: q² times the covariance of (b, a).
    """
    square = 4 * (curvature**2 - spread[1, 1])
    if square <= 0:
        return None
    linear = 4 * (slope * curvature - spread[0, 1])
    root = math.sqrt(max(0.0, linear**2 - 4 * square * (slope**2 - spread[0, 0])))
    return (-linear - root) / (2 * square), (-linear + root) / (2 * square)
