"""Losses at equal time or equal tokens: what unequal amounts add to the errors of the losses.

With a budget of time the tokens of a batch size are fixed by measured steps, so that trainings
differ in time by the error of that measurement. With a budget of tokens that not all batch sizes
use up in whole steps, they differ a little in tokens. A training on more by a factor r has a lower
loss by at most s·ln r, where s is the steepest slope of its curve against ln tokens.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from sweep.config.arms import Arm
from sweep.decision.curves import Floats
from sweep.decision.decision import ALPHA
from sweep.decision.times import RATIO_ERROR, ratio_of_rounds, ratio_of_trials
from sweep.decision.trials import TrialTime, ran_as_timed
from sweep.trial.timing import Timing

ERROR = ALPHA - RATIO_ERROR  # probability that losses are wrong if times have the other half
MOST_UNEQUAL = 0.05  # beyond which an answer at equal time is provisional


def bound_time_ratios(
    seconds: Sequence[Sequence[float]], rounds: Sequence[Sequence[float]] | None
) -> tuple[Floats, Floats]:
    """Bound the log ratios of the times that batch sizes trained for, row over column, (k, k).

    Ratios come from interleaved rounds of steps, or else from the trials. The bounds hold for all
    pairs together, and include the ratio that the trials had. They are infinite for a batch size
    without times.

    Args:
        seconds: those of the trials of each batch size.
        rounds: the seconds of a trial by each round, for each batch size; None without any.
    """
    k = len(seconds)
    low = np.where(np.eye(k, dtype=bool), 0.0, -np.inf)
    high = -low
    for i in range(k):
        for j in range(k):
            if i == j or not seconds[i] or not seconds[j]:
                continue
            of_trials = ratio_of_trials(seconds[i], seconds[j], k)
            ratio = of_trials if rounds is None else ratio_of_rounds(rounds[i], rounds[j], k)
            low[i, j] = math.log(min(ratio.low, of_trials.median))
            high[i, j] = math.log(max(ratio.high, of_trials.median))
    return low, high


def ratios_of_trials(
    trials: Mapping[Arm, Sequence[TrialTime]], timing: Timing | None
) -> tuple[Floats, Floats]:
    """Bound the log ratios of the times that trials with a budget of time took, (k, k).

    Measured steps tell them if all trials ran as those steps, on the same device.

    Args:
        trials: the times of each batch size.
        timing: measured steps, None without any.
    """
    seconds = [[time.seconds for time in times] for times in trials.values()]
    rounds = None
    if timing is not None and all(ran_as_timed(trials[arm], timing, arm) for arm in trials):
        steps = {arm: max([time.steps for time in trials[arm]], default=0.0) for arm in trials}
        rounds = timing.seconds_of_trainings(steps)
    return bound_time_ratios(seconds, rounds)


def log_ratios_of_steps(
    timing: Timing, arms: Sequence[Arm]
) -> tuple[Floats, Floats, Floats] | None:
    """Return log ratios of the times per sequence, row over column, (k, k), and their bounds.

    None unless interleaved rounds give each of them an interval.
    """
    k = len(arms)
    estimate = np.zeros((k, k))
    low = np.zeros((k, k))
    high = np.zeros((k, k))
    times = [timing.times_of(arm) for arm in arms]
    for i, first in enumerate(times):
        for j, other in enumerate(times):
            if i == j:
                continue
            if first is None or other is None or not timing.rounds:
                return None
            ratio = ratio_of_rounds(first.seconds_per_sequence, other.seconds_per_sequence, k)
            if not ratio.is_interval:
                return None
            estimate[i, j] = math.log(ratio.median)
            low[i, j] = math.log(ratio.low)
            high[i, j] = math.log(ratio.high)
    return estimate, low, high


def token_ratios(tokens: Sequence[float]) -> Floats:
    """Return the log ratios of the tokens that batch sizes trained on, row over column, (k, k)."""
    log_tokens = np.log(np.asarray(tokens, dtype=float))
    return np.asarray(log_tokens[:, None] - log_tokens[None, :])


def steepest_slope(tokens: Sequence[float], values: Sequence[float]) -> float:
    """Return the most that a value falls per unit of ln tokens, between half and the end.

    NaN if it never falls there, because more training then does not lower it, or without two
    milestones.

    Args:
        tokens: those of the milestones of a trial, ascending.
        values: at the milestones; less is better.
    """
    late = [index for index, count in enumerate(tokens) if 2 * count >= max(tokens)]
    if len(late) < 2:
        return math.nan
    log_tokens = np.log(np.asarray(tokens, dtype=float)[late])
    falls = -np.diff(np.asarray(values, dtype=float)[late]) / np.diff(log_tokens)
    steepest = float(falls.max())
    return steepest if steepest > 0 else math.nan


def mean_slope(slopes: Sequence[float | None]) -> float:
    """Return the mean of the steepest slopes of some trials; NaN if one is not known."""
    known = [math.nan if slope is None else slope for slope in slopes]
    return float(np.mean(known)) if known else math.nan


def errors_of_amounts(low: Floats, high: Floats, slopes: Sequence[float]) -> tuple[Floats, Floats]:
    """Return how far differences at equal amounts may lie below and above the measured ones.

    Args:
        low: bounds of the log ratios of times or of tokens, row over column, (k, k); NaN if they
            are not known.
        high: the same.
        slopes: the `steepest_slope` of each batch size; NaN if it is not known.
    """
    slope = np.asarray(slopes, dtype=float)
    steeper = np.maximum(slope[:, None], slope[None, :])  # NaN if one is not known
    below = steeper * np.maximum(-low, 0.0)
    above = steeper * np.maximum(high, 0.0)
    is_equal = (low == 0) & (high == 0)
    is_known = np.isfinite(below) & np.isfinite(above)
    below = np.where(is_equal, 0.0, np.where(is_known, below, np.inf))
    above = np.where(is_equal, 0.0, np.where(is_known, above, np.inf))
    return below, above
