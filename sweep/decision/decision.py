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

WITHIN, OUTSIDE, UNDECIDED = "within", "outside", "undecided"  # verdicts on the tolerance
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
        least = most = np.zeros(self.mean.shape)
        if self.rates is not None:
            least, most = self.rates.regret_low, self.rates.regret_high
        low = self.difference - self.half_width - most[..., :, None] + least[..., None, :]
        high = self.difference + self.half_width - least[..., :, None] + most[..., None, :]
        has_seeds = np.isfinite(self.difference)  # in common
        return np.where(has_seeds, low, -np.inf), np.where(has_seeds, high, np.inf)

    @cached_property
    def gaps(self) -> tuple[Floats, Floats]:
        """The interval of the loss at the best rate minus the least of the others', (..., k)."""
        is_compared = np.isfinite(self.mean)
        is_pair = is_compared[..., :, None] & is_compared[..., None, :]
        is_pair &= ~np.eye(self.mean.shape[-1], dtype=bool)
        low, high = (np.where(is_pair, end, -np.inf).max(-1) for end in self.differences)
        return np.where(is_pair.any(-1), low, np.nan), np.where(is_pair.any(-1), high, np.nan)

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
        rates = self.rates and RateBounds(**{k: v[..., part] for k, v in vars(self.rates).items()})
        moments = self.mean[..., part], self.variance[..., part]
        pairs = self.difference[..., part, part], self.half_width[..., part, part]
        return Decision(*moments, *pairs, rates)

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
        return self.mean if self.rates is None else self.mean - np.nan_to_num(self.rates.regret)


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
    _, mean, variance_of_one = _moments(losses)
    compared = max(2, int(np.isfinite(mean).sum(-1).max()))

    count, difference, variance = _moments(losses[..., :, None, :] - losses[..., None, :, :])
    half_width = _half_widths(losses, count, variance, compared, looks)

    # A batch size whose few seeds agree by chance is taken to be as noisy as the quieter others.
    variance_of_one = np.nan_to_num(variance_of_one)
    total = variance_of_one.sum(-1, keepdims=True)
    largest = variance_of_one.max(-1, keepdims=True)
    mean_of_others = (total - largest) / max(1, compared - 1)
    variance_of_one = np.maximum(variance_of_one, mean_of_others)
    rates = None if points is None else bound_rates(points, variance_of_one, log_rates)
    return Decision(mean, variance_of_one, difference, half_width, rates)


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
    is_other = ~np.eye(losses.shape[-2], dtype=bool)
    counts = np.unique(count[(count > 1) & is_other]).tolist()
    critical = np.full(count.shape, np.inf)
    for seeds, value in critical_values(compared, tuple(sorted({*counts, *looks}))).items():
        critical[count == seeds] = value

    variance = np.fmax(variance, _without_noisiest(variance)[..., None, None])
    # Without seeds, or with seeds that are equal but for rounding, the error is not known.
    size = np.abs(np.nan_to_num(losses)).max((-2, -1))[..., None, None]
    variance = np.where(variance > (ROUNDING * size) ** 2, variance, np.inf)
    return np.asarray(critical * np.sqrt(variance / np.maximum(count, 1)))


