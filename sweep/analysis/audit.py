"""`sweep audit`: evaluate the table of checks on CSV, Markdown tables or a trials.csv."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweep.analysis.any_table import Table, read_tables
from sweep.analysis.checks import FAIL, Check, check_rows
from sweep.analysis.checks.table import prepare
from sweep.analysis.judge import judge_trials, objective_of
from sweep.config.numbers import format_count


def audit(path: Path, rate: float | None = None) -> dict[str, Any]:
    """Return the findings in every table of a file or folder, as `sweep audit --json` has them.

    `rate` is the learning rate of tables that do not give one.
    """
    findings = list[dict[str, Any]]()
    notes = list[str]()
    missing = dict[str, list[str]]()
    checked = set[str]()
    tables = read_tables(path)
    for table in tables:
        prefix = f"{table.name}: " if len(tables) > 1 else ""
        notes += [prefix + note for note in table.notes]
        for label, checks in _checks_of(table, rate) if len(table.rows) else ():
            start = f"{prefix}{label}: " if label else prefix
            for check in checks:
                if check.missing_columns:
                    missing.setdefault(check.code, list(check.missing_columns))
                    continue
                checked.add(check.code)
                if check.status == FAIL:
                    finding = {"code": check.code, "rows": list(check.batch_sizes)}
                    finding |= {"message": start + check.evidence, "remedy": check.remedy}
                    findings.append(finding)
    absent = {code: names for code, names in missing.items() if code not in checked}
    not_checked = [{"code": code, "missing_columns": names} for code, names in absent.items()]
    return {
        "findings": findings,
        "not_checked": not_checked,
        "notes": notes,
        "tables": [
            {"name": table.name, "rows": table.counts, "left_out": list(table.left_out)}
            for table in tables
        ],
    }


def _checks_of(table: Table, rate: float | None) -> Iterator[tuple[str, list[Check]]]:
    """Yield the checks of each part of a table whose rows are compared, with the part's name."""
    if table.is_own:
        trials = table.trials()
        has_budgets = trials["budget"].nunique() > 1
        for _, of_budget in trials.groupby("budget", dropna=False):
            policies = judge_trials(of_budget, objective_of(of_budget))
            for policy in policies:
                parts = [policy.label] if len(policies) > 1 else []
                if has_budgets:
                    parts.append(f"budget {format_count(of_budget['budget'].iloc[0])}")
                yield ", ".join(parts), policy.checks
        return
    has_no_rate = table.rows["learning_rate"].isna().all()
    for label, part in table.parts():
        # These columns are judged in a trials.csv only.
        rows = part.drop(columns=["policy", "cause"])
        if "epochs" not in table.titles:
            rows = rows.drop(columns="epochs")
        if rate is not None and has_no_rate:
            rows = rows.assign(learning_rate=rate)
        yield label, check_rows(prepare(rows, is_own=False))
