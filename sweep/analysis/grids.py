"""Decide about batch sizes from one training at each of several learning rates.

Without further seeds the noise is that of the losses about the curves over rates. What a seed adds
to all losses of a batch size is not in it, so that such an answer is provisional.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sweep.analysis.answer import points_of
from sweep.analysis.tuned_rates import TunedRate
from sweep.decision.curves import TIE, Floats, possible_curves
from sweep.decision.decision import ALPHA, Decision, moderated
from sweep.decision.rates import RatePoints, bound_rates, noise_of_residuals


@dataclass(frozen=True)
class NoiseOfGrids:
    """The noise of a loss about the curves over rates."""

    deviation: float  # NaN without degrees of freedom
    degrees: int  # degrees of freedom at all batch sizes together


def decide_best_of_grids(
    finals: pd.DataFrame, rates: Mapping[tuple[str, int], TunedRate], error: float = ALPHA
) -> tuple[pd.Index, Decision, NoiseOfGrids] | None:
    """Decide as `decide_trials`, from one seed at each of several rates, by the noise about curves.

    `finals` has one row of each label and batch size, that of the best rate.
    """
    rows = finals.set_index(["label", "batch_size"]).sort_index()
    values = rows["value"].to_numpy(float)
    if np.isfinite(values).sum() < 2:
        return None
    log_rates = np.log(rows["learning_rate"].to_numpy(float))
    decision, noise = decide_grids(values, points_of(rows.index, rates), log_rates, error)
    return rows.index, decision, noise


def describe_noise(noise: NoiseOfGrids) -> str:
    if not noise.degrees:
        return (
            "Each rate was trained once, and the curves over the rates leave no residuals, so the "
            "noise is not known. Train three seeds, or at least five rates near the best of a "
            "batch size."
        )
    return (
        "Each rate was trained once, so the losses are the lowest points of the curves over the "
        f"rates, and the noise is that of the trials about these ({noise.deviation:.2g}, "
        f"{noise.degrees} degrees of freedom), taken as similar at all batch sizes; what a seed "
        "changes at all rates of a batch size is not in it."
    )


def decide_grids(
    losses: Floats, points: RatePoints, log_rates: Floats, error: float = ALPHA
) -> tuple[Decision, NoiseOfGrids]:
    """Compute the interval of every batch size's gap to the best, for one sweep.

    The loss of a batch size is the lowest point of its curve, because the least of many measured
    losses is too low; without a curve it is the measured one, whose differences are unbounded. All
    differences together have the critical value of Tukey's studentized range.

    Args:
        losses: the least that was measured, (k,); infinite or NaN if there is none.
        points: losses of the rates near the best, (k,).
        log_rates: those of the least losses, (k,).
        error: probability that the interval of some difference over the noise is wrong.

    Returns:
        The decision, and the noise. Without residuals all differences are unbounded.
    """
    is_compared = np.isfinite(losses)
    compared = max(2, int(is_compared.sum()))
    curves = possible_curves(points.curve, np.zeros(losses.shape))
    squares, degrees = noise_of_residuals(points, curves)
    total = int(degrees.sum())
    if squares.sum() <= TIE * curves.fit.total.sum():
        total = 0  # losses that lie on curves but for the accuracy of these show no noise
    pooled = float(squares.sum()) / total if total else np.nan
    own = squares / np.where(degrees > 0, degrees, np.nan)
    variance = moderated(own, np.full(losses.shape, pooled), degrees)

    lowest = np.where(curves.has_fit, curves.optimum, log_rates)
    rates = bound_rates(points, variance, lowest, compared)
    mean = np.where(curves.has_fit, rates.level, losses)
    mean = np.where(is_compared, mean, np.nan)
    variances = variance[:, None] + variance[None, :]
    half_width = np.full(variances.shape, np.inf)
    if total:
        half_width = _critical_value(compared, total, error) * np.sqrt(variances)
    decision = Decision(
        mean=mean,
        variance=variance,
        difference=mean[:, None] - mean[None, :],
        variance_of_difference=variances,
        half_width=half_width,
        rates=rates,
    )
    return decision, NoiseOfGrids(float(np.sqrt(pooled)), total)


def _critical_value(k: int, degrees: int, error: float) -> float:
    """Return that of the largest difference of k means over its standard error."""
    from scipy.stats import studentized_range  # takes a second, and only grids need it

    return float(studentized_range.ppf(1 - error, k, degrees) / np.sqrt(2))
