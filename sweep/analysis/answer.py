"""The answer of a sweep: which batch sizes may be the best, and which one to use.

The intervals come from `sweep.decision.decision`, which also decides what `--seeds auto` runs next.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from sweep.analysis.answer_data import (
    MISSING,
    SIDES,
    AnswerData,
    BatchSizeAnswer,
    OptimizerGap,
    Pair,
    Ranking,
    Side,
    join,
    side_of_losses,
)
from sweep.analysis.sentences import best_of, describe
from sweep.analysis.sides import (
    AT_EQUAL_TIME,
    compare_times,
    decision_about_times,
    find_dominated,
    find_fewest_steps,
    find_soonest,
    unknown_side,
)
from sweep.analysis.tables import Estimate
from sweep.analysis.times import Times
from sweep.analysis.tuned_rates import TunedRate
from sweep.config.arms import Arm
from sweep.config.experiment import AnswerSettings
from sweep.config.numbers import format_seconds
from sweep.config.objective import Objective
from sweep.decision.decision import (
    ALPHA,
    LOOKS,
    OUTSIDE,
    UNDECIDED,
    WITHIN,
    Decision,
    decide,
)
from sweep.decision.question import Question, is_answered
from sweep.decision.rates import RatePoints, rate_points, stack_points

DEFAULT_SETTINGS = AnswerSettings()


class Answer(AnswerData):
    """An answer that prints its sentences, and a table in a notebook."""

    def __repr__(self) -> str:
        return "\n".join(describe(self))

    def _repr_html_(self) -> str:
        rows = pd.DataFrame(self.batch_sizes).set_index("batch_size").rename_axis("batch size")
        gaps = zip(rows["gap"], rows["gap_to_best"], strict=True)
        rows["gap_to_best"] = [
            self.write_gap(None if pd.isna(gap) else gap, interval) for gap, interval in gaps
        ]
        columns = ["mean", "seeds", "gap_to_best", "tolerance_verdict", "learning_rate", "seconds"]
        rows = rows[columns].rename(columns=lambda name: name.replace("_", " "))
        return rows.to_html(na_rep=MISSING, float_format="{:.4g}".format)


def decide_trials(
    finals: pd.DataFrame, rates: Mapping[tuple[str, int], TunedRate], error: float = ALPHA
) -> tuple[pd.Index, Decision] | None:
    """Decide about labels and batch sizes together; None if fewer than two can be compared.

    `finals` has a row per final trial that ended: label, batch_size, seed, learning_rate and value,
    which is better if it is less, and infinite if the trial diverged. `error` is that of `decide`.
    """
    keys = ["label", "batch_size"]
    table = finals.pivot_table("value", keys, "seed", dropna=False)
    table = table.reindex(finals.groupby(keys).size().index)
    values = table.to_numpy(float)
    is_compared = np.isfinite(values).any(1) & ~np.isinf(values).any(1)
    if is_compared.sum() < 2:
        return None
    used = finals.groupby(keys)["learning_rate"].first().reindex(table.index)

    has_looks = finals["has_looks"].astype(str).eq("True").any()
    looks = LOOKS if has_looks else ()

    points = points_of(table.index, rates) if rates else None
    decision = decide(values, points, np.log(used.to_numpy(float)), looks, error)
    return table.index, decision


def points_of(index: pd.Index, rates: Mapping[tuple[str, int], TunedRate]) -> RatePoints:
    """Return the points of labels and batch sizes, without any where no rates were tried."""
    untried = rate_points({})
    rates_of_arms = [rates.get(arm) for arm in index]
    return stack_points([rate.points if rate else untried for rate in rates_of_arms])


@dataclass(frozen=True)
class SoonestOfBudgets:
    """The soonest batch size by the losses of several budgets."""

    side: Side
    reasons: tuple[str, ...]  # why it is provisional, beyond the largest budget's own, sentences
    is_decided: bool  # whether no other batch size may be as soon


@dataclass(frozen=True, eq=False)
class Comparison:
    """Trials of one policy and optimizer, and the decision about their batch sizes."""

    policy: str
    finals: pd.DataFrame  # as in `decide_trials` and `known_times`
    decision: Decision
    decision_with_times: Decision  # at the level of error for statements about losses and times
    times: Times
    objective: Objective
    target: float | None = None
    time_budget_seconds: float | None = None  # seconds of each training; None: equal tokens
    reasons: Sequence[str] = ()  # why the answer can only be provisional
    scope: str = ""
    optimizer: str = ""  # if there are several


def build_answer(
    comparison: Comparison,
    settings: AnswerSettings = DEFAULT_SETTINGS,
    of_budgets: SoonestOfBudgets | None = None,
) -> Answer:
    """Build the answer about what counts, with prices if a device has one.

    Args:
        comparison: what is compared.
        settings: what counts, and the price of a device.
        of_budgets: the soonest batch size by several budgets; None without these.
    """
    objective = comparison.objective
    decision = comparison.decision
    finals = comparison.finals
    times = comparison.times
    dominated: list[bool | None] = [None] * len(times.sizes)
    if comparison.time_budget_seconds is None and not comparison.reasons:
        dominated = find_dominated(comparison.decision_with_times, times, objective)
    rows = [
        _answer_for_size(comparison, index, dominated[index], settings.price)
        for index in range(len(times.sizes))
    ]
    verdicts = {row.tolerance_verdict for row in rows}
    candidates = [row.batch_size for row in rows if row.may_be_best]

    if comparison.time_budget_seconds is None:
        fewest_tokens = _find_fewest_tokens(rows, comparison, candidates)
        if of_budgets is not None:
            soonest = of_budgets.side
        else:
            soonest = find_soonest(
                comparison.decision_with_times,
                times,
                objective,
                comparison.target,
                fewest_tokens.batch_size,
                settings.question,
            )
    else:
        fewest_tokens = unknown_side(AT_EQUAL_TIME)
        soonest = _find_soonest_of_budget(
            rows, comparison, candidates, comparison.time_budget_seconds
        )
    fewest_steps = find_fewest_steps(rows, finals, objective)
    sides = dict(zip(SIDES, (fewest_tokens, soonest, fewest_steps), strict=True))

    reasons = list(comparison.reasons)
    compared = side_of_losses(comparison.time_budget_seconds)
    pursues: str = settings.pursues
    if pursues == "auto":  # time where trainings end at one loss, or after one time
        is_at_one_loss = of_budgets is None and soonest.batch_size is not None
        pursues = "time" if is_at_one_loss else compared
    elif sides[pursues].batch_size is None:
        reasons.append(f"--for {pursues}: {sides[pursues].reason}")
        pursues = compared
    chosen = sides[pursues]
    decided = _is_decided(comparison, settings.question, pursues, chosen)
    if pursues == "time" and of_budgets is not None:
        reasons += [reason for reason in of_budgets.reasons if reason not in reasons]
        decided = of_budgets.is_decided and (decided or settings.question == "which")
    elif pursues == "time" or comparison.time_budget_seconds is not None:
        reasons += times.reasons
    assert chosen.batch_size is not None, "the side that losses compare has a batch size"
    return Answer(
        policy=comparison.policy,
        metric=objective.name,
        direction=objective.direction,
        unit=objective.unit,
        tolerance=objective.tolerance,
        candidates=candidates,
        pursues=pursues,
        recommended=chosen.batch_size,
        provisional=len(reasons) > 0 or WITHIN not in verdicts,
        basis=chosen.basis,
        reasons=reasons,
        question=settings.question,
        decided=decided,
        scope=comparison.scope,
        time_budget_seconds=comparison.time_budget_seconds,
        price_per_device_hour=settings.price,
        batch_sizes=rows,
        fewest_tokens=fewest_tokens,
        soonest=soonest,
        fewest_steps=fewest_steps,
        times_reasons=list(times.reasons),
        times_device=times.device,
        times_are_elsewhere=times.is_elsewhere,
        settle=None,
        settle_seconds=None,
        settle_reason=None,
        settle_longer=None,
        pairs=_pairs(times.sizes, decision, objective),
        optimizer=comparison.optimizer,
    )


def _is_decided(comparison: Comparison, question: Question, pursues: str, chosen: Side) -> bool:
    """Return whether the question is answered, with the recommended batch size."""
    objective = comparison.objective
    times = comparison.times
    decision: Decision | None = comparison.decision
    if question == "which" and pursues == "time" and objective.is_ratio:
        decision = decision_about_times(comparison.decision_with_times, times)
    if decision is None:
        return False
    if question == "which":
        assert chosen.batch_size is not None, "a side without a batch size is not recommended"
        index = times.sizes.index(chosen.batch_size)
        if not decision.is_within(objective.margin)[index]:
            return False
    return bool(is_answered(decision, question, pursues, objective.margin))


def _answer_for_size(
    comparison: Comparison, index: int, dominated: bool | None, price_per_hour: float | None
) -> BatchSizeAnswer:
    objective = comparison.objective
    decision = comparison.decision
    size = comparison.times.sizes[index]
    trials = comparison.finals[comparison.finals["batch_size"] == size]
    mean = float(decision.mean[index])
    low = float(decision.gap_low[index])
    high = float(decision.gap_high[index])
    verdict = UNDECIDED
    if decision.is_within(objective.margin)[index]:
        verdict = WITHIN
    elif decision.is_outside(objective.margin)[index]:
        verdict = OUTSIDE

    best_rate = None
    rate_interval = None
    regret = None
    regret_interval = None
    if decision.rates is not None and math.isfinite(decision.rates.optimum[index]):
        bounds = {name: float(values[index]) for name, values in vars(decision.rates).items()}
        best_rate = math.exp(bounds["optimum"])
        regret = objective.gap(bounds["regret"])
        if math.isfinite(bounds["optimum_low"]):
            rate_interval = (math.exp(bounds["optimum_low"]), math.exp(bounds["optimum_high"]))
        if math.isfinite(bounds["regret_high"]):
            least_regret = objective.gap(bounds["regret_low"])
            largest_regret = objective.gap(bounds["regret_high"])
            regret_interval = (least_regret, largest_regret)

    rate_used = float(trials["learning_rate"].iloc[0])
    complete = trials[np.isfinite(trials["value"])]
    microbatch = trials["microbatch_size"].min()
    clipped = float(complete["clipped_step_fraction"].mean())
    time = comparison.times.seconds.get(size)
    price = _price_per_second(trials, price_per_hour)
    interval = None
    spread = None
    if time is not None and time.is_interval:
        interval = (time.low, time.high)
    elif time is not None and time.count > 1:
        spread = (time.low, time.high)
    sequence = trials["context_length"].astype(float).max()
    has_tokens = sequence > 1  # False if it is NaN
    return BatchSizeAnswer(
        batch_size=size,
        batch_size_tokens=int(size * sequence) if has_tokens else None,
        mean=objective.value(mean) if math.isfinite(mean) else None,
        seeds=len(complete),
        missed_seeds=int(np.isinf(trials["value"]).sum()),
        gap=_gap(objective, _lead(decision, index)),
        gap_to_best=(_gap(objective, low), _gap(objective, high)),
        may_be_best=bool(decision.may_be_best[index]),
        tolerance_verdict=verdict,
        learning_rate=None if math.isnan(rate_used) else rate_used,
        best_learning_rate=best_rate,
        learning_rate_interval=rate_interval,
        estimated_regret=regret,
        regret_interval=regret_interval,
        microbatch_size=None if math.isnan(microbatch) else int(microbatch),
        seconds=None if time is None else time.median,
        seconds_interval=interval,
        seconds_range=spread,
        price=None if price is None or time is None else price * time.median,
        price_interval=_scale(interval, price),
        price_range=_scale(spread, price),
        dominated=dominated,
        clipped_step_fraction=None if math.isnan(clipped) else clipped,
    )


def _price_per_second(trials: pd.DataFrame, price_per_hour: float | None) -> float | None:
    """Return the price of a training's devices; None without a price, or if a number is missing."""
    devices = trials["devices"].astype(float).max(skipna=False)
    if price_per_hour is None or math.isnan(devices):
        return None
    return float(price_per_hour * devices / 3600)


