"""Make the registered checks of a table of trials, of a curve, or of a command."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sweep.analysis.checks.commands import RecordedVerdicts
from sweep.analysis.checks.registry import (
    DEFINITIONS,
    FAIL,
    Check,
    CheckDefinition,
    NotApplicable,
    Subject,
    registered,
)
from sweep.analysis.checks.table import TrialTable, source_of
from sweep.analysis.critical_batch_size import StepsCurve


def check_rows(table: TrialTable) -> list[Check]:
    """Check a table of trials."""
    return [
        _check_table(definition, table)
        for definition in registered(Subject.TRIALS)
        if _is_about(definition, table)
    ]


def _is_about(definition: CheckDefinition, table: TrialTable) -> bool:
    """Return False for a table that never has the columns of a check.

    Also for one with a target, or a budget of time, if the check needs what this leaves out.
    """
    if table.has_target and definition.needs_equal_budgets:
        return False
    if table.has_time_budget and definition.needs_equal_tokens:
        return False
    return set(definition.needs) <= set(table.rows)


def _check_table(definition: CheckDefinition, table: TrialTable) -> Check:
    empty = [name for name in definition.needs if table.rows[name].isna().all()]
    if empty:
        missing_columns = tuple(source_of(name, table.objective) for name in empty)
        evidence = f"Not checked: {', '.join(missing_columns)} is missing."
        return definition.build(NotApplicable(evidence, missing_columns))
    averaged = [name for name in definition.needs if name in table.best]
    return definition.evaluate(table, table.best.dropna(subset=averaged))


def check_curve(curve: StepsCurve) -> list[Check]:
    """Check steps to a target, by the curves of the trials."""
    definitions = registered(Subject.FIT, Subject.CROSSINGS)
    return [definition.evaluate(curve) for definition in definitions]


def supports_crossings(curve: StepsCurve) -> bool:
    """Return True if the measured crossings may be read."""
    checks = [definition.evaluate(curve) for definition in registered(Subject.CROSSINGS)]
    return not any(check.status == FAIL for check in checks)


def supports_fit(curve: StepsCurve) -> bool:
    """Return True if the fitted curve may be read."""
    return not any(check.status == FAIL for check in check_curve(curve))


def checks_of_command(checked: Mapping[str, Any], command: str) -> list[Check]:
    """Return the checks of check.json, or that they were not made, which `command` would do."""
    verdicts = RecordedVerdicts(checked.get("checks", {}), command)
    return [definition.evaluate(verdicts) for definition in registered(Subject.COMMAND)]


def build_check(code: str, evidence: str, missing_columns: tuple[str, ...]) -> Check:
    """Return a check that cannot be made, because columns or curves are missing."""
    return DEFINITIONS[code].build(NotApplicable(evidence, missing_columns))


def about_examples(check: Check) -> Check:
    """Reword a check of a workload whose sequences are examples without tokens."""
    return replace(
        check,
        condition=re.sub("token|sequence", "example", check.condition),
        evidence=re.sub("token|sequence", "example", check.evidence),
    )
