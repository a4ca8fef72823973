"""Trials that ran to a target loss: their steps, the curve through them, and their checks.

See docs/critical-batch-size.md.
"""

import math
from dataclasses import dataclass, replace

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
from sweep.analysis.statistics import ALPHA, Estimate, compare_pairs, seeds_sd
from sweep.errors import SweepError
from sweep.plan.tuning import PATIENCE, crossing_tokens, smoothed

LARGE_RESIDUAL = 0.1  # of log S
COLUMNS = (
    *("label", "batch_size", "seed", "learning_rate", "tokens", "steps", "seconds", "is_censored"),
    *("is_early", "trained_tokens", "trained_seconds"),
)


@dataclass(frozen=True, eq=False)
class Reached(PolicyChecks):
    """One policy's trials on their way to the target."""

    target: float
    trials: pd.DataFrame  # COLUMNS; `tokens`, `steps`, `seconds` to the target, or the bound
    batch_sizes: tuple[int, ...]  # of the fit
    fit: StepsFit | None
    no_fit: str  # why there is none


def steps_to_target(sweep: Sweep) -> pd.DataFrame:
    """Return one row per reporting trial that ended: where it reached the target, or a bound.

    A trial that was pruned or used up its budget is censored: its last evaluation is a bound. A
    trial below the target at its first evaluation is early: that evaluation is a bound from above.
    Diverged trials have no row.
    """
    target, context = sweep.plan.settings.target, sweep.plan.tokens_per_sequence
    assert target is not None
    window = sweep.plan.settings.evaluation.window
    curves = {trial: (t, v) for trial, t, v in curves_by_trial(sweep, "valid/loss")}
    rows = []
    for row in report_trials(sweep.trials).to_dict("records"):
        if row["state"] not in ("COMPLETE", "PRUNED") or row["id"] not in curves:
            continue
        when, losses = curves[row["id"]]
        crossed = crossing_tokens(when, losses, target, window)
        seen = smoothed(when, losses, window)[0]  # a mean of evaluations lies before the last
        tokens, trained = crossed or float((*when[:1], *seen)[-1]), float(when[-1])
        seconds = row["seconds_training"] / row["tokens"] if row["state"] == "COMPLETE" else np.nan
        rows.append(
            {
                **{name: row[name] for name in COLUMNS[:4]},
                "tokens": tokens,
                "steps": tokens / (row["batch_size"] * context),
                "seconds": seconds * tokens,
                "is_censored": crossed is None,
                "is_early": crossed is not None and crossed <= seen[0],
                "trained_tokens": trained,
                "trained_seconds": seconds * trained,
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
    trials = steps_to_target(sweep)
    labels = dict.fromkeys(str(label) for label in cells["label"])
    return tuple(
        _judge(sweep, cells[cells["label"] == label], trials[trials["label"] == label], label)
        for label in labels
    )


def _judge(sweep: Sweep, cells: pd.DataFrame, trials: pd.DataFrame, label: str) -> Reached:
    target = sweep.plan.settings.target
    assert target is not None
    sizes, fit, no_fit = _fit(trials)
    losses = {
        int(str(size)): dict(zip(group["seed"], np.log(group["steps"]), strict=True))
        for size, group in trials[~trials["is_censored"]].groupby("batch_size")
    }
    sigma = seeds_sd(losses) if losses else None
    degrees = compare_pairs(losses).degrees_of_freedom if losses else 0
    checks, rates = check_own_rows(sweep, label, cells, sigma, degrees)
    if sigma:
        ends = f"[{100 * sigma.low:.1f}, {100 * sigma.high:.1f}]"
        text = f"Steps to the target vary by {100 * sigma.value:.1f} {ends} % over seeds."
        seeds = checks["single_seed"]
        checks["single_seed"] = replace(seeds, evidence=f"{seeds.evidence} {text}")
    own = (*_fit_checks(sizes, fit, no_fit), *_crossing_checks(trials, target))
    reports = report_trials(sweep.trials)
    return Reached(
        label=label,
        checks=(*checks.values(), *own),
        rates=rates,
        scope=scope_sentence(sweep, reports[reports["label"] == label]),
        target=target,
        trials=trials,
        batch_sizes=sizes,
        fit=fit,
        no_fit=no_fit,
    )


def _fit(trials: pd.DataFrame) -> tuple[tuple[int, ...], StepsFit | None, str]:
    """Fit the curve through the seeds that every batch size has."""
    steps = trials.pivot_table(index="seed", columns="batch_size", values="steps").dropna()
    if steps.empty:
        return (), None, "No seed ended at every batch size."
    bounds = trials.pivot_table(index="seed", columns="batch_size", values="is_censored")
    sizes = tuple(int(size) for size in steps.columns)
    try:
        fit = fit_steps(sizes, steps.to_numpy(), bounds.loc[steps.index].to_numpy() > 0)
    except SweepError as error:
        return sizes, None, str(error)
    return sizes, fit, ""


def _fit_checks(sizes: tuple[int, ...], fit: StepsFit | None, no_fit: str) -> tuple[Check, Check]:
    if fit is None:
        return build_check("critical_batch_size", no_fit, True), build_check(
            "off_the_curve", no_fit
        )
    is_resolved = math.isfinite(fit.b_crit.high) and fit.b_crit.low > 0
    remedy = ""
    if is_resolved and not sizes[0] < fit.b_crit.value < sizes[-1]:
        remedy = f"Add {'smaller' if fit.b_crit.value <= sizes[0] else 'larger'} batch sizes."
    evidence = (
        f"S_min {words(fit.s_min)} steps, E_min {words(fit.e_min)} sequences, B_crit "
        f"{words(fit.b_crit)} sequences, by {len(fit.residuals)} seeds at {len(sizes)} batch sizes."
    )
    spread = f"The standard deviation of log S about the curve is {fit.spread:.3f}."
    off = [size for size, is_off in zip(sizes, off_the_curve(fit), strict=True) if is_off]
    if off:
        spread += f" Steps at batch size {', '.join(map(str, off))} do not lie on it."
    return (
        build_check("critical_batch_size", evidence, not is_resolved or bool(remedy), (), remedy),
        build_check("off_the_curve", spread, bool(off), off),
    )


def off_the_curve(fit: StepsFit) -> list[bool]:
    """Return which batch sizes the curve misses by over a tenth, and by more than seeds explain.

    An F test of lack of fit against the spread between seeds, at 5 %.
    """
    seeds, count = fit.residuals.shape
    means = fit.residuals.mean(0)
    pure = float(((fit.residuals - means) ** 2).sum()) / max(count * (seeds - 1), 1)
    lack = seeds * float((means**2).sum()) / max(count - 2, 1)
    chance = f_distribution.sf(lack / max(pure, 1e-30), count - 2, count * (seeds - 1))
    if seeds < 2 or chance > ALPHA:
        return [False] * count
    return [abs(mean) > LARGE_RESIDUAL for mean in means.tolist()]


def _crossing_checks(trials: pd.DataFrame, target: float) -> tuple[Check, Check]:
    censored, early = int(trials["is_censored"].sum()), trials["is_early"].astype(bool)
    sizes = tuple(sorted({int(size) for size in trials.loc[early, "batch_size"]}))
    named = ", ".join(map(str, sizes)) or "none"
    reached = (
        f"{len(trials) - censored} of {len(trials)} trials reached {target:g} at a constant rate "
        "and stayed there at the next evaluation; the crossing is interpolated in log tokens. "
        f"{censored} are censored: pruned at {PATIENCE} times the least tokens of their batch "
        "size, or at the end of the budget. With decay the same loss takes fewer tokens."
    )
    too_early = f"Batch sizes below the target at the first evaluation: {named}."
    return (
        build_check("target_not_reached", reached, censored == len(trials)),
        build_check("crossing_too_early", too_early, bool(sizes), sizes),
    )


def headline(reached: Reached) -> str:
    """Return the claim about the critical batch size; empty unless every check passes."""
    if not reached.passes or reached.fit is None:
        return ""
    fit, sizes = reached.fit, reached.batch_sizes
    claim = (
        f"To a validation loss of {reached.target:g} the critical batch size is "
        f"{words(fit.b_crit)} sequences: training there takes twice the least tokens and twice "
        "the least steps."
    )
    if fit.b_crit.low < sizes[0] or fit.b_crit.high > sizes[-1]:
        claim += " Its interval extends beyond the batch sizes that were tried."
    if fit.b_overhead.value >= sizes[0]:
        overhead = words(fit.b_overhead)
        claim += f" Up to batch size {overhead} it takes at most 20 % more tokens than the least."
    return f"{claim} {reached.scope}"


def words(estimate: Estimate, form: str = ".4g") -> str:
    """Format a number with its 95 % interval, if it has one."""
    ends = f" [{estimate.low:{form}}, {estimate.high:{form}}]"
    return f"{estimate.value:{form}}{ends if math.isfinite(estimate.low) else ''}"


def losses_at(sweep: Sweep, reached: Reached, measure: str) -> tuple[float, pd.DataFrame]:
    """Compare losses at an equal number of `tokens`, `steps` or `seconds` of training.

    Valid because the schedule knows no horizon: a shorter trial would have had the same loss.

    Returns:
        The number, the most that every trial has reached; and per batch size `loss` (mean over
        seeds, by interpolation in log tokens), `loss_sd` and `seeds`.
    """
    ids = report_trials(sweep.trials).set_index(["label", "batch_size", "seed"])["id"]
    curves = {trial: (t, v) for trial, t, v in curves_by_trial(sweep, "valid/loss")}
    per_token = {
        "tokens": pd.Series(1.0, reached.trials.index),
        "steps": reached.trials["steps"] / reached.trials["tokens"],
        "seconds": reached.trials["trained_seconds"] / reached.trials["trained_tokens"],
    }[measure]
    known = reached.trials.assign(per_token=per_token).dropna(subset=["per_token"])
    ends, common = known["trained_tokens"] * known["per_token"], math.nan
    if len(known):
        common = float(ends.min())
    rows = []
    for row in known.to_dict("records"):
        when, losses = curves[ids[row["label"], row["batch_size"], row["seed"]]]
        at = common / row["per_token"]
        if at >= when[0]:  # before the first evaluation nothing is known
            loss = float(np.interp(math.log(at), np.log(when), losses))
            rows.append({"batch_size": row["batch_size"], "loss": loss})
    table = pd.DataFrame(rows, columns=["batch_size", "loss"]).groupby("batch_size")["loss"]
    return common, table.agg(loss="mean", loss_sd="std", seeds="count").reset_index()
