"""Fit curves with one lowest point: of the loss against the log rate, or the log batch size.

A curve is quadratic on both sides of its lowest point, and on one side at most `STEEPNESS` times as
steep as on the other. It is possible if its sum of squared residuals exceeds the least one by at
most `SLACK` variances of a loss.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STEEPNESS = 2.5
RATIOS = np.array([1.0, 1 / STEEPNESS, STEEPNESS])  # curvature above over that below
SLACK = 6.0
MISFIT = 6.0  # residual variance, over that of a loss, from which on a curve does not fit
CLEAR = 3.0  # slacks by which a flat line fits worse than a curve that is clear
LEAST_POINTS = 3
TIE = 1e-7  # residuals of equal fits differ by this share of the total: the grid's accuracy
PARAMETERS = 4  # level, lowest point, curvature and ratio
LOWEST_POINTS = 41  # that are tried in each round
ROUNDS = 3  # each narrows the range of the lowest points


@dataclass(frozen=True, eq=False)
class Points:
    """Mean losses at some log rates, or log batch sizes, of each of k curves; NaN if missing."""

    positions: Floats  # (..., k, points)
    losses: Floats  # (..., k, points)
    ends: Floats  # positions between which the lowest point lies, (..., k, 2); NaN: not known
    seeds: Floats  # seeds that the losses are means of, (..., k)


@dataclass(frozen=True, eq=False)
class PossibleCurves:
    """The possible curves of each of k: lowest points and fits, (..., k, families, points).

    Properties have the shape (..., k), and NaN without a fit.
    """

    lowest: Floats
    fit: "_Fit"
    bound: Floats  # largest sum of squared residuals of a possible curve, (..., k, 1, 1)
    has_fit: NDArray[np.bool_]  # (..., k)
    index_of_best: NDArray[np.int64]  # among the flattened families and points, (..., k, 1)
    misfits: NDArray[np.bool_]  # (..., k)
    is_clear: NDArray[np.bool_]  # (..., k)
    may_be_flat: NDArray[np.bool_]  # (..., k)

    def at_best(self, values: Floats) -> Floats:
        """Return the values of the curve that fits best, (..., k)."""
        flat = values.reshape(*self.has_fit.shape, -1)
        best = np.take_along_axis(flat, self.index_of_best, -1)[..., 0]
        return np.where(self.has_fit, best, np.nan)

    @cached_property
    def optimum(self) -> Floats:
        return self.at_best(self.lowest)

    @cached_property
    def curvature(self) -> Floats:
        return self.at_best(self.fit.below)

    @cached_property
    def ratio(self) -> Floats:
        above = self.at_best(self.fit.above)
        has_curvature = self.curvature > 0
        return np.where(has_curvature, above / np.where(has_curvature, self.curvature, 1.0), 1.0)

    @cached_property
    def optimum_low(self) -> Floats:
        first, _ = _ends(self.lowest, self.fit.squares <= self.bound)
        return np.where(self.has_fit, first.min(-1), np.nan)

    @cached_property
    def optimum_high(self) -> Floats:
        _, last = _ends(self.lowest, self.fit.squares <= self.bound)
        return np.where(self.has_fit, last.max(-1), np.nan)

    def may_be_optimum(self, positions: Floats) -> NDArray[np.bool_]:
        """Return whether positions lie between the optima of the possible curves, (..., k)."""
        is_in = (self.optimum_low <= positions) & (positions <= self.optimum_high)
        return np.asarray(is_in)

    def regrets(self, used: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the regret of positions, and its least and largest possible value, (..., k).

        Without a fit they are NaN, 0 and infinite.
        """
        fit = self.fit
        distance = used[..., None, None] - self.lowest
        of_curves = np.where(distance > 0, fit.above, fit.below) * np.square(distance)
        smallest, largest = fit.regrets_between(distance, self.bound)
        return (
            self.at_best(of_curves),
            np.where(self.has_fit, smallest.min((-2, -1)), 0.0),
            np.where(self.has_fit, largest.max((-2, -1)), np.inf),
        )


