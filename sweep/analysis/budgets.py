"""The budgets of a sweep together: the best batch size of each, its range, and what gaps are worth.

The best batch size of a budget is the lowest point of the loss over log batch sizes, each at its
best rate. At an edge of those tried it is a bound, which no law is fitted to.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial

from sweep.analysis.answer import Answer
from sweep.analysis.answer_data import BatchSizeAnswer
from sweep.analysis.law import DEVIATIONS, Optimum
from sweep.decision.budgets import batch_size_points
from sweep.decision.curves import Floats, PossibleCurves, possible_curves
from sweep.decision.decision import Decision, Flags
from sweep.plan.course import repeats_too_often

LOSSES_BETWEEN = 200  # at which an interpolated curve of losses is looked up


@dataclass(frozen=True)
class BestBatchSize:
    """The best batch size of one budget, in sequences."""

    value: float | None  # None at an edge, and if it is not known
    interval: tuple[float | None, float | None]  # that of a 95 % interval; None: not bounded
    # smallest or largest of those tried, which the best one is; "" if it is neither or not known
    edge: str
    # batch sizes whose estimated loss is within the tolerance of the least, inside those tried
    range_within_tolerance: tuple[float, float]
    is_range_open: tuple[bool, bool]  # whether it ends with the batch sizes that were tried
    # curvatures of the loss over log batch sizes, below and above the best one; NaN at an edge
    curvatures: tuple[float, float] = (math.nan, math.nan)

    @property
    def is_by_curve(self) -> bool:
        """Whether the range is that of the fitted curve, and not interpolated between losses."""
        return self.value is not None

    @property
    def may_be_smaller(self) -> bool:
        """Whether batch sizes that were not tried may be better than the smallest one."""
        return self.edge == "smallest" and self.range_within_tolerance[0] > 1


@dataclass(frozen=True)
class BudgetAnswer:
    """The answer of one budget, with its best batch size."""

    tokens: int  # the budget
    best: BestBatchSize
    loss: float  # the least over batch sizes, estimated at the best rates; less is better
    loss_error: float  # half the width of its 95 % interval, about
    epochs: float | None  # passes over the data; None: not known
    answer: Answer

    @property
    def is_repetitive(self) -> bool:
        """Whether the data are known to be repeated so often that no law includes the budget."""
        return repeats_too_often(self.epochs)

    @property
    def is_tuned(self) -> bool:
        """Whether rates were searched at the batch sizes, and curves through their losses fit."""
        return any(row.regret_interval is not None for row in self.answer.batch_sizes)

    def optimum(self, unit: int = 1, parameters: float | None = None) -> Optimum | None:
        """Return the best batch size as a point of a law; None at an edge, or if it is not bounded.

        Args:
            unit: tokens per sequence, for a law in tokens.
            parameters: the model size, if it is known.
        """
        low, high = self.best.interval
        if self.best.value is None or low is None or high is None:
            return None
        return Optimum(
            tokens=self.tokens,
            batch_size=self.best.value * unit,
            low=low * unit,
            high=high * unit,
            parameters=parameters,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the keys of an answer, with those of the budget first."""
        best = {
            "value": self.best.value,
            "interval": self.best.interval,
            "range_within_tolerance": self.best.range_within_tolerance,
            "is_range_open": self.best.is_range_open,
            "edge": self.best.edge,
        }
        return {"tokens": self.tokens, "best": best, **self.answer.as_json()}


def answer_document(
    answer: Answer | None, budgets: Sequence[BudgetAnswer] = ()
) -> dict[str, Any] | None:
    """Return the document of answer.json; with several budgets it has the answers of all."""
    if answer is None:
        return None
    document = answer.as_json()
    if budgets:
        document["budgets"] = [budget.as_json() for budget in budgets]
    return document


def find_best_batch_size(
    sizes: Sequence[int], decision: Decision, seeds: Sequence[int], margin: float
) -> tuple[BestBatchSize, float, float]:
    """Return the best batch size of one budget, the least loss, and that loss's error.

    Args:
        sizes: the batch sizes, ascending.
        decision: about these, in the same order.
        seeds: complete ones of each.
        margin: the difference of compared values that is good enough.
    """
    is_compared = np.isfinite(decision.mean)
    losses = decision.best_estimate[is_compared]
    compared = np.array(sizes)[is_compared].tolist()
    count = min(np.array(seeds)[is_compared])
    points = batch_size_points(compared, losses.tolist(), count)
    error = 2 * math.sqrt(_variance(decision, is_compared, count) / count)
    variance = _variance_between(decision, is_compared, count)
    curves = possible_curves(points, np.array([variance]))

    log_sizes = np.log(compared)
    optimum = float(curves.optimum[0])
    edge = _edge_of(optimum, log_sizes, losses)
    may_be_best = decision.may_be_best[is_compared]
    is_flat = bool(curves.may_be_flat[0]) and bool(may_be_best.all())
    if edge and is_flat and not _is_least(edge, losses):
        best = _unknown_best(compared, losses, margin)
        return best, float(losses.min()), error
    if edge:
        best = _best_at_edge(edge, compared, losses, may_be_best, margin)
        return best, float(losses.min()), error
    low, high = _within(curves, margin)
    is_open = bool(low < log_sizes[0]), bool(high > log_sizes[-1])
    best = BestBatchSize(
        value=math.exp(optimum),
        interval=_interval(curves, log_sizes),
        edge="",
        range_within_tolerance=(
            math.exp(max(low, log_sizes[0])),
            math.exp(min(high, log_sizes[-1])),
        ),
        is_range_open=is_open,
        curvatures=(
            float(curves.curvature[0]),
            float(curves.curvature[0] * curves.ratio[0]),
        ),
    )
    return best, float(curves.at_best(curves.fit.level)[0]), error


