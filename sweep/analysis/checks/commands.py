"""The checks of a command, which `sweep check` makes by training (sweep/orchestration/check.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweep.analysis.checks.registry import FAIL, PASS, NotApplicable, Subject, Verdict, check


@dataclass(frozen=True)
class RecordedVerdicts:
    """The verdicts in check.json."""

    rows: Mapping[str, Mapping[str, Any]]  # status and evidence by code
    command: str  # what would make the checks

    def read(self, code: str) -> Verdict | NotApplicable:
        row = self.rows.get(code)
        if row is None:
            return NotApplicable(f"Not checked: {self.command}")
        if row["status"] not in (PASS, FAIL):
            return NotApplicable(row["evidence"])
        return Verdict(row["evidence"], is_failed=row["status"] == FAIL)


@check(
    subject=Subject.COMMAND,
    condition="The command gives the same losses again with the same seed.",
    remedy=(
        "Let the script draw all random numbers from {seed}. Until then seeds vary by more than "
        "data and initial weights, and results cannot be repeated exactly."
    ),
)
def command_repeats(verdicts: RecordedVerdicts) -> Verdict | NotApplicable:
    """Fail if two runs with one seed differ in a loss by more than 10⁻⁶ of its size."""
    return verdicts.read("command_repeats")


@check(
    subject=Subject.COMMAND,
    condition="The command gives the same losses with half the microbatch.",
    remedy=(
        "Divide the loss by the whole batch, and draw nothing per microbatch. Until then compare "
        "only trials that ran with one microbatch size."
    ),
)
def command_accumulation(verdicts: RecordedVerdicts) -> Verdict | NotApplicable:
    """Fail if a run with half the microbatch differs in a loss by more than 10⁻⁴ of its size."""
    return verdicts.read("command_accumulation")


@check(
    subject=Subject.COMMAND,
    condition="The command gives the same losses if it is killed and resumes.",
    remedy=(
        "Keep weights, optimizer, step and random state in {resume}, or leave {resume} out of the "
        "command, so that a killed trial begins again."
    ),
)
def command_resumes(verdicts: RecordedVerdicts) -> Verdict | NotApplicable:
    """Fail if a run that is killed (SIGKILL) after half of its lines and resumes differs in a loss
    by more than 10⁻⁶ of its size.
    """
    return verdicts.read("command_resumes")
