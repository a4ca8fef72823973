"""Plan a further budget of a sweep from smaller ones: its batch sizes, and where its search begins.

What is predicted only chooses what is tried. A search of rates brackets the best one by itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sweep.decision.curves import Points, possible_curves
from sweep.decision.prediction import extrapolate

SIZES = 5  # batch sizes of a budget, if they are not given
USUAL_GROWTH = 0.5  # exponent of the best batch size: published ones are 0.38 to 0.57


class TunedArm(NamedTuple):
    """The rate that the search of a batch size chose at one budget."""

    tokens: int
    batch_size: int
    rate: float


def predict_rate(
    tuned: Sequence[TunedArm], tokens: int, batch_size: int, rule: Callable[[int], float]
) -> float:
    """Return the rate at a further budget on a plane through log rates, with three digits.

    The plane is least squares with normal priors: its slope over batch sizes around that of the
    rule, and that over tokens around 0.

    Args:
        tuned: one or more arms of other budgets.
        tokens: the further budget.
        batch_size: the one to predict.
        rule: the rate at a batch size by a rule.
    """
    of_rule = np.log([rule(arm.batch_size) for arm in tuned])
    residuals = np.log([arm.rate for arm in tuned]) - of_rule
    columns = np.log([[arm.tokens, arm.batch_size] for arm in tuned])
    point = np.log([tokens, batch_size])
    offset = extrapolate(columns, residuals, point)
    return float(f"{rule(batch_size) * math.exp(offset):.3g}")


def estimate_best_batch_size(losses: Mapping[int, float]) -> float:
    """Return the lowest point of the losses over log batch sizes; at an edge, that batch size."""
    sizes = sorted(losses)
    points = batch_size_points(sizes, [losses[size] for size in sizes], seeds=1)
    optimum = math.nan
    if np.isfinite(points.losses).all():
        optimum = float(possible_curves(points, np.zeros(1)).optimum[0])
    if math.isnan(optimum):
        return float(min(sizes, key=lambda size: losses[size]))
    return math.exp(optimum)


def batch_size_points(sizes: Sequence[int], losses: Sequence[float], seeds: float) -> Points:
    """Return the points of one curve of losses over log batch sizes, (1, sizes).

    The ends are those of the batch sizes, unless the best one is at an edge.
    """
    log_sizes = np.log(sizes)
    ends = np.full(2, np.nan)
    best = int(np.argmin(losses))
    if 0 < best < len(sizes) - 1:
        ends = log_sizes[[0, -1]]
    return Points(
        positions=log_sizes[None],
        losses=np.array([losses], float),
        ends=ends[None],
        seeds=np.array([float(seeds)]),
    )


def predict_batch_sizes(best: Mapping[int, float], tokens: int) -> tuple[int, ...]:
    """Return five powers of two around the best batch size that smaller budgets predict.

    Args:
        best: the best batch size by budget, in sequences.
        tokens: the further budget.
    """
    columns = np.log([[budget] for budget in best])
    residuals = np.log([*best.values()]) - USUAL_GROWTH * columns[:, 0]
    point = np.log([tokens])
    offset = extrapolate(columns, residuals, point)
    log_size = USUAL_GROWTH * math.log(tokens) + offset
    first = max(0, round(log_size / math.log(2)) - SIZES // 2)
    return tuple(2**exponent for exponent in range(first, first + SIZES))
