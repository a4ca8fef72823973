"""The budgets of several sweeps that a recommendation is made from, and which fit together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sweep.analysis.budgets import BudgetAnswer
from sweep.analysis.law import Optimum
from sweep.analysis.results import Sweep
from sweep.config.numbers import format_count
from sweep.errors import SweepError
from sweep.plan.course import MOST_EPOCHS

SAME_SIZE = 1.02  # ratio of model sizes that count as equal
LEAST_SIZES = 2  # of an answer


@dataclass(frozen=True)
class Measured:
    """One budget of one sweep."""

    sweep: Sweep
    budget: BudgetAnswer
    parameters: float | None  # model size without embeddings; None: not known

    @property
    def tokens_per_sequence(self) -> int:
        return self.sweep.plan.tokens_per_sequence

    @property
    def is_best_one(self) -> bool:
        """Whether the best batch size is 1 by its estimate, below which there is none."""
        best = self.budget.best
        return best.edge == "smallest" and not best.may_be_smaller

    @property
    def optimum(self) -> Optimum | None:
        """The point of a law in tokens; None at an edge, or if it is not bounded."""
        return self.budget.optimum(self.tokens_per_sequence, self.parameters)


def refuse_repeated(measured: Sequence[Measured]) -> None:
    """Refuse folders that share trials: a copy would count as another measurement."""
    owners: dict[str, Sweep] = {}
    for each in measured:
        for of_budget in each.sweep.by_budget:
            for row in of_budget.plan.known_trials:
                owner = owners.setdefault(str(row.id), each.sweep)
                if owner is not each.sweep:
                    raise SweepError(
                        f"{owner.path} and {each.sweep.path} have the same trials. Leave one out."
                    )


def measure_budgets(sweeps: Sequence[Sweep]) -> list[Measured]:
    """Return the budgets of sweeps, ascending.

    Raises:
        SweepError: if a sweep has no answer at a budget of tokens.
    """
    measured = []
    for sweep in sweeps:
        if not sweep.budgets:
            settings = sweep.plan.settings
            problem = "has no answer yet: finish the sweep, or leave it out"
            if settings.target is not None:
                problem = "has a target: sweep budgets of tokens without one"
            elif sweep.plan.token_budget is None:
                problem = "has a budget of time: sweep budgets of tokens"
            elif len(settings.batches) < LEAST_SIZES:
                problem = f"has {len(settings.batches)} batch size: compare several"
            raise SweepError(
                f"a law needs answers at budgets of tokens, but {sweep.path} {problem}."
            )
        model = sweep.plan.model
        parameters = None
        if model.parameters:
            embeddings = model.embedding_parameters if model.embedding_parameters else 0
            parameters = float(model.parameters - embeddings)
        measured += [Measured(sweep, budget, parameters) for budget in sweep.budgets]
    return sorted(measured, key=lambda each: each.budget.tokens)


def describe_unanswered(sweeps: Sequence[Sweep]) -> list[str]:
    """Return a sentence for each budget that was planned and has no answer."""
    reasons = []
    for sweep in sweeps:
        answered = {budget.tokens for budget in sweep.budgets}
        planned = [of_budget.plan.token_budget for of_budget in sweep.by_budget]
        reasons += [
            f"The budget of {format_count(tokens)} in {sweep.path} has no answer yet. The sweep's "
            "own command goes on with it."
            for tokens in (*planned, *sweep.plan.later_budgets)
            if tokens is not None and tokens not in answered
        ]
    return reasons


def refuse_different(measured: Sequence[Measured]) -> None:
    """Refuse sweeps that differ in what a law must share."""
    first = measured[0]
    for each in measured:
        for name, of_first, value in (
            ("policy", first.budget.answer.policy, each.budget.answer.policy),
            ("metric", first.budget.answer.metric, each.budget.answer.metric),
            ("optimizer", _optimizer(first), _optimizer(each)),
            ("schedule", first.sweep.plan.settings.schedule, each.sweep.plan.settings.schedule),
            ("data", first.sweep.plan.data, each.sweep.plan.data),
            ("initial weights", first.sweep.plan.start, each.sweep.plan.start),
            *_shared_settings(first, each),
            ("tokens per sequence", first.tokens_per_sequence, each.tokens_per_sequence),
            ("model of unknown size", _unsized_model(first), _unsized_model(each)),
        ):
            if of_first != value:
                raise SweepError(
                    f"budgets must have the same {name}, got {of_first!r} in {first.sweep.path} "
                    f"and {value!r} in {each.sweep.path}. Leave one out."
                )


def _shared_settings(first: Measured, each: Measured) -> list[tuple[str, Any, Any]]:
    """Return the names and both values of settings that sweeps of one law share.

    Models of different sizes differ; those of one size must be the same.
    """
    settings = first.sweep.plan.settings
    other = each.sweep.plan.settings
    shared: list[tuple[str, Any, Any]] = [
        ("precision", settings.precision, other.precision),
        ("tokenizer", settings.tokenizer, other.tokenizer),
        ("workload", settings.workload, other.workload),
    ]
    sizes = first.parameters, each.parameters
    if sizes[0] is not None and sizes[1] is not None and is_near(sizes[0], sizes[1]):
        shared.append(("model", settings.model, other.model))
    return shared


def without_repetitive(measured: Sequence[Measured]) -> tuple[list[Measured], list[str]]:
    """Leave out the budgets that repeat the data too often; the reasons say so.

    Raises:
        SweepError: if none is left.
    """
    kept = [each for each in measured if not each.budget.is_repetitive]
    rule = f"it has over {MOST_EPOCHS} epochs of the data"
    if not kept:
        raise SweepError(
            f"a budget must have at most {MOST_EPOCHS} epochs of the data, but each of these has "
            "more. Sweep on more data, or at smaller budgets."
        )
    left_out = [each for each in measured if each.budget.is_repetitive]
    return kept, [
        f"The budget of {format_count(each.budget.tokens)} is left out: {rule}."
        for each in left_out
    ]


def _unsized_model(each: Measured) -> dict[str, Any] | None:
    """Return what decides the model, if its size does not tell it from others."""
    if each.parameters is not None:
        return None
    settings = each.sweep.plan.settings
    return {
        "model": settings.model.model_dump(mode="json"),
        "workload": settings.workload.model_dump(mode="json"),
    }


def _optimizer(each: Measured) -> dict[str, Any]:
    return each.sweep.plan.settings.optimizer.model_dump(mode="json")


def model_sizes(measured: Sequence[Measured]) -> list[float]:
    """Return the different model sizes, ascending."""
    sizes: list[float] = []
    for size in sorted(each.parameters for each in measured if each.parameters is not None):
        if not sizes or size > SAME_SIZE * sizes[-1]:
            sizes.append(size)
    return sizes


def is_near(value: float, other: float) -> bool:
    """Return True if two sizes, or two budgets, count as equal."""
    return 1 / SAME_SIZE <= value / other <= SAME_SIZE