def _scale(bounds: tuple[float, float] | None, factor: float | None) -> tuple[float, float] | None:
    if bounds is None or factor is None:
        return None
    return factor * bounds[0], factor * bounds[1]


def _lead(decision: Decision, index: int) -> float:
    """Return an estimated best loss minus the least of the others; NaN if one is missing."""
    estimates = np.where(np.isfinite(decision.mean), decision.best_estimate, np.inf)
    least = float(np.delete(estimates, index).min())
    if not math.isfinite(least):
        return math.nan
    return float(estimates[index]) - least


def _gap(objective: Objective, difference: float) -> float | None:
    return objective.gap(float(difference)) if math.isfinite(difference) else None


def _find_fewest_tokens(
    rows: Sequence[BatchSizeAnswer], comparison: Comparison, candidates: list[int]
) -> Side:
    """Return the batch size to use if tokens count: the fastest of those that need the fewest."""
    recommended, basis = _recommend(rows, comparison)
    reasons = comparison.times.reasons
    within = [row for row in rows if row.tolerance_verdict == WITHIN]
    is_chosen_by_time = len(within) > 1
    tokens: float | None
    if comparison.objective.is_ratio:  # tokens are what is compared
        tokens = next(row.mean for row in rows if row.batch_size == recommended)
    else:
        of_size = comparison.finals[comparison.finals["batch_size"] == recommended]
        tokens = float(of_size["tokens_taken"].median())
    return Side(
        batch_size=recommended,
        candidates=sorted({*candidates, recommended}),
        basis=basis,
        value=tokens if tokens is not None and math.isfinite(tokens) else None,
        interval=None,
        reason=" ".join(reasons) if reasons and is_chosen_by_time else None,
    )