def next_trainings(
    made: Decision,
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
    is_decided = made.is_within(tolerance) | made.is_outside(tolerance)
    is_open = ~is_decided & np.isfinite(made.mean)
    estimate = np.where(np.isfinite(made.mean), made.best_estimate, np.inf)
    is_best = estimate == estimate.min(-1, keepdims=True)
    needs_seeds = is_open & made.may_be_decided(tolerance)
    needs_seeds |= is_best & needs_seeds.any(-1, keepdims=True)
    is_open |= is_best & is_open.any(-1, keepdims=True)
    wanted, needs_rates = tuning_seeds, np.zeros(is_open.shape, bool)
    if made.rates is not None:
        spread = made.rates.regret_high - made.rates.regret_low
        is_unclear = is_open & (spread > tolerance / 2) & np.isfinite(spread)
        needs_rates = is_unclear & (tuning_seeds == 1) & is_refinable
        needs_rates &= made.rates.misfit > MISFIT * made.variance
        doubled = np.minimum(2 * tuning_seeds, TUNING_SEEDS)
        grows = is_unclear & ~needs_rates & (doubled > tuning_seeds)
        wanted = np.where(grows, doubled, tuning_seeds)
    is_tuning = ((wanted > tuning_seeds) | needs_rates).any(-1, keepdims=True)
    fewest = np.where(needs_seeds, seeds, most_seeds).min(-1, keepdims=True)
    look = np.vectorize(next_look)(fewest, most_seeds)
    grown = np.where(needs_seeds, np.maximum(seeds, look), seeds)
    return np.where(is_tuning, seeds, grown), wanted, needs_rates


def next_look(seeds: int, most_seeds: int) -> int:
    """Return the number of seeds at the next look; the same number after the last one."""
    later = (look for look in (*LOOKS, most_seeds) if seeds < look <= most_seeds)
    return next(later, seeds)


def _moments(values: Floats) -> tuple[Counts, Floats, Floats]:
    """Return count, mean and variance over the last axis, without missing values."""
    is_given = ~np.isnan(values)
    count = is_given.sum(-1)
    mean = np.where(is_given, values, 0.0).sum(-1) / np.where(count, count, np.nan)
    squares = np.where(is_given, values - mean[..., None], 0.0) ** 2
    return count, mean, squares.sum(-1) / np.where(count > 1, count - 1, np.nan)


def _without_noisiest(variance: Floats) -> Floats:
    """Return the mean variance of the pairs without the batch size that has the largest ones.

    `variance` is (..., k, k); the diagonal is not used, and pairs may be missing.
    """
    is_pair = np.isfinite(variance) & ~np.eye(variance.shape[-1], dtype=bool)
    sums, pairs = np.where(is_pair, variance, 0.0).sum(-1), is_pair.sum(-1)
    noisiest = (sums / np.maximum(pairs, 1)).argmax(-1)[..., None]
    rest, count = (
        numbers.sum(-1) - 2 * np.take_along_axis(numbers, noisiest, -1)[..., 0]
        for numbers in (sums, pairs)
    )
    return np.where(count > 0, rest / np.maximum(count, 1), 0.0)


@functools.cache
def critical_values(k: int, looks: tuple[int, ...]) -> dict[int, float]:
    """Return the critical value of |difference| over its standard error, by number of seeds.

    With probability 1 - ALPHA no pair of k batch sizes exceeds it at any look. The values are
    quantiles, at the same level for all looks, of a simulation with independent normal losses; both
    hold for the worst of several patterns of standard deviations.
    """
    if not looks:
        return {}
    patterns = [np.r_[1 / NOISY, np.ones(k - 1)]]
    if k > 3:
        patterns += [np.r_[ratio, ratio, np.ones(k - 2)] for ratio in (3.0, NOISY)]
        patterns += [np.where(np.arange(k) < k // 2, 3.0, 1.0), np.geomspace(1, NOISY, k)]
    draws = DRAWS if k > 2 else 10 * DRAWS  # one pair is quick
    largest = np.empty((len(looks), len(patterns), draws))
    rng = np.random.default_rng(0)
    for start in range(0, draws, CHUNK):
        normal = rng.standard_normal((CHUNK, k, looks[-1]))
        for index, seeds in enumerate(looks):
            mean = normal[..., :seeds].mean(-1)
            rest = normal[..., :seeds] - mean[..., None]
            covariance = rest @ rest.swapaxes(1, 2) / (seeds - 1)
            for pattern, sd in enumerate(patterns):
                values = _largest_statistic(mean * sd, covariance * np.outer(sd, sd), seeds)
                largest[index, pattern, start : start + CHUNK] = values
    low, high = ALPHA / len(looks), ALPHA
    while high - low > 1e-4:
        level = (low + high) / 2
        critical = np.quantile(largest, 1 - level, axis=-1).max(1)
        is_exceeded = (largest > critical[:, None, None]).any(0)
        low, high = (low, level) if is_exceeded.mean(-1).max() > ALPHA else (level, high)
    critical = np.quantile(largest, 1 - low, axis=-1).max(1)
    return dict(zip(looks, critical.tolist(), strict=True))


def _largest_statistic(mean: Floats, covariance: Floats, seeds: int) -> Floats:
    own = np.diagonal(covariance, axis1=-2, axis2=-1)
    variance = own[..., :, None] + own[..., None, :] - 2 * covariance
    variance = np.maximum(variance, _without_noisiest(variance)[..., None, None])
    variance += np.eye(variance.shape[-1])  # the diagonal has no difference
    difference = np.abs(mean[..., :, None] - mean[..., None, :])
    return np.asarray((difference / np.sqrt(variance / seeds)).max((-2, -1)))
