"""The table of checks: every fact that a claim about batch sizes rests on, judged once.

The report and `sweep audit` read this table. Conditions and remedies are in checks.toml. The rules
that need only a table of trials are in `sweep.analysis.rules`; they judge our own trials.csv and
published tables alike.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sweep.analysis.rules import RULES, TrialTable

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
