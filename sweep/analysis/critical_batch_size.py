"""The critical batch size, by steps to a target."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.polynomial import Polynomial
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.special import log_ndtr, stdtrit

from sweep.analysis.tables import Estimate, SweepTables, curves_by_trial, final_trials
from sweep.config.experiment import EvaluationSettings
from sweep.decision.curves import Floats
from sweep.decision.trials import End
from sweep.errors import SweepError
from sweep.plan.course import Course
from sweep.plan.target import crossing_tokens, smoothed

RESAMPLES = 1000
ROUNDING = 1e-9  # relative error of recorded tokens
TAILS = (0.025, 0.975)
OVERHEAD = 0.2  # more steps than linear scaling would take, at B*
NEGLIGIBLE = 1e-5  # a term with a smaller share of S at every batch size was not measured
LEAST_BATCH_SIZES = 3  # two parameters and a residual
FIT_TOLERANCE = 1e-12  # relative, of the parameters, the squares and their gradient
SPREAD_ROUNDS = 100
SPREAD_TOLERANCE = 1e-3
LEAST_SPREAD = 1e-12
COLUMNS = (
    *("label", "batch_size", "seed", "learning_rate", "tokens", "steps", "is_censored"),
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
    # COLUMNS; `tokens` and `steps` to the target, or the bound; NaN if they are not known
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
        _, log_tokens = self._log_tokens
        if not len(log_tokens):
            return False
        means = log_tokens.mean(0)
        if len(means) < 2 or means.argmin() > 0:
            return False
        return bool(means[1] - means[0] > FLAT)

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
    """Return one row per final trial that ended: where it reached the target, or a bound.

    A trial that was pruned or used up its budget is censored: its last evaluation is a bound. One
    below the target at its first evaluation is early. Diverged trials have no row. The target is
    the sweep's, or a higher one, which the same trials passed before. A trial without its curve has
    the tokens to the sweep's target that it recorded; a bound, or another target, is not known.
    """
    own_target = sweep.plan.settings.target
    if not target:
        target = own_target
    assert target is not None
    is_own_target = target == own_target
    window = sweep.plan.settings.evaluation.window
    curves = {trial: (t, v) for trial, t, v in curves_by_trial(sweep, "valid/loss")}
    trials = final_trials(sweep.trials)
    has_ended = trials["trial_end"].isin([End.COMPLETE, End.PRUNED])

    courses = {str(row.id): sweep.plan.course(row) for row in sweep.plan.known_trials}
    rows = []
    for row in trials[has_ended].to_dict("records"):
        row["has_curve"] = row["id"] in curves
        row["is_known"] = row["has_curve"] or is_own_target
        row["is_early"] = False
        row["interpolation_error"] = math.nan
        if row["has_curve"]:
            row |= _crossing(*curves[row["id"]], target=target, window=window)
        elif is_own_target:
            row["tokens"] = row["tokens_to_target"]
            row["is_censored"] = not row["tokens_to_target"] > 0
            first = _first_evaluation(courses[row["id"]], sweep.plan.settings.evaluation)
            row["is_early"] = row["tokens"] <= first * (1 + ROUNDING)
        else:
            row["tokens"] = math.nan
            row["is_censored"] = False

        row["steps"] = courses[row["id"]].step_at(row["tokens"])
        rows.append(row)

    kinds = dict.fromkeys(("is_censored", "is_early", "has_curve", "is_known"), bool)
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(kinds)
    return table.astype(dict.fromkeys(("tokens", "steps"), float))


def _first_evaluation(course: Course, evaluation: EvaluationSettings) -> float:
    """Return the tokens of the first evaluation, or of the first mean over a window of them."""
    steps = course.milestones(evaluation.points)[: evaluation.window]
    return float(np.exp(np.mean(np.log([course.tokens_at(step) for step in steps]))))


def _crossing(
    tokens: Sequence[float], losses: Sequence[float], target: float, window: int
) -> dict[Hashable, Any]:
    """Return the columns that a trial's validation curve, of `losses` at `tokens`, decides."""
    crossed = crossing_tokens(tokens, losses, target, window)
    means_at, _ = smoothed(tokens, losses, window)  # a mean lies before its last point
    bound = means_at[-1] if len(means_at) else tokens[0]
    return {
        "tokens": crossed if crossed else float(bound),
        "is_censored": crossed is None,
        "is_early": crossed is not None and crossed <= means_at[0],
        "interpolation_error": interpolation_error(tokens, losses, target, window),
        "trained_tokens": float(tokens[-1]),
    }


