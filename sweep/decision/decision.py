"""Decide about batch sizes from the losses of a sweep.

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

from sweep.decision.curves import Floats
from sweep.decision.rates import RateBounds, RatePoints, bound_rates

# Verdicts on the tolerance.
WITHIN = "within"
OUTSIDE = "outside"
UNDECIDED = "undecided"

ALPHA = 0.05
LOOKS = (3, 5, 8, 12, 20)  # seeds per batch size at which `--seeds auto` decides what to run next
DRAWS = 40_000  # simulated sweeps per critical value
CHUNK = 2_000  # sweeps simulated at once
ROUNDING = 1e-12  # relative error of a loss
PRIOR_DEGREES = 5.0  # weight of the other pairs' variance, by which a pair's own is moderated
RATIOS_OF_NOISE = (3.0, 10.0)  # standard deviations of noisy batch sizes over the others'

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Decision:
    """Losses and intervals of k batch sizes; NaN for a batch size that is not compared."""

    mean: Floats  # at the rate used, (..., k)
    # over seeds, moderated by that of the quieter batch sizes; NaN if it is not known, (..., k)
    variance: Floats
    difference: Floats  # mean of row minus column over their common seeds, (..., k, k)
    # over common seeds, for each of these differences; NaN below two, (..., k, k)
    variance_of_difference: Floats
    half_width: Floats  # half the interval's width; infinite below two common seeds, (..., k, k)
    rates: RateBounds | None  # (..., k); None if the rates were not tuned
    # How far differences may lie below and above, whatever the losses, (..., k, k) each.
    other_errors: tuple[Floats, Floats] | None = None

    @cached_property
    def differences(self) -> tuple[Floats, Floats]:
        """The interval of each loss at the best rate minus each other one, (..., k, k)."""
        estimate, below, above = self._estimates(self.half_width)
        has_seeds = np.isfinite(self.difference)  # in common
        low = np.where(has_seeds, estimate - below, -np.inf)
        high = np.where(has_seeds, estimate + above, np.inf)
        return low, high

    @property
    def differences_of_rates_used(self) -> tuple[Floats, Floats]:
        """The interval of each loss at the rate used minus each other one, (..., k, k)."""
        below = self.half_width
        above = self.half_width
        if self.other_errors is not None:
            below = below + self.other_errors[0]
            above = above + self.other_errors[1]
        return self.difference - below, self.difference + above

    def _estimates(self, half_width: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the differences at the best rates, and how far the intervals go below and above.

        The errors of three independent estimates, of a difference and of two regrets, are combined
        by their squares: the method of variance estimates recovery (Zou and Donner 2008,
        doi:10.1002/sim.3095). The bounds of curves that are not clear are added instead, and so are
        other errors.
        """
        estimate = self.difference
        below = np.square(half_width)
        above = below
        added_below = np.zeros(())
        added_above = np.zeros(())
        if self.other_errors is not None:
            added_below, added_above = self.other_errors
        if self.rates is not None:
            rates = self.rates
            regret = np.nan_to_num(rates.regret)
            estimate = estimate - regret[..., :, None] + regret[..., None, :]
            to_least = regret - rates.regret_low
            to_largest = rates.regret_high - regret

            least = np.where(rates.is_clear, np.square(to_least), 0.0)
            largest = np.where(rates.is_clear, np.square(to_largest), 0.0)
            below = below + largest[..., :, None] + least[..., None, :]
            above = above + least[..., :, None] + largest[..., None, :]

            least = np.where(rates.is_clear, 0.0, to_least)
            largest = np.where(rates.is_clear, 0.0, to_largest)
            added_below = added_below + largest[..., :, None] + least[..., None, :]
            added_above = added_above + least[..., :, None] + largest[..., None, :]
        return estimate, np.sqrt(below) + added_below, np.sqrt(above) + added_above

    @cached_property
    def gaps(self) -> tuple[Floats, Floats]:
        """The interval of the loss at the best rate minus the least of the others', (..., k)."""
        return self._gaps_of(*self.differences)

    def _gaps_of(self, low: Floats, high: Floats) -> tuple[Floats, Floats]:
        """Return the ends of the gaps, by those of the differences."""
        is_compared = np.isfinite(self.mean)
        is_pair = is_compared[..., :, None] & is_compared[..., None, :]
        is_pair &= ~np.eye(self.mean.shape[-1], dtype=bool)
        has_pair = is_pair.any(-1)

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
        other_errors = None
        if self.other_errors is not None:
            below, above = self.other_errors
            other_errors = below[..., part, part], above[..., part, part]
        return Decision(
            mean=self.mean[..., part],
            variance=self.variance[..., part],
            difference=self.difference[..., part, part],
            variance_of_difference=self.variance_of_difference[..., part, part],
            half_width=self.half_width[..., part, part],
            rates=rates,
            other_errors=other_errors,
        )

    def in_time(self, log_ratios: tuple[Floats, Floats, Floats]) -> "Decision":
        """Return the decision about times, if this one is about the logarithms of tokens.

        It must have no other errors: sweeps with a target compare equal amounts.

        Args:
            log_ratios: those of the times per token, row over column, (..., k, k), and their
                bounds; all are known.
        """
        assert self.other_errors is None
        estimate, low, high = log_ratios
        return replace(
            self,
            mean=self.mean + estimate[..., 0],
            difference=self.difference + estimate,
            other_errors=(estimate - low, high - estimate),
        )

    def is_within(self, tolerance: float) -> Flags:
        return np.asarray(self.gap_high <= tolerance)

    def is_outside(self, tolerance: float) -> Flags:
        return np.asarray(self.gap_low > tolerance)

    def reach(self, *, without_noise: bool, known_rates: Flags | bool) -> tuple[Floats, Floats]:
        """Return the largest low end and the least high end that further trainings may give gaps.

        They are those of the most favourable differences inside the present intervals, (..., k).

        Args:
            without_noise: whether the noise of the seeds would be gone.
            known_rates: the batch sizes whose best rates would be known exactly, (..., k).
        """
        noise = np.zeros(self.half_width.shape)
        known = replace(self, rates=self._rates_of(known_rates), other_errors=None)
        estimate, below, above = known._estimates(self.half_width if without_noise else noise)
        lowest = estimate - below
        highest = estimate + above

        remaining = replace(self, rates=self._rates_of(np.logical_not(known_rates)))
        _, below, above = remaining._estimates(noise if without_noise else self.half_width)
        with np.errstate(invalid="ignore"):  # NaN, which decides nothing, if two are unbounded
            return self._gaps_of(highest - below, lowest + above)

    def _rates_of(self, chosen: Flags | bool) -> RateBounds | None:
        """Return the bounds of some batch sizes, (..., k); the others' regrets count as exact."""
        if self.rates is None:
            return None
        regret = np.nan_to_num(self.rates.regret)
        return replace(
            self.rates,
            regret_low=np.where(chosen, self.rates.regret_low, regret),
            regret_high=np.where(chosen, self.rates.regret_high, regret),
        )

    @property
    def best_estimate(self) -> Floats:
        """The estimated loss at the best rate, (..., k)."""
        if self.rates is None:
            return self.mean
        return self.mean - np.nan_to_num(self.rates.regret)


