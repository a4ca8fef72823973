"""Differences between batch sizes: paired tests, equivalence, and the power of more seeds.

One seed gives the same weights and stream at every batch size: randomized blocks. The two one-sided
tests are Schuirmann's (1987). Formulas and simulated error rates: docs/statistics.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, nctdtrinc, stdtr, stdtrit

ALPHA = 0.05
POWER = 0.8
MOST_SEEDS = 1000  # upper end of the search for enough seeds

Losses = Mapping[int, Mapping[int, float]]  # batch size -> seed -> final loss
Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A value and its 95 % interval, whose ends are NaN if the data allow none."""

    value: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        """Write `1.5 [1.4, 1.6]`, or the value alone."""
        ends = f" [{self.low:{form}}, {self.high:{form}}]" if math.isfinite(self.low) else ""
        return f"{self.value:{form}}{ends}"


@dataclass(frozen=True)
class Pair:
    batch_sizes: tuple[int, int]
    difference: Estimate  # mean of larger minus smaller; the interval is for this pair alone
    standard_error: float  # the larger of the pooled one and the pair's own
    p_different: float
    p_different_holm: float  # adjusted over all pairs
    p_equivalent: float  # that the means differ by the margin or more
    p_equivalent_holm: float

    @property
    def is_different(self) -> bool:
        return self.p_different_holm <= ALPHA

    @property
    def is_equivalent(self) -> bool:
        return self.p_equivalent_holm <= ALPHA

    @property
    def verdict(self) -> str:  # a small difference can be both significant and equivalent
        if self.is_equivalent:
            return "equivalent"
        return "different" if self.is_different else "undecided"


@dataclass(frozen=True)
class Comparison:
    batch_sizes: tuple[int, ...]
    seeds: tuple[int, ...]  # common to all batch sizes
    left_out: dict[int, tuple[int, ...]]  # batch size -> its seeds that another one lacks
    margin: float  # equivalence margin in `unit`
    unit: str
    degrees_of_freedom: int
    not_applicable: str = ""  # reason, if there are no pairs
    pairs: tuple[Pair, ...] = ()
    sigma: Estimate | None = None  # sd over seeds: residual after batch size and seed; chi-square
    variance_ratio: float = math.nan  # largest variance of a batch size over the smallest
    least: int | None = None  # batch size of the least mean loss

    @property
    def pairs_with_best(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if self.least in pair.batch_sizes)

    @property
    def listed_pairs(self) -> tuple[Pair, ...]:
        """All pairs; of more than 15, those with the best batch size."""
        return self.pairs if len(self.pairs) <= 15 else self.pairs_with_best


def compare_pairs(losses: Losses, margin: float = 0.01, unit: str = "nats") -> Comparison:
    """Compare all pairs of batch sizes by paired t tests and test equivalence, Holm-adjusted."""
    sizes = tuple(sorted(losses))
    common = set.intersection(*map(set, losses.values())) if losses else set()
    seeds = tuple(sorted(common))
    left_out = {n: tuple(sorted(set(losses[n]) - common)) for n in sizes if set(losses[n]) - common}
    reason = ""
    # Means without a diverged trial would be of lucky seeds.
    if infinite := [n for n in sizes if not all(map(math.isfinite, losses[n].values()))]:
        reason = f"batch size {infinite[0]} has a loss that is not finite"
    elif len(sizes) < 2:
        reason = f"a comparison needs at least 2 batch sizes; this sweep has {len(sizes)}"
    elif len(seeds) < 2:
        reason = f"paired tests need at least 2 seeds at all batch sizes; there are {len(seeds)}"
    degrees = max(0, (len(sizes) - 1) * (len(seeds) - 1))
    if reason:
        return Comparison(sizes, seeds, left_out, margin, unit, degrees, reason)
    table = np.array([[losses[size][seed] for seed in seeds] for size in sizes])
    means, seed_means = table.mean(axis=1), table.mean(axis=0)
    residuals = table - means[:, None] - seed_means + table.mean()
    mean_square = float(np.square(residuals).sum() / degrees)
    squares = degrees * mean_square
    low, high = (math.sqrt(squares / chdtri(degrees, p)) for p in (ALPHA / 2, 1 - ALPHA / 2))
    variances = table.var(axis=1, ddof=1).tolist()
    least, most = min(variances), max(variances)
    return Comparison(
        *(sizes, seeds, left_out, margin, unit, degrees),
        pairs=_pairs(sizes, table, mean_square, degrees, margin),
        sigma=Estimate(math.sqrt(squares / degrees), low, high),
        variance_ratio=most / least if least else math.inf if most else 1.0,
        least=sizes[int(means.argmin())],
    )


def _pairs(
    sizes: tuple[int, ...], table: Floats, mean_square: float, degrees: int, margin: float
) -> tuple[Pair, ...]:
    count, seeds = table.shape
    first, second = np.triu_indices(count, 1)
    by_seed = table[second] - table[first]  # (pairs, seeds)
    mean = by_seed.mean(axis=1)
    own = by_seed.std(axis=1, ddof=1) / math.sqrt(seeds)
    error = np.maximum(math.sqrt(2 * mean_square / seeds), own)
    half = stdtrit(degrees, 1 - ALPHA / 2) * error
    # Without noise any difference is infinitely clear, and no difference is 0.
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.nan_to_num(np.abs(mean) / error, posinf=math.inf)
        nearer = (np.abs(mean) - margin) / error
    different = 2 * stdtr(degrees, -t)
    # The larger p value of the two one-sided tests is that of the nearer edge.
    equivalent = stdtr(degrees, np.nan_to_num(nearer, posinf=math.inf, neginf=-math.inf))
    columns = (mean, mean - half, mean + half, error, different, holm(different))
    numbers = np.stack([*columns, equivalent, holm(equivalent)], axis=1).tolist()
    return tuple(
        Pair((sizes[i], sizes[j]), Estimate(*row[:3]), *row[3:])
        for i, j, row in zip(first, second, numbers, strict=True)
    )


def holm(p_values: Floats) -> Floats:
    """Adjust p values for the family-wise error by Holm 1979."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * p_values[order]), 1.0)
    return adjusted


def minimal_detectable_difference(
    sigma: float, seeds: int, batch_sizes: int, pairs: int = 1
) -> float | None:
    """Return the difference that a two-sided test at .05 over `pairs` detects with power .8."""
    degrees = (batch_sizes - 1) * (seeds - 1)
    if degrees < 1:
        return None
    critical = stdtrit(degrees, 1 - ALPHA / (2 * pairs))
    # The other tail's share of the power is below 1e-6.
    return float(nctdtrinc(degrees, 1 - POWER, critical)) * sigma * math.sqrt(2 / seeds)


def seeds_to_detect(
    difference: float, sigma: float, batch_sizes: int, pairs: int = 1
) -> int | None:
    """Return the least number of seeds that can show a difference; None above `MOST_SEEDS`."""
    for seeds in range(2, MOST_SEEDS + 1):
        least = minimal_detectable_difference(sigma, seeds, batch_sizes, pairs)
        if least is not None and least <= abs(difference):
            return seeds
    return None