def interpolation_error(
    tokens: Sequence[float], losses: Sequence[float], target: float, window: int = 1
) -> float:
    """Return the relative error of a crossing that interpolation may make; NaN without one.

    It is the difference to the crossing of the parabola, in log tokens, through the evaluations
    before and after the crossing and the next one.
    """
    linear = crossing_tokens(tokens, losses, target, window)
    if not linear:
        return math.nan
    when, values = smoothed(tokens, losses, window)
    k = int(np.searchsorted(when, linear))
    if not 0 < k < len(when) - 1:
        return math.nan

    logs = np.log(when[k - 1 : k + 2])
    three = values[k - 1 : k + 2]
    if len(set(three)) < 3:  # equal losses have no parabola of log tokens
        return math.nan
    curved = float(Polynomial.fit(three - target, logs, 2)(0.0))
    return abs(math.expm1(curved - math.log(linear)))


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

    value = crossing(log_tokens.mean(0))
    if not math.isfinite(value):
        return None
    seeds = len(log_tokens)
    draws = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    resampled = np.array([crossing(log_tokens[draw].mean(0)) for draw in draws])
    return _estimate(value, resampled, seeds)


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


def describe_excess(curve: StepsCurve, unit: str = "sequences") -> list[str]:
    """Write at which batch sizes, in a unit, the tokens exceed their least by 20 and by 100 %."""
    most = " at most" if curve.is_excess_bound else ""
    return [
        f"by {100 * excess:.0f} % at {estimate:.3g} {unit} per step{most}"
        for excess, estimate in curve.excess.items()
        if estimate is not None
    ]


def losses_at(
    sweep: SweepTables, trials: pd.DataFrame, per_token: pd.Series
) -> tuple[float, pd.DataFrame]:
    """Compare losses at an equal amount of tokens, steps or seconds of training.

    The amount is the most that every trial reached. The schedule knows no horizon, so a shorter
    trial would have had the same loss. Trials without a curve are left out.

    Args:
        sweep: the one that the trials belong to.
        trials: those of a StepsCurve.
        per_token: the amount per token of each trial; NaN leaves it out.
    """
    curves = {trial: (t, v) for trial, t, v in curves_by_trial(sweep, "valid/loss")}
    trials = trials[trials["has_curve"]]
    trials = trials.assign(per_token=per_token).dropna(subset="per_token")
    common = float((trials["trained_tokens"] * trials["per_token"]).min())

    trials["loss"] = np.nan  # no loss is known before the first evaluation
    for k, row in trials.iterrows():
        evaluated, losses = curves[row["id"]]
        tokens = common / row["per_token"]
        if tokens >= evaluated[0]:
            trials.loc[k, "loss"] = np.interp(math.log(tokens), np.log(evaluated), losses)

    groups = trials.dropna(subset="loss").groupby("batch_size")["loss"]
    table = groups.agg(loss="mean", loss_sd="std", seeds="count")
    return common, table.reset_index()


