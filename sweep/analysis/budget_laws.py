"""How batch sizes grow with the budget: laws of the budgets of a sweep, and their sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from sweep.analysis.budgets import (
    BestBatchSize,
    BudgetAnswer,
    end_of_range,
    nearest_budgets,
)
from sweep.analysis.law import LEAST_BUDGETS, Law, Optimum, fit_law
from sweep.analysis.tables import Estimate
from sweep.config.numbers import format_count
from sweep.decision.curves import Floats
from sweep.plan.plan import Plan

EXCESS_TOKENS = 0.2  # share of tokens that a larger batch size needs in addition
NOT_TUNED = (
    "How the best batch size grows is not known, because the rates were not tuned at each batch "
    "size: the best ones may only be those that the rate suits."
)
SMALLEST_POWER = 1e-6  # α of the losses over tokens that are tried
LARGEST_POWER = 10.0


@dataclass(frozen=True)
class Growth:
    """Laws in sequences. One is None unless its batch size is known at three budgets."""

    best: Law | None = None
    # with the best one at an edge of those tried
    within: Law | None = None  # the largest batch size within the tolerance
    excess: Law | None = None  # the batch size that needs 20 % more tokens than the best one
    is_tuned: bool = True  # without tuned rates nothing is known about the best batch sizes
    left_out: int = 0  # budgets whose best batch size is at an edge or has no interval


def growth_of(budgets: Sequence[BudgetAnswer]) -> Growth:
    """Fit how batch sizes grow over the budgets of one model, ascending.

    Budgets that repeat the data too often are left out.
    """
    budgets = [budget for budget in budgets if not budget.is_repetitive]
    if not all(budget.is_tuned for budget in budgets):
        return Growth(is_tuned=False)
    optima = [budget.optimum() for budget in budgets]
    inside = [optimum for optimum in optima if optimum is not None]
    if len(inside) >= LEAST_BUDGETS:
        return Growth(best=fit_law(inside), left_out=len(optima) - len(inside))
    return Growth(within=law_of_range(budgets), excess=_law_of_excess(budgets))


def law_of_range(budgets: Sequence[BudgetAnswer]) -> Law | None:
    """Fit a law to the largest batch size within the tolerance, as far as it was tried."""
    return _law_through(
        [
            (budget.tokens, budget.best.range_within_tolerance[1])
            for budget in budgets
            if not budget.best.is_range_open[1] and not budget.best.may_be_smaller
        ]
    )


def _law_of_excess(budgets: Sequence[BudgetAnswer]) -> Law | None:
    """Fit a law to the batch size that needs 20 % more tokens than the best one for its loss.

    At the smallest budget it is not known.
    """
    if len(budgets) < LEAST_BUDGETS:
        return None
    log_tokens = np.log([budget.tokens for budget in budgets])
    losses = np.array([budget.loss for budget in budgets])
    points = []
    for index in range(1, len(budgets)):
        nearest = nearest_budgets(index, len(budgets))
        at_fewer = log_tokens[index] - math.log(1 + EXCESS_TOKENS)
        margin = _loss_between(log_tokens[nearest], losses[nearest], at_fewer) - losses[index]
        rows = [row for row in budgets[index].answer.batch_sizes if row.gap is not None]
        sizes = [row.batch_size for row in rows]
        gaps = np.array([row.gap for row in rows], float)
        excess = np.maximum(gaps, 0.0)  # the gap of the best one is to the second
        size, is_open = end_of_range(sizes, excess, margin, step=1)
        if margin > 0 and not is_open:
            points.append((budgets[index].tokens, size))
    return _law_through(points)


def _loss_between(log_tokens: Floats, losses: Floats, position: float) -> float:
    """Return the loss at log tokens between three budgets.

    By the curve E + A·D^−α through all three; by a chord if losses do not fall ever more slowly.
    """
    before, after = losses[:-1] - losses[1:]
    if before <= 0 or after <= 0 or _ratio_of_falls(SMALLEST_POWER, log_tokens) >= before / after:
        return float(np.interp(position, log_tokens, losses))
    power = LARGEST_POWER
    if _ratio_of_falls(LARGEST_POWER, log_tokens) > before / after:
        power = brentq(
            lambda power: math.log(_ratio_of_falls(power, log_tokens) * after / before),
            SMALLEST_POWER,
            LARGEST_POWER,
        )
    heights = np.exp(-power * (log_tokens - log_tokens[1]))
    scale = (losses[0] - losses[2]) / (heights[0] - heights[2])
    height = math.exp(-power * (position - log_tokens[1]))
    return float(losses[1] + scale * (height - heights[1]))


def _ratio_of_falls(power: float, log_tokens: Floats) -> float:
    """Return how much farther D^−α falls between the first two of three budgets than after."""
    first, middle, last = np.exp(-power * (log_tokens - log_tokens[1]))
    return float((first - middle) / (middle - last))


def _law_through(points: Sequence[tuple[int, float]]) -> Law | None:
    """Fit a law to pairs of tokens and a batch size, which all count the same."""
    if len({tokens for tokens, _ in points}) < LEAST_BUDGETS:
        return None
    return fit_law([Optimum(tokens, size, low=size, high=size) for tokens, size in points])


def describe_best(best: BestBatchSize) -> str:
    """Write the best batch size; at an edge, that it is the smallest or the largest tried.

    It is not known if the curve of the losses may be flat, or is lowest where the losses are not.
    """
    if best.value is not None:
        return f"{best.value:.3g}"
    if not best.edge:
        return "not known, because the losses hardly differ"
    low, high = best.range_within_tolerance
    if best.edge == "smallest":
        return f"{low:g}, the smallest tried"
    return f"{high:g}, the largest tried"


def describe_interval(best: BestBatchSize) -> str:
    """Write the interval of the best batch size; "" at an edge."""
    low, high = best.interval
    if best.value is None:
        return ""
    if low is None or high is None:
        return " (not bounded)"
    return f" (95 % interval {low:.3g} to {high:.3g})"


def describe_budgets(budgets: Sequence[BudgetAnswer], growth: Growth, plan: Plan) -> list[str]:
    """Write the range and the best batch size of each budget, and how the best one grows."""
    if not budgets:
        return []
    lines = [describe_budget(budget, plan) for budget in budgets]
    return lines + describe_growth(growth, budgets[-1], plan.settings.token_unit)


def describe_budget(budget: BudgetAnswer, plan: Plan) -> str:
    """Write the range and the best batch size of one budget."""
    low, high = budget.best.range_within_tolerance
    sizes = f"{low:.3g} to {high:.3g}"
    unit = plan.tokens_per_sequence
    if unit > 1:
        sizes += f" ({format_count(low * unit)} to {format_count(high * unit)} tokens)"
    is_open = budget.best.is_range_open[0] and low > 1, budget.best.is_range_open[1]
    if all(is_open):
        sizes += ", all that were tried,"
    elif any(is_open):
        sizes += f", and perhaps {'smaller' if is_open[0] else 'larger'} ones,"
    close = budget.answer.compared.write(budget.answer.tolerance)
    how = "the fitted curve" if budget.best.is_by_curve else "the losses"
    return (
        f"At {format_count(budget.tokens)} {plan.settings.token_unit}, batch sizes {sizes} are "
        f"within {close} of the best by {how}; the best estimate is "
        f"{describe_best(budget.best)}{describe_interval(budget.best)}."
    )


def describe_growth(growth: Growth, largest: BudgetAnswer, unit: str) -> list[str]:
    """Write the exponents of the laws, with their intervals.

    Args:
        growth: the laws.
        largest: the largest budget.
        unit: what the budgets count, tokens or examples.
    """
    if not growth.is_tuned:
        return [NOT_TUNED]
    close = largest.answer.compared.write(largest.answer.tolerance)
    laws = {
        "The best batch size": growth.best,
        f"The largest batch size within {close} of the best": growth.within,
        f"The batch size that needs {100 * EXCESS_TOKENS:.0f} % more {unit} than the best": (
            growth.excess
        ),
    }
    lines = [
        f"{subject} grows as {describe_exponent(law.exponent)}, D: training {unit}."
        for subject, law in laws.items()
        if law is not None
    ]
    return lines + describe_left_out(growth.left_out)


def describe_left_out(count: int) -> list[str]:
    """Write how many budgets are no points of a law; no sentence if there are none."""
    if not count:
        return []
    budgets = "1 budget" if count == 1 else f"{count} budgets"
    return [
        f"The law leaves out {budgets} whose best batch size is at an edge of those tried, or has "
        "no interval."
    ]


def describe_exponent(exponent: Estimate) -> str:
    """Write a power of the budget D with the interval of its exponent."""
    low, high = exponent.low, exponent.high
    return f"D^{exponent.value:.2f} (95 % interval {low:.2f} to {high:.2f})"
