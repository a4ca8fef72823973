"""The best learning rate of a batch size: its interval, and whether the grid encloses it.

The loss is fitted by a quadratic in log η; the interval of its vertex is Fieller's (1954), which is
unbounded, here None, if noise could hide the curvature. See docs/statistics.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from sweep.analysis.statistics import ALPHA
from sweep.errors import SweepError

NEIGHBOURS = 2  # finite points on each side of the best that the quadratic is fitted to

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LearningRateOptimum:
    """The best rate of a grid of losses."""

    best: float | None  # the measured rate of the least loss; None if every trial diverged
    is_inside: bool  # whether it is strictly inside its grid
    rate: float | None  # η*, the vertex
    interval: tuple[float, float] | None  # of η*, 95 %; None without σ or if it is unbounded
    plateau: tuple[float, float] | None  # range of measured rates within one σ of the least loss
    no_rate: str = ""  # why there is no η*


@dataclass(frozen=True, eq=False)
class TunedRate:
    """The optimum of one batch size and the trials that it rests on."""

    batch_size: int
    # ascending in rate: learning_rate, state and loss (inf: diverged; NaN: pruned); with a target
    # the loss is the logarithm of the tokens to it (inf: not reached)
    trials: pd.DataFrame
    optimum: LearningRateOptimum
    is_full: bool  # whether the trials had as many tokens as the reports
    tried: int  # trials of this batch size in all
    failed: int  # of them, for a cause that says nothing about the rate
    has_no_result: int  # rates that were tried and neither completed nor diverged
    has_other_dimensions: bool  # β2 or weight decay were tuned too


def tuned_rates(
    rows: pd.DataFrame, sigma: float | None = None, degrees: float = math.inf
) -> tuple[TunedRate, ...]:
    """Return the optimum of each batch size; nothing if at most one rate was tried at each.

    Tuning trials count; in a table without them, every row.

    Args:
        rows: prepared as `sweep.analysis.rules.Evidence.rows`.
        sigma: standard deviation over seeds of a loss, or of log tokens; None if unknown.
        degrees: degrees of freedom of sigma.
    """
    is_tuning = rows["stage"] == "tune"
    trials = rows[is_tuning] if is_tuning.any() else rows[~rows["is_out_of_memory"]]
    if not trials.groupby("batch_size")["learning_rate"].nunique().max() > 1:
        return ()
    reports = rows[~is_tuning]
    return tuple(
        _tuned_rate(group, reports[reports["batch_size"] == batch], sigma, degrees or math.inf)
        for batch, group in trials.groupby("batch_size")
    )


def _tuned_rate(
    group: pd.DataFrame, reports: pd.DataFrame, sigma: float | None, degrees: float
) -> TunedRate:
    is_lost = group["is_failed"] & ~group["has_diverged"] & (group["state"] != "PRUNED")
    ended, most = group[~is_lost], float(group["token_budget"].max())
    is_tuning = bool((group["stage"] == "tune").all())
    is_full, dimensions = True, group[["adam_beta2", "weight_decay"]].nunique()
    if is_tuning and not math.isnan(most):
        # A rate that diverges early would have diverged later too.
        ended = ended[(ended["token_budget"] == most) | ended["has_diverged"]]
        is_full = not reports["token_budget"].max() > most
    has_other_dimensions = is_tuning and "policy" in group and bool((dimensions > 1).any())
    for name in dimensions[dimensions > 1].index if has_other_dimensions else ():
        winners = reports if len(reports) else ended[~ended["is_failed"]]
        if len(winners):
            best = winners["loss"].fillna(math.inf).to_numpy().argmin()
            ended = ended[ended[name] == winners[name].iloc[int(best)]]
    ended = ended.assign(loss=ended["loss"].mask(ended["has_diverged"], math.inf))
    table = ended.groupby("learning_rate", as_index=False).agg({"loss": "mean", "state": "first"})
    known = table.dropna(subset=["loss"])
    rates, losses = known["learning_rate"].to_list(), known["loss"].to_list()
    return TunedRate(
        batch_size=int(group["batch_size"].iloc[0]),
        trials=table,
        optimum=learning_rate_optimum(rates, losses, sigma, degrees),
        is_full=is_full,
        tried=len(group),
        failed=int(((group["state"] == "FAILED") & ~group["has_diverged"]).sum()),
        has_no_result=group["learning_rate"].nunique() - len(known),
        has_other_dimensions=has_other_dimensions,
    )


def is_inside(rates: Sequence[float], losses: Sequence[float]) -> bool:
    """Return True if both ends of the grid are worse than the best; a diverged trial is +∞."""
    _, values = _sorted(rates, losses)
    least = values.min(initial=math.inf)
    return bool(math.isfinite(least) and values[0] > least and values[-1] > least)


def learning_rate_optimum(
    rates: Sequence[float],
    losses: Sequence[float],
    sigma: float | None = None,
    degrees_of_freedom: float = math.inf,
) -> LearningRateOptimum:
    """Fit a quadratic in log η through the best rate and up to two finite points on each side.

    The interval covers the noise of seeds only, not a curve that is no parabola.

    Args:
        rates: distinct and positive, in any order.
        losses: one for each rate; not finite if the trial diverged.
        sigma: standard deviation of one of the losses.
        degrees_of_freedom: of sigma; infinite if it is known exactly.
    """
    inside = is_inside(rates, losses)
    grid, values = _sorted(rates, losses)
    is_finite = np.isfinite(values)
    grid, values = grid[is_finite], values[is_finite]
    if not len(values):
        return LearningRateOptimum(None, inside, None, None, None, "every trial diverged")
    index = int(np.argmin(values))
    near = slice(max(0, index - NEIGHBOURS), index + NEIGHBOURS + 1)
    plateau, reach = None, None
    if sigma is not None:
        plateau = _plateau(grid, values, index, sigma)
        reach = sigma * float(stdtrit(degrees_of_freedom, 1 - ALPHA / 2))
    rate, interval, no_rate = _vertex(np.log(grid[near]), values[near], reach)
    return LearningRateOptimum(float(grid[index]), inside, rate, interval, plateau, no_rate)


def _sorted(rates: Sequence[float], losses: Sequence[float]) -> tuple[Floats, Floats]:
    """Return rates and losses by ascending rate, +∞ for every loss that is not finite."""
    grid, values = np.array(rates, dtype=float), np.array(losses, dtype=float)
    is_grid = bool((grid > 0).all()) and len(set(grid.tolist())) == len(grid)
    if not is_grid or grid.shape != values.shape:
        raise SweepError(
            f"Rates must be positive and distinct, one for each of {len(values)} losses, got "
            f"{grid.tolist()}. Give the mean loss of a rate with several seeds."
        )
    order = np.argsort(grid)
    return grid[order], np.where(np.isfinite(values), values, math.inf)[order]


def _plateau(grid: Floats, values: Floats, index: int, sigma: float) -> tuple[float, float]:
    is_far = values > values[index] + sigma
    low = index - int(np.argmax(np.append(is_far[index::-1], True))) + 1
    high = index + int(np.argmax(np.append(is_far[index:], True))) - 1
    return float(grid[low]), float(grid[high])


def _vertex(
    log_rates: Floats, values: Floats, reach: float | None
) -> tuple[float | None, tuple[float, float] | None, str]:
    """Return η*, its interval (`reach` is σ times its quantile) and, without η*, the reason."""
    if len(log_rates) < 3:
        return None, None, "fewer than three rates have a finite loss"
    centre = float(log_rates.mean())
    x = log_rates - centre
    inverse = np.linalg.pinv(np.stack([np.ones_like(x), x, x**2], axis=1))  # (3, points)
    _, slope, curvature = (inverse @ values).tolist()
    if curvature <= 0:
        return None, None, "the curvature is not positive"
    vertex = centre - slope / (2 * curvature)
    if not log_rates[0] <= vertex <= log_rates[-1]:
        return None, None, "the vertex lies outside the fitted rates"
    if reach is None:
        return math.exp(vertex), None, ""
    covariance = (inverse @ inverse.T)[1:, 1:]  # of slope and curvature, over σ²
    roots = _fieller(slope, curvature, reach**2 * covariance)
    interval = roots and (math.exp(centre + roots[0]), math.exp(centre + roots[1]))
    return math.exp(vertex), interval, ""


def _fieller(slope: float, curvature: float, spread: Floats) -> tuple[float, float] | None:
    """Return where b + 2a·x could be 0: (b + 2a·x)² ≤ q²·Var(b + 2a·x); None if unbounded.

    Args:
        slope: b.
        curvature: a.
        spread: q² times the covariance of (b, a).
    """
    square = 4 * (curvature**2 - spread[1, 1])
    if square <= 0:
        return None
    linear = 4 * (slope * curvature - spread[0, 1])
    root = math.sqrt(max(0.0, linear**2 - 4 * square * (slope**2 - spread[0, 0])))
    return (-linear - root) / (2 * square), (-linear + root) / (2 * square)
