"""Differences between batch sizes: paired tests, equivalence, and what more seeds could show.

Losses are paired: one seed gives the same weights and the same stream at every batch size. Two-way
layout of batch sizes and seeds (randomized blocks); Holm 1979; two one-sided tests, Schuirmann
1987; power by the noncentral t. docs/statistics.md holds the formulas and the simulations.
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
EQUIVALENCE_MARGIN = 0.01  # nats
MOST_SEEDS = 1000  # where the search for enough seeds ends

Losses = Mapping[int, Mapping[int, float]]  # batch size -> seed -> final loss in nats
Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A value and its 95 % interval, whose ends are NaN if the data allow none."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float, start: float = 0.0) -> "Estimate":
        """Return start + factor times the number and its interval; the factor is positive."""
        return Estimate(*(start + factor * end for end in self))


@dataclass(frozen=True)
class Pair:
    """Two batch sizes compared over the seeds they share."""

    batch_sizes: tuple[int, int]
    by_seed: tuple[float, ...]  # nats, the larger batch size's loss minus the smaller's
    difference: Estimate  # nats, their mean; the interval is this pair's alone
    standard_error: float  # nats, the larger of the pooled one and the pair's own
    p_different: float
    p_different_holm: float  # adjusted over all pairs
    p_equivalent: float  # that the means differ by the margin or more
    p_equivalent_holm: float

    @property
    def is_different(self) -> bool:
        """Whether the means differ, with a family-wise error of 5 % over all pairs."""
        return self.p_different_holm <= ALPHA

    @property
    def is_equivalent(self) -> bool:
        """Whether the means differ by less than the margin: only then "no difference"."""
        return self.p_equivalent_holm <= ALPHA


@dataclass(frozen=True)
class Comparison:
    """Every pair of batch sizes over the seeds that all of them have."""

    batch_sizes: tuple[int, ...]
    seeds: tuple[int, ...]  # common to all batch sizes; the order of Pair.by_seed
    left_out: dict[int, tuple[int, ...]]  # batch size -> its seeds that another one lacks
    degrees_of_freedom: int
    variances: dict[int, float]  # batch size -> variance over the seeds, nats²
    variance_ratio: float  # the largest of them over the smallest
    margin: float  # nats, within which losses count as no different
    pairs: tuple[Pair, ...]
    not_applicable: str = ""  # why there are no pairs
    unit: str = "nats"
    least: int | None = None  # the batch size of the least mean loss

    def pairs_with(self, batch_size: int) -> tuple[Pair, ...]:
        """Return the pairs that hold a batch size."""
        return tuple(pair for pair in self.pairs if batch_size in pair.batch_sizes)


def compare_pairs(
    losses: Losses, margin: float = EQUIVALENCE_MARGIN, unit: str = "nats"
) -> Comparison:
    """Compare all pairs of batch sizes by paired t tests, Holm-adjusted, and test equivalence.

    Returns:
        A comparison without pairs, and with `not_applicable`, if there are fewer than two batch
        sizes or common seeds, or a loss is not finite (a diverged trial is data: without it the
        means would be those of the lucky seeds).
    """
    sizes, seeds = tuple(sorted(losses)), _common_seeds(losses)
    degrees = max(0, (len(sizes) - 1) * (len(seeds) - 1))
    extra = {size: tuple(sorted(set(losses[size]) - set(seeds))) for size in sizes}
    left_out = {size: others for size, others in extra.items() if others}
    if reason := _not_applicable(losses):
        nan = float("nan")
        return Comparison(sizes, seeds, left_out, degrees, {}, nan, margin, (), reason, unit)
    table = _table(losses)
    variances = table.var(axis=1, ddof=1).tolist()
    least, most = min(variances), max(variances)
    return Comparison(
        batch_sizes=sizes,
        seeds=seeds,
        left_out=left_out,
        degrees_of_freedom=degrees,
        variances=dict(zip(sizes, variances, strict=True)),
        variance_ratio=most / least if least else math.inf if most else 1.0,
        margin=margin,
        pairs=_pairs(sizes, table, margin),
        unit=unit,
        least=sizes[int(table.mean(axis=1).argmin())],
    )


def _common_seeds(losses: Losses) -> tuple[int, ...]:
    sets = [set(by_seed) for by_seed in losses.values()]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def _not_applicable(losses: Losses) -> str:
    """Return why the batch sizes cannot be compared, or an empty text."""
    common = len(_common_seeds(losses))
    for size in sorted(losses):
        if not all(math.isfinite(loss) for loss in losses[size].values()):
            return f"batch size {size} has a loss that is not finite"
    if len(losses) < 2:
        return f"a comparison needs 2 batch sizes, there is {len(losses) or 'none'}"
    if common < 2:
        return f"paired tests need 2 seeds common to all batch sizes, there is {common or 'none'}"
    return ""


def _table(losses: Losses) -> Floats:
    seeds = _common_seeds(losses)
    return np.array([[losses[size][seed] for seed in seeds] for size in sorted(losses)])


def _mean_square(table: Floats) -> float:
    """Return the residual mean square of a table (batch sizes, seeds) with effects of both."""
    rows, columns = table.mean(axis=1, keepdims=True), table.mean(axis=0, keepdims=True)
    residuals = table - rows - columns + table.mean()
    return float(np.square(residuals).sum() / ((rows.size - 1) * (columns.size - 1)))


def _pairs(sizes: tuple[int, ...], table: Floats, margin: float) -> tuple[Pair, ...]:
    count, seeds = table.shape
    degrees = (count - 1) * (seeds - 1)
    first, second = np.triu_indices(count, 1)
    by_seed = table[second] - table[first]  # (pairs, seeds)
    mean = by_seed.mean(axis=1)
    own = by_seed.std(axis=1, ddof=1) / math.sqrt(seeds)
    error = np.maximum(math.sqrt(2 * _mean_square(table) / seeds), own)
    half = stdtrit(degrees, 1 - ALPHA / 2) * error
    different = 2 * stdtr(degrees, -_ratio(np.abs(mean), error))
    # The larger p value of the two one-sided tests is that of the nearer edge.
    equivalent = stdtr(degrees, _ratio(np.abs(mean) - margin, error))
    columns = (mean, mean - half, mean + half, error, different, holm(different))
    numbers = np.stack([*columns, equivalent, holm(equivalent)], axis=1).tolist()
    names = zip(first.tolist(), second.tolist(), by_seed.tolist(), numbers, strict=True)
    return tuple(
        Pair((sizes[i], sizes[j]), tuple(values), Estimate(*row[:3]), *row[3:])
        for i, j, values, row in names
    )


def _ratio(numerator: Floats, error: Floats) -> Floats:
    """Divide; without noise any difference is infinitely clear, and no difference is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(numerator / error, nan=0.0, posinf=math.inf, neginf=-math.inf)


