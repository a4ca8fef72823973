"""The gradient noise scale B_simple = tr Σ / |G|² (McCandlish et al. 2018, appendix A).

A diagnostic: measured critical batch sizes can be far from it (Merrill et al. 2025). See
docs/critical-batch-size.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from sweep.analysis.statistics import Estimate
from sweep.errors import SweepError

RESAMPLES = 1000
TAILS = (0.025, 0.975)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class NoiseScale:
    """B_simple over some steps; each number with its 95 % interval."""

    value: Estimate | None  # sequences; None is unresolved: the interval of square contains 0
    trace: Estimate  # tr Σ of the gradient of one sequence
    square: Estimate  # |G|²; may be negative, for it is not clamped
    records: int
    block_length: int  # records, of the bootstrap


def noise_scale(
    traces: Sequence[float],
    squares: Sequence[float],
    *,
    block_length: int | None = None,
    rng_seed: int = 0,
) -> NoiseScale:
    """Average tr Σ̂ and Ĝ² separately over records in order, then divide.

    Intervals are those of a bootstrap of moving blocks that wrap round at the end (Politis & Romano
    1992), widened by t/1.96·√(m/(m−1)), t with m − 1 degrees of freedom, for the m blocks.

    Args:
        traces: tr Σ̂ of each record, as `sweep.training.noise` records them.
        squares: Ĝ² of each.
        block_length: in records, at most half of them; by default ⌊√n⌋.
        rng_seed: of the resampling.
    """
    values = np.array([traces, squares], float).T  # (records, 2)
    count = len(values)
    length = math.isqrt(count) if block_length is None else block_length
    if not (count > 1 and np.isfinite(values).all() and 1 <= length <= count // 2):
        raise SweepError(
            "A noise scale must have at least two finite records and blocks of at most half of "
            f"them, got {count} records, {int((~np.isfinite(values)).any(1).sum())} not finite, "
            f"and blocks of {length}. Record more steps."
        )
    blocks = count // length
    means = _resampled_means(values, length, blocks, np.random.default_rng(rng_seed))
    widening = float(student.ppf(TAILS[1], blocks - 1) / student.ppf(TAILS[1], math.inf))
    widening *= math.sqrt(blocks / (blocks - 1))
    trace, square = (
        _widened(float(mean), own, widening)
        for mean, own in zip(values.mean(0), means.T, strict=True)
    )
    ratio = None
    if square.low > 0:
        positive = means[:, 1] > 0
        ratios = np.full(len(means), np.inf)
        np.divide(means[:, 0], means[:, 1], out=ratios, where=positive)
        ends = np.quantile(ratios, TAILS, method="nearest")
        value = trace.value / square.value
        low, high = (value * (end / value) ** widening for end in ends)
        ratio = Estimate(value, float(low), float(high))
    return NoiseScale(ratio, trace, square, count, length)


def _resampled_means(values: Floats, length: int, blocks: int, rng: np.random.Generator) -> Floats:
    """Return means over random blocks, (resamples, 2)."""
    wrapped = np.concatenate([values, values[: length - 1]])
    windows = np.lib.stride_tricks.sliding_window_view(wrapped, length, axis=0).mean(-1)
    starts = rng.integers(len(values), size=(RESAMPLES, blocks))
    return np.asarray(windows[starts].mean(1))


def _widened(mean: float, resampled: Floats, widening: float) -> Estimate:
    low, high = np.quantile(resampled, TAILS)
    return Estimate(mean, mean + widening * float(low - mean), mean + widening * float(high - mean))
