"""The table of checks: every fact that a claim about batch sizes rests on, judged once.

The report and `sweep audit` read this table. Conditions and remedies are in checks.toml; the rules
that need only a table of trials are in `sweep.analysis.rules`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import fdtrc

from sweep.analysis import statistics
from sweep.analysis.critical_batch_size import StepsCurve, fit_curve, steps_to_target
from sweep.analysis.frames import Sweep, compare_batch_sizes, report_trials
from sweep.analysis.optimum import TunedRate
from sweep.analysis.rules import RULES, TrialTable, prepare, rows_of_trials
from sweep.analysis.statistics import Comparison, Estimate, Floats, compare_pairs
from sweep.config import read_toml
from sweep.config.numbers import format_count
from sweep.plan.plan import TUNING_SEED, answering_command
from sweep.plan.rates import PATIENCE

TABLE: dict[str, dict[str, Any]] = read_toml(__file__, "checks.toml")
PASS, FAIL, NOT_APPLICABLE = "PASS", "FAIL", "NOT APPLICABLE"
CURVE_CHECKS = ("critical_batch_size", "off_the_curve", "target_not_reached", "crossing_too_early")
DERIVED_FROM = {"true_steps": "steps", "outcome": "final_valid_loss", "loss": "final_valid_loss"}


@dataclass(frozen=True)
class Check:
    code: str
    status: str  # PASS, FAIL or NOT APPLICABLE
    condition: str  # what must hold, a sentence
    evidence: str  # the numbers, one or more sentences
    remedy: str  # a sentence or a command; empty unless the check fails
    blocks_claims: bool  # no claim about the best batch size is made while it fails
    batch_sizes: tuple[int, ...]  # those at fault
    missing_columns: tuple[str, ...]  # columns whose absence makes it NOT APPLICABLE


def build_check(
    code: str,
    evidence: str,
    is_failed: bool | None = None,
    batch_sizes: Iterable[Any] = (),
    remedy: str = "",
    missing_columns: tuple[str, ...] = (),
) -> Check:
    """Evaluate a row of checks.toml; it is not applicable if `is_failed` is None."""
    row, status = TABLE[code], {None: NOT_APPLICABLE, True: FAIL, False: PASS}[is_failed]
    remedy = (remedy or row.get("remedy", "")) if is_failed else ""
    blocks_claims, condition = row.get("blocks_claims", False), row["condition"]
    sizes = tuple(sorted({int(size) for size in batch_sizes})) if is_failed else ()
    return Check(code, status, condition, evidence, remedy, blocks_claims, sizes, missing_columns)


def check_rows(table: TrialTable, tuning_command: str = "") -> list[Check]:
    """Evaluate the rules on one table; a rule is left out if such a table never has its columns."""
    checks = []
    for code, rule in RULES.items():
        needs, needs_equal_budgets = TABLE[code]["needs"], TABLE[code].get("needs_equal_budgets")
        if not set(needs) <= set(table.rows) or (table.has_target and needs_equal_budgets):
            continue
        absent = [name for name in needs if table.rows[name].isna().all()]
        missing = tuple(DERIVED_FROM.get(name, name) for name in absent)
        cells = table.best.dropna(subset=[name for name in needs if name in table.best])
        if missing:
            evidence = f"Not checked: {', '.join(missing)} is missing."
            checks.append(build_check(code, evidence, missing_columns=missing))
        elif verdict := rule(table, cells):
            sizes, evidence = list(verdict[0]), verdict[1]
            is_of_rates = code in ("fixed_learning_rate", "scaled_learning_rate")
            remedy = tuning_command if is_of_rates else ""
            checks.append(build_check(code, evidence, bool(sizes), sizes, remedy))
        else:
            checks.append(build_check(code, "Nothing here to judge."))
    return checks


@dataclass(frozen=True, eq=False)
class PolicyResult:
    label: str  # "tuned", "fixed 3e-4", "sqrt:0.001@32"
    checks: list[Check]
    rates: tuple[TunedRate, ...]  # empty unless the rates were tuned
    scope: str  # "Scope: model small, data …", a sentence
    comparison: Comparison  # paired by seed: final losses, or log steps to the target
    curve: StepsCurve | None  # None without a target

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == FAIL]

    @property
    def passes(self) -> bool:
        return not any(check.blocks_claims for check in self.failed)

    @property
    def headline(self) -> str:
        """The claim about the best or the critical batch size; empty if it is blocked."""
        comparison, best, curve = self.comparison, self.comparison.least, self.curve
        if self.passes and curve and curve.fit:
            return (
                f"To a validation loss of {curve.target:g} the critical batch size is "
                f"{curve.fit.b_crit:.4g} sequences: training there takes twice the least tokens "
                f"and twice the least steps. {self.scope}"
            )
        if not self.passes or curve or best is None:
            return ""
        claim = f"With rates tuned at each batch size, batch size {best} has the lowest final loss."
        for pair in comparison.pairs_with_best:
            (other,) = set(pair.batch_sizes) - {best}
            difference = f"{abs(pair.difference.value):.4f} {comparison.unit} higher"
            if pair.verdict == "equivalent":
                difference = f"equivalent within ±{comparison.margin:g} {comparison.unit}"
            claim += f" Batch size {other} is {difference}."
        return f"{claim} {self.scope}"


def judge(sweep: Sweep) -> tuple[PolicyResult, ...]:
    """Compare and check each policy of a sweep, in the plan's order."""
    steps = None if sweep.plan.settings.target is None else steps_to_target(sweep)
    results = judge_trials(sweep.trials, steps, answering_command(sweep.plan) or "")
    return tuple(replace(result, scope=_scope(sweep, result.label)) for result in results)


