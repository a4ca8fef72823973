"""The three sides of an answer: the fewest tokens, the soonest, the fewest steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sweep.analysis.answer_data import BatchSizeAnswer, Side, join
from sweep.analysis.times import Times
from sweep.config.numbers import format_seconds
from sweep.config.objective import Objective
from sweep.decision.curves import Floats
from sweep.decision.decision import OUTSIDE, WITHIN, Decision, Flags
from sweep.decision.question import Question
from sweep.decision.times import TimeEstimate

NOTABLE_REGRET = 0.005  # share of the time that is given up at the rate used, to be named
NEEDS_A_TARGET = (
    "It is not known which batch size is the soonest: that needs trainings to one loss, and these "
    "end at different ones."
)
AT_EQUAL_TIME = (
    "It is not known which batch size needs the fewest tokens: losses are compared at equal time, "
    "on different tokens."
)


@dataclass(frozen=True, eq=False)
class LogTimeRatios:
    """Log ratios of the times of trainings, row over column, (k, k), with bounds."""

    estimate: Floats  # NaN if it is not known
    low: Floats
    high: Floats

    @property
    def may_be_soonest(self) -> Flags:
        # If pairs share different seeds, each may be later than another: the least excess counts.
        excess = self.low.max(-1)
        return np.asarray(excess <= np.maximum(excess.min(), 0.0))

    @property
    def relative_times(self) -> Floats:
        """The log times up to a constant, (k,)."""
        reference = int(np.isfinite(self.estimate).sum(0).argmax())
        return np.asarray(self.estimate[:, reference])


def compare_times(decision: Decision, times: Times, objective: Objective) -> LogTimeRatios:
    """Compare the times of trainings: on their tokens, or to a target.

    With a target, `decision` is about the logarithms of the tokens. The bounds then hold for the
    trainings at the rates used and at the best rates. The errors of tokens and times are added, so
    that they hold if both of theirs do.
    """
    if not objective.is_ratio:
        return LogTimeRatios(*times.log_ratios_of_trainings)
    tokens_low, tokens_high = decision.differences
    used_low, used_high = decision.differences_of_rates_used
    tokens = decision.best_estimate[:, None] - decision.best_estimate[None, :]
    time, time_low, time_high = times.log_ratios
    low = np.fmin(tokens_low, used_low) + time_low
    high = np.fmax(tokens_high, used_high) + time_high
    np.fill_diagonal(low, 0.0)
    np.fill_diagonal(high, 0.0)
    return LogTimeRatios(estimate=tokens + time, low=low, high=high)


def find_dominated(decision: Decision, times: Times, objective: Objective) -> list[bool | None]:
    """Return whether each batch size is worse and slower than some other one; None: not known.

    Those that are not compared dominate none.
    """
    k = len(times.sizes)
    if times.reasons or not times.has_intervals:
        return [None] * k
    ratios = compare_times(decision, times, objective)
    is_compared = np.isfinite(decision.mean)
    worse_low, worse_high = decision.differences
    is_worse = (worse_low > 0) & (ratios.low > 0)
    is_not = (worse_high < 0) | (ratios.high < 0) | np.eye(k, dtype=bool) | ~is_compared
    dominated: list[bool | None] = []
    for index in range(k):
        if not is_compared[index]:
            dominated.append(None)
        elif is_worse[index].any():
            dominated.append(True)
        else:
            dominated.append(False if is_not[index].all() else None)
    return dominated


def decision_about_times(decision: Decision, times: Times) -> Decision | None:
    """Return the decision about times to a target; None unless all ratios have intervals.

    `decision` is about the logarithms of tokens, as in `find_soonest`.
    """
    if times.unknown or not times.has_intervals:
        return None
    return decision.in_time(times.log_ratios)


def find_soonest(
    decision: Decision,
    times: Times,
    objective: Objective,
    target: float | None,
    fewest_tokens: int | None,
    question: Question,
) -> Side:
    """Return the batch size that reaches the target first, compared with that of fewest tokens.

    For the question `which`, one that is known to be within the tolerance is preferred. `decision`
    is at the level of error that is left when the ratios of times have theirs.
    """
    if not objective.is_ratio or target is None:
        return unknown_side(NEEDS_A_TARGET)
    is_compared = np.isfinite(decision.mean)
    compared = [size for size, is_in in zip(times.sizes, is_compared, strict=True) if is_in]
    unknown = [size for size in compared if size in times.unknown]
    if unknown:
        where = f"batch size {join(unknown)}"
        return unknown_side(f"The time to the target is not known at {where}.")

    to_target = compare_times(decision, times, objective)
    candidates = [size for size in compared if to_target.may_be_soonest[times.sizes.index(size)]]
    at_best_rates = {size: _at_best_rate(decision, times, size) for size in compared}
    soonest = min(candidates, key=lambda size: at_best_rates[size].median)
    about_times = decision_about_times(decision, times)
    chosen = soonest
    if question == "which" and about_times is not None:
        is_within = about_times.is_within(objective.margin)
        within = [size for size in compared if is_within[times.sizes.index(size)]]
        chosen = min(within, key=lambda size: at_best_rates[size].median, default=soonest)
    time = at_best_rates[chosen]

    details = [format_seconds(time.median)]
    if abs(math.log(time.median / times.seconds[chosen].median)) > NOTABLE_REGRET:
        details = [f"{format_seconds(time.median)} at its best rate"]
    others = [size for size in candidates if size != chosen]
    if others:
        details.append(f"{join(others, 'or')} may be as soon")
    if fewest_tokens in compared and fewest_tokens not in candidates:
        index = times.sizes.index(fewest_tokens)
        ratio = math.exp(to_target.estimate[index, times.sizes.index(chosen)])
        details.append(f"{fewest_tokens} takes {ratio:.2g} times as long")
    start = "soonest" if len(compared) == len(times.sizes) else "soonest of those compared"
    if chosen != soonest:
        start = f"known to be within {objective.write(objective.tolerance)} of the {start}"
    return Side(
        batch_size=chosen,
        candidates=sorted({*candidates, chosen}),
        basis=f"{start} to a loss of {target:g} ({'; '.join(details)})",
        value=time.median,
        interval=(time.low, time.high) if time.is_interval else None,
        reason=" ".join(times.reasons) if times.reasons else None,
    )


def _at_best_rate(decision: Decision, times: Times, size: int) -> TimeEstimate:
    """Return the time to the target at the best rate, without what the rate used gives up.

    Errors are combined by their squares. It has no interval if the regret is not bounded.
    """
    time = times.seconds[size]
    if decision.rates is None:
        return time
    index = times.sizes.index(size)
    regret = float(np.nan_to_num(decision.rates.regret[index]))
    least = float(decision.rates.regret_low[index])
    largest = float(decision.rates.regret_high[index])
    below = math.hypot(math.log(time.median / time.low), largest - regret)
    above = math.hypot(math.log(time.high / time.median), regret - least)
    median = time.median * math.exp(-regret)
    return TimeEstimate(
        median=median,
        low=median * math.exp(-below),
        high=median * math.exp(above),
        count=time.count,
        is_interval=time.is_interval and math.isfinite(below),
    )


def find_fewest_steps(
    rows: Sequence[BatchSizeAnswer], finals: pd.DataFrame, objective: Objective
) -> Side:
    """Return the largest batch size that is known to be within the tolerance."""
    close = f"within {objective.write(objective.tolerance)} of the best"
    within = [row.batch_size for row in rows if row.tolerance_verdict == WITHIN]
    if not within:
        return unknown_side(f"No batch size is known to be {close}.")
    largest = max(within)
    may_be_within = [row for row in rows if row.tolerance_verdict != OUTSIDE]
    open_sizes = [row.batch_size for row in may_be_within if row.mean is not None]
    steps = finals[finals["batch_size"] == largest]["steps_taken"].median()
    return Side(
        batch_size=largest,
        candidates=[size for size in open_sizes if size >= largest],
        basis=f"the fewest steps of those {close}",
        value=float(steps) if math.isfinite(steps) else None,
        interval=None,
    )


def unknown_side(reason: str) -> Side:
    return Side(None, [], basis="", value=None, interval=None, reason=reason)
