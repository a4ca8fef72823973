"""Tokens at which each batch size reaches one loss, from its losses at two budgets or more."""

import math
from dataclasses import dataclass

import numpy as np

from sweep.decision.curves import Floats

POSITIONS = 401  # between two budgets, at which a curve is looked up


@dataclass(frozen=True, eq=False)
class Bounded:
    """Estimates with bounds, (k,): NaN with infinite bounds if one is not known."""

    estimate: Floats
    low: Floats
    high: Floats


def log_tokens_to_loss(
    log_tokens: tuple[float, float], smaller: Bounded, larger: Bounded, curvature: Bounded
) -> Bounded:
    """Return the logarithms of the tokens at which each batch size reaches a loss.

    The bounds are the two budgets, if the loss is reached between them. If a third budget shows
    that the curve is convex in ln tokens, the latest point is that of the chord of the two, and the
    earliest one that of a quadratic with the largest curvature, at least twice the estimate. Then
    the chord also tells how long before the smaller budget the loss is reached at the earliest.
    The latest point of a batch size that may not reach the loss is infinite. There is an estimate
    with a third budget, or if the smaller one reaches the loss.

    Args:
        log_tokens: those of the smaller and the larger budget.
        smaller: excess of the losses at the smaller budget over the loss to reach, (k,).
        larger: the same at the larger budget.
        curvature: second divided differences of the losses in ln tokens at three budgets, (k,).
    """
    first, last = log_tokens
    width = last - first
    share = np.linspace(0.0, 1.0, POSITIONS)
    arc = width**2 * share * (1 - share)
    step = width / (POSITIONS - 1)
    is_known = np.isfinite([smaller.low, smaller.high, larger.low, larger.high]).all(0)
    is_convex = is_known & (curvature.low > 0)

    def crossing(at_first: Floats, at_last: Floats, bend: Floats | float) -> Floats:
        """Return where curves first reach 0; `last` where they do not."""
        start = np.where(is_known, at_first, 0.0)[:, None]
        end = np.where(is_known, at_last, 0.0)[:, None]
        bent = np.where(is_convex, bend, 0.0)[:, None]
        is_below = start + share * (end - start) - bent * arc <= 0
        position = first + width * share[is_below.argmax(1)]
        return np.where(is_below.any(1), position, last)

    latest = np.where(is_convex, crossing(smaller.high, larger.high, 0.0), last)
    latest = np.where(larger.high <= 0, latest, math.inf)
    latest = np.where(smaller.high <= 0, first, latest)

    most = np.maximum(2 * curvature.estimate, curvature.high)
    between = np.maximum(first, crossing(smaller.low, larger.low, most) - step)
    before = _before(first, smaller.low, (smaller.low - larger.high) / width)
    earliest = np.where(is_convex, between, first)
    earliest = np.where(smaller.low < 0, np.where(is_convex, before, -math.inf), earliest)
    earliest = np.where((smaller.low > 0) & (larger.low > 0), last, earliest)

    estimate = crossing(smaller.estimate, larger.estimate, curvature.estimate)
    before = _before(first, smaller.estimate, (smaller.estimate - larger.estimate) / width)
    estimate = np.where(smaller.estimate <= 0, before, estimate)
    has_estimate = np.isfinite(estimate) & (larger.estimate <= 0) & is_known
    has_estimate &= np.isfinite(curvature.estimate) | (smaller.estimate <= 0)
    return Bounded(
        estimate=np.where(has_estimate, estimate, math.nan),
        low=earliest,
        high=latest,
    )


def _before(first: float, excess: Floats, slope: Floats) -> Floats:
    """Return where lines with an excess below 0 at the smaller budget reach 0 before it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(slope > 0, first + excess / slope, -math.inf)
