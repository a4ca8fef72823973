"""The table of checks: every fact that a claim about batch sizes rests on, judged once.

The report and `sweep audit` read this table. Conditions and remedies are in checks.toml. The rules
that need only a table of trials are in `sweep.analysis.rules`; they judge our own trials.csv and
published tables alike.
"""

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from sweep.analysis.comparison import report_trials
from sweep.analysis.frames import Sweep
from sweep.analysis.optimum import TunedRate
from sweep.analysis.rules import RULES, TrialTable, prepare, rows_of_trials
from sweep.analysis.statistics import (
    MOST_SEEDS,
    Comparison,
    compare_pairs,
    minimal_detectable_difference,
    seeds_to_detect,
)
from sweep.config.numbers import format_count
from sweep.plan.plan import TUNING_SEED, answering_command

TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("checks.toml").read_text(encoding="utf-8")
)
PASS, FAIL, NOT_APPLICABLE = "PASS", "FAIL", "NOT APPLICABLE"
NEED_TUNING = ("fixed_learning_rate", "scaled_learning_rate")
DERIVED_FROM = {"true_steps": "steps", "outcome": "final_valid_loss", "loss": "final_valid_loss"}


@dataclass(frozen=True)
class Check:
    """One condition, evaluated for the trials of one policy."""

    code: str
    status: Literal["PASS", "FAIL", "NOT APPLICABLE"]
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
    row = TABLE[code]
    return Check(
        code=code,
        status="NOT APPLICABLE" if is_failed is None else "FAIL" if is_failed else "PASS",
        condition=row["condition"],
        evidence=evidence,
        remedy=(remedy or row.get("remedy", "")) if is_failed else "",
        blocks_claims=row.get("blocks_claims", False),
        batch_sizes=tuple(sorted({int(size) for size in batch_sizes})) if is_failed else (),
        missing_columns=missing_columns,
    )


@dataclass(frozen=True, eq=False)
class PolicyChecks:
    """The checks of one learning-rate policy and the optimum of each batch size."""

    label: str  # "tuned", "fixed 3e-4", "sqrt:0.001@32"
    checks: list[Check]
    rates: tuple[TunedRate, ...]  # empty unless the rates were tuned
    scope: str  # "This holds for …", a sentence

    @property
    def failed(self) -> list[Check]:
        """The checks that fail."""
        return [check for check in self.checks if check.status == FAIL]

    @property
    def passes(self) -> bool:
        """Whether no check fails that blocks claims."""
        return not any(check.blocks_claims for check in self.failed)


@dataclass(frozen=True, eq=False)
class PolicyResult(PolicyChecks):
    """The reporting trials of one learning-rate policy, compared and checked."""

    comparison: Comparison  # final losses, paired by seed


def check_rows(table: TrialTable, tuning_command: str = "") -> list[Check]:
    """Evaluate the rules on one table; a rule is left out if such a table never has its columns.

    `tuning_command` is the remedy for rates that were not tuned, if there is such a command.
    """
    checks = []
    for code, rule in RULES.items():
        needs, has_equal_budgets = TABLE[code]["needs"], TABLE[code].get("equal_budgets", False)
        if not set(needs) <= set(table.rows) or (table.has_target and has_equal_budgets):
            continue
        absent = [name for name in needs if table.rows[name].isna().all()]
        missing = tuple(DERIVED_FROM.get(name, name) for name in absent)
        cells = table.best.dropna(subset=[name for name in needs if name in table.best])
        if missing:
            evidence = f"Not checked: {', '.join(missing)} is missing."
            checks.append(build_check(code, evidence, missing_columns=missing))
        elif verdict := rule(table, cells):
            sizes, evidence = list(verdict[0]), verdict[1]
            remedy = tuning_command if code in NEED_TUNING else ""
            checks.append(build_check(code, evidence, bool(sizes), sizes, remedy))
        else:
            checks.append(build_check(code, "Not applicable."))
    return checks


