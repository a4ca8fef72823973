"""Tuning rates: what is tried next, what is pruned, which rate won (SCIENCE.md §2).

Pure: from what the trials so far showed. What carries it out is `sweep.orchestration.tuning`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from sweep.config.experiment import EvaluationSettings
from sweep.plan.steps import milestone_steps

GRID = (0.25, 0.5, 1.0, 2.0, 4.0)  # around the centre
CONFIRMATION = (0.5, 1.0, 2.0)  # around a winner that was found at fewer tokens
EXTENSIONS = 4  # steps of 2 beyond either end of the grid, at most
FINEST = math.sqrt(2)  # ratio of neighbouring rates at which refinement ends
RUNGS = (Fraction(1, 4), Fraction(1, 2))  # of a trial's steps, where the worse are pruned
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Tried:
    """One rate, as the search sees it."""

    rate: float
    loss: float | None  # final, or tokens to the target; inf: diverged or pruned; None: open


@dataclass(frozen=True)
class Shown:
    """What one tuning trial's folder shows."""

    values: dict[str, float]  # learning_rate; beta2, weight_decay as factors on the policy's
    loss: float | None  # as of Tried
    is_pruned: bool
    at_rungs: tuple[tuple[int, float], ...]  # step, validation loss

    @property
    def tried(self) -> Tried:
        """Its rate and loss."""
        return Tried(self.values["learning_rate"], self.loss)


@dataclass(frozen=True)
class Search:
    """What one study looks for, and how far."""

    name: str  # of the study in its storage
    grid: tuple[float, ...]  # rates
    finest: float = FINEST  # ratio of neighbouring rates at which refinement ends
    extra: tuple[str, ...] = ()  # beta2, weight_decay: then all dimensions are searched at once
    trials: int = 0  # where there are several dimensions

    def is_done(self, shown: Iterable[Shown], wanted: int) -> bool:
        """Tell whether nothing more is to be tried, with `wanted` trials at least."""
        tried = [one.tried for one in shown]
        if self.extra and len(tried) >= len(self.grid):
            return len(tried) >= max(self.trials, wanted)
        return not next_rates(tried, self.grid, self.finest, wanted)


def next_rates(
    tried: Sequence[Tried], grid: Sequence[float], finest: float = FINEST, wanted: int = 0
) -> tuple[float, ...]:
    """Return the rates to try next; none while one is open, and none once the search has settled.

    First the grid. Then, while the best is at an edge, one step beyond it. Then the wider of the
    two gaps beside the best is halved in log rate (the upper one where they are equal), until
    neighbours are within `finest` and `wanted` rates were tried. Where all diverged, nothing is
    refined.
    """
    missing = tuple(rate for rate in grid if not is_in(rate, (one.rate for one in tried)))
    if missing:
        return missing
    if any(one.loss is None for one in tried):
        return ()
    ordered = sorted(tried, key=lambda one: one.rate)
    best = best_place(ordered)
    rate, reach = ordered[best].rate, 2.0**EXTENSIONS
    if best == 0 and rate > min(grid) / reach * ROUNDING:
        return (rate / 2,)
    if best == len(ordered) - 1 and rate * ROUNDING < max(grid) * reach:
        return (rate * 2,)
    if ordered[best].loss == math.inf:
        return ()
    beside = [ordered[place].rate for place in (best - 1, best + 1) if 0 <= place < len(ordered)]
    widest = max(beside, key=lambda other: (round(abs(math.log(other / rate)), 9), other))
    is_wide = abs(math.log(widest / rate)) > math.log(finest * ROUNDING)
    return (math.sqrt(widest * rate),) if is_wide or len(tried) < wanted else ()


def best_place(ordered: Sequence[Tried]) -> int:
    """Return the place of the least loss; the lowest rate where all diverged."""
    losses = [math.inf if one.loss is None else one.loss for one in ordered]
    return losses.index(min(losses))


def winning_rate(tried: Sequence[Tried]) -> float | None:
    """Return the rate of the least finite loss; None where every trial diverged."""
    best = tried[best_place(tried)]
    return best.rate if best.loss is not None and math.isfinite(best.loss) else None


def rung_steps(steps: int, evaluation: EvaluationSettings) -> tuple[int, ...]:
    """Return the steps at which a tuning trial pauses to be compared: milestones of evaluation."""
    milestones = milestone_steps(steps, evaluation.points)
    places = [math.ceil(share * len(milestones)) - 1 for share in RUNGS]
    found = {milestones[place] for place in places if place >= 0}
    return tuple(sorted(step for step in found if step < steps))


def neighbours(ordered: Sequence[Tried]) -> tuple[int, ...]:
    """Return the places beside the least loss: what bounds the best rate."""
    best = best_place(ordered)
    return tuple(place for place in (best - 1, best + 1) if 0 <= place < len(ordered))


def survivors(at_rung: Mapping[str, tuple[float, float]]) -> set[str]:
    """Return the trials that go on behind a rung: the better half, and the best's neighbours.

    A higher rate looks worse before it decays than it is at the end.

    Args:
        at_rung: rate and loss of every trial of the study that reached the rung, by trial id.
    """
    ranked = sorted(at_rung, key=lambda trial: at_rung[trial][1])
    kept = set(ranked[: math.ceil(len(ranked) / 2)])
    by_rate = sorted(at_rung, key=lambda trial: at_rung[trial][0])
    best = by_rate.index(ranked[0])
    return kept | set(by_rate[max(0, best - 1) : best + 2])


def is_in(rate: float, grid: Iterable[float]) -> bool:
    """Tell whether a rate is one of a grid's, but for rounding."""
    return any(math.isclose(rate, one, rel_tol=1e-6) for one in grid)
