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

NEEDS_A_TARGET = (
    "It is not known which batch size is the soonest: that needs trainings to one loss, and these "
    "end at different ones."
)
AT_EQUAL_TIME = (
    "It is not known which batch size needs the fewest tokens: losses are compared at equal time, "
    "on different tokens."
)


@dataclass(frozen=True, eq=False)
class TimesToTarget:
    """Log ratios of the times to a target loss, row over column, (k, k)."""

    estimate: Floats
    low: Floats
    high: Floats

    @property
    def may_be_soonest(self) -> Flags:
        return np.asarray(~(self.low > 0).any(-1))


def times_to_target(decision: Decision, times: Times) -> TimesToTarget:
    """Combine the tokens to a target with the times per token.

    `decision` is about the logarithms of the tokens. The errors of tokens and times are added, so
    that the bounds hold if both of theirs do.
    """
    tokens_low, tokens_high = decision.differences
    tokens = decision.best_estimate[:, None] - decision.best_estimate[None, :]
    time, time_low, time_high = times.log_ratios
    low = tokens_low + time_low
    high = tokens_high + time_high
    np.fill_diagonal(low, 0.0)
    np.fill_diagonal(high, 0.0)
    return TimesToTarget(estimate=tokens + time, low=low, high=high)


def relative_log_times(decision: Decision, times: Times, objective: Objective) -> Floats:
    """Return the log times of trainings up to a constant, (k,); NaN if one is not known."""
    per_token, _, _ = times.log_ratios
    reference = int(np.isfinite(per_token).sum(0).argmax())
    tokens = decision.best_estimate if objective.is_ratio else np.zeros(len(times.sizes))
    return np.asarray(per_token[:, reference] + tokens)


def find_dominated(decision: Decision, times: Times, objective: Objective) -> list[bool | None]:
    """Return whether each batch size is worse and slower than some other one; None: not known."""
    k = len(times.sizes)
    if times.reasons or not times.has_intervals:
        return [None] * k
    if objective.is_ratio:
        to_target = times_to_target(decision, times)
        time_low, time_high = to_target.low, to_target.high
    else:
        _, time_low, time_high = times.log_ratios
    worse_low, worse_high = decision.differences
    is_worse = (worse_low > 0) & (time_low > 0)
    is_not = (worse_high < 0) | (time_high < 0) | np.eye(k, dtype=bool)
    dominated: list[bool | None] = []
    for others, not_by in zip(is_worse, is_not, strict=True):
        if others.any():
            dominated.append(True)
        else:
            dominated.append(False if not_by.all() else None)
    return dominated


def find_soonest(
    decision: Decision,
    times: Times,
    objective: Objective,
    target: float | None,
    fewest_tokens: int | None,
) -> Side:
    """Return the batch size that reaches the target first, compared with that of fewest tokens.

    `decision` is at the level of error that is left when the ratios of times have theirs.
    """
    if not objective.is_ratio or target is None:
        return unknown_side(NEEDS_A_TARGET)
    is_compared = np.isfinite(decision.mean)
    compared = [size for size, is_in in zip(times.sizes, is_compared, strict=True) if is_in]
    unknown = [size for size in compared if size in times.unknown]
    if unknown:
        where = f"batch size {join(unknown)}"
        return unknown_side(f"The time to the target is not known at {where}.")

    to_target = times_to_target(decision, times)
    candidates = [size for size in compared if to_target.may_be_soonest[times.sizes.index(size)]]
    log_times = to_target.estimate[:, times.sizes.index(candidates[0])]
    chosen = min(candidates, key=lambda size: log_times[times.sizes.index(size)])
    time = times.seconds[chosen]

    details = [format_seconds(time.median)]
    others = [size for size in candidates if size != chosen]
    if others:
        details.append(f"{join(others, 'or')} may be as soon")
    if fewest_tokens in compared and fewest_tokens not in candidates:
        index = times.sizes.index(fewest_tokens)
        ratio = math.exp(to_target.estimate[index, times.sizes.index(chosen)])
        details.append(f"{fewest_tokens} takes {ratio:.2g} times as long")
    return Side(
        batch_size=chosen,
        candidates=candidates,
        basis=f"soonest to a loss of {target:g} ({'; '.join(details)})",
        value=time.median,
        interval=(time.low, time.high) if time.is_interval else None,
        reason=" ".join(times.reasons) if times.reasons else None,
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
    open_sizes = [row.batch_size for row in rows if row.tolerance_verdict != OUTSIDE]
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
