"""Trials that ran to a target loss: their steps, the curve through them, and its checks.

See docs/critical-batch-size.md.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import f as f_distribution

from sweep.analysis.checks import Check, build_check
from sweep.analysis.comparison import report_trials
from sweep.analysis.critical_batch_size import StepsFit, fit_steps
from sweep.analysis.frames import Sweep, curves_by_trial
from sweep.analysis.statistics import ALPHA, Estimate
from sweep.errors import SweepError
from sweep.plan.rates import PATIENCE, crossing_tokens, smoothed

LARGE_RESIDUAL = 0.1  # residual of log S
COLUMNS = (
    *("label", "batch_size", "seed", "learning_rate", "tokens", "steps", "seconds", "is_censored"),
    *("is_early", "trained_tokens", "id"),
)


@dataclass(frozen=True, eq=False)
class StepsCurve:
    """One policy's trials on their way to the target."""

    target: float
    trials: pd.DataFrame  # COLUMNS; `tokens`, `steps`, `seconds` to the target, or the bound
    batch_sizes: tuple[int, ...]  # batch sizes in the fit
    fit: StepsFit | None
    no_fit: str  # reason, if there is no fit

    def log_steps(self) -> dict[int, dict[int, float]]:
        """Return the log of the steps to the target by batch size and seed."""
        groups = self.trials[~self.trials["is_censored"]].groupby("batch_size")
        return {
            int(str(size)): dict(zip(rows["seed"], np.log(rows["steps"]), strict=True))
            for size, rows in groups
        }


def steps_to_target(sweep: Sweep) -> pd.DataFrame:
    """Return one row per reporting trial that ended: where it reached the target, or a bound.

    A trial that was pruned or used up its budget is censored: its last evaluation is a bound. One
    below the target at its first evaluation is early. Diverged trials have no row.
    """
    target, window = sweep.plan.settings.target, sweep.plan.settings.evaluation.window
    assert target is not None
    trials, rows = report_trials(sweep.trials).set_index("id", drop=False), []
    ended = trials[trials["state"].isin(["COMPLETE", "PRUNED"])].to_dict("index")
    for trial, evaluated, losses in curves_by_trial(sweep, "valid/loss"):
        if (row := ended.get(trial)) is None:
            continue
        crossed = crossing_tokens(evaluated, losses, target, window)
        means_at = smoothed(evaluated, losses, window)[0]  # a mean lies before its last evaluation
        tokens = crossed or float((*evaluated[:1], *means_at)[-1])
        seconds = row["seconds_training"] / row["tokens"] if row["state"] == "COMPLETE" else np.nan
        row |= {"tokens": tokens, "seconds": seconds * tokens, "is_censored": crossed is None}
        row["steps"] = tokens / (row["batch_size"] * sweep.plan.tokens_per_sequence)
        row["is_early"] = crossed is not None and crossed <= means_at[0]
        rows.append(row | {"trained_tokens": float(evaluated[-1])})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def fit_curve(trials: pd.DataFrame, target: float) -> StepsCurve:
    """Fit the curve through the seeds that every batch size of a policy has."""
    steps = trials.pivot_table(index="seed", columns="batch_size", values="steps").dropna()
    sizes = tuple(int(size) for size in steps.columns)
    if steps.empty:
        return StepsCurve(target, trials, (), None, "No seed ended at every batch size.")
    bounds = trials.pivot_table(index="seed", columns="batch_size", values="is_censored")
    try:
        fit = fit_steps(sizes, steps.to_numpy(), bounds.loc[steps.index] > 0)
        return StepsCurve(target, trials, sizes, fit, "")
    except SweepError as error:
        return StepsCurve(target, trials, sizes, None, str(error))


def check_curve(curve: StepsCurve, sigma: Estimate | None) -> list[Check]:
    """Evaluate the checks of a critical batch size; sigma is of log steps over seeds."""
    return [*_check_fit(curve, sigma), *_check_crossings(curve)]


def _check_fit(curve: StepsCurve, sigma: Estimate | None) -> list[Check]:
    fit, sizes = curve.fit, curve.batch_sizes
    if fit is None:
        off = build_check("off_the_curve", curve.no_fit)
        return [build_check("critical_batch_size", curve.no_fit, True), off]
    is_resolved = math.isfinite(fit.b_crit.high) and fit.b_crit.low > 0
    is_beyond = is_resolved and not sizes[0] < fit.b_crit.value < sizes[-1]
    side = "smaller" if fit.b_crit.value <= sizes[0] else "larger"
    remedy = f"Add {side} batch sizes." if is_beyond else ""
    evidence = (
        f"S_min {fit.s_min:.4g} steps, E_min {fit.e_min:.4g} sequences, B_crit {fit.b_crit:.4g} "
        f"sequences, by {len(fit.residuals)} seeds at {len(sizes)} batch sizes."
    )
    # F test of lack of fit against the spread between seeds.
    seeds, count = fit.residuals.shape
    means = fit.residuals.mean(0)
    pure = float(((fit.residuals - means) ** 2).sum()) / max(count * (seeds - 1), 1)
    lack = seeds * float((means**2).sum()) / max(count - 2, 1)
    chance = f_distribution.sf(lack / max(pure, 1e-30), count - 2, count * (seeds - 1))
    is_far = (np.abs(means) > LARGE_RESIDUAL) & (seeds > 1) & (chance <= ALPHA)
    of_seeds = f" and {sigma:.3f} over seeds" if sigma else ""
    spread = f"The standard deviation of log S is {fit.spread:.3f} about the curve{of_seeds}."
    return [
        build_check("critical_batch_size", evidence, not is_resolved or is_beyond, (), remedy),
        build_check("off_the_curve", spread, bool(is_far.any()), np.array(sizes)[is_far]),
    ]


def _check_crossings(curve: StepsCurve) -> list[Check]:
    trials, censored = curve.trials, int(curve.trials["is_censored"].sum())
    sizes = sorted(set(trials["batch_size"][trials["is_early"].astype(bool)]))
    reached = (
        f"{len(trials) - censored} of {len(trials)} trials reached {curve.target:g} at a constant "
        "rate and stayed there at the next evaluation; the crossing is interpolated in log tokens. "
        f"{censored} are censored: pruned at {PATIENCE} times the least tokens of their batch "
        "size, or at the end of the budget. With decay the same loss takes fewer tokens."
    )
    too_early = "Batch sizes below the target at the first evaluation: "
    too_early += f"{', '.join(map(str, sizes)) or 'none'}."
    return [
        build_check("target_not_reached", reached, censored == len(trials)),
        build_check("crossing_too_early", too_early, bool(sizes), sizes),
    ]


def losses_at(sweep: Sweep, trials: pd.DataFrame, measure: str) -> tuple[float, pd.DataFrame]:
    """Compare losses at an equal number of `tokens`, `steps` or `seconds` of training.

    Valid because the schedule knows no horizon: a shorter trial would have had the same loss.
    Returns the number, the most that every trial reached, and a table: batch_size, loss, loss_sd,
    seeds.
    """
    curves = {trial: (t, v) for trial, t, v in curves_by_trial(sweep, "valid/loss")}
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
