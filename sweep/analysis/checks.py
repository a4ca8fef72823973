"""The table of checks: every fact that a claim about batch sizes rests on, judged once.

The report and `sweep audit` read this table. Conditions and remedies are in checks.toml; the rules
that need only a table of trials are in `sweep.analysis.rules`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import fdtrc

from sweep.analysis.critical_batch_size import StepsCurve
from sweep.analysis.rules import RULES, TrialTable
from sweep.decision.decision import ALPHA
from sweep.plan.target import PATIENCE
from sweep.resources import read_toml

TABLE: dict[str, dict[str, Any]] = read_toml(__file__, "checks.toml")
PASS, FAIL, NOT_APPLICABLE = "PASS", "FAIL", "NOT APPLICABLE"
CURVE_CHECKS, COMMAND_CHECKS = (
    tuple(code for code, row in TABLE.items() if row.get("of") == of) for of in ("curve", "command")
)
MISSING_CURVES = ("metrics.jsonl",)  # "columns" that no table of trials has
CROSSING_CHECKS = ("target_not_reached", "crossing_too_early", "crossing_unresolved")
MOST_INTERPOLATION_ERROR = 0.01  # relative error of the tokens to a target
DERIVED_FROM = {
    "true_steps": "steps",
    "trained_tokens": "token_budget",
    "outcome": "final_valid_loss",
    "loss": "final_valid_loss",
}


@dataclass(frozen=True)
class Check:
    code: str
    status: str  # PASS, FAIL or NOT APPLICABLE
    condition: str  # a sentence
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
            remedy = tuning_command if code == "fixed_learning_rate" else ""
            checks.append(build_check(code, evidence, bool(sizes), sizes, remedy))
        else:
            checks.append(build_check(code, "Nothing here to judge."))
    return checks


def about_examples(check: Check) -> Check:
    """Reword a check of a workload whose sequences are examples without tokens."""
    texts = check.condition, check.evidence
    condition, evidence = (re.sub("token|sequence", "example", text) for text in texts)
    return replace(check, condition=condition, evidence=evidence)


def checks_of_command(checked: Mapping[str, Any], command: str) -> list[Check]:
    """Return the checks of check.json, or that they were not made, which `command` would do."""
    none = {"status": NOT_APPLICABLE, "evidence": f"Not checked: {command}"}
    rows = dict.fromkeys(COMMAND_CHECKS, none) | checked.get("checks", {})
    failed = {PASS: False, FAIL: True}
    return [build_check(c, row["evidence"], failed.get(row["status"])) for c, row in rows.items()]


def check_curve(curve: StepsCurve) -> list[Check]:
    """Check steps to a target, which need the curves of the trials: CURVE_CHECKS."""
    return _check_fit(curve) + _check_crossings(curve)


def supports_crossings(curve: StepsCurve) -> bool:
    """Return True if the measured crossings may be read."""
    return not any(check.status == FAIL for check in _check_crossings(curve))


def supports_fit(curve: StepsCurve) -> bool:
    """Return True if the fitted curve may be read."""
    return not any(check.status == FAIL for check in check_curve(curve))


def _check_fit(curve: StepsCurve) -> list[Check]:
    fit, sizes = curve.fit, curve.batch_sizes
    if fit is None:
        has_all_steps = len(curve.trials) > 0 and bool(curve.trials["steps"].notna().all())
        off = build_check("off_the_curve", curve.no_fit)
        return [build_check("critical_batch_size", curve.no_fit, has_all_steps or None), off]
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
    is_far = (np.abs(means) > 0.1) & (seeds > 1) & (chance <= ALPHA)
    of_seeds = f" and {math.sqrt(pure):.3f} over seeds" if seeds > 1 else ""
    spread = f"The standard deviation of log S is {fit.spread:.3f} about the curve{of_seeds}."
    return [
        build_check("critical_batch_size", evidence, not is_resolved or is_beyond, (), remedy),
        build_check("off_the_curve", spread, bool(is_far.any()), np.array(sizes)[is_far]),
    ]


def _check_crossings(curve: StepsCurve) -> list[Check]:
    """Check where the trials reached the target; NOT APPLICABLE if it is not known of any."""
    known = curve.trials[curve.trials["is_known"]]
    if known.empty:
        none = f"Not checked: {curve.no_fit}"
        missing = MISSING_CURVES if len(curve.trials) else ()
        return [build_check(code, none, missing_columns=missing) for code in CROSSING_CHECKS]
    censored = int(known["is_censored"].sum())
    reached = (
        f"{len(known) - censored} of {len(known)} trials reached {curve.target:g} at a constant "
        "rate and stayed there at the next evaluation; the crossing is interpolated in log tokens. "
        f"{censored} are censored: pruned at {PATIENCE} times the least tokens of their batch "
        "size, or at the end of the budget. With decay the same loss takes fewer tokens."
    )
    unknown = len(curve.trials) - len(known)
    if unknown:
        reached += f" Of {unknown} more it is not known, because their curves are missing."

    sizes = sorted(set(known["batch_size"][known["is_early"]]))
    early = ", ".join(map(str, sizes)) or "none"
    too_early = f"Batch sizes below the target at the first evaluation: {early}."

    errors = known.groupby("batch_size")["interpolation_error"].mean().dropna()
    coarse = errors[errors > MOST_INTERPOLATION_ERROR]
    listed = ", ".join(f"{100 * share:.2f} % at batch size {b}" for b, share in errors.items())
    resolution = f"Mean error of the interpolated crossings, by a parabola: {listed or 'unknown'}."

    checks = [build_check("target_not_reached", reached, censored == len(known))]
    is_early, is_coarse = bool(sizes), bool(len(coarse))
    without_curve = int((~known["has_curve"]).sum())
    not_checked = f"Not checked: the curves of {without_curve} trials are missing."
    if without_curve and not is_early:
        code = "crossing_too_early"
        checks.append(build_check(code, not_checked, missing_columns=MISSING_CURVES))
    else:
        checks.append(build_check("crossing_too_early", too_early, is_early, sizes))
    if without_curve and not is_coarse:
        code = "crossing_unresolved"
        checks.append(build_check(code, not_checked, missing_columns=MISSING_CURVES))
    else:
        is_failed = is_coarse if len(errors) else None
        checks.append(build_check("crossing_unresolved", resolution, is_failed, coarse.index))
    return checks