def check_own_rows(
    sweep: Sweep, label: str, comparison: Comparison
) -> tuple[list[Check], tuple[TunedRate, ...]]:
    """Evaluate the rules on one policy of a sweep; return the checks and the best rates.

    The comparison, of losses or of log steps to the target, gives the σ for intervals of rates.
    """
    rows = rows_of_trials(sweep.trials, sweep.plan)
    sigma = comparison.sigma.value if comparison.sigma else None
    table = prepare(rows[rows["label"] == label], sigma, comparison.degrees_of_freedom)
    return check_rows(table, answering_command(sweep.plan) or ""), table.rates


def run_checks(sweep: Sweep, cells: pd.DataFrame) -> dict[str, PolicyResult]:
    """Evaluate every check for each policy of a sweep without a target, in the plan's order.

    `cells` are those of `compare_batch_sizes`.
    """
    reports, settings, results = report_trials(sweep.trials), sweep.plan.settings, {}
    no_equal_steps = "The schedule knows its end, so a shorter trial would have had another loss."
    if settings.schedule.name == "constant":
        no_equal_steps = "Only final losses were measured on the whole validation split."
    for name, trials in reports.groupby("label", sort=False):
        label, own = str(name), cells[cells["label"] == name]
        losses: dict[int, dict[int, float]] = {size: {} for size in trials["batch_size"]}
        for row in trials.to_dict("records"):
            if row["state"] == "COMPLETE" or row["cause"] == "diverged":
                loss = row["final_valid_loss"] if row["state"] == "COMPLETE" else math.inf
                losses[row["batch_size"]][row["seed"]] = loss
        comparison = compare_pairs(losses, unit=settings.traits.loss_unit)
        checks, rates = check_own_rows(sweep, label, comparison)
        complete = own.loc[own["is_comparable"], "batch_size"].nunique()
        compared = f"{complete} of {len(losses)} batch sizes are complete."
        count = own["complete"].sum()
        final = f"{count} losses of the whole validation split, after the last step."
        checks += [
            _differences(comparison),
            build_check("nothing_to_compare", compared, complete < 2),
            build_check("final_losses", final, False if count else None),
            build_check("equal_steps", no_equal_steps),
            build_check("generalisation", "Why losses differ was not measured."),
        ]
        scope = scope_sentence(sweep, trials)
        results[label] = PolicyResult(label, checks, rates, scope, comparison)
    return results


def _differences(comparison: Comparison) -> Check:
    code, best, sigma = "undecided_differences", comparison.least, comparison.sigma
    if best is None or sigma is None:
        return build_check(code, f"{comparison.not_applicable.capitalize()}.")
    pairs, margin, unit = comparison.pairs_with(best), comparison.margin, comparison.unit
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


def scope_sentence(sweep: Sweep, trials: pd.DataFrame) -> str:
    """Return what a claim about these reporting trials holds for."""
    settings, plan = sweep.plan.settings, sweep.plan
    parts = [settings.model.name, *([str(plan.data.get("name", "own data"))] if plan.data else [])]
    parts += [f"{format_count(plan.token_budget)} tokens", settings.optimizer.name]
    parts.append(f"{settings.schedule.name} schedule")
    tuned = sweep.trials[(sweep.trials["stage"] == "tune") & (sweep.trials["policy"] == "tuned")]
    if set(trials["policy"]) == {"tuned"} and len(tuned):
        counts = tuned.groupby("batch_size").size()
        tried = " to ".join(dict.fromkeys(map(str, (counts.min(), counts.max()))))
        names = " and ".join(settings.tuning.dimensions)
        parts.append(f"{names} tuned by {tried} trials at seed {TUNING_SEED}")
    seeds = ", ".join(map(str, sorted(trials["seed"].unique())))
    return f"This holds for {', '.join(parts)}, reported on seeds {seeds}."


def headline(result: PolicyResult) -> str:
    """Return the claim about the best batch size; empty unless every blocking check passes."""
    comparison, best = result.comparison, result.comparison.least
    if best is None or not result.passes:
        return ""
    claim = f"At rates tuned for each, batch size {best} has the lowest final loss."
    for pair in comparison.pairs_with(best):
        (other,) = set(pair.batch_sizes) - {best}
        difference = f"{abs(pair.difference.value):.4f} {comparison.unit} higher"
        if pair.is_equivalent:
            difference = f"equivalent within ±{comparison.margin:g} {comparison.unit}"
        claim += f" Batch size {other} is {difference}."
    return f"{claim} {result.scope}"
