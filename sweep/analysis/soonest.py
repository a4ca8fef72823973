"""The soonest batch size, from the losses of several budgets and the times of steps.

Batch sizes end at different losses, so each budget alone tells no time to a loss. With two budgets,
the loss that one batch size reaches at the smaller one lies between the losses of others at both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sweep.analysis.answer import Comparison, SoonestOfBudgets, decide_trials
from sweep.analysis.answer_data import Side, join
from sweep.analysis.sides import LogTimeRatios, unknown_side
from sweep.analysis.tuned_rates import TunedRate
from sweep.config.numbers import format_count
from sweep.config.objective import LOSS
from sweep.decision.decision import LOOKS, Decision, critical_values
from sweep.decision.equal_amounts import ERROR
from sweep.decision.soonest import Bounded, log_tokens_to_loss
from sweep.plan.course import MOST_EPOCHS, repeats_too_often

# Parts of the error of losses: both budgets, and the change of the reference between them.
PARTS = 3
NOT_KNOWN = "It is not known which batch size is the soonest"


@dataclass(frozen=True, eq=False)
class AtBudget:
    """The trials of one policy at one budget."""

    tokens: int  # the budget
    epochs: float | None  # passes over the data; None: not known
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

    def error_of(self, size: int) -> float:
        """Return the error of the loss of a batch size; infinite if it is not known."""
        finals = self.comparison.finals
        values = finals.loc[finals["batch_size"] == size, "value"]
        seeds = int(np.isfinite(values).sum())
        if seeds < 2:
            return math.inf
        has_looks = finals["has_looks"].astype(str).eq("True").any()
        looks = {seeds, *LOOKS} if has_looks else {seeds}
        critical = critical_values(2, tuple(sorted(looks)), ERROR / PARTS)[seeds]

        decision = self.comparison.decision
        index = self.sizes.index(size)
        error = critical * math.sqrt(float(decision.variance[index]) / seeds)
        if decision.rates is not None:
            error += float((decision.rates.regret_high - decision.rates.regret_low)[index])
        return error if math.isfinite(error) else math.inf


def find_soonest_of_budgets(
    budgets: Sequence[AtBudget], reference: int, unit: str
) -> SoonestOfBudgets:
    """Find the batch size that is the first to reach a loss between the two largest budgets.

    Args:
        budgets: ascending, at least two; a third one tells whether the curves are convex.
        reference: the batch size whose loss at the second-largest budget is to be reached.
        unit: what budgets count, such as tokens.
    """
    *_, smaller, larger = budgets
    comparison = larger.comparison
    problem = _problem(smaller, larger, reference)
    if problem:
        return SoonestOfBudgets(unknown_side(f"{NOT_KNOWN}: {problem}."), (), False)

    decision = larger.decide()
    decision_of_smaller = smaller.decide()
    at_smaller = _excess(smaller.sizes, decision_of_smaller, reference, larger.sizes)
    at_larger = _excess(larger.sizes, decision, reference, larger.sizes)
    change = _loss_of(larger, reference) - _loss_of(smaller, reference)
    error = math.hypot(smaller.error_of(reference), larger.error_of(reference))
    if not change + error < 0:
        problem = f"the loss of batch size {reference} may not fall between the two largest budgets"
        return SoonestOfBudgets(unknown_side(f"{NOT_KNOWN}: {problem}."), (), False)
    reached = log_tokens_to_loss(
        (math.log(smaller.tokens), math.log(larger.tokens)),
        at_smaller,
        Bounded(
            estimate=at_larger.estimate + change,
            low=at_larger.low + change - error,
            high=at_larger.high + change + error,
        ),
        _curvatures(budgets, larger.sizes),
    )

    times = comparison.times
    is_compared = np.isfinite(decision.mean) & ~np.isin(larger.sizes, times.unknown)
    ratio, ratio_low, ratio_high = times.log_ratios
    low = reached.low[:, None] - reached.high[None, :] + ratio_low
    high = reached.high[:, None] - reached.low[None, :] + ratio_high
    np.fill_diagonal(low, 0.0)
    np.fill_diagonal(high, 0.0)
    between = reached.estimate[:, None] - reached.estimate[None, :] + ratio
    may_be = LogTimeRatios(estimate=between, low=low, high=high).may_be_soonest & is_compared

    seconds = np.array([_seconds_per_token(larger, size) for size in larger.sizes])
    latest = np.where(may_be, np.log(seconds) + reached.high, math.inf)
    chosen = int(latest.argmin())
    tried = {size for budget in budgets for size in budget.sizes}
    compared = {size for size, is_in in zip(larger.sizes, is_compared, strict=True) if is_in}
    missing = sorted(tried - compared)
    candidates = [size for size, is_in in zip(larger.sizes, may_be, strict=True) if is_in]
    side = _side(budgets, reference, unit, candidates, missing, larger.sizes[chosen])
    value = math.exp(reached.estimate[chosen]) * seconds[chosen]
    side = replace(side, value=float(value) if math.isfinite(value) else None)
    has_reasons = len(_reasons(budgets)) > 0
    is_decided = not missing and len(candidates) == 1 and times.has_intervals and not has_reasons
    beyond_own = tuple(_reasons(budgets, with_largest=False))
    return SoonestOfBudgets(side, beyond_own, is_decided)


def _problem(smaller: AtBudget, larger: AtBudget, reference: int) -> str:
    """Return why no batch size can be named; "" if one can."""
    if larger.comparison.optimizer:
        return "several optimizers are not compared over budgets"
    if repeats_too_often(larger.epochs):
        return f"the largest budget has over {MOST_EPOCHS} epochs of the data"
    for budget in (smaller, larger):
        index = budget.sizes.index(reference) if reference in budget.sizes else None
        if index is None or not math.isfinite(budget.comparison.decision.mean[index]):
            return f"that needs results of batch size {reference} at the two largest budgets"
        if not math.isfinite(budget.error_of(reference)):
            return f"the error of the loss of batch size {reference} is not known"
    if reference in larger.comparison.times.unknown:
        return f"the time of batch size {reference} is not known"
    return ""


def _side(
    budgets: Sequence[AtBudget],
    reference: int,
    unit: str,
    candidates: list[int],
    missing: list[int],
    size: int,
) -> Side:
    """Describe the batch size that takes the least time in the worst case."""
    *_, smaller, larger = budgets
    objective = larger.comparison.objective
    loss = objective.value(_loss_of(smaller, reference))
    start = "the soonest" if candidates == [size] else "in the worst case the soonest"
    if missing:
        start += " of those compared at the largest budget"
    basis = (
        f"{start} to a {objective.metric} of {loss:.4g}, which batch size {reference} reaches at "
        f"{format_count(smaller.tokens)} {unit}"
    )
    others = [other for other in candidates if other != size]
    if others:
        basis += f" ({join(others, 'or')} may be as soon)"
    reasons = _reasons(budgets)
    return Side(
        batch_size=size,
        candidates=candidates,
        basis=basis,
        value=None,
        interval=None,
        reason=" ".join(reasons) if reasons else None,
    )


def _reasons(budgets: Sequence[AtBudget], with_largest: bool = True) -> list[str]:
    """Return why what the budgets tell together is provisional.

    Those of the largest budget, which its answer has too, may be left out.
    """
    reasons: list[str] = []
    used = budgets[-3:] if with_largest else budgets[-3:-1]
    for budget in used:
        at = f"At a budget of {format_count(budget.tokens)}: "
        reasons += [f"{at}{reason}" for reason in budget.comparison.reasons]
    if budgets[-1].epochs is None:
        reasons.append("How often the data are repeated is not known.")
    reasons += budgets[-1].comparison.times.reasons
    return reasons


def _loss_of(budget: AtBudget, size: int) -> float:
    """Return the estimated loss of a batch size at its best rate."""
    return float(budget.comparison.decision.best_estimate[budget.sizes.index(size)])


def _excess(
    sizes: Sequence[int], decision: Decision, reference: int, wanted: Sequence[int]
) -> Bounded:
    """Return the losses of batch sizes minus that of one, at the best rates; NaN if untried."""
    base = sizes.index(reference)
    low, high = decision.differences
    estimate = decision.best_estimate - decision.best_estimate[base]
    excess = _not_known(len(wanted))
    for position, size in enumerate(wanted):
        if size not in sizes or not math.isfinite(estimate[sizes.index(size)]):
            continue
        index = sizes.index(size)
        excess.estimate[position] = estimate[index]
        excess.low[position] = 0.0 if index == base else low[index, base]
        excess.high[position] = 0.0 if index == base else high[index, base]
    return excess


def _not_known(count: int) -> Bounded:
    return Bounded(
        estimate=np.full(count, math.nan),
        low=np.full(count, -math.inf),
        high=np.full(count, math.inf),
    )


def _curvatures(budgets: Sequence[AtBudget], sizes: Sequence[int]) -> Bounded:
    """Return the second divided differences of the losses at the three largest budgets.

    They are not known for a batch size that was not compared at each of them, and for metrics
    other than the loss, whose curves need not be convex.
    """
    nearest = budgets[-3:]
    curvatures = _not_known(len(sizes))
    if len(nearest) < 3 or nearest[-1].comparison.objective.name != LOSS.name:
        return curvatures
    start, middle, end = np.log([budget.tokens for budget in nearest])
    weights = np.array(
        [
            1 / ((middle - start) * (end - start)),
            -1 / ((middle - start) * (end - middle)),
            1 / ((end - middle) * (end - start)),
        ]
    )
    for position, size in enumerate(sizes):
        if all(size in budget.sizes for budget in nearest):
            losses = [_loss_of(budget, size) for budget in nearest]
            errors = [budget.error_of(size) for budget in nearest]
            estimate = float(weights @ np.array(losses))
            error = float(np.linalg.norm(weights * np.array(errors)))
            if math.isfinite(estimate):
                curvatures.estimate[position] = estimate
                curvatures.low[position] = estimate - error
                curvatures.high[position] = estimate + error
    return curvatures


def _seconds_per_token(budget: AtBudget, size: int) -> float:
    """Return the median time of a token; NaN if it is not known."""
    times = budget.comparison.times
    if size not in times.seconds:
        return math.nan
    return times.seconds[size].median / times.tokens.get(size, math.nan)
