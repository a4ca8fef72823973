"""The registry of checks: how a check is declared, and its outcome for one sweep or table.

A check is a function with a decorator. The name of the function is the code of the check, its
docstring says when the check fails, and the decorator holds the other texts and what the check
needs. The order of a report is the order of registration.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from sweep.errors import SweepError, user_code
from sweep.usercode.extensions import load_extensions

PASS = "PASS"
FAIL = "FAIL"
NOT_APPLICABLE = "NOT APPLICABLE"
EXTENSIONS = "sweep.checks"  # the entry points of packages that register checks


class Subject(StrEnum):
    """The argument of a check's function."""

    TRIALS = "trials"  # a table of trials, and the best cell of each batch size
    FIT = "fit"  # a curve of steps to a target, of which the check judges the fit
    CROSSINGS = "crossings"  # such a curve, of which the check judges where trials crossed
    COMMAND = "command"  # the verdicts of `sweep check`


@dataclass(frozen=True)
class Verdict:
    """The verdict of a check that applies."""

    evidence: str  # the numbers, one or more sentences
    batch_sizes: Iterable[Any] = ()  # those at fault; the check fails if there are any
    is_failed: bool = False  # the check fails, although no single batch size is at fault
    remedy: str = ""  # a sentence in place of the remedy of the check
    command: str | None = None  # in its place too; the report's next step proposes it


@dataclass(frozen=True)
class NotApplicable:
    """The reason why a check does not apply, or cannot be made."""

    evidence: str = "Nothing here to judge."
    missing_columns: tuple[str, ...] = ()


Judge = TypeVar("Judge", bound=Callable[..., Verdict | NotApplicable])


@dataclass(frozen=True)
class Check:
    """A check that was made."""

    code: str
    subject: Subject
    status: str  # PASS, FAIL or NOT APPLICABLE
    condition: str  # a sentence
    evidence: str  # the numbers, one or more sentences
    remedy: str  # a sentence or a command; empty unless the check fails
    is_next_step: bool  # whether the remedy is a command, which the next step proposes
    blocks_claims: bool  # no claim about the best batch size is made while it fails
    batch_sizes: tuple[int, ...]  # those at fault
    missing_columns: tuple[str, ...]  # columns whose absence makes it NOT APPLICABLE

    @property
    def is_of_command(self) -> bool:
        """Whether `sweep check` makes it."""
        return self.subject is Subject.COMMAND


@dataclass(frozen=True, eq=False)
class CheckDefinition:
    """A check that can be made, and everything that is known about it."""

    code: str
    subject: Subject
    judge: Callable[..., Verdict | NotApplicable]
    condition: str  # a sentence that says what must hold
    remedy: str  # a sentence that says what to do if the check fails
    blocks_claims: bool = False  # no claim about the best batch size is made while it fails
    needs: tuple[str, ...] = ()  # columns; a table in which one of them is empty is not checked
    needs_equal_budgets: bool = False  # it does not apply to training to a target
    needs_equal_tokens: bool = False  # nor to training for a time

    @property
    def is_shipped(self) -> bool:
        """Return True for a check of this package."""
        return self.judge.__module__.startswith(f"{__package__}.")

    @property
    def failure(self) -> str:
        """When the check fails, as a sentence: the first paragraph of its docstring."""
        paragraph = (inspect.getdoc(self.judge) or "").partition("\n\n")[0]
        return " ".join(paragraph.split())

    def evaluate(self, *inputs: Any) -> Check:
        """Make the check.

        Raises:
            SweepError: If the check belongs to another package and raises an error.
        """
        if self.is_shipped:
            return self.build(self.judge(*inputs))
        with user_code(f"the check {self.code} must return a verdict"):
            return self.build(self.judge(*inputs))

    def build(self, outcome: Verdict | NotApplicable) -> Check:
        """Combine an outcome with the texts of the check."""
        status = PASS
        remedy = ""
        is_next_step = False
        batch_sizes: tuple[int, ...] = ()
        missing_columns: tuple[str, ...] = ()
        if isinstance(outcome, NotApplicable):
            status = NOT_APPLICABLE
            missing_columns = outcome.missing_columns
        else:
            batch_sizes = tuple(sorted({int(size) for size in outcome.batch_sizes}))
            if batch_sizes or outcome.is_failed:
                status = FAIL
                is_next_step = outcome.command is not None
                remedy = self._remedy_of(outcome)
        return Check(
            code=self.code,
            subject=self.subject,
            status=status,
            condition=self.condition,
            evidence=outcome.evidence,
            remedy=remedy,
            is_next_step=is_next_step,
            blocks_claims=self.blocks_claims,
            batch_sizes=batch_sizes,
            missing_columns=missing_columns,
        )

    def _remedy_of(self, verdict: Verdict) -> str:
        if verdict.command is not None:
            return verdict.command
        return verdict.remedy if verdict.remedy else self.remedy


DEFINITIONS: dict[str, CheckDefinition] = {}  # by code, in the order of reports


def register(definition: CheckDefinition) -> None:
    """Add a check. A module may replace its own checks, as a notebook does with a changed cell.

    Raises:
        SweepError: If another module has registered a check with this code.
    """
    earlier = DEFINITIONS.get(definition.code)
    module = definition.judge.__module__
    if earlier and earlier.judge.__module__ != module:
        problem = f"the code of a check must be unique, got {definition.code!r} of {module}"
        raise SweepError(f"{problem}, which {earlier.judge.__module__} has too. Rename it.")
    DEFINITIONS[definition.code] = definition


def registered(*subjects: Subject) -> list[CheckDefinition]:
    """Return the checks of some subjects, those of other packages included."""
    load_extensions(EXTENSIONS)
    return [definition for definition in DEFINITIONS.values() if definition.subject in subjects]


def check(
    *,
    condition: str,
    remedy: str,
    subject: Subject = Subject.TRIALS,
    needs: tuple[str, ...] = (),
    blocks_claims: bool = False,
    needs_equal_budgets: bool = False,
    needs_equal_tokens: bool = False,
) -> Callable[[Judge], Judge]:
    """Register a function as a check.

    A check of trials receives a `TrialTable` and the cells of its batch sizes: for each one the
    mean of the completed trials with the least loss, if it has all columns that the check needs.

    Args:
        condition: A sentence that says what must hold.
        remedy: A sentence that says what to do if the check fails.
        subject: What the function receives.
        needs: Columns of the table. A table that never has one of them is not about the check, and
            one in which a column is empty is not checked.
        blocks_claims: Whether a recommendation is provisional while the check fails.
        needs_equal_budgets: Whether the check is left out of training to a target.
        needs_equal_tokens: Whether it is also left out of training for a time.
    """

    def decorate(judge: Judge) -> Judge:
        register(
            CheckDefinition(
                code=judge.__name__,
                subject=subject,
                judge=judge,
                condition=condition,
                remedy=remedy,
                blocks_claims=blocks_claims,
                needs=needs,
                needs_equal_budgets=needs_equal_budgets or needs_equal_tokens,
                needs_equal_tokens=needs_equal_tokens,
            )
        )
        return judge

    return decorate
