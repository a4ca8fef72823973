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


@check(
    subject=Subject.COMMAND,
    condition="Validation before the first step gives the same at two batch sizes.",
    remedy=(
        "Evaluate on the same examples at every batch size, in batches of a fixed size or with a "
        "mean over examples. Until then the losses of batch sizes cannot be compared."
    ),
)
def command_validation(verdicts: RecordedVerdicts) -> Verdict | NotApplicable:
    """Fail if a metric valid/… at step 0 differs between two batch sizes by more than 10⁻⁶ of its
    size.
    """
    return verdicts.read("command_validation")


@check(
    subject=Subject.COMMAND,
    condition="The command trains with the batch size that it is given.",
    remedy="Let the script use {batch_size}, or {microbatch_size} and {accumulation}.",
)
def command_batch_size(verdicts: RecordedVerdicts) -> Verdict | NotApplicable:
    """Fail if all losses after the first step are the same at another batch size."""
    return verdicts.read("command_batch_size")


@check(
    subject=Subject.COMMAND,
    condition="The command trains with the learning rate that it is given.",
    remedy="Let the script use {learning_rate} as the peak of its schedule.",
)
def command_learning_rate(verdicts: RecordedVerdicts) -> Verdict | NotApplicable:
    """Fail if all losses after the first step are the same with twice the learning rate."""
    return verdicts.read("command_learning_rate")


@check(
    subject=Subject.COMMAND,
    condition="The learning rate depends on the number of steps.",
    remedy=(
        "Let the schedule end at {steps}. If the rate is meant to be constant, nothing is wrong."
    ),
)
def command_steps(verdicts: RecordedVerdicts) -> Verdict | NotApplicable:
    """Fail if the losses on the way are the same with twice the steps, as if the learning rate were
    constant or ended elsewhere.
    """
    return verdicts.read("command_steps")


@check(
    subject=Subject.COMMAND,
    condition="The command trains with the seed that it is given.",
    remedy="Let the script draw data and initial weights from {seed}.",
)
def command_seed(verdicts: RecordedVerdicts) -> Verdict | NotApplicable:
    """Fail if all losses after the first step are the same with another seed."""
    return verdicts.read("command_seed")


@check(
    subject=Subject.COMMAND,
    condition="The command counts the examples that it trains on.",
    remedy="Report `examples` or `tokens` in the lines, so that a wrong count is noticed.",
)
def command_counts(verdicts: RecordedVerdicts) -> Verdict | NotApplicable:
    """Fail if a count that it reports is not the planned one, which ends the check with a message,
    as it would end a trial.
    """
    return verdicts.read("command_counts")
