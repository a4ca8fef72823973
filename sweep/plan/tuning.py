"""Rules of the rate search and of training to a target loss (SCIENCE.md §2 and §4)."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sweep.config.experiment import EvaluationSettings
from sweep.plan.steps import milestone_steps

# Factors on the centre, which comes first because a target bounds trials by those before them.
GRID = (1.0, 0.5, 2.0, 0.25, 4.0)
CONFIRMATION = (0.5, 1.0, 2.0)  # factors on a winner that was found at fewer tokens
EXTENSIONS = 4  # most steps of a factor 2 beyond either end of the grid
FINEST = math.sqrt(2)  # ratio of neighbouring rates at which refinement ends
RUNGS = (0.25, 0.5)  # shares of a trial at which the worse ones are pruned
ROUNDING = 1 + 1e-9
CONFIRMED = 2  # consecutive evaluations at or below the target that end a trial
PATIENCE = 2  # a trial is pruned at this multiple of the least tokens of its batch size


@dataclass(frozen=True)
class TuningResult:
    """State of one tuning trial."""

    values: dict[str, float]  # learning_rate; beta2, weight_decay: factors on the policy's values
    loss: float | None  # final, or tokens to the target; inf if diverged, None while open
    is_pruned: bool = False  # ended at a rung
    at_rungs: tuple[tuple[int, float], ...] = ()  # step and validation loss at each rung so far

    @property
    def rate(self) -> float:
        return self.values["learning_rate"]


@dataclass(frozen=True)
class Search:
    """What one study looks for."""

    name: str
    grid: tuple[float, ...]  # the first rates
    finest: float = FINEST
    extra: tuple[str, ...] = ()  # further dimensions, beta2 or weight_decay
    trials: int = 0  # number of trials if there are further dimensions


def next_rates(
    results: Collection[TuningResult], grid: Sequence[float], finest: float, wanted: int
) -> tuple[float, ...]:
    """Return the rates to try next; none while a trial is open, or once the search has settled.

    First comes the grid. While the best rate is at an edge, one step beyond that edge follows.
    Then the wider of the two gaps next to the best rate is halved in log rate (the upper one if
    they are equal), until neighbours are within `finest` and `wanted` rates were tried. If all
    rates diverged, nothing is refined.
    """
    missing = tuple(rate for rate in grid if not is_in(rate, (r.rate for r in results)))
    if missing:
        return missing
    if any(result.loss is None for result in results):
        return ()
    ordered = sorted(results, key=lambda result: result.rate)
    best = best_index(ordered)
    rate, reach = ordered[best].rate, 2.0**EXTENSIONS
    if best == 0 and rate > min(grid) / reach * ROUNDING:
        return (rate / 2,)
    if best == len(ordered) - 1 and rate * ROUNDING < max(grid) * reach:
        return (rate * 2,)
    rates = [ordered[index].rate for index in neighbours(ordered)]
    gaps = [(round(abs(math.log(other / rate)), 9), other) for other in rates]
    if gaps and (max(gaps)[0] > math.log(finest * ROUNDING) or len(results) < wanted):
        return (math.sqrt(max(gaps)[1] * rate),)
    return ()


def best_index(results: Sequence[TuningResult]) -> int:
    """Return the index of the least loss; the first one if no trial has a finite loss."""
    losses = [math.inf if result.loss is None else result.loss for result in results]
    return losses.index(min(losses))


def neighbours(ordered: Sequence[TuningResult]) -> tuple[int, ...]:
    """Return the indices next to the least finite loss, whose rates bound the best rate."""
    best = best_index(ordered)
    if ordered[best].loss in (None, math.inf):
        return ()
    return tuple(index for index in (best - 1, best + 1) if 0 <= index < len(ordered))


def is_in(rate: float, grid: Iterable[float]) -> bool:
    """Return True if a rate is in a grid, up to rounding."""
    return any(math.isclose(rate, other, rel_tol=1e-6) for other in grid)


def rung_steps(steps: int, evaluation: EvaluationSettings) -> tuple[int, ...]:
    """Return the steps at which tuning trials pause to be compared: evaluation milestones."""
    milestones = milestone_steps(steps, evaluation.points)
    indices = [math.ceil(share * len(milestones)) - 1 for share in RUNGS]
    return tuple(sorted({milestones[index] for index in indices} - {steps}))


def survivors(at_rung: Mapping[str, tuple[float, float]]) -> set[str]:
    """Return the trials, from rates and losses, that continue after a rung."""
    # The best's neighbours continue, because a higher rate looks worse before it decays.
    ranked = sorted(at_rung, key=lambda trial: at_rung[trial][1])
    by_rate = sorted(at_rung, key=lambda trial: at_rung[trial][0])
    best = by_rate.index(ranked[0])
    return {*ranked[: math.ceil(len(ranked) / 2)], *by_rate[max(0, best - 1) : best + 2]}


def smoothed(
    tokens: Sequence[float], losses: Sequence[float], window: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return means over `window` consecutive evaluations: their mean log tokens and mean loss."""
    when, values = np.asarray(tokens, float), np.asarray(losses, float)
    if window == 1 or len(when) < window:
        return (when, values) if window == 1 else (when[:0], values[:0])
    logs = sliding_window_view(np.log(when), window)
    return np.exp(logs.mean(-1)), sliding_window_view(values, window).mean(-1)


def crossing_tokens(
    tokens: Sequence[float], losses: Sequence[float], target: float, window: int = 1
) -> float | None:
    """Return the tokens at which a curve reaches the target to stay; None if it does not.

    It is at the first mean of `window` evaluations at or below the target that the next one, if
    any, confirms, interpolated in log tokens from the one before if that is finite.
    """
    when, values = smoothed(tokens, losses, window)
    below = np.isfinite(values) & (values <= target)
    confirmed = np.flatnonzero(below & np.append(below[1:], True))
    if not len(confirmed):
        return None
    k = int(confirmed[0])
    if k == 0 or not math.isfinite(values[k - 1]):
        return float(when[k])
    share = (values[k - 1] - target) / (values[k - 1] - values[k])
    return float(when[k - 1] * (when[k] / when[k - 1]) ** share)


def last_step(least_tokens: float, step_tokens: int, steps: int, points: int) -> int:
    """Return the step at which a trial is pruned: the first evaluation at PATIENCE × the least."""
    milestones = milestone_steps(steps, points)
    return next((s for s in milestones if s * step_tokens >= PATIENCE * least_tokens), steps)