def holm(p_values: Floats) -> Floats:
    """Adjust p values for the family-wise error by Holm 1979."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * p_values[order]), 1.0)
    return adjusted


def seeds_sd(losses: Losses) -> Estimate | None:
    """Return σ of seeds: the residual of a loss after its batch size and its seed, in nats.

    The interval is by chi-square with (k-1)(n-1) degrees of freedom, for equal variances. None if
    the batch sizes cannot be compared.
    """
    if _not_applicable(losses):
        return None
    table = _table(losses)
    degrees = (table.shape[0] - 1) * (table.shape[1] - 1)
    squares = degrees * _mean_square(table)
    low, high = (math.sqrt(squares / chdtri(degrees, p)) for p in (ALPHA / 2, 1 - ALPHA / 2))
    return Estimate(math.sqrt(squares / degrees), low, high)


def minimal_detectable_difference(
    sigma: float, seeds: int, batch_sizes: int, pairs: int = 1
) -> float | None:
    """Return the difference that a pair's test finds with power .8; None below 2 seeds.

    Two-sided at .05 over `pairs` (1 for one pair by itself, all of them after Holm's adjustment),
    with the pooled standard error of `batch_sizes` that share one σ.
    """
    degrees = (batch_sizes - 1) * (seeds - 1)
    if degrees < 1:
        return None
    critical = stdtrit(degrees, 1 - ALPHA / (2 * pairs))
    # The other tail's share of the power is below 1e-6.
    shift = nctdtrinc(degrees, 1 - POWER, critical)
    return float(shift) * sigma * math.sqrt(2 / seeds)


def seeds_to_detect(
    difference: float, sigma: float, batch_sizes: int, pairs: int = 1
) -> int | None:
    """Return the least number of seeds that can show a difference; None above `MOST_SEEDS`."""
    for seeds in range(2, MOST_SEEDS + 1):
        least = minimal_detectable_difference(sigma, seeds, batch_sizes, pairs)
        if least is not None and least <= abs(difference):
            return seeds
    return None
