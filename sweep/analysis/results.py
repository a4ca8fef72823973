"""The results of a sweep: the checks and the answer of each policy."""

import html
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from sweep.analysis import checks, tables
from sweep.analysis.answer import Answer, SoonestOfBudgets
from sweep.analysis.answer_data import join
from sweep.analysis.budget_laws import Growth, describe_budgets, growth_of
from sweep.analysis.budgets import (
    BudgetAnswer,
    answer_document,
    find_best_batch_size,
    with_worth,
)
from sweep.analysis.critical_batch_size import (
    StepsCurve,
    describe_excess,
    fit_curve,
    steps_to_target,
)
from sweep.analysis.judge import PolicyResult, judge_trials, leading, rates_of_finals
from sweep.analysis.next_step import (
    NextStep,
    TunedResults,
    can_decide_more,
    command_for_fewest_tokens,
    command_for_longer,
    command_for_soonest,
    next_step,
)
from sweep.analysis.sentences import describe, describe_without_answer
from sweep.analysis.soonest import AtBudget, find_soonest_of_budgets
from sweep.decision.decision import UNDECIDED
from sweep.decision.proposal import check_of_command
from sweep.plan.plan import Plan


class Sweep(tables.SweepTables):
    """A sweep folder that was read; `plan`, `trials` and `curves` are its tables."""

    @cached_property
    def policies(self) -> tuple[PolicyResult, ...]:
        """Checks and answer of each policy, in the plan's order."""
        step = self.next_step
        if step is None:
            return tuple(self._results)
        return tuple(self._with_step(result, step) for result in self._results)

    def _with_step(self, result: PolicyResult, step: NextStep) -> PolicyResult:
        """Add the commands that would tell what the answer leaves open."""
        answer = result.answer
        if answer is None:
            return result
        soonest = answer.soonest
        if soonest.batch_size is None or answer.times_reasons:
            soonest = replace(soonest, settle=command_for_soonest(self, answer))
        fewest_steps = answer.fewest_steps
        if fewest_steps.batch_size is None:
            fewest_steps = replace(fewest_steps, settle=step.command)
        fewest_tokens = answer.fewest_tokens
        if fewest_tokens.batch_size is None:
            fewest_tokens = replace(fewest_tokens, settle=command_for_fewest_tokens(self, answer))
        answer = replace(
            answer,
            fewest_tokens=fewest_tokens,
            settle=step.command,
            settle_seconds=step.seconds,
            settle_reason=step.reason if step.reason else None,
            settle_longer=self._longer_command,
            has_budgets=len(self.smaller) > 0,
            soonest=soonest,
            fewest_steps=fewest_steps,
        )
        return replace(result, answer=answer)

    @cached_property
    def _longer_command(self) -> str | None:
        """The command that tells about longer trainings."""
        return command_for_longer(self)

    @cached_property
    def next_step(self) -> NextStep | None:
        """The command that would settle what the answer leaves open; None without an answer."""
        if not any(result.answer for result in self._results):
            return None
        policy = self.plan.tuned_policy
        if policy is None:
            return next_step(self, None)
        tuned = [result for result in self._results if result.policy == policy]
        return next_step(
            self,
            TunedResults(
                checks=[*chain.from_iterable(result.checks for result in tuned)],
                rates=[*chain.from_iterable(result.rates for result in tuned)],
                answers=[result.answer for result in tuned if result.answer],
            ),
        )

    @cached_property
    def _results(self) -> list[PolicyResult]:
        """Checks and answer of each policy, without the next step."""
        settings = self.plan.settings
        steps = None if settings.target is None else steps_to_target(self)
        results = judge_trials(
            self.trials,
            settings.objective,
            steps,
            self.plan,
            timing=self.timing,
            settings=settings.answer,
            find_soonest=self._find_soonest,
        )
        if not settings.workload.is_program:
            return results
        command = check_of_command(self.plan)
        if command is None:
            command = "sweep check"
        added = checks.checks_of_command(self.checked, command)
        return [replace(result, checks=[*result.checks, *added]) for result in results]

    def _find_soonest(self, result: PolicyResult) -> SoonestOfBudgets | None:
        """Find the soonest batch size by this budget and the smaller ones."""
        if not self.smaller or self.plan.settings.target is not None:
            return None
        budgets = []
        answers = []
        for of_budget in self.by_budget[:-1]:
            assert isinstance(of_budget, Sweep)
            for smaller in of_budget._results:
                if smaller.label == result.label and smaller.answer is not None:
                    budgets.append(_at_budget(of_budget, smaller))
                    answers.append(smaller.answer)
        if not answers:
            return None
        reference = answers[-1].fewest_tokens.batch_size
        if reference is None:
            return None
        budgets.append(_at_budget(self, result))
        return find_soonest_of_budgets(budgets, reference, self.plan.settings.token_unit)

    @cached_property
    def other_curves(self) -> tuple[StepsCurve, ...]:
        """The leading policy's curves of other, higher targets, which the same trials passed."""
        result = self.leading
        if result is None or self.lacks_curves:
            return ()
        targets = self.plan.settings.answer.other_targets
        steps = [steps_to_target(self, target) for target in targets]
        rows = [trials[trials["label"] == result.label] for trials in steps]
        return tuple(map(fit_curve, rows, targets))

    @property
    def leading(self) -> PolicyResult | None:
        """The policy that the report opens with: the one with tuned rates, if there is one."""
        return leading(self.policies)

    def answer(self) -> Answer | None:
        """Return the answer; None if fewer than two batch sizes have results.

        With several budgets it is that of the largest one that has an answer.
        """
        if self.smaller and self.budgets:
            return self.budgets[-1].answer
        return self.leading.answer if self.leading else None

    def answer_document(self) -> dict[str, Any] | None:
        """Return the document of answer.json."""
        return answer_document(self.answer(), self.budgets if self.smaller else ())

    @cached_property
    def budgets(self) -> tuple[BudgetAnswer, ...]:
        """The answers of all budgets that have one, ascending; a budget of time has none.

        They are about one policy: that of the largest budget with an answer.
        """
        answered: list[BudgetAnswer] = []
        label = None
        for of_budget in reversed(self.by_budget):
            assert isinstance(of_budget, Sweep)
            tokens = of_budget.plan.token_budget
            if tokens is None or of_budget.plan.settings.target is not None:
                continue
            results = [result for result in of_budget.policies if result.answer is not None]
            if label is not None:
                results = [result for result in results if result.label == label]
            result = leading(results)
            if result is None or result.decision is None:
                continue
            label = result.label
            answered.insert(0, _answer_of_budget(of_budget.plan, result))
        finished = tuple(answered)
        has_budgets = len(self.smaller) > 0
        budgets = []
        for index, budget in enumerate(finished):
            answer = with_worth(finished, index)
            answer = replace(answer, settle_longer=self._longer_command, has_budgets=has_budgets)
            budgets.append(replace(budget, answer=answer))
        return tuple(budgets)

    @cached_property
    def growth(self) -> Growth:
        """How batch sizes grow with the budget."""
        return growth_of(self.budgets)

    def sentences(self) -> list[str]:
        """Return the answer in a few sentences, or a description of the sweep without one."""
        result = self.leading
        if result is None or result.answer is None:
            lines = [describe_without_answer(self)]
            answer = self.answer()  # that of a smaller budget
            if answer is not None:
                lines += describe(answer)
            if self.smaller:
                lines += describe_budgets(self.budgets, self.growth, self.plan)
            return lines

        lines = describe(result.answer)
        answer = result.answer
        rows = [row for row in answer.batch_sizes if row.tolerance_verdict == UNDECIDED]
        seeds = [row.seeds for row in rows]
        most_seeds = self.plan.settings.answer.max_seeds
        is_auto = self.plan.settings.seeds == "auto" and len(rows) > 0
        if is_auto and answer.decided:
            if min(seeds) < most_seeds and self._can_decide_more(result):
                lines.append("With --answer order, the command goes on with what seeds can decide.")
        elif is_auto and max(seeds) >= most_seeds:
            lines.append(f"The sweep ended at {max(seeds)} seeds, its limit (--max-seeds).")
        if result.curve:
            lines += _describe_curve(result.curve)
        if self.smaller:
            lines += describe_budgets(self.budgets, self.growth, self.plan)
        return lines

    def _can_decide_more(self, result: PolicyResult) -> bool:
        """Return True if `--answer order` would add trainings; not known at rates not tuned."""
        if result.answer is None or result.policy != self.plan.tuned_policy:
            return False
        return can_decide_more(self, [row.batch_size for row in result.answer.batch_sizes])

    @property
    def report(self) -> Path:
        """The page of the report, next to report.md, trials.csv and answer.json."""
        return self.path / "report.html"

    def __repr__(self) -> str:
        return f"<sweep {self.name}: {len(self.trials)} trials>"

    def _repr_html_(self) -> str:
        answer = self.answer()
        table = "" if answer is None else answer._repr_html_()
        return "<br>".join([*map(html.escape, self.sentences()), table])


