"""The checks of steps to a target, which need the curves of the trials."""

import math

import numpy as np
import pandas as pd
from scipy.special import fdtrc

from sweep.analysis.checks.registry import NotApplicable, Subject, Verdict, check
from sweep.analysis.critical_batch_size import StepsCurve, StepsFit
from sweep.decision.decision import ALPHA
from sweep.plan.target import PATIENCE

MISSING_CURVES = ("metrics.jsonl",)  # "columns" that no table of trials has
MOST_INTERPOLATION_ERROR = 0.01  # relative error of the tokens to a target
MOST_MISFIT = 0.1  # largest error of log S at a batch size


@check(
    subject=Subject.FIT,
    condition="The critical batch size is resolved and lies among those tried.",
    remedy="Add seeds, and batch sizes on both sides; or raise the target or the budget.",
)
def critical_batch_size(curve: StepsCurve) -> Verdict | NotApplicable:
    """Fail if the interval of B_crit is not finite, or B_crit does not lie among the batch
    sizes.
    """
    fit = curve.fit
    if fit is None:
        has_all_steps = len(curve.trials) > 0 and bool(curve.trials["steps"].notna().all())
        if has_all_steps:
            return Verdict(curve.no_fit, is_failed=True)
        return NotApplicable(curve.no_fit)

    sizes = curve.batch_sizes
    seeds = f"{len(fit.residuals)} seeds" if len(fit.residuals) > 1 else "one seed"
    evidence = (
        f"S_min {fit.s_min:.4g} steps, E_min {fit.e_min:.4g} sequences, B_crit {fit.b_crit:.4g} "
        f"sequences, by {seeds} at {len(sizes)} batch sizes."
    )
    is_resolved = math.isfinite(fit.b_crit.high) and fit.b_crit.low > 0
    if not is_resolved:
        return Verdict(evidence, is_failed=True)
    if curve.covers(fit.b_crit.value):
        return Verdict(evidence)
    side = "smaller" if fit.b_crit.value <= sizes[0] else "larger"
    return Verdict(evidence, is_failed=True, remedy=f"Add {side} batch sizes.")


@check(
    subject=Subject.FIT,
    condition="The steps at every batch size lie on the curve S_min + E_min/B.",
    remedy="Find out why the curve does not hold at these batch sizes.",
)
def off_the_curve(curve: StepsCurve) -> Verdict | NotApplicable:
    """Fail if a batch size is off the curve by more than a tenth and by more than seeds explain (F
    test of lack of fit).
    """
    fit = curve.fit
    if fit is None:
        return NotApplicable(curve.no_fit)
    seed_count = len(fit.residuals)
    means = fit.residuals.mean(0)
    variance = _variance_over_seeds(fit)
    evidence = f"The standard deviation of log S is {fit.spread:.3f} about the curve"
    if seed_count > 1:
        evidence += f" and {math.sqrt(variance):.3f} over seeds"

    is_significant = seed_count > 1 and _chance_of_misfit(fit, variance) <= ALPHA
    is_far = (np.abs(means) > MOST_MISFIT) & is_significant
    return Verdict(f"{evidence}.", batch_sizes=np.array(curve.batch_sizes)[is_far])


def _variance_over_seeds(fit: StepsFit) -> float:
    """Return the variance of log S at one batch size; 0 with one seed."""
    seed_count, size_count = fit.residuals.shape
    squares = (fit.residuals - fit.residuals.mean(0)) ** 2
    degrees_of_freedom = max(size_count * (seed_count - 1), 1)
    variance: float = squares.sum() / degrees_of_freedom
    return variance


def _chance_of_misfit(fit: StepsFit, variance: float) -> float:
    """Return the p value of the F test of lack of fit against the variance over seeds."""
    seed_count, size_count = fit.residuals.shape
    means = fit.residuals.mean(0)
    lack_of_fit = seed_count * float((means**2).sum()) / max(size_count - 2, 1)
    ratio = lack_of_fit / max(variance, 1e-30)
    chance: float = fdtrc(size_count - 2, size_count * (seed_count - 1), ratio)
    return chance


@check(
    subject=Subject.CROSSINGS,
    condition="At least one trial reached the target on the whole validation split.",
    remedy="Choose a higher target or a larger budget.",
    blocks_claims=True,
)
def target_not_reached(curve: StepsCurve) -> Verdict | NotApplicable:
    """Fail if no trial reached the target."""
    known = _known_trials(curve)
    if known.empty:
        return _without_crossings(curve)
    censored = int(known["is_censored"].sum())
    evidence = (
        f"{len(known) - censored} of {len(known)} trials reached {curve.target:g} at a constant "
        "rate and stayed there at the next evaluation; the crossing is interpolated in log tokens. "
        f"{censored} are censored: pruned at {PATIENCE} times the least tokens of their batch "
        "size, or at the end of the budget. With decay the same loss takes fewer tokens."
    )
    unknown = len(curve.trials) - len(known)
    if unknown:
        evidence += f" Of {unknown} more it is not known, because their curves are missing."
    return Verdict(evidence, is_failed=censored == len(known))


@check(
    subject=Subject.CROSSINGS,
    condition="No trial reached the target before its first evaluation.",
    remedy="Add [evaluation] points, or choose a lower target, in another --out.",
    blocks_claims=True,
)
def crossing_too_early(curve: StepsCurve) -> Verdict | NotApplicable:
    """Fail if a trial crossed before its first evaluation."""
    known = _known_trials(curve)
    if known.empty:
        return _without_crossings(curve)
    sizes = sorted(set(known["batch_size"][known["is_early"]]))
    early = ", ".join(map(str, sizes)) or "none"
    evidence = f"Batch sizes below the target at the first evaluation: {early}."
    return Verdict(evidence, batch_sizes=sizes)


@check(
    subject=Subject.CROSSINGS,
    condition=(
        "Evaluations are close enough to interpolate every crossing within 1 % of its tokens."
    ),
    remedy="Add [evaluation] points, in another --out.",
)
def crossing_unresolved(curve: StepsCurve) -> Verdict | NotApplicable:
    """Fail if a crossing moves by more than 1 % if a parabola through three evaluations takes the
    place of the line through two.
    """
    known = _known_trials(curve)
    if known.empty:
        return _without_crossings(curve)
    errors = known.groupby("batch_size")["interpolation_error"].mean().dropna()
    coarse = errors[errors > MOST_INTERPOLATION_ERROR]
    if coarse.empty and _count_without_curve(known):
        return _without_some_curves(known)
    shares = [f"{100 * share:.2f} % at batch size {size}" for size, share in errors.items()]
    listed = ", ".join(shares) or "unknown"
    evidence = f"Mean error of the interpolated crossings, by a parabola: {listed}."
    if errors.empty:
        return NotApplicable(evidence)
    return Verdict(evidence, batch_sizes=coarse.index)


def _known_trials(curve: StepsCurve) -> pd.DataFrame:
    """Return the trials of which it is known whether they reached the target."""
    return curve.trials[curve.trials["is_known"]]


def _without_crossings(curve: StepsCurve) -> NotApplicable:
    missing_columns = MISSING_CURVES if len(curve.trials) else ()
    return NotApplicable(f"Not checked: {curve.no_fit}", missing_columns)


def _count_without_curve(known: pd.DataFrame) -> int:
    return int((~known["has_curve"]).sum())


def _without_some_curves(known: pd.DataFrame) -> NotApplicable:
    count = _count_without_curve(known)
    evidence = f"Not checked: the curves of {count} trials are missing."
    return NotApplicable(evidence, MISSING_CURVES)
