"""The best learning rate of a batch size and its interval: docs/statistics.md."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.polynomial import Polynomial
from scipy.special import stdtrit

from sweep.analysis.statistics import ALPHA, Floats

NEIGHBOURS = 2  # finite points on each side of the best that the quadratic is fitted to
Interval = tuple[float, float]


@dataclass(frozen=True)
class LearningRateOptimum:
    best: float | None  # the measured rate of the least loss; None if every trial diverged
    is_inside: bool  # whether both ends of the grid are worse; a diverged trial is +∞
    curve: Polynomial | None = None  # the fitted quadratic: loss of log η, in the fitted range
    rate: float | None = None  # η*, its vertex
    interval: Interval | None = None  # 95 % interval of η*; None without σ or if unbounded
    plateau: Interval | None = None  # range of measured rates within one σ of the least loss


@dataclass(frozen=True, eq=False)
class TunedRate:
    batch_size: int
    # ascending in rate: learning_rate, state and loss (inf: diverged; NaN: pruned); with a target
    # the loss is the logarithm of the tokens to it (inf: not reached)
    trials: pd.DataFrame
    optimum: LearningRateOptimum
    is_full: bool  # whether the trials had as many tokens as the reports
    tried: int  # trials of this batch size in all
    rates_without_result: int  # rates that were tried and neither completed nor diverged
    has_other_dimensions: bool  # β2 or weight decay were tuned too


def tuned_rates(rows: pd.DataFrame, sigma: float | None, degrees: float) -> tuple[TunedRate, ...]:
    """Return the optimum of each batch size; nothing if at most one rate was tried at each."""
    is_tuning = rows["stage"] == "tune"
    trials = rows[is_tuning] if is_tuning.any() else rows[~rows["is_out_of_memory"]]
    if not trials.groupby("batch_size")["learning_rate"].nunique().max() > 1:
        return ()
    rates = []
    for batch_size, group in trials.groupby("batch_size"):
        reports = rows[~is_tuning & (rows["batch_size"] == batch_size)]
        has_no_loss = group["is_failed"] & ~group["has_diverged"] & (group["state"] != "PRUNED")
        ended = group[~has_no_loss]
        most = group["token_budget"].max()
        dimensions: list[str] = []
        if is_tuning.any():
            # A rate that diverges early would have diverged later too.
            ended = ended[~(ended["token_budget"] < most) | ended["has_diverged"]]
            if "policy" in group:
                dimensions = [n for n in ("adam_beta2", "weight_decay") if group[n].nunique() > 1]
        winners = reports if len(reports) else ended[~ended["is_failed"]]
        if len(winners):
            best = winners.iloc[winners["loss"].fillna(math.inf).to_numpy().argmin()]
            for name in dimensions:
                ended = ended[ended[name] == best[name]]
        ended = ended.assign(loss=ended["loss"].mask(ended["has_diverged"], math.inf))
        by_rate = ended.groupby("learning_rate", as_index=False)
        table = by_rate.agg({"loss": "mean", "state": "first"})
        points = table.dropna(subset=["loss"])
        grid = points["learning_rate"].to_list()
        losses = points["loss"].to_list()
        rates.append(
            TunedRate(
                batch_size=int(group["batch_size"].iloc[0]),
                trials=table,
                optimum=learning_rate_optimum(grid, losses, sigma, degrees or math.inf),
                is_full=not (is_tuning.any() and reports["token_budget"].max() > most),
                tried=len(group),
                rates_without_result=group["learning_rate"].nunique() - len(points),
                has_other_dimensions=bool(dimensions),
            )
        )
    return tuple(rates)


def learning_rate_optimum(
    rates: list[float], losses: list[float], sigma: float | None = None, degrees: float = math.inf
) -> LearningRateOptimum:
    """Fit a quadratic in log η through the best rate and up to two finite points on each side.

    The interval of its vertex is Fieller's (1954), for noise of the standard deviation `sigma`
    alone; it is None if noise could hide the curvature. A diverged trial's loss is not finite.
    """
    order = np.argsort(rates)
    grid = np.asarray(rates, float)[order]
    values = np.asarray(losses, float)[order]
    is_finite = np.isfinite(values)
    if not is_finite.any():
        return LearningRateOptimum(None, False)
    least = values[is_finite].min()
    is_inside = not (values[0] <= least or values[-1] <= least)  # NaN is worse too
    grid, values = grid[is_finite], values[is_finite]
    best = int(values.argmin())
    near = slice(max(0, best - NEIGHBOURS), best + NEIGHBOURS + 1)
    reach = math.nan
    plateau = None
    if sigma is not None:
        reach = sigma * float(stdtrit(degrees, 1 - ALPHA / 2))
        ends = np.flatnonzero(np.r_[True, values > least + sigma, True]) - 1  # ends of the plateau
        after = int(np.searchsorted(ends, best))
        plateau = (float(grid[ends[after - 1] + 1]), float(grid[ends[after] - 1]))
    fit = _fit(np.log(grid[near]), values[near], reach)
    return LearningRateOptimum(float(grid[best]), is_inside, *fit, plateau)


def _fit(
    log_rates: Floats, values: Floats, reach: float
) -> tuple[Polynomial | None, float | None, Interval | None]:
    """Return the quadratic, η* and its interval; `reach` is σ times its quantile, or NaN."""
    if len(log_rates) < 3:
        return None, None, None
    centre = float(log_rates.mean())
    x = log_rates - centre
    inverse = np.linalg.pinv(np.stack([np.ones_like(x), x, x**2], axis=1))  # (3, points)
    constant, slope, curvature = (inverse @ values).tolist()
    vertex = centre - slope / (2 * curvature) if curvature > 0 else math.nan
    if not log_rates[0] <= vertex <= log_rates[-1]:
        return None, None, None
    curve = Polynomial([constant, slope, curvature], log_rates[[0, -1]], x[[0, -1]])
    # Fieller: the slope b + 2a·x could be 0 if (b + 2a·x)² ≤ q²·Var(b + 2a·x).
    spread = reach**2 * (inverse @ inverse.T)[1:, 1:]  # covariance of slope and curvature, times q²
    square = 4 * (curvature**2 - spread[1, 1])
    if not square > 0:
        return curve, math.exp(vertex), None
    linear = 4 * (slope * curvature - spread[0, 1])
    root = math.sqrt(max(0.0, linear**2 - 4 * square * (slope**2 - spread[0, 0])))
    low = (-linear - root) / (2 * square)
    high = (-linear + root) / (2 * square)
    return curve, math.exp(vertex), (math.exp(centre + low), math.exp(centre + high))
