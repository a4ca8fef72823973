"""The first rates of a batch size's search: a grid, or a few around what others predict.

The best rates of the batch sizes that were tuned before lie near a line in logarithms,
lr* = c·B^p. The line only chooses which rates are tried; what is said about a batch size comes from
its own trials.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sweep.config.arms import Arm
from sweep.decision.prediction import extrapolate
from sweep.decision.rates import RatePoints, best_curve, rate_points
from sweep.plan.plan import TUNING_SEED, Plan
from sweep.plan.policies import Policy
from sweep.plan.rate_search import FINEST, GRID, PREDICTED, RateTrial, is_in, neighbours

Values = Mapping[float, float]  # compared value of each rate tried; NaN without one

FLAT = 1.0  # tolerances by which a curve rises over a factor of √2, below which it is flat
STEEP = 5.0  # tolerances by which the rates next to the best are worse, above which it is steep
SPACING_OF_FLAT = 2.0  # ratio of neighbouring rates
SPACING_OF_STEEP = 2.0**0.25


@dataclass(frozen=True)
class FirstRates:
    """The rates that a search begins with, and how close it comes to the best one."""

    rates: tuple[float, ...]
    finest: float = FINEST  # ratio of neighbouring rates at which refinement ends
    may_prune: bool = True  # False: all are near the best one, and tell about its curve


def first_rates_of(
    plan: Plan, policy: Policy, arm: Arm, values: Mapping[Arm, Values]
) -> FirstRates:
    """Return the first rates of an arm in a plan.

    Args:
        plan: the plan of the sweep.
        policy: the tuned policy.
        arm: the arm whose rates are searched.
        values: those of its trials, and of the arms with its optimizer that were tuned before.
    """
    earlier = {}
    if plan.settings.tuning.predicts_rates:
        earlier = {
            other.batch_size: values[other]
            for other in values
            if other != arm and other.optimizer == arm.optimizer
        }
    optimizer = arm.optimizer or plan.settings.optimizer.name
    return first_rates(
        batch_size=arm.batch_size,
        tried=values.get(arm, {}),
        earlier=earlier,
        tolerance=plan.settings.objective.margin,
        centre=plan.tuning_centre(policy, arm),
        rule=lambda batch_size: policy.rate_at(batch_size, optimizer),
    )


def first_rates(
    batch_size: int,
    tried: Values,
    earlier: Mapping[int, Values],
    tolerance: float,
    centre: float,
    rule: Callable[[int], float],
) -> FirstRates:
    """Return the rates that a search begins with.

    They are a grid around the centre, or three rates around the prediction from earlier batch
    sizes, farther apart if their curves are flat. If the best one of these is inside, one more
    follows on each side. Refinement ends early where the curve of its own trials is flat, and late
    where the rates next to the best one are much worse.

    Args:
        batch_size: the one whose rates are searched.
        tried: the values of its own trials, in the order of the plan; once it has begun, results of
            other batch sizes do not move its rates.
        earlier: those of batch sizes that were tuned before.
        tolerance: the difference of values that matters.
        centre: the centre of the grid without a prediction.
        rule: the rate at a batch size by a rule, which one earlier batch size is extrapolated with.
    """
    grid = tuple(centre * factor for factor in GRID)
    has_begun_with_grid = all(is_in(rate, tried) for rate in grid)
    best_rates: dict[int, float] = {}
    curvatures: list[float] = []
    for size, values in earlier.items():
        best, curvature = _best_of(values)
        if math.isfinite(best):
            best_rates[size] = best
        if math.isfinite(curvature):
            curvatures.append(curvature)
    if has_begun_with_grid or not best_rates:
        return FirstRates(grid)

    near = tuple(tried)[:PREDICTED]
    if not near:
        usual = float(np.median(curvatures)) if curvatures else math.nan
        spacing = SPACING_OF_FLAT if _rise(usual) < FLAT * tolerance else FINEST
        predicted = _predict(batch_size, best_rates, rule)
        near = (predicted, predicted / spacing, predicted * spacing)
    elif _is_lowest_inside([tried[rate] for rate in sorted(near)]):
        middle, low, high = near
        near += (low**2 / middle, high**2 / middle)

    _, own = _best_of(tried)
    finest = FINEST
    if _rise_of_neighbours(tried) > STEEP * tolerance:
        finest = SPACING_OF_STEEP
    elif _rise(own) < FLAT * tolerance:
        finest = SPACING_OF_FLAT
    return FirstRates(near, finest, may_prune=False)


def _rise(curvature: float) -> float:
    """Return by how much a curve rises over a factor of √2; NaN if it is not known."""
    return curvature * math.log(FINEST) ** 2


def _rise_of_neighbours(values: Values) -> float:
    """Return by how much the rates next to the best one are worse; NaN if they have no result."""
    measured = {rate: value for rate, value in values.items() if not math.isnan(value)}
    trials = [RateTrial(rate, value) for rate, value in measured.items()]
    next_to_best = [measured[trial.rate] for trial in neighbours(trials)] if trials else []
    finite = [value for value in next_to_best if math.isfinite(value)]
    return float(np.mean(finite)) - min(measured.values()) if finite else math.nan


def _is_lowest_inside(values: Sequence[float]) -> bool:
    """Return True if there are three values, and the middle one is known to be the least."""
    return len(values) == PREDICTED and values[0] > values[1] < values[2]


def _predict(
    batch_size: int, best_rates: Mapping[int, float], rule: Callable[[int], float]
) -> float:
    """Return the rate at a batch size on a line through best log rates, with three digits.

    Its slope is least squares with a normal prior around that of the rule.
    """
    sizes = [*best_rates, batch_size]
    log_rule = np.log([rule(size) for size in sizes])
    slope_of_rule = np.polynomial.Polynomial.fit(np.log(sizes), log_rule, 1).convert().coef[1]

    log_sizes = np.log([*best_rates])
    without_slope = np.array([*best_rates.values()]) - slope_of_rule * log_sizes
    point = np.log([batch_size])
    offset = extrapolate(log_sizes[:, None], without_slope, point)
    log_rate = offset + slope_of_rule * math.log(batch_size)
    return float(f"{math.exp(log_rate):.3g}")


def points_of_search(values: Values) -> RatePoints:
    """Return the points of one batch size, of which a search tries each rate with one seed."""
    return rate_points({rate: {TUNING_SEED: value} for rate, value in values.items()})


def _best_of(values: Values) -> tuple[float, float]:
    """Return the best log rate and the curvature of the curve that fits best.

    Without a result, the rate is NaN.
    """
    log_rate, curvature = best_curve(points_of_search(values))
    return float(log_rate), float(curvature)
