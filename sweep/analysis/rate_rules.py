"""The exponent of the best rate in the batch size, and what a rule would have cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.interpolate import PchipInterpolator
from scipy.special import stdtrit

from sweep.analysis.answer_data import join
from sweep.analysis.published_laws import Scale, step_law_rate
from sweep.analysis.tables import Estimate
from sweep.analysis.tuned_rates import TunedRate
from sweep.config.optimizers import optimizer_facts
from sweep.decision.decision import ALPHA
from sweep.plan.plan import Plan
from sweep.resources import read_toml

RULES: dict[str, str] = read_toml(__file__, "rate_rules.toml")  # name and source of each rule


def rate_exponent(rates: Sequence[TunedRate]) -> Estimate | None:
    """Fit the exponent of the best rate in the batch size; None below three fitted rates.

    The interval is that of the regression of log rates, so it includes deviations from a power.
    """
    fitted = [(rate.batch_size, rate.optimum) for rate in rates if rate.optimum is not None]
    if len(fitted) < 3:
        return None
    from scipy.stats import linregress  # takes half a second, and only tuned rates need it

    line = linregress(*np.log(fitted).T)
    half = float(stdtrit(len(fitted) - 2, 1 - ALPHA / 2)) * line.stderr
    return Estimate(line.slope, line.slope - half, line.slope + half)


@dataclass(frozen=True)
class RuleCost:
    """The cost of one rule that starts from the best rate of one batch size."""

    rule: str
    anchor: int | None  # that batch size; None if the rule needs none
    rates: dict[int, float]  # by batch size
    costs: dict[int, Estimate | None]  # loss given up; None outside of the measured rates

    @property
    def worst(self) -> Estimate | None:
        """The most that it gives up at a batch size; None if one is not known."""
        known = [cost for cost in self.costs.values() if cost is not None]
        if len(known) < len(self.costs):
            return None
        return max(known, key=lambda cost: cost.value)

    def is_within(self, margin: float) -> bool:
        """Return True if every batch size is known to give up at most the margin."""
        return all(cost is not None and cost.high <= margin for cost in self.costs.values())


@dataclass(frozen=True)
class RuleSummary:
    """The most that a rule gives up at a batch size, given the best rate of some other one.

    It is known for those anchors from which all rates of the rule lie within the measured ones.
    """

    name: str
    known: Sequence[RuleCost]  # ascending by what they give up
    anchors: int  # number of all


def summarize_rules(costs: Sequence[RuleCost]) -> list[RuleSummary]:
    """Return a line per rule, in their order."""
    summaries = []
    for name in dict.fromkeys(cost.rule for cost in costs):
        of_rule = [cost for cost in costs if cost.rule == name]
        known = [cost for cost in of_rule if cost.worst is not None]
        known.sort(key=lambda cost: math.inf if cost.worst is None else cost.worst.value)
        summaries.append(RuleSummary(name, known, len(of_rule)))
    return summaries


def rules_table(costs: Sequence[RuleCost]) -> pd.DataFrame:
    """Return each rate of each rule: rule, anchor, batch_size, learning_rate, given_up, bounds."""
    rows = [
        (cost.rule, cost.anchor, size, rate, *(cost.costs[size] or (None, None, None)))
        for cost in costs
        for size, rate in cost.rates.items()
    ]
    columns = ["rule", "anchor", "batch_size", "learning_rate", "given_up", "low", "high"]
    return pd.DataFrame(rows, columns=columns).astype({"anchor": "Int64"})


def rule_costs(plan: Plan, rates: Sequence[TunedRate], sds: Mapping[int, float]) -> list[RuleCost]:
    """Return the cost of each rule anchored at each batch size; `sds` are of losses over seeds.

    A cost is the loss at the rule's rate, interpolated in log rates between the tuning trials,
    minus that at the lowest point of the fitted curve. The standard error is that of linear
    interpolation.
    """
    by_size = {rate.batch_size: rate for rate in rates}
    optima = {}
    for rate in rates:
        optimum = rate.optimum
        if optimum is None:  # a rule has to suit every batch size
            return []
        optima[rate.batch_size] = optimum
    if len(optima) < 2:
        return []

    rules: list[tuple[str, int | None, dict[int, float]]] = []
    for name, exponent in (("same", 0.0), ("sqrt", 0.5), ("linear", 1.0)):
        for anchor, optimum in optima.items():
            ratios = {size: size / anchor for size in optima}
            chosen = {size: optimum * ratio**exponent for size, ratio in ratios.items()}
            rules.append((name, anchor, chosen))
    step_law = _step_law(plan)
    if step_law:
        rules.append(("step_law", None, dict.fromkeys(optima, step_law)))

    results = []
    for name, known_size, chosen in rules:
        costs = {size: _cost(by_size[size], rate, sds) for size, rate in chosen.items()}
        results.append(RuleCost(name, known_size, chosen, costs))
    return results


def _step_law(plan: Plan) -> float | None:
    """Return the rate of Li et al. 2025 for AdamW and language models, at every batch size."""
    is_pretraining = plan.settings.expected_initial_loss is not None
    has_law = all(optimizer_facts(name)["step_law"] for name in plan.settings.optimizer_names)
    if not is_pretraining or not has_law or plan.token_budget is None:
        return None
    parameters = plan.model.parameters
    embedding = plan.model.embedding_parameters
    if not parameters:
        return None
    if embedding is None:
        embedding = 0
    return step_law_rate(Scale(parameters - embedding, plan.token_budget))


def _cost(rate: TunedRate, chosen: float, sigma: Mapping[int, float]) -> Estimate | None:
    """Return the loss at the chosen rate minus that at the optimum, between the tried rates."""
    losses = rate.trials.groupby("learning_rate")["value"].agg(["mean", "count"])
    losses = losses[np.isfinite(losses["mean"])]
    if len(losses) < 2:
        return None
    if not losses.index[0] <= chosen <= losses.index[-1]:
        return None

    log_rates = np.log(losses.index)
    optimum = math.nan if rate.optimum is None else rate.optimum
    ends = np.log([optimum, chosen])
    curve = PchipInterpolator(log_rates, losses["mean"].to_numpy())
    cost = float(np.diff(curve(ends))[0])

    # The cost as a weighted sum of the means, if the curve were linear between them.
    each_mean = np.eye(len(losses))
    weights = [np.interp(ends, log_rates, only) for only in each_mean]
    differences = np.diff(weights)[:, 0]
    variance = float((differences**2 / losses["count"]).sum())
    sd = sigma.get(rate.batch_size, math.nan)
    half_width = 1.96 * math.sqrt(variance) * sd
    return Estimate(cost, cost - half_width, cost + half_width)


def describe_costs(costs: Sequence[RuleCost], margin: float) -> str:
    """List the rules that would have kept every batch size within the tolerance of losses."""
    too_costly = {cost.rule for cost in costs if not cost.is_within(margin)}
    rules = dict.fromkeys(cost.rule for cost in costs)  # in their order
    good = [rule for rule in rules if rule not in too_costly]
    if good:
        return f"Yes, by {join(good)}, within the tolerance from every batch size's best rate."
    return "No: no rule is known to stay within the tolerance from every batch size's best rate."
