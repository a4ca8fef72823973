"""Decide about batch sizes from the losses of a sweep, and choose the trainings to add.

If a sweep has several optimizers, each of them with each batch size counts as a batch size here.
The intervals hold for all batch sizes together and, if seeds were added until the answer was
clear, for all looks together. The documentation on statistics has their derivation.
All arrays may hold many sweeps at once.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweep.decision.curves import Floats, RateBounds, RatePoints, bound_rates

# Verdicts on the tolerance.
WITHIN = "within"
OUTSIDE = "outside"
UNDECIDED = "undecided"

ALPHA = 0.05
LOOKS = (3, 5, 8, 12, 20)  # seeds per batch size at which `--seeds auto` decides what to run next
MISFIT = 2.0  # times the variance of a loss from which on the curve does not fit
TUNING_SEEDS = 4  # most tuning seeds of the rates near the best
DRAWS = 40_000  # simulated sweeps per critical value
CHUNK = 2_000  # sweeps simulated at once
ROUNDING = 1e-12  # relative error of a loss
NOISY = 10.0  # standard deviation of a noisy batch size over that of the others

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Decision:
    """Losses and intervals of k batch sizes; NaN for a batch size that is not compared."""

    mean: Floats  # at the rate used, (..., k)
    variance: Floats  # over seeds, at least that of the quieter batch sizes, (..., k)
    difference: Floats  # mean of row minus column over their common seeds, (..., k, k)
    half_width: Floats  # half the interval's width; infinite below two common seeds, (..., k, k)
    rates: RateBounds | None  # (..., k); None if the rates were not tuned

    @cached_property
    def differences(self) -> tuple[Floats, Floats]:
        """The interval of each loss at the best rate minus each other one, (..., k, k)."""
        if self.rates is None:
            least = np.zeros(self.mean.shape)
            most = least
        else:
            least = self.rates.regret_low
            most = self.rates.regret_high

        has_seeds = np.isfinite(self.difference)  # in common
        low = self.difference - self.half_width - most[..., :, None] + least[..., None, :]
        low = np.where(has_seeds, low, -np.inf)
        high = self.difference + self.half_width - least[..., :, None] + most[..., None, :]
        high = np.where(has_seeds, high, np.inf)
        return low, high

    @cached_property
    def gaps(self) -> tuple[Floats, Floats]:
        """The interval of the loss at the best rate minus the least of the others', (..., k)."""
        is_compared = np.isfinite(self.mean)
        is_pair = is_compared[..., :, None] & is_compared[..., None, :]
        is_pair &= ~np.eye(self.mean.shape[-1], dtype=bool)
        has_pair = is_pair.any(-1)

        low, high = self.differences
        low = np.where(is_pair, low, -np.inf).max(-1)
        high = np.where(is_pair, high, -np.inf).max(-1)
        return np.where(has_pair, low, np.nan), np.where(has_pair, high, np.nan)

    @property
    def gap_low(self) -> Floats:
        return self.gaps[0]

    @property
    def gap_high(self) -> Floats:
        return self.gaps[1]

    @property
    def may_be_best(self) -> Flags:
        # If pairs share different seeds, every gap may lie above 0: the least one counts.
        least = np.fmin.reduce(self.gap_low, -1, keepdims=True)
        return np.asarray(self.gap_low <= np.maximum(least, 0))

    def of(self, part: slice) -> "Decision":
        """Return the decision about some of the batch sizes, whose intervals still hold for all."""
        rates = None
        if self.rates is not None:
            bounds = {name: values[..., part] for name, values in vars(self.rates).items()}
            rates = RateBounds(**bounds)
        return Decision(
            mean=self.mean[..., part],
            variance=self.variance[..., part],
            difference=self.difference[..., part, part],
            half_width=self.half_width[..., part, part],
            rates=rates,
        )

    def is_within(self, tolerance: float) -> Flags:
        return np.asarray(self.gap_high <= tolerance)

    def is_outside(self, tolerance: float) -> Flags:
        return np.asarray(self.gap_low > tolerance)

    def may_be_decided(self, tolerance: float) -> Flags:
        """Return whether some differences inside the intervals would decide without seed noise."""
        with np.errstate(invalid="ignore"):  # NaN, which decides nothing, if two are unbounded
            low, high = replace(self, half_width=-self.half_width).gaps
        return np.asarray((high <= tolerance) | (low > tolerance))

    @property
    def best_estimate(self) -> Floats:
        """The estimated loss at the best rate, (..., k)."""
        if self.rates is None:
            return self.mean
        return self.mean - np.nan_to_num(self.rates.regret)