def fit_steps(
    batch_sizes: Sequence[float], steps: ArrayLike, censored: ArrayLike | None = None
) -> StepsFit:
    """Fit S(B) = S_min + E_min/B to the steps that reach one loss (McCandlish et al. 2018).

    Least squares on log S, both parameters in logs. A censored S is a lower bound and enters
    one-sidedly, by the likelihood of a normal log S (Tobin 1958). Intervals are t intervals of the
    logs; the standard error is that of a bootstrap over whole seeds, times √(n/(n−1)).

    Args:
        batch_sizes: in sequences per step, increasing.
        steps: to the loss, (seeds, batch sizes) or (batch sizes,).
        censored: whether a training ended before it reached the loss, so that its steps are a
            bound; the shape of `steps`.

    Raises:
        SweepError: if the numbers are not positive and of one shape, the batch sizes do not
            increase, or fewer than three of them reached the loss.
    """
    sizes = np.asarray(batch_sizes, float)
    values = np.atleast_2d(np.asarray(steps, float))
    is_ordered = sizes.ndim == 1 and bool((sizes > 0).all()) and bool((np.diff(sizes) > 0).all())
    if not is_ordered or values.ndim != 2 or values.shape[-1] != len(sizes):
        problem = "batch_sizes must be positive and increase, with one column of steps each"
        raise SweepError(f"{problem}, got {sizes.shape} and {values.shape}. Correct them.")
    if not (np.isfinite(values) & (values > 0)).all():
        raise SweepError("steps must be positive numbers. Leave out what was not measured.")
    logs = np.log(values)
    bounds = np.zeros(logs.shape, bool)
    if censored is not None:
        bounds |= np.asarray(censored, bool)
    crossed = ~bounds.all(0)
    if crossed.sum() < LEAST_BATCH_SIZES:
        raise SweepError(
            f"A fit must have {LEAST_BATCH_SIZES} batch sizes that reached the target, got "
            f"{crossed.sum()}. Raise the target or the budget, or add batch sizes."
        )
    data = sizes, logs, bounds
    point, spread = _fit_with_spread(data)

    seeds = len(logs)
    resamples = RESAMPLES if seeds > 1 else 0
    draws = np.random.default_rng(0).multinomial(seeds, [1 / seeds] * seeds, resamples)
    weights, counts = np.unique(draws, axis=0, return_counts=True)  # each resample is fitted once
    fits = [_fit(data, spread, point, row) for row in weights]
    resampled = np.array([_parameters(fit, sizes) for fit in fits]).reshape(-1, 3)
    columns = zip(_parameters(point, sizes), resampled.repeat(counts, axis=0).T, strict=True)
    s_min, e_min, b_crit = (_estimate(value, column, seeds) for value, column in columns)

    b_overhead = Estimate(*(OVERHEAD * end for end in b_crit))
    is_linear = crossed & (sizes <= b_crit.value / 8)
    b_opt = None
    b_star = None
    if is_linear.any():
        b_opt = float(sizes[is_linear].max())
        b_star = Estimate(*((1 + OVERHEAD) * b_opt + end for end in b_overhead))

    residuals = logs - _curve(point, sizes)
    known_logs = np.where(bounds, np.nan, logs)
    return StepsFit(
        s_min=s_min,
        e_min=e_min,
        b_crit=b_crit,
        b_overhead=b_overhead,
        b_opt=b_opt,
        b_star=b_star,
        residuals=np.where(bounds, residuals.clip(0), residuals),
        slopes=np.diff(known_logs.mean(0)) / np.diff(np.log(sizes)),
        spread=spread,
    )


def _curve(point: Floats, sizes: Floats) -> Floats:
    return np.asarray(np.logaddexp(point[0], point[1] - np.log(sizes)))


def _fit(data: Data, spread: float, start: Floats, weights: Floats) -> Floats:
    """Return log S_min and log E_min by least squares with seeds weighted.

    The residual of a bound is σ·√(−2 log Φ(z)), z = (log fit − log bound)/σ, σ the spread: it
    vanishes if the fit lies well above the bound and is the shortfall if it lies well below.
    """
    sizes, logs, censored = data
    root = np.sqrt(weights)[:, None]

    def terms(point: Floats) -> Floats:
        gap = _curve(point, sizes) - logs
        gap[censored] = spread * np.sqrt(-2 * log_ndtr(gap[censored] / spread))
        return (root * gap).ravel()

    result = least_squares(
        terms, start, method="lm", xtol=FIT_TOLERANCE, ftol=FIT_TOLERANCE, gtol=FIT_TOLERANCE
    )
    return np.asarray(result.x)


def _fit_with_spread(data: Data) -> tuple[Floats, float]:
    """Alternate the fit with the spread: σ² is the mean of E r², over N − 2, as in EM."""
    sizes, logs, censored = data
    weights = np.ones(len(logs))
    degrees_of_freedom = max(logs.size - 2, 1)

    smallest = logs.min()
    sequences = logs[:, 0] + math.log(sizes[0])
    start = np.array([smallest, sequences.mean()])
    point = _fit(data, LEAST_SPREAD, start, weights)
    gap = _curve(point, sizes) - logs
    squares = float((gap[~censored] ** 2).sum())
    spread = max(math.sqrt(squares / degrees_of_freedom), LEAST_SPREAD)
    if not censored.any():
        return point, spread

    for _ in range(SPREAD_ROUNDS):
        point = _fit(data, spread, point, weights)
        gap = _curve(point, sizes) - logs
        z = gap[censored] / spread
        slope = np.exp(-(z**2) / 2 - log_ndtr(z)) / math.sqrt(2 * math.pi)
        squares = float((gap[~censored] ** 2).sum() + (spread**2 * (1 - z * slope)).sum())

        last_spread = spread
        spread = max(math.sqrt(squares / degrees_of_freedom), LEAST_SPREAD)
        if abs(spread - last_spread) <= SPREAD_TOLERANCE * spread:
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