def _variance(decision: Decision, is_compared: Floats, seeds: int) -> float:
    """Return the variance of a loss at its best rate over seeds, with the error of that rate.

    It is infinite if there is one seed, or if the regret of some batch size is not bounded.
    """
    variances = decision.variance[is_compared]
    known = variances[np.isfinite(variances)]  # none with one seed
    variance = float(known.mean()) if len(known) else math.inf
    return variance + seeds * _variance_of_rates(decision, is_compared)


def _variance_between(decision: Decision, is_compared: Floats, seeds: int) -> float:
    """Return the variance of a loss over seeds, without what a seed adds at every batch size.

    That moves a curve over batch sizes up or down, and not its lowest point. It includes the error
    of the rates, and is infinite as the whole variance is.
    """
    pairs = decision.variance_of_difference[is_compared][:, is_compared]
    known = pairs[np.isfinite(pairs) & ~np.eye(len(pairs), dtype=bool)]
    variance = float(known.mean()) / 2 if len(known) else math.inf
    return variance + seeds * _variance_of_rates(decision, is_compared)


def _variance_of_rates(decision: Decision, is_compared: Floats) -> float:
    """Return the variance of the losses at the best rates that comes from the rates."""
    if decision.rates is None:
        return 0.0
    spread = (decision.rates.regret_high - decision.rates.regret_low)[is_compared]
    return float(np.square(spread / DEVIATIONS).mean())


def _interval(curves: PossibleCurves, log_sizes: Floats) -> tuple[float | None, float | None]:
    """Return the possible lowest points; None for an end that reaches the batch sizes tried."""
    if curves.may_be_flat[0]:
        return None, None
    low = float(curves.optimum_low[0])
    high = float(curves.optimum_high[0])
    is_bounded = low > log_sizes[0] + 1e-9, high < log_sizes[-1] - 1e-9
    return (
        math.exp(low) if is_bounded[0] else None,
        math.exp(high) if is_bounded[1] else None,
    )


def _within(curves: PossibleCurves, margin: float) -> tuple[float, float]:
    """Return the log batch sizes between which the best curve is within a margin of its least."""
    below = float(curves.curvature[0])
    above = below * float(curves.ratio[0])
    optimum = float(curves.optimum[0])
    if below <= 0:
        return -math.inf, math.inf
    return optimum - math.sqrt(margin / below), optimum + math.sqrt(margin / above)


def _edge_of(optimum: float, log_sizes: Floats, losses: Floats) -> str:
    """Return smallest or largest if the lowest point is at an edge of the sizes tried, else ""."""
    if math.isnan(optimum):
        return "smallest" if int(losses.argmin()) == 0 else "largest"
    if np.isclose(optimum, log_sizes[0]):
        return "smallest"
    return "largest" if np.isclose(optimum, log_sizes[-1]) else ""


def _is_least(edge: str, losses: Floats) -> bool:
    """Return True if the batch size at an edge has the least loss."""
    return int(losses.argmin()) == (0 if edge == "smallest" else len(losses) - 1)


def _unknown_best(sizes: Sequence[int], losses: Floats, margin: float) -> BestBatchSize:
    """Return that the best batch size is not known, with a range by linear interpolation."""
    low, is_low_open = end_of_range(sizes, losses, margin, step=-1)
    high, is_high_open = end_of_range(sizes, losses, margin, step=1)
    return BestBatchSize(
        value=None,
        interval=(None, None),
        edge="",
        range_within_tolerance=(low, high),
        is_range_open=(is_low_open, is_high_open),
    )


def _best_at_edge(
    edge: str, sizes: Sequence[int], losses: Floats, may_be_best: Flags, margin: float
) -> BestBatchSize:
    """Return the bound of a best batch size at an edge, with a range by linear interpolation.

    Its interval reaches to the next batch size that cannot be the best.
    """
    candidates = np.flatnonzero(may_be_best)
    first = int(candidates.min(initial=len(sizes) - 1))
    last = int(candidates.max(initial=0))
    low, is_low_open = end_of_range(sizes, losses, margin, step=-1)
    high, is_high_open = end_of_range(sizes, losses, margin, step=1)
    if edge == "smallest":
        low, is_low_open = float(sizes[0]), True
    else:
        high, is_high_open = float(sizes[-1]), True
    return BestBatchSize(
        value=None,
        interval=(
            float(sizes[first - 1]) if first > 0 else None,
            float(sizes[last + 1]) if last < len(sizes) - 1 else None,
        ),
        edge=edge,
        range_within_tolerance=(low, high),
        is_range_open=(is_low_open, is_high_open),
    )


