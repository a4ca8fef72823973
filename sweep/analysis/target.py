"""Trials that ran to a target loss: their steps, the curve through them, and the gates it needs.

See docs/critical-batch-size.md.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import f as f_distribution

from sweep.analysis import gates
from sweep.analysis.comparison import SEEDS_FOR_SPREAD, report_trials
from sweep.analysis.critical_batch_size import StepsFit, fit_steps
from sweep.analysis.estimate import Estimate
from sweep.analysis.frames import Sweep, curves_by_trial
from sweep.analysis.gates import INCONCLUSIVE, PASS, Gate
from sweep.analysis.statistics import ALPHA, compare_pairs, seeds_sd
from sweep.analysis.tuned import TunedRate, tuned_rates
from sweep.errors import SweepError
from sweep.plan.target import PATIENCE, crossing_tokens, smoothed

LARGE_RESIDUAL = 0.1  # of log S
COLUMNS = (
    *("label", "batch_size", "seed", "learning_rate", "tokens", "steps", "seconds", "is_censored"),
    *("is_early", "trained_tokens", "trained_seconds"),
)


@dataclass(frozen=True, eq=False)
class Reached:
    """One policy's trials on their way to the target."""

    label: str
    target: float
    trials: pd.DataFrame  # COLUMNS; `tokens`, `steps`, `seconds` to the target, or the bound
    batch_sizes: tuple[int, ...]  # of the fit
    fit: StepsFit | None
    no_fit: str  # why there is none
    gates: tuple[Gate, ...]
    rates: tuple[TunedRate, ...]
    scope: str  # a sentence

    @property
    def passes(self) -> bool:
        """Whether every gate passes."""
        return all(gate.verdict == PASS for gate in self.gates)


def steps_to_target(sweep: Sweep) -> pd.DataFrame:
    """Return one row per reporting trial that ended: where it reached the target, or a bound.

    A trial that was pruned or came to its budget is censored: its last evaluation is a bound. One
    that is below the target at its first evaluation is early: that evaluation is a bound from
    above. A diverged trial has none.
    """
    target, context = sweep.plan.settings.target, sweep.plan.tokens_per_sequence
    assert target is not None
    window = sweep.plan.settings.evaluation.window
    curves = {one: (t, v) for one, t, v in curves_by_trial(sweep, "valid/loss")}
    rows = []
    for row in report_trials(sweep.trials).to_dict("records"):
        if row["state"] not in ("COMPLETE", "PRUNED") or row["id"] not in curves:
            continue
        when, losses = curves[row["id"]]
        crossed = crossing_tokens(when, losses, target, window)
        seen = smoothed(when, losses, window)[0]  # the mean of the last ones is not at the last
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


def judge_target(sweep: Sweep, cells: pd.DataFrame) -> tuple[Reached, ...]:
    """Fit and judge each policy of a sweep to a target, in the plan's order."""
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
    is_tuned = set(cells["policy"]) == {"tuned"}
    rates = tuple(tuned_rates(sweep, sigma.value if sigma else None, degrees)) * is_tuned
    reports = report_trials(sweep.trials)
    reports = reports[reports["label"] == label]
    found = (
        gates.rate_gate(sweep, cells, rates, is_tuned),
        _seed_gate(cells, sigma),
        _fit_gate(sizes, fit, no_fit),
        _crossing_gate(trials, target),
        _questions_gate(),
        gates.divergence_gate(cells),
        gates.sanity_gate(sweep, reports),
        gates.scope_gate(sweep, reports),
    )
    scope = gates.scope_sentence(sweep, reports)
    return Reached(label, target, trials, sizes, fit, no_fit, found, rates, scope)


def _fit(trials: pd.DataFrame) -> tuple[tuple[int, ...], StepsFit | None, str]:
    """Fit the curve through the seeds that every batch size has."""
    steps = trials.pivot_table(index="seed", columns="batch_size", values="steps").dropna()
    if steps.empty:
        return (), None, "no seed ended at every batch size"
    bounds = trials.pivot_table(index="seed", columns="batch_size", values="is_censored")
    sizes = tuple(int(size) for size in steps.columns)
    try:
        fit = fit_steps(sizes, steps.to_numpy(), bounds.loc[steps.index].to_numpy() > 0)
    except SweepError as error:
        return sizes, None, str(error)
    return sizes, fit, ""


def _seed_gate(cells: pd.DataFrame, sigma: Estimate | None) -> Gate:
    name = f"At least {SEEDS_FOR_SPREAD} seeds in every cell"
    fewest = int((cells["complete"] + cells["pruned"]).min())
    evidence = f"{fewest} seeds in the poorest cell"
    if sigma:
        ends = f"[{100 * sigma.low:.1f}, {100 * sigma.high:.1f}]"
        evidence += f"; steps to the target vary by {100 * sigma.value:.1f} {ends} % over seeds"
    if fewest >= SEEDS_FOR_SPREAD:
        return Gate(2, name, PASS, f"{evidence}.")
    more = f"--seeds {SEEDS_FOR_SPREAD} or more (5 recommended)"
    return Gate(2, name, INCONCLUSIVE, f"{evidence}.", more)


