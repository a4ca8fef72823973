"""The critical batch size: from gradient noise, and from the steps to a target loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.special import log_ndtr
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


OVERHEAD = 0.2  # more steps than linear scaling would take, at B*
LINEAR_OVERHEAD = 1 / 8  # fitted; up to it a batch size counts as still on linear scaling
NEGLIGIBLE = 1e-5  # a term with a smaller share of S at every batch size was not measured
LEAST_BATCH_SIZES = 3  # two parameters and something left to judge them by
PUBLISHED_START = (1.0, 1.0)  # log S_min and log E_min, as in the published fits
PUBLISHED_TOLERANCE = 1e-8  # that of scipy's `curve_fit`
TOLERANCE = 1e-12
CLEARLY = 1e-9  # relative improvement of the squares that counts as another optimum
SPREAD_ROUNDS, SPREAD_TOLERANCE, LEAST_SPREAD = 100, 1e-3, 1e-12

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class StepsFit:
    """The fitted curve, with 95 % intervals; with one seed these are NaN."""

    s_min: Estimate  # steps; 0 if the steps still fall as 1/B at the largest batch size
    e_min: Estimate  # sequences; 0 if the steps do not depend on the batch size
    b_crit: Estimate  # sequences; infinite if s_min is 0
    b_overhead: Estimate  # 0.2·B_crit: takes 20 % more tokens than the least
    b_opt: float | None  # the largest batch size still on linear scaling
    b_star: Estimate | None  # takes 20 % more steps than linear scaling from b_opt, which is held
    residuals: Floats  # (seeds, batch sizes): log S − log fit; of a bound its least, 0 or more
    slopes: Floats  # d log S / d log B between neighbours, over seeds; NaN next to a censored one
    spread: float  # standard deviation of log S about the curve


def fit_steps(
    batch_sizes: Sequence[float],
    steps: ArrayLike,
    censored: ArrayLike | None = None,
    *,
    b_opt: float | None = None,
    rng_seed: int = 0,
) -> StepsFit:
    """Fit S(B) = S_min + E_min/B by least squares on log S, both parameters in logs.

    A censored S is a lower bound and enters one-sidedly, by the likelihood of a normal log S (Tobin
    1958). Intervals are t intervals of the logs with seeds − 1 degrees of freedom; the standard
    error is that of a bootstrap over whole seeds, times √(n/(n−1)), because the percentiles of a
    bootstrap over few seeds are far too narrow.

    Args:
        batch_sizes: increasing.
        steps: to the target, or the bound; shape (seeds, batch sizes), or (batch sizes,).
        censored: of the same shape, true if `steps` is a bound.
        b_opt: the largest batch size on linear scaling; by default the largest that crossed with
            a fitted excess of tokens, B/B_crit, of at most an eighth.
        rng_seed: of the bootstrap.

    Raises:
        SweepError: if fewer than three batch sizes crossed, or the numbers are no step counts.
    """
    sizes, logs, bounds = _checked(batch_sizes, steps, censored)
    point, spread = _fit_with_spread(sizes, logs, bounds)
    resampled = _resampled(sizes, logs, bounds, spread, point, rng_seed)
    columns = zip(_parameters(point, sizes), resampled.T, strict=True)
    s_min, e_min, b_crit = (_estimate(value, column, len(logs)) for value, column in columns)
    if b_opt is None:
        linear = sizes[~bounds.all(0) & (sizes <= LINEAR_OVERHEAD * b_crit.value)]
        b_opt = float(linear.max()) if len(linear) else None
    residuals = logs - _curve(point, sizes)
    cells = np.where(bounds, np.nan, logs).mean(0)
    return StepsFit(
        s_min=s_min,
        e_min=e_min,
        b_crit=b_crit,
        b_overhead=b_crit.scaled(OVERHEAD),
        b_opt=b_opt,
        b_star=None if b_opt is None else b_crit.scaled(OVERHEAD, (1 + OVERHEAD) * b_opt),
        residuals=np.where(bounds, residuals.clip(0), residuals),
        slopes=np.diff(cells) / np.diff(np.log(sizes)),
        spread=spread,
    )


def _checked(
    batch_sizes: Sequence[float], steps: ArrayLike, censored: ArrayLike | None
) -> tuple[Floats, Floats, Flags]:
    """Return the batch sizes, log S and which are bounds, the last two (seeds, batch sizes)."""
    sizes, counts = np.asarray(batch_sizes, float), np.atleast_2d(np.asarray(steps, float))
    bounds = np.zeros(counts.shape, bool)
    if censored is not None:
        bounds = np.atleast_2d(np.asarray(censored, bool))
    shapes = {counts.shape, bounds.shape, (len(counts), len(sizes))}
    is_grid = len(shapes) == 1 and bool((np.diff(sizes, prepend=0) > 0).all())
    if not (is_grid and np.isfinite(counts).all() and (counts > 0).all()):
        raise SweepError(
            "Steps to a target must be positive and finite, one for each seed and increasing "
            f"batch size, got {counts.tolist()} at {sizes.tolist()}. Mark a trial that did not "
            "reach the target as censored, with the steps it took."
        )
    crossed = int((~bounds.all(0)).sum())
    if crossed < LEAST_BATCH_SIZES:
        raise SweepError(
            f"A fit must have {LEAST_BATCH_SIZES} batch sizes that reached the target, got "
            f"{crossed}. Raise the target or the budget, or add batch sizes."
        )
    return sizes, np.log(counts), bounds


def _curve(point: Floats, sizes: Floats) -> Floats:
    return np.asarray(np.logaddexp(point[0], point[1] - np.log(sizes)))


def _fit(
    sizes: Floats,
    logs: Floats,
    censored: Flags,
    spread: float,
    start: Floats,
    weights: Floats,
    tolerance: float = TOLERANCE,
) -> tuple[Floats, float]:
    """Return log S_min and log E_min by least squares with seeds weighted, and the cost.

    The residual of a bound is σ·√(−2 log Φ(z)), z = (log fit − log bound)/σ, σ the spread: it
    vanishes if the fit lies well above the bound and is the shortfall if it lies well below.
    """
    root = np.sqrt(weights)[:, None]

    def terms(point: Floats) -> Floats:
        gap = _curve(point, sizes) - logs
        if censored.any():
            gap[censored] = spread * np.sqrt(-2 * log_ndtr(gap[censored] / spread))
        return (root * gap).ravel()

    tol = tolerance
    result = least_squares(terms, start, method="lm", xtol=tol, ftol=tol, gtol=tol)
    return np.asarray(result.x), float(result.cost)


def _fit_with_spread(sizes: Floats, logs: Floats, censored: Flags) -> tuple[Floats, float]:
    """Alternate the fit with the spread: σ² is the mean of E r², over N − 2, as in EM."""
    weights, known = np.ones(len(logs)), ~censored
    spread, point = LEAST_SPREAD, np.array([logs.min(), (logs[:, 0] + math.log(sizes[0])).mean()])
    for turn in range(SPREAD_ROUNDS):
        point, left = _fit(sizes, logs, censored, spread, point, weights)
        if turn == 0:  # the published digits, unless they are not of the optimum
            start, tolerance = np.array(PUBLISHED_START), PUBLISHED_TOLERANCE
            early, more = _fit(sizes, logs, censored, spread, start, weights, tolerance)
            point = early if more <= left * (1 + CLEARLY) else point
        gap = _curve(point, sizes) - logs
        squares = float((gap[known] ** 2).sum())
        if turn > 0:
            z = gap[censored] / spread
            slope = np.exp(-(z**2) / 2 - log_ndtr(z)) / math.sqrt(2 * math.pi)
            squares += float((spread**2 * (1 - z * slope)).sum())
        last, spread = spread, max(math.sqrt(squares / max(gap.size - 2, 1)), LEAST_SPREAD)
        if not censored.any() or abs(spread - last) <= SPREAD_TOLERANCE * spread:
            break
    return point, spread


def _resampled(
    sizes: Floats, logs: Floats, censored: Flags, spread: float, point: Floats, rng_seed: int
) -> Floats:
    """Return the parameters of fits to resampled seeds, (resamples, 3); none for one seed."""
    seeds = len(logs)
    rng = np.random.default_rng(rng_seed)
    draws = rng.multinomial(seeds, [1 / seeds] * seeds, RESAMPLES if seeds > 1 else 0)
    weights, times = np.unique(draws, axis=0, return_counts=True)
    fits = [_fit(sizes, logs, censored, spread, point, row)[0] for row in weights]
    return np.array([_parameters(fit, sizes) for fit in fits]).reshape(-1, 3).repeat(times, axis=0)


def _parameters(point: Floats, sizes: Floats) -> tuple[float, float, float]:
    """Return the logs of S_min, E_min and B_crit; ±∞ if no batch size resolves a term."""
    s_min, e_min = float(point[0]), float(point[1])
    if e_min - s_min > math.log(sizes[-1] / NEGLIGIBLE):
        s_min = -math.inf
    elif e_min - s_min < math.log(sizes[0] * NEGLIGIBLE):
        e_min = -math.inf
    return s_min, e_min, e_min - s_min


def _estimate(log_value: float, resampled: Floats, seeds: int) -> Estimate:
    """Return exp(value ± t·se); the interval is (0, ∞) if a resample does not resolve it."""
    value = math.exp(log_value)
    if seeds == 1:
        return Estimate(value, math.nan, math.nan)
    if not np.isfinite([log_value, *resampled]).all():
        return Estimate(value, 0.0, math.inf)
    error = float(resampled.std()) * math.sqrt(seeds / (seeds - 1))
    half = float(student.ppf(0.975, seeds - 1)) * error
    with np.errstate(over="ignore"):
        low, high = np.exp([log_value - half, log_value + half])
    return Estimate(value, float(low), float(high))
