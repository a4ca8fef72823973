"""The best rate of each batch size, from the curve of its losses, and the regret of another rate.

With other seeds the lowest point may lie elsewhere: see `largest_shift`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from sweep.decision.curves import (
    PARAMETERS,
    STEEPNESS,
    Floats,
    Points,
    PossibleCurves,
    possible_curves,
)
from sweep.plan.rate_search import FINEST

SHIFT = 0.05  # standard deviation of the best log rates of single seeds
LEAST_DEVIATIONS = 2.0  # least shift that is allowed for, over SHIFT
SHIFT_ERROR = 0.06  # probability that some batch size has a larger shift, to one side
CORNER = 3.0  # standard deviations of a loss beyond the steepest curve that make a corner
CLIFF = 10.0  # a rise over that of a parabola, from which on a rate has nearly diverged
NEIGHBOURS = 2  # rates on each side of the best that a curve is fitted to, at least
REACH = 2.0  # ratio to the best rate up to which all rates are fitted
LEAST_GAP = 1.1  # ratio of neighbouring rates between which no rate is added
USUAL_SIZES = 5  # batch sizes for whose shift a rate is chosen; it does not depend on the others
CANDIDATES = 9  # rates between the least and the largest optimum, of which one is used


@dataclass(frozen=True, eq=False)
class RatePoints:
    """Mean losses of the rates near the best, of each batch size; NaN if there are fewer rates."""

    log_rates: Floats  # (..., k, rates)
    losses: Floats  # (..., k, rates)
    ends: Floats  # log rates between which the best one lies, (..., k, 2); NaN: it is at an edge
    seeds: Floats  # tuning seeds that the losses are means of, (..., k)
    spread: Floats  # standard deviation of the seeds' own best log rates, (..., k); 0 for one seed

    @property
    def curve(self) -> Points:
        """The points that a curve is fitted to."""
        return Points(self.log_rates, self.losses, self.ends, self.seeds)


@dataclass(frozen=True, eq=False)
class RateBounds:
    """The curves of each batch size, (..., k): best log rate, and regret of the rate used."""

    optimum: Floats  # this and the next three are the best curve's; NaN without a fit
    level: Floats  # its loss
    curvature: Floats  # loss per squared log rate below the optimum
    ratio: Floats  # curvature above the optimum over that below
    # least and largest optimum of the possible curves, also with other seeds; NaN if one is flat
    optimum_low: Floats
    optimum_high: Floats
    regret: Floats  # loss that the rate used gives up, of the curve that fits best
    regret_low: Floats  # least and largest regret of the possible curves; 0 without a fit
    regret_high: Floats  # infinite without a fit
    misfits: NDArray[np.bool_]  # whether the residuals show more noise than the seeds do
    # whether the curve fits, much better than a flat line, and may be lowest at the rate used
    is_clear: NDArray[np.bool_]
    has_corner: NDArray[np.bool_]  # whether the loss rises more steeply above the best rate

    def losses_at(self, log_rates: Floats) -> Floats:
        """Return the losses of the curve that fits best, for one batch size."""
        distance = log_rates - self.optimum
        side = np.where(distance > 0, self.ratio, 1.0)
        return np.asarray(self.level + self.curvature * side * np.square(distance))


def rate_points(tried: Mapping[float, Mapping[int, float]]) -> RatePoints:
    """Return the points of one batch size, without the axis k, from losses by rate and seed.

    A loss is infinite if the trial diverged, and NaN if it was pruned, which bounds nothing. The
    rates are those near the best of the seed with the most rates; further seeds count if they have
    all of these.
    """
    measured = {rate: _without_pruned(losses) for rate, losses in sorted(tried.items())}
    counts = Counter(chain.from_iterable(measured.values()))
    first = min(counts, key=lambda seed: (-counts[seed], seed), default=0)

    rates = [rate for rate in measured if first in measured[rate]]
    losses = np.array([measured[rate][first] for rate in rates])
    finite = np.flatnonzero(np.isfinite(losses))
    if not len(finite):
        nothing = np.full(1, np.nan)
        return RatePoints(
            log_rates=nothing,
            losses=nothing,
            ends=np.full(2, np.nan),
            seeds=np.ones(()),
            spread=np.zeros(()),
        )

    log_rates = np.log(rates)
    rank = int(losses[finite].argmin())
    best = finite[rank]
    distance = np.abs(log_rates[finite] - log_rates[best])
    is_near = distance <= math.log(REACH) * (1 + 1e-9)
    is_near |= np.abs(np.arange(len(finite)) - rank) <= NEIGHBOURS
    near = finite[is_near]
    near = near[~_is_over_cliff(log_rates[near] - log_rates[best], losses[near] - losses[best])]

    losses_near = [measured[rates[index]] for index in near]
    common = set.intersection(*map(set, losses_near))
    seeds = [seed for seed in counts if seed in common]
    losses_of_seeds = np.array([[by_seed[seed] for by_seed in losses_near] for seed in seeds])

    ends = np.full(2, np.nan)
    is_at_edge = losses[0] <= losses[best] or losses[-1] <= losses[best]
    if not is_at_edge:
        low = near[0]
        high = near[-1]
        # Next to the best, a rate that diverged, or nearly so, bounds the lowest point too.
        if low == best:
            low -= 1
        if high == best:
            high += 1
        ends[:] = log_rates[[low, high]]
    points = RatePoints(
        log_rates=log_rates[near],
        losses=losses_of_seeds.mean(0),
        ends=ends,
        seeds=np.array(float(len(seeds))),
        spread=np.zeros(()),
    )
    return replace(points, spread=_spread_of_best(points, losses_of_seeds))


def _is_over_cliff(distance: Floats, rise: Floats) -> NDArray[np.bool_]:
    """Return which rates have nearly diverged, and all above them; no curve fits through them.

    They are worse by more than CLIFF times what a parabola allows that passes through the highest
    loss of at least two rates below the best one.

    Args:
        distance: in log rates from the best one, ascending, (rates,).
        rise: loss above that of the best one, (rates,).
    """
    is_below = distance < 0
    if is_below.sum() < 2:
        return np.zeros(len(rise), bool)
    highest = rise[is_below].max()
    allowed = CLIFF * highest * np.maximum(1.0, np.square(distance / distance[0]))
    return np.logical_or.accumulate((distance > 0) & (rise > allowed))


def _spread_of_best(points: RatePoints, losses: Floats) -> Floats:
    """Return the standard deviation of the seeds' own best log rates; `losses` are (seeds, rates).

    It is 0 with one seed, and for rates to which no curve can be fitted.
    """
    if len(losses) < 2:
        return np.zeros(())
    seeds = range(len(losses))
    of_seeds = stack_points([replace(points, losses=losses[seed]) for seed in seeds])
    optima = possible_curves(of_seeds.curve, np.zeros(len(losses))).optimum
    return np.asarray(np.nan_to_num(np.std(optima, ddof=1)))


def _without_pruned(losses: Mapping[int, float]) -> dict[int, float]:
    return {seed: loss for seed, loss in losses.items() if not math.isnan(loss)}


def stack_points(points: Sequence[RatePoints]) -> RatePoints:
    """Combine the points of k batch sizes, with NaN where some have fewer rates."""
    width = max(row.losses.shape[-1] for row in points)

    def padded(values: Floats) -> Floats:
        missing = np.full((*values.shape[:-1], width - values.shape[-1]), np.nan)
        return np.concatenate([values, missing], axis=-1)

    return RatePoints(
        log_rates=np.stack([padded(row.log_rates) for row in points]),
        losses=np.stack([padded(row.losses) for row in points]),
        ends=np.stack([row.ends for row in points]),
        seeds=np.stack([row.seeds for row in points]),
        spread=np.stack([row.spread for row in points]),
    )


def rates_between(points: RatePoints) -> list[float]:
    """Return the rates halfway, in logarithms, between the best one and its neighbours.

    `points` are those of one batch size. Gaps below LEAST_GAP are not halved.
    """
    is_finite = np.isfinite(points.losses)
    if not is_finite.any():
        return []
    best = points.log_rates[int(np.nanargmin(points.losses))]

    rates = []
    for low, high in pairwise(points.log_rates[is_finite]):
        is_wide = high - low > math.log(LEAST_GAP)
        if best in (low, high) and is_wide:
            rates.append(math.exp((low + high) / 2))
    return rates


def best_log_rates(points: RatePoints) -> Floats:
    """Return the lowest point of the curve that fits best; without a fit, the best rate.

    It is no higher than the highest rate near the best that did not diverge.
    """
    log_rates, _ = best_curve(points)
    return log_rates


def best_curve(points: RatePoints) -> tuple[Floats, Floats]:
    """Return the `best_log_rates`, and the curvature, a mean of both sides; NaN without a fit."""
    curves = possible_curves(points.curve, np.zeros(points.seeds.shape))
    mean_curvature = curves.curvature * (1 + curves.ratio) / 2
    return _measured_or(curves.optimum, points), np.asarray(mean_curvature)


def _measured_or(log_rates: Floats, points: RatePoints) -> Floats:
    """Return log rates, bounded by those that did not diverge; the best measured one if NaN."""
    is_finite = np.isfinite(points.losses)
    losses = np.where(is_finite, points.losses, np.inf)
    is_best = losses == losses.min(-1, keepdims=True)
    measured = np.where(is_best, points.log_rates, np.inf).min(-1)
    highest = np.where(is_finite, points.log_rates, -np.inf).max(-1)
    return np.asarray(np.where(np.isnan(log_rates), measured, np.minimum(log_rates, highest)))


def bound_rates(points: RatePoints, variance: Floats, used: Floats, compared: int) -> RateBounds:
    """Fit the curves, and allow for another best rate of the seeds of the final trials.

    Args:
        points: losses of the rates near the best, (..., k).
        variance: that of one loss over seeds, (..., k); where it is NaN, nothing is bounded.
        used: log rates of the final trials, (..., k).
        compared: number of batch sizes that are compared.
    """
    is_known = np.isfinite(variance)
    noise = np.where(is_known, variance, 0.0)
    curves = possible_curves(points.curve, noise)
    regret, least, largest = curves.regrets(used)

    has_optimum = is_known & ~curves.may_be_flat
    shift = _shift(points, compared)
    least, largest = _with_other_seeds(curves, used, shift, least, largest)
    return RateBounds(
        optimum=curves.optimum,
        level=curves.at_best(curves.fit.level),
        curvature=curves.curvature,
        ratio=curves.ratio,
        optimum_low=np.where(has_optimum, curves.optimum_low - shift, np.nan),
        optimum_high=np.where(has_optimum, curves.optimum_high + shift, np.nan),
        regret=regret,
        regret_low=np.where(is_known, least, 0.0),
        regret_high=np.where(is_known, largest, np.inf),
        misfits=curves.misfits & is_known,
        is_clear=curves.is_clear & curves.may_be_optimum(used) & is_known,
        has_corner=_has_corner(points, noise) & is_known,
    )


def _with_other_seeds(
    curves: PossibleCurves, used: Floats, shift: Floats, least: Floats, largest: Floats
) -> tuple[Floats, Floats]:
    """Return the least and the largest regret if the best rate may also shift with the seeds.

    The errors of the fit and the shift are independent errors of one log rate, and are combined by
    their squares. The lowest point may lie on either side of the rate used, which has the curvature
    of that side. On a flat line nothing changes.
    """
    above = curves.curvature * curves.ratio
    is_above = used > curves.optimum
    own = np.where(is_above, above, curves.curvature)
    other = np.where(is_above, curves.curvature, above)
    own = np.where(own > 0, own, np.nan)

    distance = np.abs(used - curves.optimum)
    beyond = np.fmax(np.sqrt(largest / own) - distance, 0.0)
    short = np.fmax(distance - np.sqrt(least / own), 0.0)
    reach = np.hypot(beyond, shift)
    nearest = np.fmax(distance - np.hypot(short, shift), 0.0)
    across = np.fmax(reach - distance, 0.0)
    least = np.fmin(least, own * np.square(nearest))
    largest = np.fmax(largest, own * np.square(distance + reach))
    largest = np.fmax(largest, other * np.square(across))
    return least, largest


def _shift(points: RatePoints, compared: int) -> Floats:
    """Return how far the best rate of the final seeds may lie from that of the tuning seeds."""
    return np.asarray(np.fmax(largest_shift(compared) / np.sqrt(points.seeds), points.spread))


def largest_shift(compared: int) -> float:
    """Return the distance, in log rates, from the best rate of one seed to that of all seeds.

    Of so many batch sizes none has a larger one to one side, with a probability of at least
    1 - SHIFT_ERROR. It is at least two standard deviations.
    """
    return SHIFT * max(LEAST_DEVIATIONS, NormalDist().inv_cdf(1 - SHIFT_ERROR / compared))


def rates_to_use(points: RatePoints, pools_noise: bool) -> Floats:
    """Return the log rate whose largest possible regret is the least; without a fit, the best rate.

    It allows for other best rates of other seeds, and is no higher than the highest rate near the
    best that did not diverge.

    Args:
        points: those of one or several batch sizes, (..., k).
        pools_noise: whether the noise is that of the residuals at all batch sizes; a few rates of
            one hardly show it. If not, the rate of each depends on its own trials only.
    """
    curves = possible_curves(points.curve, np.zeros(points.seeds.shape))
    if pools_noise:
        squares, degrees = noise_of_residuals(points, curves)
        pooled = squares.sum(-1, keepdims=True) / np.maximum(degrees.sum(-1, keepdims=True), 1)
        curves = possible_curves(points.curve, pooled * np.ones(points.seeds.shape))
    shift = _shift(points, USUAL_SIZES)
    steps = np.linspace(0.0, 1.0, CANDIDATES)
    range_of_optimum = curves.optimum_high - curves.optimum_low
    largest_regrets = []
    for step in steps:
        candidate = curves.optimum_low + step * range_of_optimum
        _, least, largest = curves.regrets(candidate)
        _, largest = _with_other_seeds(curves, candidate, shift, least, largest)
        largest_regrets.append(largest)
    safest = np.argmin(largest_regrets, axis=0)
    log_rates = curves.optimum_low + steps[safest] * range_of_optimum
    return _measured_or(log_rates, points)


def noise_of_residuals(
    points: RatePoints, curves: PossibleCurves
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the squared residuals about the best curves and their degrees of freedom, (..., k).

    The squares are those of single losses, not of means over seeds. Both are 0 without a fit, or
    with as few rates as a curve has parameters.
    """
    count = (np.isfinite(points.log_rates) & np.isfinite(points.losses)).sum(-1)
    degrees = np.where(curves.has_fit, np.maximum(count - PARAMETERS, 0), 0)
    squares = np.maximum(curves.fit.squares.min((-2, -1)), 0.0) * points.seeds
    return np.where(degrees > 0, squares, 0.0), degrees


def _has_corner(points: RatePoints, variance: Floats) -> NDArray[np.bool_]:
    """Return whether the next higher rate is worse than the steepest of the curves allows.

    It is compared with a parabola through the best rate and the rates below it.
    """
    is_given = np.isfinite(points.losses)
    index = np.where(is_given, points.losses, np.inf).argmin(-1)[..., None]
    rise = points.losses - np.take_along_axis(points.losses, index, -1)
    distance = points.log_rates - np.take_along_axis(points.log_rates, index, -1)

    is_below = is_given & (distance < 0)
    square = np.where(is_below, np.square(distance), 0.0)
    of_square = np.where(is_below, rise, 0.0) * square
    curvature = of_square.sum(-1) / np.maximum(np.square(square).sum(-1), 1e-300)

    is_next = is_given & (distance > 0) & (distance <= math.log(FINEST) * (1 + 1e-9))
    noise = np.sqrt(variance / points.seeds)
    steepest = STEEPNESS * curvature[..., None] * np.square(distance)
    is_steeper = rise > steepest + CORNER * noise[..., None]
    return np.asarray((is_next & is_steeper).any(-1) & is_below.any(-1))
