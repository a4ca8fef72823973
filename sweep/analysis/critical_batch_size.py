"""The critical batch size by steps to a target and by noise."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.polynomial import Polynomial
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.special import log_ndtr, stdtrit

from sweep.analysis.answer import typical_time
from sweep.analysis.frames import Estimate, SweepTables, curves_by_trial, report_trials
from sweep.decision.curves import Floats
from sweep.errors import SweepError
from sweep.plan.target import crossing_tokens, smoothed
from sweep.trial.status import State

RESAMPLES = 1000
TAILS = (0.025, 0.975)
CELL, LEAST_RECORDS = ["label", "batch_size"], 4
OVERHEAD = 0.2  # more steps than linear scaling would take, at B*
NEGLIGIBLE = 1e-5  # a term with a smaller share of S at every batch size was not measured
LEAST_BATCH_SIZES = 3  # two parameters and a residual
SPREAD_ROUNDS, SPREAD_TOLERANCE, LEAST_SPREAD = 100, 1e-3, 1e-12
COLUMNS = (
    *("label", "batch_size", "seed", "learning_rate", "tokens", "steps", "seconds", "is_censored"),
    *("is_early", "interpolation_error", "trained_tokens", "has_curve", "is_known", "id"),
)
EXCESSES = (0.2, 1.0)  # more tokens than the least
FLAT = math.log(1.05)  # growth of the tokens from the smallest batch size to the next
Data = tuple[Floats, Floats, NDArray[np.bool_]]  # batch sizes, log steps, whether censored


@dataclass(frozen=True, eq=False)
class StepsFit:
    """The fitted curve, with 95 % intervals; with one seed these are NaN."""

    s_min: Estimate  # steps; 0 if the steps still fall as 1/B at the largest batch size
    e_min: Estimate  # sequences; 0 if the steps do not depend on the batch size
    b_crit: Estimate  # sequences; infinite if s_min is 0
    b_overhead: Estimate  # 0.2·B_crit: takes 20 % more tokens than the least
    b_opt: float | None  # the largest batch size up to B_crit/8: it still scales linearly
    b_star: Estimate | None  # 20 % more steps than linear scaling from b_opt, which is held fixed
    residuals: Floats  # (seeds, batch sizes): log S − log fit; of a bound its least, 0 or more
    slopes: Floats  # d log S / d log B between neighbours, over seeds; NaN next to a censored one
    spread: float  # standard deviation of log S about the curve

    @property
    def largest_misfit(self) -> float:
        """The largest mean residual of a batch size, in absolute value."""
        return float(np.abs(self.residuals.mean(0)).max())


@dataclass(frozen=True, eq=False)
class StepsCurve:
    target: float
    # COLUMNS; `tokens`, `steps`, `seconds` to the target, or the bound; NaN if they are not known
    trials: pd.DataFrame
    batch_sizes: tuple[int, ...]  # those fitted
    fit: StepsFit | None
    no_fit: str  # reason, if there is no fit

    @property
    def excess(self) -> dict[float, Estimate | None]:
        """Batch sizes at which the tokens exceed their least by each of EXCESSES, as measured."""
        sizes, logs = self._log_tokens
        if not len(logs):
            return dict.fromkeys(EXCESSES)
        return {excess: _excess(sizes, logs, math.log1p(excess)) for excess in EXCESSES}

    @property
    def is_excess_bound(self) -> bool:
        """Whether smaller batch sizes would take fewer tokens, so that `excess` is too large."""
        means = self._log_tokens[1].mean(0) if len(self._log_tokens[1]) else np.zeros(0)
        return len(means) > 1 and means.argmin() == 0 and means[1] - means[0] > FLAT

    @property
    def _log_tokens(self) -> tuple[Floats, Floats]:
        """Log batch sizes, (k,), and log tokens to the target of their common seeds, (seeds, k)."""
        is_whole = self.trials["tokens"].notna() & ~self.trials["is_censored"]
        whole = self.trials[is_whole.groupby(self.trials["batch_size"]).transform("all")]
        tokens = whole.pivot_table(index="seed", columns="batch_size", values="tokens").dropna()
        return np.log(tokens.columns.to_numpy(float)), np.log(tokens.to_numpy(float))

    def covers(self, batch_size: float) -> bool:
        """Return True if a batch size lies strictly between the smallest and largest of the fit."""
        return self.batch_sizes[0] < batch_size < self.batch_sizes[-1]


def steps_to_target(sweep: SweepTables, target: float | None = None) -> pd.DataFrame:
    """Return one row per reporting trial that ended: where it reached the target, or a bound.

    A trial that was pruned or used up its budget is censored: its last evaluation is a bound. One
    below the target at its first evaluation is early. Diverged trials have no row. The target is
    the sweep's, or a higher one, which the same trials passed before. A trial without its curve has
    the tokens to the sweep's target that it recorded; a bound, or another target, is not known.
    """
    own_target, window = sweep.plan.settings.target, sweep.plan.settings.evaluation.window
    target = target or own_target
    assert target is not None
    curves = {trial: (t, v) for trial, t, v in curves_by_trial(sweep, "valid/loss")}
    trials, rows = report_trials(sweep.trials), []
    for row in trials[trials["state"].isin([State.COMPLETE, State.PRUNED])].to_dict("records"):
        seconds = np.nan
        if row["state"] == State.COMPLETE:
            seconds = row["seconds_training"] / row["tokens"]
        row |= {"is_censored": False, "is_early": False, "interpolation_error": math.nan}
        row["has_curve"] = row["id"] in curves
        if row["has_curve"]:
            evaluated, losses = curves[row["id"]]
            crossed = crossing_tokens(evaluated, losses, target, window)
            means_at = smoothed(evaluated, losses, window)[0]  # a mean lies before its last point
            row["tokens"] = crossed or float((*evaluated[:1], *means_at)[-1])
            row["is_censored"] = crossed is None
            row["is_early"] = crossed is not None and crossed <= means_at[0]
            row["interpolation_error"] = interpolation_error(evaluated, losses, target, window)
            row["trained_tokens"] = float(evaluated[-1])
        else:
            row["tokens"] = row["tokens_to_target"] if target == own_target else math.nan
            row["is_censored"] = target == own_target and not row["tokens_to_target"] > 0
        row["is_known"] = row["has_curve"] or target == own_target
        row["seconds"] = seconds * row["tokens"]
        row["steps"] = row["tokens"] / (row["batch_size"] * sweep.plan.tokens_per_sequence)
        rows.append(row)
    kinds = dict.fromkeys(("is_censored", "is_early", "has_curve", "is_known"), bool)
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(kinds)
    return table.astype(dict.fromkeys(("tokens", "steps", "seconds"), float))


def interpolation_error(
    tokens: Sequence[float], losses: Sequence[float], target: float, window: int = 1
) -> float:
    """Return the relative error of a crossing that interpolation may make; NaN without one.

    It is the difference to the crossing of the parabola, in log tokens, through the evaluations
    before and after the crossing and the next one.
    """
    linear = crossing_tokens(tokens, losses, target, window)
    when, values = smoothed(tokens, losses, window)
    k = int(np.searchsorted(when, linear)) if linear else 0
    if not 0 < k < len(when) - 1:
        return math.nan
    logs = np.log(when[k - 1 : k + 2])
    # The parabola of log tokens as a function of the loss; equal losses have none.
    if len(set(values[k - 1 : k + 2])) < 3:
        return math.nan
    curved = float(Polynomial.fit(values[k - 1 : k + 2] - target, logs, 2)(0.0))
    return abs(math.expm1(curved - math.log(linear or 1.0)))


def _excess(log_sizes: Floats, log_tokens: Floats, excess: float) -> Estimate | None:
    """Interpolate the log batch size above the best at which the log tokens exceed the least."""

    def crossing(means: Floats) -> float:
        best = int(means.argmin())
        above = np.flatnonzero(means[best:] - means[best] >= excess)
        if not len(above):
            return math.inf
        k = best + int(above[0])
        share = (means[best] + excess - means[k - 1]) / (means[k] - means[k - 1])
        return float(log_sizes[k - 1] + share * (log_sizes[k] - log_sizes[k - 1]))

    value, seeds = crossing(log_tokens.mean(0)), len(log_tokens)
    if not math.isfinite(value):
        return None
    draws = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    return _estimate(value, np.array([crossing(log_tokens[draw].mean(0)) for draw in draws]), seeds)


def fit_curve(trials: pd.DataFrame, target: float) -> StepsCurve:
    """Fit the curve through the seeds that every batch size of a policy has."""
    steps = trials.pivot_table(index="seed", columns="batch_size", values="steps").dropna()
    sizes = tuple(int(size) for size in steps.columns)
    without_bound = int((trials["is_censored"] & trials["steps"].isna()).sum())
    if trials.empty:
        no_fit = "No trial has ended."
    elif trials["steps"].isna().all():
        no_fit = f"The curves of all {len(trials)} trials are missing."
    elif without_bound:
        no_fit = f"{without_bound} trials did not reach the target, and their curves are missing."
    elif steps.empty:
        no_fit = "No seed ended at every batch size."
    else:
        no_fit = ""
    if no_fit:
        return StepsCurve(target, trials, (), None, no_fit)
    bounds = trials.pivot_table(index="seed", columns="batch_size", values="is_censored")
    try:
        fit = fit_steps(sizes, steps.to_numpy(), bounds.loc[steps.index] > 0)
        return StepsCurve(target, trials, sizes, fit, "")
    except SweepError as error:
        return StepsCurve(target, trials, sizes, None, str(error))


def losses_at(sweep: SweepTables, trials: pd.DataFrame, measure: str) -> tuple[float, pd.DataFrame]:
    """Compare losses at an equal number of `tokens`, `steps` or `seconds` of training.

    The number is the most that every trial reached. The schedule knows no horizon, so a shorter
    trial would have had the same loss. Batch sizes whose seconds are not known are left out, and
    trials without a curve.
    """
    curves = {trial: (t, v) for trial, t, v in curves_by_trial(sweep, "valid/loss")}
    trials = trials[trials["has_curve"]]
    if measure == "seconds":
        times = trials.groupby("batch_size")["seconds"].agg(typical_time).dropna()
        trials = trials[trials["batch_size"].isin(times.index)]
    trials = trials.assign(per_token=trials[measure] / trials["tokens"]).dropna(subset="per_token")
    common = float((trials["trained_tokens"] * trials["per_token"]).min())
    trials["loss"] = np.nan  # no loss is known before the first evaluation
    for k, row in trials.iterrows():
        evaluated, losses = curves[row["id"]]
        tokens = common / row["per_token"]
        if tokens >= evaluated[0]:
            trials.loc[k, "loss"] = np.interp(math.log(tokens), np.log(evaluated), losses)
    table = trials.dropna(subset="loss").groupby("batch_size")["loss"]
    return common, table.agg(loss="mean", loss_sd="std", seeds="count").reset_index()


def fit_steps(
    batch_sizes: Sequence[float], steps: ArrayLike, censored: ArrayLike | None = None
) -> StepsFit:
    """Fit S(B) = S_min + E_min/B by least squares on log S, both parameters in logs.

    A censored S is a lower bound and enters one-sidedly, by the likelihood of a normal log S (Tobin
    1958). Intervals are t intervals of the logs; the standard error is that of a bootstrap over
    whole seeds, times √(n/(n−1)).
    `steps` has the shape (seeds, batch sizes) or (batch sizes,), with batch sizes increasing.
    """
    sizes, logs = np.asarray(batch_sizes, float), np.log(np.atleast_2d(np.asarray(steps, float)))
    bounds = np.zeros(logs.shape, bool) | (False if censored is None else np.asarray(censored))
    crossed = ~bounds.all(0)
    if crossed.sum() < LEAST_BATCH_SIZES:
        raise SweepError(
            f"A fit must have {LEAST_BATCH_SIZES} batch sizes that reached the target, got "
            f"{crossed.sum()}. Raise the target or the budget, or add batch sizes."
        )
    data, seeds = (sizes, logs, bounds), len(logs)
    point, spread = _fit_with_spread(data)
    resamples = RESAMPLES if seeds > 1 else 0
    draws = np.random.default_rng(0).multinomial(seeds, [1 / seeds] * seeds, resamples)
    weights, counts = np.unique(draws, axis=0, return_counts=True)
    fits = [_fit(data, spread, point, row)[0] for row in weights]
    resampled = np.array([_parameters(fit, sizes) for fit in fits]).reshape(-1, 3)
    columns = zip(_parameters(point, sizes), resampled.repeat(counts, axis=0).T, strict=True)
    s_min, e_min, b_crit = (_estimate(value, column, seeds) for value, column in columns)
    b_overhead = Estimate(*(OVERHEAD * end for end in b_crit))
    b_opt = max(sizes[crossed & (sizes <= b_crit.value / 8)].tolist(), default=None)
    b_star = b_opt and Estimate(*((1 + OVERHEAD) * b_opt + end for end in b_overhead))
    residuals = logs - _curve(point, sizes)
    residuals = np.where(bounds, residuals.clip(0), residuals)
    slopes = np.diff(np.where(bounds, np.nan, logs).mean(0)) / np.diff(np.log(sizes))
    return StepsFit(s_min, e_min, b_crit, b_overhead, b_opt, b_star, residuals, slopes, spread)


def _curve(point: Floats, sizes: Floats) -> Floats:
    return np.asarray(np.logaddexp(point[0], point[1] - np.log(sizes)))


def _fit(
    data: Data, spread: float, start: Floats, weights: Floats, tol: float = 1e-12
) -> tuple[Floats, float]:
    """Return log S_min and log E_min by least squares with seeds weighted, and the cost.

    The residual of a bound is σ·√(−2 log Φ(z)), z = (log fit − log bound)/σ, σ the spread: it
    vanishes if the fit lies well above the bound and is the shortfall if it lies well below.
    """
    (sizes, logs, censored), root = data, np.sqrt(weights)[:, None]

    def terms(point: Floats) -> Floats:
        gap = _curve(point, sizes) - logs
        gap[censored] = spread * np.sqrt(-2 * log_ndtr(gap[censored] / spread))
        return (root * gap).ravel()

    result = least_squares(terms, start, method="lm", xtol=tol, ftol=tol, gtol=tol)
    return np.asarray(result.x), float(result.cost)


def _fit_with_spread(data: Data) -> tuple[Floats, float]:
    """Alternate the fit with the spread: σ² is the mean of E r², over N − 2, as in EM."""
    sizes, logs, censored = data
    weights, spread = np.ones(len(logs)), LEAST_SPREAD
    start = np.array([logs.min(), (logs[:, 0] + math.log(sizes[0])).mean()])
    point, cost = _fit(data, spread, start, weights)
    # The start and tolerance of scipy's `curve_fit` give the published digits; they are kept unless
    # another optimum is better.
    early, more = _fit(data, spread, np.ones(2), weights, 1e-8)
    point = early if more <= cost * (1 + 1e-9) else point
    gap = _curve(point, sizes) - logs
    squares = float((gap[~censored] ** 2).sum())
    spread = max(math.sqrt(squares / max(gap.size - 2, 1)), LEAST_SPREAD)
    for _ in range(SPREAD_ROUNDS if censored.any() else 0):
        point, _ = _fit(data, spread, point, weights)
        gap = _curve(point, sizes) - logs
        z = gap[censored] / spread
        slope = np.exp(-(z**2) / 2 - log_ndtr(z)) / math.sqrt(2 * math.pi)
        squares = float((gap[~censored] ** 2).sum() + (spread**2 * (1 - z * slope)).sum())
        last, spread = spread, max(math.sqrt(squares / max(gap.size - 2, 1)), LEAST_SPREAD)
        if abs(spread - last) <= SPREAD_TOLERANCE * spread:
            break
    return point, spread


def _parameters(point: Floats, sizes: Floats) -> tuple[float, float, float]:
    """Return the logs of S_min, E_min and B_crit; ±∞ if no batch size resolves a term."""
    s_min, e_min = point.tolist()
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
    half = float(stdtrit(seeds - 1, TAILS[1])) * error
    with np.errstate(over="ignore"):
        low, high = np.exp([log_value - half, log_value + half])
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True)
class NoiseScale:
    """B_simple over some steps; each number with its 95 % interval."""

    value: Estimate | None  # sequences; None is unresolved: the interval of square contains 0
    trace: Estimate  # tr Σ of the gradient of one sequence
    square: Estimate  # |G|²; may be negative, because it is not clamped
    records: int


def noise_scale(traces: Sequence[float], squares: Sequence[float]) -> NoiseScale:
    """Average tr Σ̂ and Ĝ² of four or more records, in order, separately; then divide.

    Intervals are those of a bootstrap of moving blocks of ⌊√n⌋ records that wrap round at the end
    (Politis & Romano 1992), widened by t/1.96·√(m/(m−1)), t with m − 1 degrees of freedom, for the
    m blocks.
    """
    values = np.array([traces, squares], float).T  # (records, 2)
    length = math.isqrt(len(values))
    blocks = len(values) // length
    wrapped = np.concatenate([values, values[: length - 1]])
    windows = np.lib.stride_tricks.sliding_window_view(wrapped, length, axis=0).mean(-1)
    starts = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, blocks))
    means = windows[starts].mean(1)  # (resamples, 2)
    widening = float(stdtrit(blocks - 1, TAILS[1]) / stdtrit(math.inf, TAILS[1]))
    widening *= math.sqrt(blocks / (blocks - 1))
    mean = values.mean(0)
    ends = mean + widening * (np.quantile(means, TAILS, axis=0) - mean)
    trace, square = (Estimate(*numbers) for numbers in np.stack([mean, *ends], axis=1).tolist())
    ratio = None
    if square.low > 0:
        ratios = np.full(len(means), np.inf)
        np.divide(means[:, 0], means[:, 1], out=ratios, where=means[:, 1] > 0)
        value = trace.value / square.value
        ends = np.quantile(ratios, TAILS, method="nearest").tolist()
        ratio = Estimate(value, *(value * (end / value) ** widening for end in ends))
    return NoiseScale(ratio, trace, square, len(values))


def noise_scales(sweep: SweepTables) -> Iterator[dict[str, Any]]:
    """Yield each cell's noise scale over each half of training, all seeds together."""
    names = {"noise/trace": "trace", "noise/square": "square"}
    if not set(names) <= set(sweep.curves):
        return
    trials = report_trials(sweep.trials)[["id", "seed", *CELL]]
    measured = sweep.curves.rename(columns=names)[["id", "tokens", "trace", "square"]].dropna()
    measured = measured.astype({"id": object}).merge(trials, on="id")
    measured = measured.sort_values(["seed", "tokens"])

    for cell, rows in measured.groupby(CELL):
        cell_columns = dict(zip(CELL, cell, strict=True))
        halves = pd.cut(rows["tokens"], 2, labels=False)
        for half, part in rows.groupby(halves):
            if len(part) < LEAST_RECORDS:
                continue
            scale = noise_scale(part["trace"].to_list(), part["square"].to_list())
            yield {**cell_columns, "is_late": half == 1, "scale": scale}
