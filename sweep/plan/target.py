"""Training to a target loss: where a curve reaches it, and when a trial has gone on for too long.

The rules are SCIENCE.md §4's; see docs/critical-batch-size.md. No effects, no torch.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sweep.errors import SweepError
from sweep.plan.steps import milestone_steps

CONFIRMED = 2  # evaluations in a row at or below the target, behind which a trial ends
Floats = NDArray[np.float64]
PATIENCE = 2  # times the least tokens of its batch size, behind which a trial is pruned


def smoothed(
    tokens: Sequence[float], losses: Sequence[float], window: int
) -> tuple[Floats, Floats]:
    """Return the means of so many evaluations in a row, at their mean log tokens."""
    when, values = np.asarray(tokens, float), np.asarray(losses, float)
    if window == 1 or len(when) < window:
        return (when, values) if window == 1 else (when[:0], values[:0])
    logs = sliding_window_view(np.log(when), window)
    return np.exp(logs.mean(-1)), sliding_window_view(values, window).mean(-1)


def crossing_tokens(
    tokens: Sequence[float], losses: Sequence[float], target: float, window: int = 1
) -> float | None:
    """Find where a curve reaches the target to stay, by interpolation in log tokens.

    A crossing is the first evaluation at or below the target whose next evaluation, if there is
    one, is at or below it too: a single noisy dip is none, except at the very end.

    Args:
        tokens: of each evaluation, increasing, above 0.
        losses: there; one that is not finite counts as above the target.
        target: the loss to reach.
        window: evaluations in a row of which the mean counts.

    Returns:
        The tokens, None where censored. There is nothing to interpolate from at the first
        evaluation and after a loss that is not finite: the evaluation's own tokens.
    """
    when, values = np.asarray(tokens, float), np.asarray(losses, float)
    if when.shape != values.shape or not (np.diff(when, prepend=0) > 0).all():
        raise SweepError(
            f"tokens must be positive, increasing and as many as the losses ({values.size}), "
            f"got {when.tolist()}. Sort the evaluations by tokens."
        )
    when, values = smoothed(tokens, losses, window)
    below = np.isfinite(values) & (values <= target)
    stays = np.append(below[1:], True)
    confirmed = np.flatnonzero(below & stays)
    if not len(confirmed):
        return None
    k = int(confirmed[0])
    if k == 0 or not math.isfinite(values[k - 1]):
        return float(when[k])
    share = (values[k - 1] - target) / (values[k - 1] - values[k])
    return float(when[k - 1] * (when[k] / when[k - 1]) ** share)


def last_step(least_tokens: float, step_tokens: int, steps: int, points: int) -> int:
    """Return the step behind which a trial is pruned: the first evaluation at twice the least.

    Args:
        least_tokens: to the target, of the trials so far with the same batch size.
        step_tokens: of one step of this trial.
        steps: of this trial, at most.
        points: evaluations in them.
    """
    bound = PATIENCE * least_tokens
    later = (step for step in milestone_steps(steps, points) if step * step_tokens >= bound)
    return next(later, steps)
