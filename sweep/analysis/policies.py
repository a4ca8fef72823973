"""Judge each learning-rate policy of a sweep: compare its batch sizes, check, and claim."""

import math
from dataclasses import dataclass

import pandas as pd

from sweep.analysis.checks import FAIL, Check, build_check, check_rows
from sweep.analysis.comparison import compare_batch_sizes, report_trials
from sweep.analysis.frames import Sweep
from sweep.analysis.optimum import TunedRate
from sweep.analysis.rules import prepare, rows_of_trials
from sweep.analysis.statistics import (
    MOST_SEEDS,
    Comparison,
    compare_pairs,
    minimal_detectable_difference,
    seeds_to_detect,
)
from sweep.analysis.target import StepsCurve, check_curve, fit_curve, steps_to_target
from sweep.config.numbers import format_count
from sweep.plan.plan import TUNING_SEED, answering_command


@dataclass(frozen=True, eq=False)
class PolicyResult:
    """The reporting trials of one learning-rate policy, compared and checked."""

    label: str  # "tuned", "fixed 3e-4", "sqrt:0.001@32"
    checks: list[Check]
    rates: tuple[TunedRate, ...]  # empty unless the rates were tuned
    scope: str  # "This holds for …", a sentence
    comparison: Comparison  # paired by seed: final losses, or log steps to the target
    curve: StepsCurve | None  # None without a target

    @property
    def failed(self) -> list[Check]:
        """The checks that fail."""
        return [check for check in self.checks if check.status == FAIL]

    @property
    def passes(self) -> bool:
        """Whether no check fails that blocks claims."""
        return not any(check.blocks_claims for check in self.failed)

    @property
    def headline(self) -> str:
        """The claim about the best or the critical batch size; empty if it is blocked."""
        comparison, best, curve = self.comparison, self.comparison.least, self.curve
        if not self.passes or (best is None if curve is None else curve.fit is None):
            return ""
        if curve is not None and curve.fit is not None:
            return (
                f"To a validation loss of {curve.target:g} the critical batch size is "
                f"{curve.fit.b_crit:.4g} sequences: training there takes twice the least tokens "
                f"and twice the least steps. {self.scope}"
            )
        claim = f"At rates tuned for each, batch size {best} has the lowest final loss."
        for pair in comparison.pairs_with_best:
            (other,) = set(pair.batch_sizes) - {best}
            difference = f"{abs(pair.difference.value):.4f} {comparison.unit} higher"
            if pair.is_equivalent:
                difference = f"equivalent within ±{comparison.margin:g} {comparison.unit}"
            claim += f" Batch size {other} is {difference}."
        return f"{claim} {self.scope}"


def judge(sweep: Sweep) -> tuple[PolicyResult, ...]:
    """Compare and check each policy of a sweep, in the plan's order."""
    settings, results = sweep.plan.settings, []
    rows = rows_of_trials(sweep.trials, sweep.plan)
    steps = None if settings.target is None else steps_to_target(sweep)
    for name, reports in report_trials(sweep.trials).groupby("label", sort=False):
        curve = None
        if steps is None or settings.target is None:
            comparison = compare_pairs(_final_losses(reports), unit=settings.traits.loss_unit)
            more_checks = _check_losses(sweep, reports, comparison)
        else:
            curve = fit_curve(steps[steps["label"] == name], settings.target)
            comparison = compare_pairs(curve.log_steps())
            more_checks = check_curve(curve, comparison.sigma)
        # The σ of losses or of log steps gives the intervals of rates.
        sigma = comparison.sigma.value if comparison.sigma else None
        table = prepare(rows[rows["label"] == name], sigma, comparison.degrees_of_freedom)
        checks = check_rows(table, answering_command(sweep.plan) or "") + more_checks
        scope = _scope(sweep, reports)
        results.append(PolicyResult(str(name), checks, table.rates, scope, comparison, curve))
    return tuple(results)


