"""The soonest batch size, from the losses of several budgets and the times of steps.

Batch sizes end at different losses, so each budget alone tells no time to a loss. With two budgets,
the loss that one batch size reaches at the smaller one lies between the losses of others at both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from sweep.analysis.answer import Comparison, decide_trials
from sweep.analysis.answer_data import Side, join
from sweep.analysis.sides import LogTimeRatios, unknown_side
from sweep.analysis.tuned_rates import TunedRate
from sweep.config.numbers import format_count, format_seconds
from sweep.decision.curves import Floats
from sweep.decision.decision import PRIOR_DEGREES, Decision
from sweep.decision.equal_amounts import ERROR
from sweep.decision.soonest import Bounded, log_tokens_to_loss

# Parts of the error of losses: both budgets, and the change of the reference between them.
PARTS = 3


@dataclass(frozen=True, eq=False)
class AtBudget:
    """The trials of one policy at one budget."""

    tokens: int  # the budget
    comparison: Comparison
    rates: dict[tuple[str, int], TunedRate]  # by label and batch size; empty unless tuned

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.comparison.times.sizes

    def decide(self) -> Decision:
        """Return the decision at the level of error of one budget of two."""
        decided = decide_trials(self.comparison.finals, self.rates, ERROR / PARTS)
        assert decided is not None, "two batch sizes are compared"
        _, decision = decided
        return replace(decision, other_errors=self.comparison.decision.other_errors)

    def seeds_of(self, size: int) -> int:
        """Return the number of complete seeds of a batch size."""
        finals = self.comparison.finals
        values = finals.loc[finals["batch_size"] == size, "value"]
        return int(np.isfinite(values).sum())


def find_soonest_of_budgets(budgets: Sequence[AtBudget], reference: int) -> Side:
    """Return the batch size that is the first to reach a loss between the two largest budgets.

    Args:
        budgets: ascending, at least two; a third one tells how the curves bend.
        reference: the batch size whose loss at the second-largest budget is to be reached.
    """
    *_, smaller, larger = budgets
    comparison = larger.comparison
    times = comparison.times
    if reference not in smaller.sizes or reference not in larger.sizes:
        return unknown_side(
            "It is not known which batch size is the soonest: that needs batch size "
            f"{reference} at the two largest budgets."
        )
    decision = larger.decide()
    is_timed = [size not in times.unknown for size in larger.sizes]
    is_compared = np.isfinite(decision.mean) & np.array(is_timed)
    if not is_compared[larger.sizes.index(reference)]:
        return unknown_side(f"The time of batch size {reference} is not known.")

    decision_of_smaller = smaller.decide()
    at_smaller = _excess(smaller.sizes, decision_of_smaller, reference, larger.sizes)
    at_larger = _excess(larger.sizes, decision, reference, larger.sizes)
    change, error = _change_of(reference, (smaller, decision_of_smaller), (larger, decision))
    at_larger = Bounded(
        estimate=at_larger.estimate + change,
        low=at_larger.low + change - error,
        high=at_larger.high + change + error,
    )
    reached = log_tokens_to_loss(
        (math.log(smaller.tokens), math.log(larger.tokens)),
        at_smaller,
        at_larger,
        _curvatures(budgets, larger.sizes),
    )

    estimate, ratio_low, ratio_high = times.log_ratios
    low = reached.low[:, None] - reached.high[None, :] + ratio_low
    high = reached.high[:, None] - reached.low[None, :] + ratio_high
    np.fill_diagonal(low, 0.0)
    np.fill_diagonal(high, 0.0)
    between = reached.estimate[:, None] - reached.estimate[None, :] + estimate
    may_be = LogTimeRatios(estimate=between, low=low, high=high).may_be_soonest & is_compared

    seconds = [_seconds_per_token(larger, size) for size in larger.sizes]
    latest = np.log(seconds) + reached.high
    chosen = int(np.where(may_be, latest, math.inf).argmin())
    size = larger.sizes[chosen]
    value = math.exp(reached.estimate[chosen]) * seconds[chosen]
    estimates = decision_of_smaller.best_estimate
    loss = comparison.objective.value(float(estimates[smaller.sizes.index(reference)]))
    details = [format_seconds(value)] if math.isfinite(value) else []
    candidates = [other for other, is_in in zip(larger.sizes, may_be, strict=True) if is_in]
    others = [other for other in candidates if other != size]
    if others:
        details.append(f"{join(others, 'or')} may be as soon")
    end = f" ({'; '.join(details)})" if details else ""
    reasons = [*comparison.reasons, *smaller.comparison.reasons, *times.reasons]
    return Side(
        batch_size=size,
        candidates=candidates,
        basis=(
            f"the soonest to a {comparison.objective.metric} of {loss:.4g}, which batch size "
            f"{reference} reaches at {format_count(smaller.tokens)} tokens{end}"
        ),
        value=value if math.isfinite(value) else None,
        interval=_interval(larger, size, reached, chosen),
        reason=" ".join(dict.fromkeys(reasons)) if reasons else None,
    )


def _excess(
    sizes: Sequence[int], decision: Decision, reference: int, wanted: Sequence[int]
) -> Bounded:
    """Return the losses of batch sizes minus that of one, at the best rates; NaN if untried."""
    base = sizes.index(reference)
    low, high = decision.differences
    estimate = decision.best_estimate - decision.best_estimate[base]
    excess = Bounded(
        estimate=np.full(len(wanted), math.nan),
        low=np.full(len(wanted), -math.inf),
        high=np.full(len(wanted), math.inf),
    )
    for position, size in enumerate(wanted):
        if size not in sizes:
            continue
        index = sizes.index(size)
        excess.estimate[position] = estimate[index]
        excess.low[position] = 0.0 if index == base else low[index, base]
        excess.high[position] = 0.0 if index == base else high[index, base]
    return excess


def _change_of(
    reference: int, first: tuple[AtBudget, Decision], last: tuple[AtBudget, Decision]
) -> tuple[float, float]:
    """Return by how much the loss of a batch size changes between budgets, and the error."""
    estimates = []
    variance = 0.0
    degrees = []
    regret = 0.0
    for budget, decision in (first, last):
        index = budget.sizes.index(reference)
        seeds = budget.seeds_of(reference)
        estimates.append(float(decision.best_estimate[index]))
        variance += float(decision.variance[index]) / max(seeds, 1)
        degrees.append(seeds - 1 + PRIOR_DEGREES)
        if decision.rates is not None:
            regret += float((decision.rates.regret_high - decision.rates.regret_low)[index])
    critical = float(stdtrit(min(degrees), 1 - ERROR / PARTS / 2))
    error = critical * math.sqrt(variance) + regret
    return estimates[1] - estimates[0], error if math.isfinite(error) else math.inf


def _curvatures(budgets: Sequence[AtBudget], sizes: Sequence[int]) -> Floats:
    """Return the second divided differences of the losses at the three largest budgets.

    NaN for a batch size that was not compared at each of them.
    """
    nearest = budgets[-3:]
    curvatures = np.full(len(sizes), math.nan)
    if len(nearest) < 3:
        return curvatures
    positions = np.log([budget.tokens for budget in nearest])
    for index, size in enumerate(sizes):
        if all(size in budget.sizes for budget in nearest):
            losses = [
                budget.comparison.decision.best_estimate[budget.sizes.index(size)]
                for budget in nearest
            ]
            slopes = np.diff(losses) / np.diff(positions)
            curvatures[index] = (slopes[1] - slopes[0]) / (positions[2] - positions[0])
    return curvatures


def _seconds_per_token(budget: AtBudget, size: int) -> float:
    """Return the median time of a token; NaN if it is not known."""
    times = budget.comparison.times
    if size not in times.seconds:
        return math.nan
    return times.seconds[size].median / times.tokens.get(size, math.nan)


def _interval(
    budget: AtBudget, size: int, reached: Bounded, index: int
) -> tuple[float, float] | None:
    """Return the bounds of the time of a batch size; None if one is not known."""
    times = budget.comparison.times
    seconds = times.seconds[size]
    per_token = 1 / times.tokens.get(size, math.nan)
    low = math.exp(reached.low[index]) * seconds.low * per_token
    high = math.exp(reached.high[index]) * seconds.high * per_token
    if not seconds.is_interval or not math.isfinite(low + high):
        return None
    return low, high