def decide(
    losses: Floats,
    points: RatePoints | None,
    log_rates: Floats,
    looks: Sequence[int] = (),
    error: float = ALPHA,
) -> Decision:
    """Compute the interval of every batch size's gap to the best.

    Args:
        losses: those of the final trials, (..., k, seeds); NaN for missing seeds. A batch size with
            an infinite loss is not compared. If two that are compared share no seed, both gaps are
            unbounded above.
        points: losses of the rates near the best, (..., k); None if the rates were not tuned.
        log_rates: those used, (..., k).
        looks: numbers of seeds at which the sweep might have ended; empty if fixed in advance.
        error: probability that the interval of some difference over seeds is wrong.
    """
    has_diverged = np.isinf(losses).any(-1, keepdims=True)
    losses = np.where(has_diverged, np.nan, losses)
    count, mean, variance = _moments(losses)
    compared = max(2, int(np.isfinite(mean).sum(-1).max()))

    differences = losses[..., :, None, :] - losses[..., None, :, :]
    common_seeds, difference, variance_of_difference = _moments(differences)
    half_width = _half_widths(losses, common_seeds, variance_of_difference, compared, looks, error)

    is_known = np.isfinite(variance).any(-1, keepdims=True)
    variance = np.nan_to_num(variance)
    total = variance.sum(-1, keepdims=True)
    largest = variance.max(-1, keepdims=True)
    mean_of_others = (total - largest) / max(1, compared - 1)
    variance = moderated(variance, mean_of_others, count - 1)
    variance = np.where(is_known, variance, np.nan)

    rates = None
    if points is not None:
        rates = bound_rates(points, variance, log_rates, compared)
    return Decision(mean, variance, difference, variance_of_difference, half_width, rates)


