"""Intervals of times and of their ratios, by order statistics.

Times are skewed, and other programs make some of them far too long. The order statistics of
independent times bound their median whatever the distribution: the k-th smallest exceeds it with
the probability that a fair coin shows fewer than k heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

INTERVAL_ERROR = 0.05  # probability that the interval of one median misses it
RATIO_ERROR = 0.025  # that some ratio's interval misses its ratio; the other half is the losses'


@dataclass(frozen=True)
class TimeEstimate:
    """A median of times, or of ratios of times, between two bounds."""

    median: float
    low: float
    high: float
    count: int  # times that it is the median of
    is_interval: bool  # False: there are too few, and the bounds are the least and the largest


def estimate_time(times: Sequence[float], error: float = INTERVAL_ERROR) -> TimeEstimate:
    """Estimate the median of at least one time, with an interval that misses it with `error`.

    The interval is between the innermost pair of order statistics that is wide enough. With too few
    times it is their range.
    """
    ordered = np.sort(np.asarray(times, dtype=float))
    count = len(ordered)
    rank = interval_rank(count, error)
    outermost = max(rank, 1)
    return TimeEstimate(
        median=float(np.median(ordered)),
        low=float(ordered[outermost - 1]),
        high=float(ordered[count - outermost]),
        count=count,
        is_interval=rank > 0,
    )


def interval_rank(count: int, error: float) -> int:
    """Return the largest k for which the median lies between the k-th smallest and largest time.

    This holds with a probability of at least 1 - `error` for so many independent times. 0: there
    are too few of them.
    """
    rank = 0
    outside = 0.0  # probability that the median is not between the times of the next rank
    while outside <= error and 2 * rank < count:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside <= error:
            rank += 1
    return rank


def rounds_needed(batch_sizes: int) -> int:
    """Return the least number of rounds that gives an interval of each ratio between batch sizes.

    They hold together: n rounds miss one ratio with a probability of 2^(1 - n). A single batch size
    has no ratios, and needs enough rounds for the interval of its time.
    """
    return _least_count(_error_of_pair(batch_sizes) if batch_sizes > 1 else INTERVAL_ERROR)


def trials_needed(batch_sizes: int) -> int:
    """Return the least number of trials of each batch size that gives intervals of the ratios."""
    return _least_count(RATIO_ERROR / batch_sizes)


def _least_count(error: float) -> int:
    """Return the least number of times whose median has an interval."""
    count = 1
    while interval_rank(count, error) == 0:
        count += 1
    return count


def ratio_of_rounds(
    times: Sequence[float], other_times: Sequence[float], batch_sizes: int
) -> TimeEstimate:
    """Estimate the ratio of the times of two batch sizes from interleaved rounds.

    Args:
        times: those of one batch size, one per round.
        other_times: those of the other one, in the same rounds.
        batch_sizes: number of those that were timed. The intervals of all pairs hold together.
    """
    log_ratios = np.log(np.asarray(times, dtype=float)) - np.log(np.asarray(other_times))
    estimate = estimate_time(log_ratios.tolist(), _error_of_pair(batch_sizes))
    return TimeEstimate(
        median=math.exp(estimate.median),
        low=math.exp(estimate.low),
        high=math.exp(estimate.high),
        count=estimate.count,
        is_interval=estimate.is_interval,
    )


def ratio_of_trials(
    times: Sequence[float], other_times: Sequence[float], batch_sizes: int
) -> TimeEstimate:
    """Estimate the ratio of the times of two batch sizes from trials that ran at different times.

    The bounds are quotients of the ends of the two medians' intervals. Those of all batch sizes
    hold together, and so do the ratios. It is the range if either batch size has too few times.
    """
    error = RATIO_ERROR / batch_sizes
    first = estimate_time(times, error)
    second = estimate_time(other_times, error)
    return TimeEstimate(
        median=first.median / second.median,
        low=first.low / second.high,
        high=first.high / second.low,
        count=min(first.count, second.count),
        is_interval=first.is_interval and second.is_interval,
    )


def _error_of_pair(batch_sizes: int) -> float:
    pairs = batch_sizes * (batch_sizes - 1) // 2
    return RATIO_ERROR / max(1, pairs)