def _final_losses(reports: pd.DataFrame) -> dict[int, dict[int, float]]:
    """Return the final losses by batch size and seed; a diverged trial's is infinite."""
    losses: dict[int, dict[int, float]] = {size: {} for size in reports["batch_size"]}
    is_complete, has_diverged = reports["state"] == "COMPLETE", reports["cause"] == "diverged"
    values = reports["final_valid_loss"].where(is_complete, math.inf)
    for row in reports.assign(loss=values)[is_complete | has_diverged].to_dict("records"):
        losses[row["batch_size"]][row["seed"]] = row["loss"]
    return losses


def _check_losses(sweep: Sweep, reports: pd.DataFrame, comparison: Comparison) -> list[Check]:
    cells = compare_batch_sizes(reports)
    complete = cells.loc[cells["is_comparable"], "batch_size"].nunique()
    compared = f"{complete} of {len(comparison.batch_sizes)} batch sizes are complete."
    count = cells["complete"].sum()
    final = f"{count} losses of the whole validation split, after the last step."
    no_equal_steps = "The schedule knows its end, so a shorter trial would have had another loss."
    if sweep.plan.settings.schedule.name == "constant":
        no_equal_steps = "Only final losses were measured on the whole validation split."
    return [
        _check_differences(comparison),
        build_check("nothing_to_compare", compared, complete < 2),
        build_check("final_losses", final, False if count else None),
        build_check("equal_steps", no_equal_steps),
        build_check("generalisation", "Why losses differ was not measured."),
    ]


def _check_differences(comparison: Comparison) -> Check:
    code, best, sigma = "undecided_differences", comparison.least, comparison.sigma
    if best is None or sigma is None:
        return build_check(code, f"{comparison.not_applicable.capitalize()}.")
    pairs, margin, unit = comparison.pairs_with_best, comparison.margin, comparison.unit
    undecided = [pair for pair in pairs if not (pair.is_different or pair.is_equivalent)]
    different = sum(pair.is_different for pair in pairs)
    shape = (len(comparison.batch_sizes), len(comparison.pairs))
    seeds = len(comparison.seeds)
    least = minimal_detectable_difference(sigma.value, seeds, *shape)
    needed = seeds_to_detect(margin, sigma.value, *shape) or f"more than {MOST_SEEDS}"
    evidence = (
        f"Paired by seed, Holm over all pairs: of {len(pairs)} batch sizes {different} differ from "
        f"batch size {best}, {len(pairs) - different - len(undecided)} are equivalent within "
        f"±{margin:g} {unit}, {len(undecided)} are undecided. The largest variance is "
        f"{comparison.variance_ratio:.1f} times the smallest. σ of seeds is {sigma:.4f} {unit}. "
        f"{seeds} seeds show a difference of {least:.4f} {unit} with power 0.8; {margin:g} {unit} "
        f"would need {needed} seeds."
    )
    if not undecided:
        return build_check(code, evidence, False)
    wanted = max(min(abs(pair.difference.value) for pair in undecided), margin)
    remedy = f"More than {MOST_SEEDS} seeds would be needed."
    if enough := seeds_to_detect(wanted, sigma.value, *shape):
        remedy = f"--seeds {max(enough, seeds + 1)} for a difference of {wanted:.4f} {unit}"
    others = {size for pair in undecided for size in pair.batch_sizes} - {best}
    return build_check(code, evidence, True, others, remedy)


def _scope(sweep: Sweep, reports: pd.DataFrame) -> str:
    """Return what a claim about these reporting trials holds for."""
    settings, plan = sweep.plan.settings, sweep.plan
    parts = [settings.model.name, *([str(plan.data.get("name", "own data"))] if plan.data else [])]
    parts += [f"{format_count(plan.token_budget)} tokens", settings.optimizer.name]
    parts.append(f"{settings.schedule.name} schedule")
    tuned = sweep.trials[(sweep.trials["stage"] == "tune") & (sweep.trials["policy"] == "tuned")]
    if set(reports["policy"]) == {"tuned"} and len(tuned):
        counts = tuned.groupby("batch_size").size()
        tried = " to ".join(dict.fromkeys(map(str, (counts.min(), counts.max()))))
        names = " and ".join(settings.tuning.dimensions)
        parts.append(f"{names} tuned by {tried} trials at seed {TUNING_SEED}")
    seeds = ", ".join(map(str, sorted(reports["seed"].unique())))
    return f"This holds for {', '.join(parts)}, reported on seeds {seeds}."