def _fit_gate(sizes: tuple[int, ...], fit: StepsFit | None, no_fit: str) -> Gate:
    name = "The curve of steps is resolved, and B_crit lies among the batch sizes"
    if fit is None:
        return Gate(3, name, INCONCLUSIVE, no_fit, "more batch sizes, a higher target or budget")
    evidence = (
        f"S_min {words(fit.s_min)} steps, E_min {words(fit.e_min)} sequences, B_crit "
        f"{words(fit.b_crit)} sequences, by {len(fit.residuals)} seeds at {len(sizes)} batch "
        f"sizes; log S lies {fit.spread:.3f} about the curve."
    )
    off = [size for size, is_off in zip(sizes, off_the_curve(fit), strict=True) if is_off]
    if off:
        named = ", ".join(map(str, off))
        evidence += f" Steps at batch size {named} do not lie on the curve S_min + E_min/B."
        return Gate(3, name, INCONCLUSIVE, evidence, "find out why; or leave out what is off")
    if not math.isfinite(fit.b_crit.high) or not fit.b_crit.low > 0:
        return Gate(3, name, INCONCLUSIVE, evidence, "more seeds, and batch sizes on both sides")
    if not sizes[0] < fit.b_crit.value < sizes[-1]:
        side = "smaller" if fit.b_crit.value <= sizes[0] else "larger"
        return Gate(3, name, INCONCLUSIVE, f"{evidence} It lies outside.", f"{side} batch sizes")
    return Gate(3, name, PASS, evidence)


def off_the_curve(fit: StepsFit) -> list[bool]:
    """Tell which batch sizes' steps the curve misses by more than a tenth, and than seeds explain.

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


def _crossing_gate(trials: pd.DataFrame, target: float) -> Gate:
    name = "The target was reached on the whole validation split, without a horizon"
    censored = int(trials["is_censored"].sum())
    evidence = (
        f"{len(trials) - censored} of {len(trials)} trials reached {target:g} at a constant rate, "
        "and stayed there at the next evaluation (but at a trial's very end); the point is "
        f"interpolated in log tokens. {censored} are censored: pruned at {PATIENCE} times the "
        "least tokens of their batch size, or at the end of the budget. The rate was not decayed: "
        "with decay the same loss takes fewer tokens."
    )
    if censored == len(trials):
        return Gate(4, name, INCONCLUSIVE, evidence, "a higher target, or a larger budget")
    if trials["is_early"].any():
        named = ", ".join(map(str, sorted(set(trials.loc[trials["is_early"], "batch_size"]))))
        evidence += f" Batch size {named} was there before the first evaluation: a bound, no point."
        return Gate(4, name, INCONCLUSIVE, evidence, "more [evaluation] points, or a lower target")
    return Gate(4, name, PASS, evidence)


def _questions_gate() -> Gate:
    evidence = "Equal loss is asked; equal tokens, equal steps and equal seconds have own tables."
    return Gate(5, "Equal tokens, equal steps and equal seconds are kept apart", PASS, evidence)


def headline(reached: Reached) -> str:
    """Say what the critical batch size is, where every gate passes; else nothing."""
    if not reached.passes or reached.fit is None:
        return ""
    fit, sizes = reached.fit, reached.batch_sizes
    said = (
        f"To a validation loss of {reached.target:g} the critical batch size is "
        f"{words(fit.b_crit)} sequences: there training takes twice the least tokens and twice "
        "the least steps."
    )
    if fit.b_crit.low < sizes[0] or fit.b_crit.high > sizes[-1]:
        said += " Its interval reaches beyond the batch sizes that were tried."
    if fit.b_overhead.value >= sizes[0]:
        overhead = words(fit.b_overhead)
        said += f" Up to batch size {overhead} it takes at most 20 % more tokens than the least."
    return f"{said} {reached.scope}"


def words(estimate: Estimate) -> str:
    """Write a number with its 95 % interval."""
    ends = f" [{estimate.low:.4g}, {estimate.high:.4g}]" if math.isfinite(estimate.low) else ""
    return f"{estimate.value:.4g}{ends}"


def losses_at(sweep: Sweep, reached: Reached, measure: str) -> tuple[float, pd.DataFrame]:
    """Compare losses at an equal number of `tokens`, `steps` or `seconds` of training.

    Valid because the schedule knows no horizon: a point within a trial is what a shorter one
    would have reached.

    Returns:
        The number, the most that every trial has reached; and per batch size `loss` (mean over
        seeds, by interpolation in log tokens), `loss_sd` and `seeds`.
    """
    ids = report_trials(sweep.trials).set_index(["label", "batch_size", "seed"])["id"]
    curves = {one: (t, v) for one, t, v in curves_by_trial(sweep, "valid/loss")}
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
