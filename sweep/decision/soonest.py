"""Tokens at which each batch size reaches one loss, from its losses at two budgets.

Losses fall with the budget, and less and less per unit of ln tokens: the curve is convex there.
"""

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
    log_tokens: tuple[float, float], smaller: Bounded, larger: Bounded, curvature: Floats
) -> Bounded:
    """Return the logarithms of the tokens at which each batch size reaches a loss.

    It is reached at the latest where the chord of the two budgets reaches it, because the curve is
    convex. The estimate is where the quadratic does that goes through a third budget too, and its
    difference from the chord counts twice for the earliest point. Without a third budget there is
    no estimate between the two, and the earliest point is the smaller budget. The latest point of a
    batch size that does not reach the loss is infinite, and its earliest one is the larger budget.

    Args:
        log_tokens: those of the smaller and the larger budget.
        smaller: excess of the losses at the smaller budget over the loss to reach, (k,).
        larger: the same at the larger budget.
        curvature: of the quadratic in ln tokens, (k,); NaN without a third budget.
    """
    first, last = log_tokens
    share = np.linspace(0.0, 1.0, POSITIONS)
    width = last - first
    sag = np.maximum(curvature, 0.0)[:, None] * width**2 * (share * (1 - share))

    def chord(losses_first: Floats, losses_last: Floats) -> Floats:
        return losses_first[:, None] + share * (losses_last - losses_first)[:, None]

    def crossing(curve: Floats) -> Floats:
        is_below = curve <= 0
        position = first + width * share[is_below.argmax(1)]
        return np.where(is_below.any(1), position, math.inf)

    with np.errstate(invalid="ignore"):
        latest = crossing(chord(smaller.high, larger.high))
        estimate = crossing(chord(smaller.estimate, larger.estimate) - sag)
        earliest = crossing(chord(smaller.low, larger.low) - 2 * sag)
        estimate = np.where(np.isfinite(estimate) & ~np.isnan(curvature), estimate, math.nan)
        earliest = np.where(np.isnan(curvature), first, np.minimum(earliest, last))

        # Before the smaller budget the curve is at least as steep as the chord.
        before = _before(first, smaller.estimate, (smaller.estimate - larger.estimate) / width)
        estimate = np.where(smaller.estimate <= 0, before, estimate)
        before = _before(first, smaller.low, (smaller.low - larger.high) / width)
        earliest = np.where(smaller.low < 0, before, earliest)

    is_untried = np.isnan(smaller.estimate)
    reaches_it = larger.high <= 0
    latest = np.where(is_untried, np.where(reaches_it, last, math.inf), latest)
    earliest = np.where(is_untried, np.where(larger.low > 0, last, -math.inf), earliest)
    earliest = np.where(larger.low > 0, last, earliest)

    is_unknown = np.isnan(larger.estimate)
    return Bounded(
        estimate=np.where(is_unknown, math.nan, estimate),
        low=np.where(is_unknown, -math.inf, earliest),
        high=np.where(is_unknown, math.inf, latest),
    )


def _before(first: float, excess: Floats, slope: Floats) -> Floats:
    """Return where lines through an excess below 0 at the smaller budget cross 0 before it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(slope > 0, first + excess / slope, -math.inf)