def _half_widths(
    losses: Floats,
    count: Counts,
    variance: Floats,
    compared: int,
    looks: Sequence[int],
    error: float,
) -> Floats:
    """Return half the widths of the intervals of all differences, (..., k, k).

    Args:
        losses: those of the final trials, (..., k, seeds).
        count: seeds that a pair has in common, (..., k, k).
        variance: that of the differences of a pair, (..., k, k).
        compared: number of batch sizes that are compared.
        looks: as in `decide`.
        error: as in `decide`.
    """
    is_pair = ~np.eye(losses.shape[-2], dtype=bool)
    has_seeds = count > 1
    counts = np.unique(count[has_seeds & is_pair]).tolist()
    critical = np.full(count.shape, np.inf)
    for seeds in counts:
        seen = tuple(sorted({seeds, *looks}))
        critical[count == seeds] = critical_values(compared, seen, error)[seeds]

    variance_of_quieter = _without_noisiest(variance)
    variance = moderated(variance, variance_of_quieter[..., None, None], count - 1)

    # Without seeds, or with seeds that are equal but for rounding, the error is not known.
    largest_loss = np.abs(np.nan_to_num(losses)).max((-2, -1))
    rounding = ROUNDING * largest_loss[..., None, None]
    variance = np.where(variance > rounding**2, variance, np.inf)

    standard_error = np.sqrt(variance / np.maximum(count, 1))
    return np.asarray(critical * standard_error)


def _moments(values: Floats) -> tuple[Counts, Floats, Floats]:
    """Return count, mean and variance over the last axis, without missing values."""
    is_given = ~np.isnan(values)
    count = is_given.sum(-1)
    mean = np.where(is_given, values, 0.0).sum(-1) / np.where(count, count, np.nan)
    squares = np.where(is_given, values - mean[..., None], 0.0) ** 2
    variance = squares.sum(-1) / np.where(count > 1, count - 1, np.nan)
    return count, mean, variance


def moderated(variance: Floats, prior: Floats, degrees: Counts | int) -> Floats:
    """Return variances moderated by a prior one, but no less than they are.

    A variance that is small by chance does not make differences significant (Smyth 2004,
    doi:10.2202/1544-6115.1027). Where a variance is not known, the prior one is returned.
    """
    known = np.where(np.isfinite(variance), degrees, 0)
    moderated = (PRIOR_DEGREES * prior + known * np.nan_to_num(variance)) / (PRIOR_DEGREES + known)
    return np.asarray(np.fmax(variance, moderated))


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
def critical_values(k: int, looks: tuple[int, ...], error: float = ALPHA) -> dict[int, float]:
    """Return the critical value of |difference| over its standard error, by number of seeds.

    With probability 1 - `error` no pair of k batch sizes exceeds it at any look. The values are
    quantiles, at the same level for all looks, of a simulation with independent normal losses; both
    hold for the worst of several patterns of standard deviations.
    """
    if not looks:
        return {}
    largest = _simulate_statistics(k, looks)

    # Bisect the level of a single look.
    low = error / len(looks)
    high = error
    while high - low > 1e-4:
        level = (low + high) / 2
        critical = np.quantile(largest, 1 - level, axis=-1).max(1)
        is_exceeded = (largest > critical[:, None, None]).any(0)
        if is_exceeded.mean(-1).max() > error:
            high = level
        else:
            low = level
    critical = np.quantile(largest, 1 - low, axis=-1).max(1)
    return dict(zip(looks, critical.tolist(), strict=True))


@functools.lru_cache(maxsize=4)  # both levels of error, for a few numbers of seeds
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
    patterns = [np.ones(k)]
    if k == 2:  # the variance of the only pair is its own
        return patterns
    for ratio in RATIOS_OF_NOISE:
        one_is_noisy = np.r_[ratio, np.ones(k - 1)]
        one_is_quiet = 1 / one_is_noisy
        patterns += [one_is_noisy, one_is_quiet]
        if k > 3:
            two_are_noisy = np.r_[ratio, ratio, np.ones(k - 2)]
            half_is_noisy = np.where(np.arange(k) < k // 2, ratio, 1.0)
            evenly_spread = np.geomspace(1, ratio, k)
            patterns += [two_are_noisy, half_is_noisy, evenly_spread]
    return patterns


def _largest_statistic(mean: Floats, covariance: Floats, seeds: int) -> Floats:
    """Return the largest of |difference| over its standard error among the pairs of each sweep."""
    variance_of_one = np.diagonal(covariance, axis1=-2, axis2=-1)
    sums = variance_of_one[..., :, None] + variance_of_one[..., None, :]
    variance = sums - 2 * covariance
    variance = moderated(variance, _without_noisiest(variance)[..., None, None], seeds - 1)
    variance += np.eye(variance.shape[-1])  # the diagonal has no difference

    difference = np.abs(mean[..., :, None] - mean[..., None, :])
    standard_error = np.sqrt(variance / seeds)
    return np.asarray((difference / standard_error).max((-2, -1)))