def possible_curves(points: Points, variance: Floats) -> PossibleCurves:
    """Fit the curves through some points.

    Args:
        points: at least three for a fit, whose ends are known.
        variance: that of one loss over seeds, (..., k).
    """
    is_given = np.isfinite(points.positions) & np.isfinite(points.losses)
    count = is_given.sum(-1)
    has_fit = (count >= LEAST_POINTS) & np.isfinite(points.ends).all(-1)

    ends = np.where(has_fit[..., None], points.ends, [0.0, 1.0])
    start = ends[..., 0, None]
    end = ends[..., 1, None]
    families = len(RATIOS) + 1
    low = np.repeat(start, families, axis=-1)
    high = np.repeat(end, families, axis=-1)
    for _ in range(ROUNDS):
        step = (high - low) / (LOWEST_POINTS - 1)
        steps = step[..., None] * np.arange(LOWEST_POINTS)
        lowest = low[..., None] + steps  # (..., k, families, points)
        fit = _fit(points, is_given, lowest)
        least_of_family = fit.squares.min(-1)
        least = least_of_family.min(-1)

        # A curve that fits badly shows more noise than the seeds do.
        degrees = count - PARAMETERS
        misfit = np.where(degrees > 0, least / np.maximum(degrees, 1), 0.0)
        noise = variance / points.seeds
        misfits = misfit > MISFIT * noise
        slack = SLACK * np.where(misfits, misfit, noise)
        of_exact_fits = np.where(degrees > 0, 0.0, TIE * fit.total)  # many curves fit few points
        slack = np.maximum(slack, of_exact_fits)

        bound_of_family = least_of_family + slack[..., None]
        first, last = _ends(lowest, fit.squares <= bound_of_family[..., None])
        low = np.maximum(first - step, start)
        high = np.minimum(last + step, end)

    # If several curves fit equally well, the first counts, which is a parabola.
    is_best = fit.squares <= (least + TIE * fit.total)[..., None, None]
    return PossibleCurves(
        lowest=lowest,
        fit=fit,
        bound=(least + slack)[..., None, None],
        has_fit=has_fit,
        index_of_best=is_best.reshape(*count.shape, -1).argmax(-1)[..., None],
        misfits=misfits,
        is_clear=~misfits & (fit.total - least > CLEAR * slack),
        may_be_flat=fit.total - least <= slack,
    )