def judge_trials(
    trials: pd.DataFrame, steps: pd.DataFrame | None = None, tuning_command: str = ""
) -> list[PolicyResult]:
    """Compare and check each policy of a trials.csv; `steps` are those of `steps_to_target`."""
    rows, results = rows_of_trials(trials), []
    for label, own in rows.groupby("label", sort=False):
        reports, target, curve = own[own["stage"] == "report"], own["target"].max(), None
        if steps is not None:
            curve = fit_curve(steps[steps["label"] == label], target)
            reached = curve.trials[~curve.trials["is_censored"]]
            logs = np.log(reached["steps"].astype(float))
            comparison = compare_pairs(_by_seed(reached, logs))
            more_checks = _check_fit(curve, comparison.sigma) + _check_crossings(curve)
        elif own["has_target"].any():
            comparison, missing = compare_pairs({}), ("metrics.jsonl",)
            evidence = "Not checked: the curves are missing."
            more_checks = [build_check(c, evidence, missing_columns=missing) for c in CURVE_CHECKS]
        else:
            is_complete = reports["state"] == "COMPLETE"
            losses = reports["final_valid_loss"].where(is_complete, math.inf)
            ended = _by_seed(reports[is_complete | reports["has_diverged"]], losses)
            by_size = {size: ended.get(size, {}) for size in reports["batch_size"]}
            comparison = compare_pairs(by_size, unit=own["loss_unit"].iloc[0])
            more_checks = _check_losses(trials.loc[reports.index], comparison)
        # The σ of losses or of log steps gives the intervals of rates.
        sigma = comparison.sigma.value if comparison.sigma else None
        table = prepare(own, sigma, comparison.degrees_of_freedom)
        checks = check_rows(table, tuning_command) + more_checks
        results.append(PolicyResult(str(label), checks, table.rates, "", comparison, curve))
    return results


def leading(policies: Sequence[PolicyResult]) -> Sequence[PolicyResult]:
    """Return the policies that a report opens with: those with tuned rates, if there are any."""
    return [policy for policy in policies if policy.rates] or policies


def _by_seed(trials: pd.DataFrame, values: pd.Series | Floats) -> dict[Any, dict[int, float]]:
    groups = trials.assign(value=values).groupby("batch_size")
    return {size: dict(zip(rows["seed"], rows["value"], strict=True)) for size, rows in groups}