def decide(
    losses: Floats, points: RatePoints | None, log_rates: Floats, looks: Sequence[int] = ()
) -> Decision:
    """Compute the interval of every batch size's gap to the best.

    Args:
        losses: of the final trials, (..., k, seeds); NaN for missing seeds. A batch size with
            an infinite loss is not compared. If two that are compared share no seed, both gaps are
            unbounded above.
        points: losses of the rates near the best, (..., k); None if the rates were not tuned.
        log_rates: those used, (..., k).
        looks: numbers of seeds at which the sweep might have ended; empty if fixed in advance.
    """
    has_diverged = np.isinf(losses).any(-1, keepdims=True)
    losses = np.where(has_diverged, np.nan, losses)
    _, mean, variance = _moments(losses)
    compared = max(2, int(np.isfinite(mean).sum(-1).max()))

    differences = losses[..., :, None, :] - losses[..., None, :, :]
    common_seeds, difference, variance_of_difference = _moments(differences)
    half_width = _half_widths(losses, common_seeds, variance_of_difference, compared, looks)

    # A batch size whose few seeds agree by chance is taken to be as noisy as the quieter others.
    variance = np.nan_to_num(variance)
    total = variance.sum(-1, keepdims=True)
    largest = variance.max(-1, keepdims=True)
    mean_of_others = (total - largest) / max(1, compared - 1)
    variance = np.maximum(variance, mean_of_others)

    rates = None
    if points is not None:
        rates = bound_rates(points, variance, log_rates)
    return Decision(mean, variance, difference, half_width, rates)


def _half_widths(
    losses: Floats, count: Counts, variance: Floats, compared: int, looks: Sequence[int]
) -> Floats:
    """Return half the widths of the intervals of all differences, (..., k, k).

    Args:
        losses: of the final trials, (..., k, seeds).
        count: seeds that a pair has in common, (..., k, k).
        variance: of the differences of a pair, (..., k, k).
        compared: number of batch sizes that are compared.
        looks: as in `decide`.
    """
    is_pair = ~np.eye(losses.shape[-2], dtype=bool)
    has_seeds = count > 1
    counts = np.unique(count[has_seeds & is_pair]).tolist()
    all_looks = sorted({*counts, *looks})
    critical = np.full(count.shape, np.inf)
    for seeds, value in critical_values(compared, tuple(all_looks)).items():
        critical[count == seeds] = value

    variance_of_quieter = _without_noisiest(variance)
    variance = np.fmax(variance, variance_of_quieter[..., None, None])

    # Without seeds, or with seeds that are equal but for rounding, the error is not known.
    largest_loss = np.abs(np.nan_to_num(losses)).max((-2, -1))
    rounding = ROUNDING * largest_loss[..., None, None]
    variance = np.where(variance > rounding**2, variance, np.inf)

    standard_error = np.sqrt(variance / np.maximum(count, 1))
    return np.asarray(critical * standard_error)


def next_trainings(
    decision: Decision,
    seeds: Counts,
    tuning_seeds: Counts,
    is_refinable: Flags,  # whether there are rates left between the best one and its neighbours
    tolerance: float,
    most_seeds: int,
) -> tuple[Counts, Counts, Flags]:
    """Return the seeds and tuning seeds that each batch size should have, and which need rates.

    Batch sizes that are undecided get more, and the best of all. If the regret of a rate is not
    known to within half of the tolerance, tuning comes first: rates next to the best one if the
    curve does not fit, else tuning seeds. Seeds follow only where they may decide. All have the
    shape (..., k). Nothing changes once every batch size is decided, or nothing may decide more.
    """
    is_decided = decision.is_within(tolerance) | decision.is_outside(tolerance)
    is_compared = np.isfinite(decision.mean)
    is_open = ~is_decided & is_compared
    estimate = np.where(is_compared, decision.best_estimate, np.inf)
    is_best = estimate == estimate.min(-1, keepdims=True)

    needs_seeds = is_open & decision.may_be_decided(tolerance)
    needs_seeds |= is_best & needs_seeds.any(-1, keepdims=True)
    is_open |= is_best & is_open.any(-1, keepdims=True)

    wanted = tuning_seeds
    needs_rates = np.zeros(is_open.shape, bool)
    if decision.rates is not None:
        spread = decision.rates.regret_high - decision.rates.regret_low
        is_unclear = is_open & (spread > tolerance / 2) & np.isfinite(spread)
        needs_rates = is_unclear & (tuning_seeds == 1) & is_refinable
        needs_rates &= decision.rates.misfit > MISFIT * decision.variance

        doubled = np.minimum(2 * tuning_seeds, TUNING_SEEDS)
        can_grow = doubled > tuning_seeds
        wanted = np.where(is_unclear & ~needs_rates & can_grow, doubled, tuning_seeds)
    is_tuning = ((wanted > tuning_seeds) | needs_rates).any(-1, keepdims=True)

    fewest = np.where(needs_seeds, seeds, most_seeds).min(-1, keepdims=True)
    look = np.vectorize(next_look)(fewest, most_seeds)
    grown = np.where(needs_seeds, np.maximum(seeds, look), seeds)
    return np.where(is_tuning, seeds, grown), wanted, needs_rates


def next_look(seeds: int, most_seeds: int) -> int:
    """Return the number of seeds at the next look; the same number after the last one."""
    for look in (*LOOKS, most_seeds):
        if seeds < look <= most_seeds:
            return look
    return seeds


