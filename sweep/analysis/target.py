"""Trials that ran to a target loss: their steps, the curve through them, and their checks.

See docs/critical-batch-size.md.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import f as f_distribution

from sweep.analysis.checks import (
    Check,
    PolicyChecks,
    PolicyResult,
    build_check,
    check_own_rows,
    run_checks,
    scope_sentence,
)
from sweep.analysis.comparison import compare_batch_sizes, report_trials
from sweep.analysis.critical_batch_size import StepsFit, fit_steps
from sweep.analysis.frames import Sweep, curves_by_trial
from sweep.analysis.statistics import ALPHA, compare_pairs
from sweep.errors import SweepError
from sweep.plan.tuning import PATIENCE, crossing_tokens, smoothed

LARGE_RESIDUAL = 0.1  # residual of log S
COLUMNS = (
    *("label", "batch_size", "seed", "learning_rate", "tokens", "steps", "seconds", "is_censored"),
    *("is_early", "trained_tokens", "id"),
)


@dataclass(frozen=True, eq=False)
class Reached(PolicyChecks):
    """One policy's trials on their way to the target."""

    target: float
    trials: pd.DataFrame  # COLUMNS; `tokens`, `steps`, `seconds` to the target, or the bound
    batch_sizes: tuple[int, ...]  # batch sizes in the fit
    fit: StepsFit | None
    no_fit: str  # reason, if there is no fit


def steps_to_target(sweep: Sweep) -> pd.DataFrame:
    """Return one row per reporting trial that ended: where it reached the target, or a bound.

    A trial that was pruned or used up its budget is censored: its last evaluation is a bound. One
    below the target at its first evaluation is early. Diverged trials have no row.
    """
    target, window = sweep.plan.settings.target, sweep.plan.settings.evaluation.window
    assert target is not None
    reports, rows = report_trials(sweep.trials).set_index("id"), []
    curves = {trial: (t, v) for trial, t, v in curves_by_trial(sweep, "valid/loss")}
    for trial, row in reports[reports["state"].isin(["COMPLETE", "PRUNED"])].iterrows():
        if trial not in curves:
            continue
        evaluated, losses = curves[str(trial)]
        crossed = crossing_tokens(evaluated, losses, target, window)
        means_at = smoothed(evaluated, losses, window)[0]  # a mean lies before its last evaluation
        tokens = crossed or float((*evaluated[:1], *means_at)[-1])
        seconds = row["seconds_training"] / row["tokens"] if row["state"] == "COMPLETE" else np.nan
        rows.append(
            {
                **row[list(COLUMNS[:4])],
                "tokens": tokens,
                "steps": tokens / (row["batch_size"] * sweep.plan.tokens_per_sequence),
                "seconds": seconds * tokens,
                "is_censored": crossed is None,
                "is_early": crossed is not None and crossed <= means_at[0],
                "trained_tokens": float(evaluated[-1]),
                "id": trial,
            }
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def judge(sweep: Sweep) -> tuple[PolicyResult, ...] | tuple[Reached, ...]:
    """Check each policy of a sweep, against the target if it has one."""
    cells = compare_batch_sizes(sweep.trials)
    if sweep.plan.settings.target is None:
        return tuple(run_checks(sweep, cells).values())
    return judge_target(sweep, cells)


def judge_target(sweep: Sweep, cells: pd.DataFrame) -> tuple[Reached, ...]:
    """Fit and check each policy of a sweep to a target, in the plan's order."""
    target = sweep.plan.settings.target
    assert target is not None
    table, policies = steps_to_target(sweep), []
    for name, reports in report_trials(sweep.trials).groupby("label", sort=False):
        label, trials = str(name), table[table["label"] == name]
        logs = {
            int(str(size)): dict(zip(group["seed"], np.log(group["steps"]), strict=True))
            for size, group in trials[~trials["is_censored"]].groupby("batch_size")
        }
        comparison = compare_pairs(logs)
        checks, rates = check_own_rows(sweep, label, comparison)
        sizes, fit, no_fit = _fit(trials)
        sigma = f" and {comparison.sigma:.3f} over seeds" if comparison.sigma else ""
        checks += _fit_checks(sizes, fit, no_fit, sigma) + _crossing_checks(trials, target)
        scope = scope_sentence(sweep, reports)
        policies.append(Reached(label, checks, rates, scope, target, trials, sizes, fit, no_fit))
    return tuple(policies)


def _fit(trials: pd.DataFrame) -> tuple[tuple[int, ...], StepsFit | None, str]:
    """Fit the curve through the seeds that every batch size has; else return the reason."""
    steps = trials.pivot_table(index="seed", columns="batch_size", values="steps").dropna()
    if steps.empty:
        return (), None, "No seed ended at every batch size."
    bounds = trials.pivot_table(index="seed", columns="batch_size", values="is_censored")
    sizes = tuple(int(size) for size in steps.columns)
    try:
        return sizes, fit_steps(sizes, steps.to_numpy(), bounds.loc[steps.index] > 0), ""
    except SweepError as error:
        return sizes, None, str(error)


def _fit_checks(
    sizes: tuple[int, ...], fit: StepsFit | None, no_fit: str, sigma: str
) -> list[Check]:
    if fit is None:
        off = build_check("off_the_curve", no_fit)
        return [build_check("critical_batch_size", no_fit, True), off]
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
    spread = f"The standard deviation of log S is {fit.spread:.3f} about the curve{sigma}."
    return [
        build_check("critical_batch_size", evidence, not is_resolved or is_beyond, (), remedy),
        build_check("off_the_curve", spread, bool(is_far.any()), np.array(sizes)[is_far]),
    ]


def _crossing_checks(trials: pd.DataFrame, target: float) -> list[Check]:
    censored = int(trials["is_censored"].sum())
    sizes = sorted(set(trials["batch_size"][trials["is_early"].astype(bool)]))
    reached = (
        f"{len(trials) - censored} of {len(trials)} trials reached {target:g} at a constant rate "
        "and stayed there at the next evaluation; the crossing is interpolated in log tokens. "
        f"{censored} are censored: pruned at {PATIENCE} times the least tokens of their batch "
        "size, or at the end of the budget. With decay the same loss takes fewer tokens."
    )
    listed = ", ".join(map(str, sizes)) or "none"
    too_early = f"Batch sizes below the target at the first evaluation: {listed}."
    return [
        build_check("target_not_reached", reached, censored == len(trials)),
        build_check("crossing_too_early", too_early, bool(sizes), sizes),
    ]


def headline(reached: Reached) -> str:
    """Return the claim about the critical batch size; empty unless every check passes."""
    if not reached.passes or reached.fit is None:
        return ""
    return (
        f"To a validation loss of {reached.target:g} the critical batch size is "
        f"{reached.fit.b_crit:.4g} sequences: training there takes twice the least tokens and "
        f"twice the least steps. {reached.scope}"
    )


def losses_at(sweep: Sweep, reached: Reached, measure: str) -> tuple[float, pd.DataFrame]:
    """Compare losses at an equal number of `tokens`, `steps` or `seconds` of training.

    Valid because the schedule knows no horizon: a shorter trial would have had the same loss.
    Returns the number, the most that every trial reached, and a table: batch_size, loss, loss_sd,
    seeds.
    """
    curves = {trial: (t, v) for trial, t, v in curves_by_trial(sweep, "valid/loss")}
    trials = reached.trials
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