def _check_losses(reports: pd.DataFrame, comparison: Comparison) -> list[Check]:
    cells = compare_batch_sizes(reports)
    complete = cells.loc[cells["is_comparable"], "batch_size"].nunique()
    compared = f"{complete} of {len(comparison.batch_sizes)} batch sizes are complete."
    count = cells["complete"].sum()
    final = f"{count} losses of the whole validation split, after the last step."
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
    undecided = [pair for pair in pairs if pair.verdict == "undecided"]
    counts, seeds = Counter(pair.verdict for pair in pairs), len(comparison.seeds)
    shape = (len(comparison.batch_sizes), len(comparison.pairs))
    least = statistics.minimal_detectable_difference(sigma.value, seeds, *shape)
    too_many = f"more than {statistics.MOST_SEEDS}"
    needed = statistics.seeds_to_detect(margin, sigma.value, *shape) or too_many
    evidence = (
        f"Batch sizes that differ from {best}: {counts['different']}; equivalent (±{margin:g} "
        f"{unit}): {counts['equivalent']}; undecided: {len(undecided)} (paired by seed, Holm over "
        f"all pairs). The largest variance is {comparison.variance_ratio:.1f} times the smallest. "
        f"σ of seeds is {sigma:.4f} {unit}. "
        f"{seeds} seeds show a difference of {least:.4f} {unit} with power 0.8; {margin:g} {unit} "
        f"would need {needed} seeds."
    )
    if not undecided:
        return build_check(code, evidence, False)
    difference = max(min(abs(pair.difference.value) for pair in undecided), margin)
    remedy = f"{too_many.capitalize()} seeds would be needed."
    if enough := statistics.seeds_to_detect(difference, sigma.value, *shape):
        remedy = f"--seeds {max(enough, seeds + 1)} for a difference of {difference:.4f} {unit}"
    others = {size for pair in undecided for size in pair.batch_sizes} - {best}
    return build_check(code, evidence, True, others, remedy)


def _scope(sweep: Sweep, label: str) -> str:
    settings, plan, reports = sweep.plan.settings, sweep.plan, report_trials(sweep.trials)
    reports = reports[reports["label"] == label]
    parts = [f"model {settings.model.name}", f"data {settings.data or settings.workload}"]
    parts += [f"{format_count(plan.token_budget)} tokens", f"optimizer {settings.optimizer.name}"]
    parts.append(f"{settings.schedule.name} schedule")
    tuned = sweep.trials[(sweep.trials["stage"] == "tune") & (sweep.trials["policy"] == "tuned")]
    if set(reports["policy"]) == {"tuned"} and len(tuned):
        counts = tuned.groupby("batch_size").size()
        tried = " to ".join(dict.fromkeys(map(str, (counts.min(), counts.max()))))
        names = " and ".join(settings.tuning.dimensions)
        parts.append(f"{names} tuned by {tried} trials at seed {TUNING_SEED}")
    seeds = ", ".join(map(str, sorted(reports["seed"].unique()))) or "not yet known"
    return f"Scope: {', '.join(parts)}; seeds {seeds}."


def _check_fit(curve: StepsCurve, sigma: Estimate | None) -> list[Check]:
    """Evaluate the checks of the fit; sigma is of log steps over seeds."""
    fit, sizes = curve.fit, curve.batch_sizes
    if fit is None:
        off = build_check("off_the_curve", curve.no_fit)
        return [build_check("critical_batch_size", curve.no_fit, True), off]
    is_resolved = math.isfinite(fit.b_crit.high) and fit.b_crit.low > 0
    is_beyond = is_resolved and not curve.covers(fit.b_crit.value)
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
    chance = fdtrc(count - 2, count * (seeds - 1), lack / max(pure, 1e-30))
    is_far = (np.abs(means) > 0.1) & (seeds > 1) & (chance <= statistics.ALPHA)
    of_seeds = f" and {sigma:.3f} over seeds" if sigma else ""
    spread = f"The standard deviation of log S is {fit.spread:.3f} about the curve{of_seeds}."
    return [
        build_check("critical_batch_size", evidence, not is_resolved or is_beyond, (), remedy),
        build_check("off_the_curve", spread, bool(is_far.any()), np.array(sizes)[is_far]),
    ]


def _check_crossings(curve: StepsCurve) -> list[Check]:
    trials, censored = curve.trials, int(curve.trials["is_censored"].sum())
    sizes = sorted(set(trials["batch_size"][trials["is_early"]]))
    reached = (
        f"{len(trials) - censored} of {len(trials)} trials reached {curve.target:g} at a constant "
        "rate and stayed there at the next evaluation; the crossing is interpolated in log tokens. "
        f"{censored} are censored: pruned at {PATIENCE} times the least tokens of their batch "
        "size, or at the end of the budget. With decay the same loss takes fewer tokens."
    )
    early = ", ".join(map(str, sizes)) or "none"
    too_early = f"Batch sizes below the target at the first evaluation: {early}."
    return [
        build_check("target_not_reached", reached, censored == len(trials)),
        build_check("crossing_too_early", too_early, bool(sizes), sizes),
    ]