def end_of_range(
    sizes: Sequence[int], losses: Floats, margin: float, step: int
) -> tuple[float, bool]:
    """Return the last batch size within a margin of the least loss, and whether it may be farther.

    Losses between batch sizes are interpolated in log batch sizes.

    Args:
        sizes: the batch sizes, ascending.
        losses: one for each batch size; less is better.
        margin: the difference of losses.
        step: 1 for the largest batch size, −1 for the smallest.
    """
    log_sizes = np.log(sizes)
    position = int(losses.argmin())
    excess = losses - losses[position]
    while 0 <= position + step < len(sizes):
        following = position + step
        if excess[following] > margin:
            share = (margin - excess[position]) / (excess[following] - excess[position])
            between = log_sizes[position] + share * (log_sizes[following] - log_sizes[position])
            return math.exp(between), False
        position = following
    return float(sizes[position]), True


def with_worth(budgets: Sequence[BudgetAnswer], index: int) -> Answer:
    """Return the answer of a budget, whose gaps are also shares of its tokens.

    A gap is worth the share of the tokens that the best batch size could save and still reach the
    loss of the other. It is not known at the smallest budget.
    """
    answer = budgets[index].answer
    if index == 0:
        return answer
    log_tokens = np.log([budget.tokens for budget in budgets])
    losses = np.array([budget.loss for budget in budgets])
    errors = np.array([budget.loss_error for budget in budgets])
    rows = []
    for row in answer.batch_sizes:
        worth = _worth(row, log_tokens, losses, errors, index)
        rows.append(replace(row, worth_in_tokens=worth))
    return replace(answer, batch_sizes=rows)


def _worth(
    row: BatchSizeAnswer,
    log_tokens: Floats,
    losses: Floats,
    errors: Floats,
    index: int,
) -> tuple[float, float | None] | None:
    """Return the least and the largest share of tokens; None for an end that is not bounded.

    A chord lies above the convex curve of the losses, so two budgets give no largest share.
    """
    low, high = row.gap_to_best
    is_known = low is not None or high is not None
    if not is_known or not np.isfinite(errors).all():
        return None
    higher = losses + errors
    higher[index] = losses[index]
    lower = losses - errors
    lower[index] = losses[index]

    least: float | None = None
    if low is not None and low > 0:
        least = _saved(low, log_tokens, higher, index, is_least=True)
    if least is None:
        least = 0.0
    largest = None
    if high is not None and index > 1:
        largest = _saved(max(high, 0.0), log_tokens, lower, index, is_least=False)
    return least, largest


def _saved(
    gap: float, log_tokens: Floats, losses: Floats, index: int, is_least: bool
) -> float | None:
    """Return the share of tokens that a gap is worth; None if it needs a smaller budget.

    The least loss between budgets is interpolated by a chord and, with three budgets, by a
    quadratic in log tokens, whose error is its difference from the chord, on both sides.

    Args:
        gap: in the compared value.
        log_tokens: of the budgets, ascending.
        losses: the least at each budget.
        index: the budget that the gap is of.
        is_least: whether the least share is wanted, or the largest.
    """
    target = losses[index] + gap
    if target > losses[:index].max():
        share = 1 - math.exp(log_tokens[0] - log_tokens[index])
        return share if is_least else None
    shares = []
    for curve in _curves_between(log_tokens, losses, index):
        grid = np.linspace(log_tokens[0], log_tokens[index], LOSSES_BETWEEN)
        position = _first_at_most(target, grid, curve(grid))
        if position is not None:
            shares.append(1 - math.exp(position - log_tokens[index]))
    if not shares:
        return None
    return min(shares) if is_least else max(shares)


def _first_at_most(target: float, positions: Floats, losses: Floats) -> float | None:
    """Return where losses, interpolated linearly, first are at most a target; None if nowhere."""
    reached = np.flatnonzero(losses <= target)
    if not len(reached):
        return None
    end = int(reached[0])
    if end == 0:
        return float(positions[0])
    before = losses[end - 1]
    share = (before - target) / (before - losses[end])
    return float(positions[end - 1] + share * (positions[end] - positions[end - 1]))


def _curves_between(
    log_tokens: Floats, losses: Floats, index: int
) -> list[Callable[[Floats], Floats]]:
    """Return functions of log tokens that interpolate the losses of budgets up to one."""

    def chord(positions: Floats) -> Floats:
        return np.asarray(np.interp(positions, log_tokens, losses))

    if len(losses) <= 2:
        return [chord]
    nearest = nearest_budgets(index, len(losses))
    quadratic = Polynomial.fit(log_tokens[nearest], losses[nearest], 2)

    def below_quadratic(positions: Floats) -> Floats:
        return np.asarray(2 * quadratic(positions) - chord(positions))

    return [chord, quadratic, below_quadratic]


def nearest_budgets(index: int, count: int) -> slice:
    """Return the three budgets around one of several."""
    first = max(0, min(index - 1, count - 3))
    return slice(first, first + 3)