def _at_budget(sweep: Sweep, result: PolicyResult) -> AtBudget:
    assert result.comparison is not None
    plan = sweep.plan
    return AtBudget(
        tokens=plan.budget_tokens,
        epochs=plan.known_epochs,
        comparison=result.comparison,
        rates=rates_of_finals([result], result.comparison.finals),
    )


def _answer_of_budget(plan: Plan, result: PolicyResult) -> BudgetAnswer:
    assert result.answer is not None and result.decision is not None
    rows = result.answer.batch_sizes
    best, loss, error = find_best_batch_size(
        sizes=[row.batch_size for row in rows],
        decision=result.decision,
        seeds=[row.seeds for row in rows],
        margin=result.answer.compared.margin,
    )
    return BudgetAnswer(
        tokens=plan.budget_tokens,
        best=best,
        loss=loss,
        loss_error=error,
        epochs=plan.known_epochs,
        answer=result.answer,
    )


def load_sweep(
    path: str | Path,
    pursues: str | None = None,
    price: float | None = None,
    question: str | None = None,
) -> Sweep:
    """Read a sweep folder without starting or changing anything.

    Args:
        path: the folder.
        pursues: what the answer is about: tokens, time or steps; by default what the sweep's
            newest command asked for.
        price: the price of a device for an hour; by default as in the newest command.
        question: which or order, by default as in the newest command.

    Raises:
        SweepError: if the folder holds no readable plan.json.
    """
    loaded = tables.load_tables(path)
    changes = {"pursues": pursues, "price": price, "question": question}
    changes = {name: value for name, value in changes.items() if value is not None}
    of_budgets: list[Sweep] = []
    for of_budget in loaded.by_budget:
        plan = of_budget.plan.with_answer(**changes) if changes else of_budget.plan
        smaller = tuple(of_budgets)
        of_budgets.append(Sweep(**vars(of_budget) | {"plan": plan, "smaller": smaller}))
    return of_budgets[-1]


def _describe_curve(curve: StepsCurve) -> list[str]:
    """Write what larger batch sizes cost on the way to a target, as measured and as fitted."""
    lines = []
    measured = describe_excess(curve)
    if measured and checks.supports_crossings(curve):
        text = f"Measured: the tokens to a loss of {curve.target:g} exceed their least"
        lines.append(f"{text} {join(measured)}.")
    if curve.fit and checks.supports_fit(curve):
        lines.append(
            f"Fitted: by the curve S_min + E_min/B, which is {100 * curve.fit.largest_misfit:.1f} "
            f"% off at most, the critical batch size is {curve.fit.b_crit:.3g} sequences; it takes "
            "twice the least tokens and twice the least steps of the curve."
        )
    return lines