def _moments(values: Floats) -> tuple[Counts, Floats, Floats]:
    """Return count, mean and variance over the last axis, without missing values."""
    is_given = ~np.isnan(values)
    count = is_given.sum(-1)
    mean = np.where(is_given, values, 0.0).sum(-1) / np.where(count, count, np.nan)
    squares = np.where(is_given, values - mean[..., None], 0.0) ** 2
    variance = squares.sum(-1) / np.where(count > 1, count - 1, np.nan)
    return count, mean, variance


def _without_noisiest(variance: Floats) -> Floats:
    """Return the mean variance of the pairs without the batch size that has the largest ones.

    `variance` is (..., k, k); the diagonal is not used, and pairs may be missing.
    """
    is_pair = np.isfinite(variance) & ~np.eye(variance.shape[-1], dtype=bool)
    sums = np.where(is_pair, variance, 0.0).sum(-1)
    counts = is_pair.sum(-1)
    noisiest = (sums / np.maximum(counts, 1)).argmax(-1)[..., None]

    # Each pair is in two sums.
    sum_of_noisiest = np.take_along_axis(sums, noisiest, -1)[..., 0]
    sum_of_others = sums.sum(-1) - 2 * sum_of_noisiest
    count_of_noisiest = np.take_along_axis(counts, noisiest, -1)[..., 0]
    count_of_others = counts.sum(-1) - 2 * count_of_noisiest
    return np.where(count_of_others > 0, sum_of_others / np.maximum(count_of_others, 1), 0.0)


@functools.cache
def critical_values(k: int, looks: tuple[int, ...]) -> dict[int, float]:
    """Return the critical value of |difference| over its standard error, by number of seeds.

    With probability 1 - ALPHA no pair of k batch sizes exceeds it at any look. The values are
    quantiles, at the same level for all looks, of a simulation with independent normal losses; both
    hold for the worst of several patterns of standard deviations.
    """
    if not looks:
        return {}
    largest = _simulate_statistics(k, looks)

    # Bisect the level of a single look.
    low = ALPHA / len(looks)
    high = ALPHA
    while high - low > 1e-4:
        level = (low + high) / 2
        critical = np.quantile(largest, 1 - level, axis=-1).max(1)
        is_exceeded = (largest > critical[:, None, None]).any(0)
        if is_exceeded.mean(-1).max() > ALPHA:
            high = level
        else:
            low = level
    critical = np.quantile(largest, 1 - low, axis=-1).max(1)
    return dict(zip(looks, critical.tolist(), strict=True))


def _simulate_statistics(k: int, looks: tuple[int, ...]) -> Floats:
    """Return the largest statistic of the pairs of simulated sweeps, (looks, patterns, draws)."""
    patterns = _patterns_of_noise(k)
    draws = DRAWS if k > 2 else 10 * DRAWS  # one pair is quick
    largest = np.empty((len(looks), len(patterns), draws))
    rng = np.random.default_rng(0)
    for start in range(0, draws, CHUNK):
        chunk = slice(start, start + CHUNK)
        normal = rng.standard_normal((CHUNK, k, looks[-1]))
        for look, seeds in enumerate(looks):
            mean = normal[..., :seeds].mean(-1)
            residual = normal[..., :seeds] - mean[..., None]
            covariance = residual @ residual.swapaxes(1, 2) / (seeds - 1)
            for pattern, deviations in enumerate(patterns):
                scaled = covariance * np.outer(deviations, deviations)
                statistic = _largest_statistic(mean * deviations, scaled, seeds)
                largest[look, pattern, chunk] = statistic
    return largest


def _patterns_of_noise(k: int) -> list[Floats]:
    """Return standard deviations of k batch sizes for which the critical values should hold."""
    one_is_quiet = np.r_[1 / NOISY, np.ones(k - 1)]
    if k <= 3:
        return [one_is_quiet]
    two_are_noisier = np.r_[3.0, 3.0, np.ones(k - 2)]
    two_are_noisy = np.r_[NOISY, NOISY, np.ones(k - 2)]
    half_is_noisier = np.where(np.arange(k) < k // 2, 3.0, 1.0)
    evenly_spread = np.geomspace(1, NOISY, k)
    return [one_is_quiet, two_are_noisier, two_are_noisy, half_is_noisier, evenly_spread]


def _largest_statistic(mean: Floats, covariance: Floats, seeds: int) -> Floats:
    """Return the largest of |difference| over its standard error among the pairs of each sweep."""
    variance_of_one = np.diagonal(covariance, axis1=-2, axis2=-1)
    sums = variance_of_one[..., :, None] + variance_of_one[..., None, :]
    variance = sums - 2 * covariance
    variance = np.maximum(variance, _without_noisiest(variance)[..., None, None])
    variance += np.eye(variance.shape[-1])  # the diagonal has no difference

    difference = np.abs(mean[..., :, None] - mean[..., None, :])
    standard_error = np.sqrt(variance / seeds)
    return np.asarray((difference / standard_error).max((-2, -1)))
