"""Decide at which tokens a training reaches its target loss, and when it has missed it."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sweep.plan.course import Course

CONFIRMED = 2  # consecutive evaluations at or below the target that end a trial
PATIENCE = 2  # a trial is pruned at this multiple of the least tokens of its batch size


def smoothed(
    tokens: Sequence[float], losses: Sequence[float], window: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return means over `window` consecutive evaluations: their mean log tokens and mean loss."""
    when = np.asarray(tokens, float)
    values = np.asarray(losses, float)
    if window == 1:
        return when, values
    if len(when) < window:
        return when[:0], values[:0]

    logs = sliding_window_view(np.log(when), window)
    return np.exp(logs.mean(-1)), sliding_window_view(values, window).mean(-1)


def crossing_tokens(
    tokens: Sequence[float], losses: Sequence[float], target: float, window: int = 1
) -> float | None:
    """Return the tokens from which on the loss stays at or below the target, or None.

    The first mean over `window` evaluations at or below the target counts if the next one, if any,
    is too. It is interpolated in log tokens from the one before, if that is finite.
    """
    when, values = smoothed(tokens, losses, window)
    is_below = np.isfinite(values) & (values <= target)
    is_next_below = np.append(is_below[1:], True)
    confirmed = np.flatnonzero(is_below & is_next_below)
    if not len(confirmed):
        return None

    k = int(confirmed[0])
    if k == 0 or not math.isfinite(values[k - 1]):
        return float(when[k])
    share = (values[k - 1] - target) / (values[k - 1] - values[k])
    return float(when[k - 1] * (when[k] / when[k - 1]) ** share)


def last_step(least_tokens: float, course: Course, points: int) -> int | None:
    """Return the first evaluation at PATIENCE times the least tokens to the target, or None."""
    bound = PATIENCE * least_tokens
    later = (step for step in course.milestones(points) if course.tokens_at(step) >= bound)
    return next(later, None)