def _find_soonest_of_budget(
    rows: Sequence[BatchSizeAnswer], comparison: Comparison, candidates: list[int], budget: float
) -> Side:
    """Return the batch size to use for trainings of this time: that of the lowest loss."""
    recommended, basis = _recommend(rows, comparison)
    time = comparison.times.seconds.get(recommended)
    reasons = [*comparison.reasons, *comparison.times.reasons]
    return Side(
        batch_size=recommended,
        candidates=candidates,
        basis=f"{basis}, after {format_seconds(budget)} of training",
        value=None if time is None else time.median,
        interval=(time.low, time.high) if time is not None and time.is_interval else None,
        reason=" ".join(reasons) if reasons else None,
    )


def _recommend(rows: Sequence[BatchSizeAnswer], comparison: Comparison) -> tuple[int, str]:
    """Return the batch size with the fewest tokens, and why it is this one."""
    decision = comparison.decision
    objective = comparison.objective
    close = f"within {objective.write(objective.tolerance)} of the best"
    eligible = [row.batch_size for row in rows if row.tolerance_verdict == WITHIN]
    if not eligible:
        # The worst case of a batch size whose regret is unbounded leaves out that it may be better.
        is_bounded = np.isfinite(0.0 if decision.rates is None else decision.rates.regret_high)
        worst = np.where(is_bounded & np.isfinite(decision.gap_high), decision.gap_high, math.inf)
        means = np.where(np.isnan(decision.mean), math.inf, decision.best_estimate)
        reason = "gives up least in the worst case"
        if np.isinf(worst[decision.may_be_best]).all():
            worst = np.where(decision.may_be_best, 0.0, math.inf)
            reason = "has the best estimate"
        best = min(range(len(rows)), key=lambda i: (worst[i], means[i]))
        return rows[best].batch_size, f"no batch size is known to be {close}, and this one {reason}"

    if len(eligible) == 1:
        if [row.batch_size for row in rows if row.may_be_best] == eligible:
            return eligible[0], best_of(rows)
        return eligible[0], f"the only one that is known to be {close}"

    if comparison.time_budget_seconds is not None:
        estimates = {row.batch_size: row.gap for row in rows if row.gap is not None}
        best = min(eligible, key=lambda size: estimates.get(size, math.inf))
        return best, f"the best estimate of those {close}"
    unknown = [size for size in comparison.times.unknown if size in eligible]
    if unknown:
        why = f"the time at batch size {join(unknown)} is not known"
        return eligible[-1], f"the largest, and usually the fastest, of those {close}; {why}"
    sizes = comparison.times.sizes
    ratios = compare_times(comparison.decision_with_times, comparison.times, objective)
    fastest = min(eligible, key=lambda size: ratios.relative_times[sizes.index(size)])
    basis = f"the fastest of those {close}"
    if comparison.times.reasons:
        return fastest, f"{basis}, as far as their times are known"
    is_slower = ratios.low[:, sizes.index(fastest)] > 0
    others = [size for size in eligible if size != fastest]
    as_fast = [size for size in others if not is_slower[sizes.index(size)]]
    if as_fast:
        basis += f" ({join(as_fast, 'or')} may be as fast)"
    return fastest, basis


