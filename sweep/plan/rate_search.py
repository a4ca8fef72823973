"""The search for the best rate of a batch size: which rates are tried next, and which go on."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from sweep.config.experiment import EvaluationSettings
from sweep.plan.course import Course

GRID = (1.0, 0.5, 2.0, 0.25, 4.0)
PREDICTED = 3  # rates that a search begins with if others predict its best one
CONFIRMATION = (0.5, 1.0, 2.0)  # factors on a winner that was found at fewer tokens
REFINEMENTS = 4  # rates between those of the grid, at most; √2 needs two, and the best may move
EXTENSIONS = 4  # most steps of a factor 2 beyond either end of the grid
FINEST = math.sqrt(2)  # ratio of neighbouring rates at which refinement ends
RUNGS = (Fraction(1, 4), Fraction(1, 2))  # shares of a trial at which the worse ones are pruned
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class RateTrial:
    """A rate and its loss: final, or tokens to the target; inf if diverged, None while open."""

    rate: float
    loss: float | None


Trial = TypeVar("Trial", bound=RateTrial)


def next_rates(
    tried: Sequence[RateTrial], grid: Sequence[float], finest: float = FINEST
) -> tuple[float, ...]:
    """Return the rates to try next; none while a trial is open, or once the search has settled.

    First comes the grid. While the best rate is at an edge, one step beyond that edge follows.
    Then the wider gap next to the best rate (the upper one of equal gaps) is halved in log rate,
    until neighbours are within `finest`.
    """
    rates = [trial.rate for trial in tried]
    missing = tuple(rate for rate in grid if not is_in(rate, rates))
    if missing:
        return missing
    if any(trial.loss is None for trial in tried):
        return ()

    best = best_of(tried)
    reach = 2.0**EXTENSIONS
    if best.rate == min(rates) and best.rate > min(grid) / reach * ROUNDING:
        return (best.rate / 2,)
    top = max(tried, key=lambda trial: trial.rate)  # which may be as good as the best
    if top.loss == best.loss != math.inf and top.rate * ROUNDING < max(grid) * reach:
        return (top.rate * 2,)

    gaps = [(round(abs(math.log(t.rate / best.rate)), 9), t.rate) for t in neighbours(tried)]
    if not gaps:
        return ()
    gap, other = max(gaps)
    if gap > math.log(finest * ROUNDING):
        return (math.sqrt(other * best.rate),)
    return ()


def best_of(tried: Iterable[Trial]) -> Trial:
    """Return the trial with the least loss; in a tie, the one with the lowest rate."""
    return min(tried, key=lambda t: (math.inf if t.loss is None else t.loss, t.rate))


def neighbours(tried: Sequence[Trial]) -> list[Trial]:
    """Return the trials next to the best rate, which bound it; none without a finite loss."""
    best = best_of(tried)
    if best.loss is None or not math.isfinite(best.loss):
        return []

    ordered = sorted(tried, key=lambda trial: trial.rate)
    index = ordered.index(best)
    return [*ordered[max(0, index - 1) : index], *ordered[index + 1 : index + 2]]


def is_in(rate: float, grid: Iterable[float]) -> bool:
    return any(math.isclose(rate, other, rel_tol=1e-6) for other in grid)


def rung_steps(course: Course, evaluation: EvaluationSettings) -> tuple[int, ...]:
    """Return the steps at which tuning trials pause to be compared: evaluation milestones."""
    milestones = course.milestones(evaluation.points)
    indices = [math.ceil(share * len(milestones)) - 1 for share in RUNGS]
    return tuple(sorted({milestones[index] for index in indices} - {course.steps}))


def survivors(at_rung: Mapping[str, tuple[float, float]]) -> set[str]:
    """Return the better half and the best's neighbours, from rate and loss at a rung."""
    # Not only the better half: a high rate looks worse before its decay than at its end.
    ranked = sorted(at_rung, key=lambda trial: at_rung[trial][1])
    better_half = ranked[: math.ceil(len(ranked) / 2)]

    by_rate = sorted(at_rung, key=lambda trial: at_rung[trial][0])
    best = by_rate.index(ranked[0])
    best_and_neighbours = by_rate[max(0, best - 1) : best + 2]
    return {*better_half, *best_and_neighbours}