class _Fit(NamedTuple):
    """Least squares at each lowest point, for each family of curves, (..., k, families, points).

    The curves of a family have the same ratio of the curvature above to that below, one of RATIOS;
    those of the last family any ratio up to STEEPNESS.
    """

    level: Floats
    below: Floats  # curvatures of the best curve, not negative
    above: Floats
    squares: Floats  # its residuals; infinite in the last family if its ratio is not allowed
    free_below: Floats  # curvatures that may be negative, and of any ratio in the last family
    free_above: Floats
    free_squares: Floats
    variance_below: Floats  # covariance matrix of the free curvatures, for residuals of variance 1
    covariance: Floats
    variance_above: Floats
    total: Floats  # squares without a curve, (..., k)

    def regrets_between(self, distance: Floats, bound: Floats) -> tuple[Floats, Floats]:
        """Return the least and the largest regret of curves with residuals up to `bound`.

        `distance` is that from the lowest point to the position used. Without such a curve the
        regrets are infinite and 0.
        """
        lower, has_lower = self._end_of_curvature(distance, bound, sign=-1)
        upper, has_upper = self._end_of_curvature(distance, bound, sign=1)
        best = np.where(distance > 0, self.above, self.below)
        has_best = self.squares <= bound

        least = np.where(has_lower, lower, np.inf)
        least = np.minimum(least, np.where(has_best, best, np.inf))
        largest = np.where(has_upper, upper, 0.0)
        largest = np.maximum(largest, np.where(has_best, best, 0.0))
        square = np.square(distance)
        return _regret(least, square, without=np.inf), _regret(largest, square, without=0.0)

    def _end_of_curvature(
        self, distance: Floats, bound: Floats, sign: int
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the least (sign -1) or the largest curvature of possible curves, and if any is.

        It is the curvature on the side of the position used.
        """
        is_above = distance > 0
        side = np.where(is_above, self.free_above, self.free_below)
        other = np.where(is_above, self.free_below, self.free_above)
        variance = np.where(is_above, self.variance_above, self.variance_below)
        variance = np.maximum(variance, 1e-300)
        scale = np.sqrt(np.maximum(bound - self.free_squares, 0.0) / variance)

        curvature = side + sign * scale * variance
        of_other_side = other + sign * scale * self.covariance
        is_allowed = _is_allowed(curvature, of_other_side)
        is_allowed[..., :-1, :] = True  # the ratio is fixed
        is_possible = is_allowed & (self.free_squares <= bound)
        return np.maximum(curvature, 0.0), is_possible


def _regret(curvature: Floats, square: Floats, without: float) -> Floats:
    """Return the regret at a squared distance from the lowest point; `without` a curve."""
    is_finite = np.isfinite(curvature)
    regret = np.where(is_finite, curvature, 0.0) * square
    return np.where(is_finite, regret, without)


def _is_allowed(curvature: Floats, other: Floats) -> NDArray[np.bool_]:
    return (other <= STEEPNESS * curvature) & (curvature <= STEEPNESS * other)


def _fit(points: Points, is_given: NDArray[np.bool_], lowest: Floats) -> _Fit:
    is_in = is_given[..., None, None, :]
    count = np.maximum(is_in.sum(-1, keepdims=True), 1)
    weights = np.where(is_in, 1 / count, 0.0)
    losses = np.where(is_in, points.losses[..., None, None, :], 0.0)
    mean = _dot(weights, losses)
    residual = np.where(is_in, losses - mean[..., None], 0.0)

    # The squared distances below the lowest point (x) and above it (y), without their means.
    positions = np.where(is_in, points.positions[..., None, None, :], 0.0)
    distance = positions - lowest[..., None]  # (..., k, families, points, rates)
    square = np.square(distance)
    x = np.where(distance < 0, square, 0.0)
    y = np.where(distance > 0, square, 0.0)
    mean_x = _dot(weights, x)
    mean_y = _dot(weights, y)
    x = np.where(is_in, x - mean_x[..., None], 0.0)
    y = np.where(is_in, y - mean_y[..., None], 0.0)

    xx = _dot(x, x)
    xy = _dot(x, y)
    yy = _dot(y, y)
    xr = _dot(x, residual)
    yr = _dot(y, residual)
    total = _dot(residual, residual)

    # Fixed ratios: regression on one variable, x + ratio * y.
    ratios = np.r_[RATIOS, 1.0][:, None]  # the last one is not used
    gram = np.maximum(xx + 2 * ratios * xy + ratios**2 * yy, 1e-300)
    curvature = (xr + ratios * yr) / gram

    # Any ratio: regression on x and y.
    is_free = (np.arange(len(ratios)) == len(RATIOS))[:, None]
    determinant = xx * yy - xy**2
    is_regular = determinant > 1e-9 * xx * yy
    determinant = np.where(is_regular, determinant, 1.0)

    free_below = np.where(is_free, (yy * xr - xy * yr) / determinant, curvature)
    free_above = np.where(is_free, (xx * yr - xy * xr) / determinant, ratios * curvature)
    free_squares = total - free_below * xr - free_above * yr
    free_squares = np.where(is_free & ~is_regular, np.inf, free_squares)

    is_allowed = np.where(is_free, _is_allowed(free_below, free_above), curvature > 0)
    below = np.where(is_allowed, free_below, 0.0)
    above = np.where(is_allowed, free_above, 0.0)
    without_curve = np.where(is_free, np.inf, total)
    return _Fit(
        level=mean - below * mean_x - above * mean_y,
        below=below,
        above=above,
        squares=np.where(is_allowed, free_squares, without_curve),
        free_below=free_below,
        free_above=free_above,
        free_squares=free_squares,
        variance_below=np.where(is_free, yy / determinant, 1 / gram),
        covariance=np.where(is_free, -xy / determinant, ratios / gram),
        variance_above=np.where(is_free, xx / determinant, ratios**2 / gram),
        total=total[..., 0, 0],
    )


def _dot(left: Floats, right: Floats) -> Floats:
    return np.asarray(np.einsum("...r,...r", left, right))


def _ends(points: Floats, is_in: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the least and the largest of the points that are in, over the last axis."""
    least = np.where(is_in, points, np.inf).min(-1)
    largest = np.where(is_in, points, -np.inf).max(-1)
    return least, largest