def _pairs(sizes: Sequence[int], decision: Decision, objective: Objective) -> list[Pair]:
    low, high = decision.differences_of_rates_used
    pairs = []
    for i, j in combinations(range(len(sizes)), 2):
        bounds = objective.sign * low[j, i], objective.sign * high[j, i]
        if np.isfinite(bounds).all():
            value = objective.sign * decision.difference[j, i]
            difference = Estimate(float(value), float(min(bounds)), float(max(bounds)))
            pairs.append(Pair((sizes[i], sizes[j]), difference, objective.margin))
    return pairs


def build_ranking(
    arms: list[Arm], decision: Decision, metric: Objective, others: list[Answer]
) -> Ranking:
    """Rank the optimizers; `decision` is about these arms, of which each has an optimizer."""
    sizes = sorted({arm.batch_size for arm in arms})
    best_first = {size: list[str]() for size in sizes}
    gaps = []
    compared = [i for i in range(len(arms)) if np.isfinite(decision.mean[i])]
    for i in sorted(compared, key=decision.best_estimate.item):
        worse = arms[i]
        name = str(worse.optimizer)
        for better in best_first[worse.batch_size]:
            j = arms.index(Arm(better, worse.batch_size))
            lows, highs = decision.differences
            low = float(lows[i, j])
            estimate = float(decision.best_estimate[i] - decision.best_estimate[j])
            gap = OptimizerGap(
                batch_size=worse.batch_size,
                better=better,
                worse=name,
                estimate=_gap(metric, estimate),
                gap=(_gap(metric, low), _gap(metric, float(highs[i, j]))),
                is_decided=low > 0,
            )
            gaps.append(gap)
        best_first[worse.batch_size].append(name)
    gaps.sort(key=lambda gap: gap.batch_size)

    best = [arms[i] for i in np.flatnonzero(decision.may_be_best)]
    candidates = [(str(arm.optimizer), arm.batch_size) for arm in best]
    names = {arm.optimizer for arm in arms}
    pairs = len(sizes) * math.comb(len(names), 2)
    return Ranking(_is_same_order(gaps, pairs), best_first, gaps, candidates, others)


def _is_same_order(gaps: list[OptimizerGap], pairs: int) -> bool | None:
    """Return whether the optimizers rank alike at all batch sizes; None: undecided.

    Args:
        pairs: optimizers to tell apart, over all batch sizes.
    """
    decided = [(gap.better, gap.worse) for gap in gaps if gap.is_decided]
    if any((worse, better) in decided for better, worse in decided):
        return False
    if len(decided) == pairs:
        return True
    return None
