"""Loss against learning rate near its lowest point: the best rate, and what another one gives up.

A curve is quadratic in the log rate on both sides of its lowest point, and on one side at most
`STEEPNESS` times as steep as on the other. It is possible if its sum of squared residuals exceeds
the least one by at most `SLACK` variances of a loss: docs/statistics.md.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STEEPNESS = 2.5
RATIOS = STEEPNESS ** np.array([0.0, -0.5, 0.5, -1.0, 1.0])  # curvature above over that below
SLACK = 6.0
NEIGHBOURS = 2  # rates on each side of the best that a curve is fitted to
LEAST_RATES = 3
FINEST = 1.1  # ratio of neighbouring rates that is not refined any further
PARAMETERS = 4  # level, lowest point, curvature and ratio
GRID, ROUNDS = 41, 3  # lowest points that are tried in each round; a round narrows their range


@dataclass(frozen=True, eq=False)
class RatePoints:
    """Mean losses of the rates near the best, of each batch size; NaN if there are fewer rates."""

    log_rates: Floats  # (..., k, rates)
    losses: Floats  # (..., k, rates)
    ends: Floats  # log rates between which the best one lies, (..., k, 2); NaN: it is at an edge
    seeds: Floats  # tuning seeds that the losses are means of, (..., k)


@dataclass(frozen=True, eq=False)
class RateBounds:
    """The curves of each batch size, (..., k): best log rate, and regret of the rate used."""

    optimum: Floats  # of the curve that fits best, as the next three; NaN without a fit
    level: Floats  # its loss
    curvature: Floats  # loss per squared log rate below the optimum
    ratio: Floats  # curvature above the optimum over that below
    optimum_low: Floats  # of the possible curves
    optimum_high: Floats
    regret: Floats  # loss that the rate used gives up, of the curve that fits best
    regret_low: Floats  # of the possible curves; 0 without a fit
    regret_high: Floats  # infinite without a fit
    misfit: Floats  # squared residual per degree of freedom of the curve that fits best

    def losses_at(self, log_rates: Floats) -> Floats:
        """Return the losses of the curve that fits best, for one batch size."""
        distance = log_rates - self.optimum
        side = np.where(distance > 0, self.ratio, 1.0)
        return np.asarray(self.level + self.curvature * side * np.square(distance))


def rate_points(tried: Mapping[float, Mapping[int, float]]) -> RatePoints:
    """Return the points of one batch size, without the axis k, from losses by rate and seed.

    A loss is infinite if the trial diverged, and NaN if it was pruned, which bounds nothing. The
    rates are those next to the best of the seed with the most rates; further seeds count if they
    have all of these.
    """
    tried = {
        rate: {seed: loss for seed, loss in losses.items() if not math.isnan(loss)}
        for rate, losses in sorted(tried.items())
    }
    counts = Counter(seed for losses in tried.values() for seed in losses)
    first = min(counts, key=lambda seed: (-counts[seed], seed), default=0)
    rates = [rate for rate in tried if first in tried[rate]]
    losses = np.array([tried[rate][first] for rate in rates])
    finite = np.flatnonzero(np.isfinite(losses))
    points = np.full((2, 2 * NEIGHBOURS + 1), np.nan)
    ends = np.full(2, np.nan)
    if not len(finite):
        return RatePoints(points[0], points[1], ends, np.ones(()))
    best = int(losses[finite].argmin())
    near = finite[max(0, best - NEIGHBOURS) : best + NEIGHBOURS + 1]
    seeds = [seed for seed in counts if all(seed in tried[rates[i]] for i in near)]
    means = [float(np.mean([tried[rates[i]][seed] for seed in seeds])) for i in near]
    points[:, : len(near)] = np.log([rates[i] for i in near]), means
    least = losses[finite[best]]
    if not (losses[0] <= least or losses[-1] <= least):
        # Next to the best, a rate that diverged bounds the lowest point like one that is worse.
        low, high = near[0], near[-1]
        low -= low == finite[best]
        high += high == finite[best]
        ends[:] = math.log(rates[low]), math.log(rates[high])
    return RatePoints(points[0], points[1], ends, np.array(float(len(seeds))))


def stack_points(points: Sequence[RatePoints]) -> RatePoints:
    """Combine the points of k batch sizes."""
    names = [field.name for field in fields(RatePoints)]
    return RatePoints(*(np.stack([getattr(one, name) for one in points]) for name in names))


def rates_between(points: RatePoints) -> list[float]:
    """Return the rates halfway, in logarithms, between the best one and its neighbours.

    `points` are those of one batch size. Gaps below FINEST are not halved.
    """
    log_rates = points.log_rates[np.isfinite(points.losses)]
    best = int(np.nanargmin(points.losses))
    near = [pair for pair in pairwise(log_rates) if points.log_rates[best] in pair]
    return [math.exp((a + b) / 2) for a, b in near if b - a > math.log(FINEST)]


def best_log_rates(points: RatePoints) -> Floats:
    """Return the lowest point of the curve that fits best; without a fit, the best rate.

    It is no higher than the highest rate near the best that did not diverge.
    """
    zeros = np.zeros(points.seeds.shape)
    optimum = bound_rates(points, zeros, zeros).optimum
    losses = np.where(np.isfinite(points.losses), points.losses, np.inf)
    is_best = losses == losses.min(-1, keepdims=True)
    measured = np.where(is_best, points.log_rates, np.inf).min(-1)
    highest = np.where(np.isfinite(losses), points.log_rates, -np.inf).max(-1)
    return np.asarray(np.where(np.isnan(optimum), measured, np.minimum(optimum, highest)))


def bound_rates(points: RatePoints, variance: Floats, used: Floats) -> RateBounds:
    """Fit the curves; `variance` is that of one loss over seeds, `used` are log rates, (..., k)."""
    is_given = np.isfinite(points.log_rates) & np.isfinite(points.losses)
    count = is_given.sum(-1)
    has_fit = (count >= LEAST_RATES) & np.isfinite(points.ends).all(-1)
    ends = np.where(has_fit[..., None], points.ends, [0.0, 1.0])
    start, end = ends[..., 0, None], ends[..., 1, None]
    low, high = (np.repeat(side, len(RATIOS), axis=-1) for side in (start, end))
    for _ in range(ROUNDS):
        step = (high - low) / (GRID - 1)
        lowest = low[..., None] + step[..., None] * np.arange(GRID)  # (..., k, ratios, GRID)
        fit = _fit(points, is_given, lowest)
        least_of_ratio = fit.squares.min(-1)
        least = least_of_ratio.min(-1)
        # A curve that fits badly shows more noise than the seeds do.
        misfit = np.where(count > PARAMETERS, least / np.maximum(count - PARAMETERS, 1), 0.0)
        slack = SLACK * np.maximum(variance / points.seeds, misfit)
        first, last = _ends(lowest, fit.squares <= (least_of_ratio + slack[..., None])[..., None])
        low, high = np.maximum(first - step, start), np.minimum(last + step, end)
    bound = (least + slack)[..., None, None]
    is_possible = fit.squares <= bound
    half = np.sqrt(np.maximum(bound - fit.unbounded_squares, 0.0) / fit.gram)
    bowl = _bowl(used[..., None, None] - lowest)
    regret, smallest, largest = (
        np.maximum(fit.curvature + sign * half, 0.0) * bowl for sign in (0, -1, 1)
    )
    # Of curves that fit equally well the first counts, which is a parabola.
    is_best = fit.squares <= (least + 1e-12 * fit.total)[..., None, None]
    index = is_best.reshape(*count.shape, -1).argmax(-1)[..., None]

    def at_best(values: Floats) -> Floats:
        flat = np.broadcast_to(values, lowest.shape).reshape(*count.shape, -1)
        return np.where(has_fit, np.take_along_axis(flat, index, -1)[..., 0], np.nan)

    first, last = _ends(lowest, is_possible)
    least_regret = np.where(is_possible, smallest, np.inf).min((-2, -1))
    most_regret = np.where(is_possible, largest, 0.0).max((-2, -1))
    return RateBounds(
        optimum=at_best(lowest),
        level=at_best(fit.level),
        curvature=at_best(np.maximum(fit.curvature, 0.0)),
        ratio=at_best(RATIOS[:, None]),
        optimum_low=np.where(has_fit, first.min(-1), np.nan),
        optimum_high=np.where(has_fit, last.max(-1), np.nan),
        regret=at_best(regret),
        regret_low=np.where(has_fit, least_regret, 0.0),
        regret_high=np.where(has_fit, most_regret, np.inf),
        misfit=misfit,
    )


class _Fit(NamedTuple):
    """Least squares for each ratio and lowest point, (..., k, ratios, GRID)."""

    level: Floats
    curvature: Floats  # may be negative
    gram: Floats  # sum of squares of the centred bowl
    unbounded_squares: Floats  # residuals with that curvature
    squares: Floats  # residuals with a curvature that is not negative
    total: Floats  # squares without a curve, (..., k)


def _fit(points: RatePoints, is_given: NDArray[np.bool_], lowest: Floats) -> _Fit:
    log_rates = np.where(is_given, points.log_rates, 0.0)[..., None, None, :]
    weights = is_given / np.maximum(is_given.sum(-1, keepdims=True), 1)
    losses = np.where(is_given, points.losses, 0.0)
    mean = (weights * losses).sum(-1)
    residual = np.where(is_given, losses - mean[..., None], 0.0)[..., None, None, :]
    bowl = _bowl(np.moveaxis(log_rates - lowest[..., None], -1, 0))
    bowl = np.moveaxis(bowl, 0, -1)  # (..., k, ratios, GRID, rates)
    mean_bowl = (weights[..., None, None, :] * bowl).sum(-1)
    bowl = np.where(is_given[..., None, None, :], bowl - mean_bowl[..., None], 0.0)
    gram = np.maximum(np.square(bowl).sum(-1), 1e-300)
    total = np.square(residual).sum(-1)
    curvature = (bowl * residual).sum(-1) / gram
    unbounded = total - curvature**2 * gram
    squares = np.where(curvature > 0, unbounded, total)
    level = mean[..., None, None] - np.maximum(curvature, 0.0) * mean_bowl
    return _Fit(level, curvature, gram, unbounded, squares, total[..., 0, 0])


def _bowl(distance: Floats) -> Floats:
    """Return the curve of curvature 1 at distances above the lowest point, (..., ratios, GRID)."""
    return np.where(distance > 0, RATIOS[:, None], 1.0) * np.square(distance)


def _ends(points: Floats, is_in: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the least and the largest of the points that are in, over the last axis."""
    return np.where(is_in, points, np.inf).min(-1), np.where(is_in, points, -np.inf).max(-1)
