"""Judge the trials of a sweep: the checks, the decision and the answer of each policy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sweep.analysis import checks, tables
from sweep.analysis.answer import (
    DEFAULT_SETTINGS,
    Answer,
    Comparison,
    SoonestOfBudgets,
    build_answer,
    build_ranking,
    decide_trials,
)
from sweep.analysis.answer_data import join
from sweep.analysis.checks import Check
from sweep.analysis.checks.table import (
    TrialTable,
    prepare,
    rows_of_trials,
    time_budget_of,
)
from sweep.analysis.critical_batch_size import StepsCurve, fit_curve
from sweep.analysis.grids import decide_best_of_grids, describe_noise
from sweep.analysis.times import known_times, reasons_of_time_budget, time_ratios
from sweep.analysis.tuned_rates import TunedRate
from sweep.config.arms import Arm
from sweep.config.experiment import AnswerSettings, Experiment
from sweep.config.numbers import format_count, format_seconds
from sweep.config.objective import LOSS, TOKENS_TO_TARGET, Objective
from sweep.decision.decision import Decision
from sweep.decision.equal_amounts import ERROR, errors_of_amounts, token_ratios
from sweep.decision.proposal import answering_command
from sweep.plan.plan import Plan
from sweep.trial.timing import Timing

LIKE = 0.98  # share of the most tokens down to which numbers of tokens count as one
UNCHECKED = (
    "Whether the trials were evaluated early and often enough is not known, because curves are "
    "missing."
)


# Returns None if there is no smaller budget to compare with.
FindSoonest = Callable[["PolicyResult"], SoonestOfBudgets | None]


@dataclass(frozen=True, eq=False)
class PolicyResult:
    label: str  # "tuned", "fixed 3e-4", "sqrt:0.001@32"; "muon, tuned" with several optimizers
    policy: str  # as it is recorded, such as fixed or tuned
    optimizer: str  # "" if there is only one
    checks: list[Check]
    rates: tuple[TunedRate, ...]  # empty unless the rates were tuned
    scope: str  # what was measured
    comparison: Comparison | None  # None with fewer than two batch sizes that have results
    answer: Answer | None  # the same
    curve: StepsCurve | None  # None without a target

    @property
    def decision(self) -> Decision | None:
        return None if self.comparison is None else self.comparison.decision

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == checks.FAIL]

    @property
    def unchecked(self) -> list[Check]:
        """The checks that could make a recommendation provisional, but lack the curves."""
        return [
            check
            for check in self.checks
            if check.blocks_claims and check.missing_columns == checks.MISSING_CURVES
        ]

    @property
    def blocking(self) -> list[Check]:
        """The failed checks that make a recommendation provisional."""
        return [check for check in self.failed if check.blocks_claims]

    @property
    def reasons(self) -> list[str]:
        """Why a recommendation is provisional; a command is left to the next step."""
        reasons = []
        for check in self.blocking:
            text = check.evidence
            if not check.is_next_step:
                text += f" {check.remedy}"
            reasons.append(text)
        if self.unchecked:
            reasons.append(UNCHECKED)
        return reasons


def leading(results: Sequence[PolicyResult]) -> PolicyResult | None:
    def order(result: PolicyResult) -> tuple[bool, bool, bool]:
        has_ranking = result.answer is not None and result.answer.optimizers is not None
        return result.answer is None, not result.rates, not has_ranking

    return min(results, key=order, default=None)


def objective_of(trials: pd.DataFrame) -> Objective:
    """Return what a trials.csv compares batch sizes by, if its column of the loss is asked for."""
    return TOKENS_TO_TARGET if trials["target"].notna().any() else LOSS


def judge_trials(
    trials: pd.DataFrame,
    objective: Objective = LOSS,
    steps: pd.DataFrame | None = None,
    plan: Plan | None = None,
    timing: Timing | None = None,
    settings: AnswerSettings = DEFAULT_SETTINGS,
    find_soonest: FindSoonest | None = None,
    has_grids: bool = False,
) -> list[PolicyResult]:
    """Check each policy of a trials.csv, and answer.

    Args:
        trials: as in trials.csv.
        objective: what is compared.
        steps: those of `steps_to_target`; None without a target, or without curves.
        plan: the sweep's; None for a table.
        timing: measured steps.
        settings: what counts, and the price of a device; the tolerance is that of the objective.
        find_soonest: finds the soonest batch size by several budgets; None without these.
        has_grids: whether each final trial is the best one of the trials that tried the rates, so
            that the only noise that is known is that of these about their curves.
    """
    rows = rows_of_trials(trials, objective)
    has_optimizers = rows["optimizer"].nunique() > 1
    tuning_command = answering_command(plan) if plan else None

    by_policy: dict[str, list[PolicyResult]] = {}
    for label, rows_of_label in rows.groupby("label", sort=False):
        policy_name = str(rows_of_label["policy"].iloc[0])
        optimizer = str(rows_of_label["optimizer"].iloc[0])
        waiting = _waiting_batch_sizes(plan, policy_name, optimizer)
        table = prepare(
            rows_of_label, objective=objective, tuning_command=tuning_command, waiting=waiting
        )
        curve = None
        if steps is not None:
            target = rows_of_label["target"].max()
            curve = fit_curve(steps[steps["label"] == label], target)
        result = PolicyResult(
            label=str(label),
            policy=policy_name,
            optimizer=optimizer if has_optimizers else "",
            checks=_make_checks(table, curve, plan),
            rates=table.rates,
            scope=scope_of(trials, str(label), plan),
            comparison=None,
            answer=None,
            curve=curve,
        )
        policy = tables.policy_names(rows_of_label)[0]  # with the rate if it is fixed
        by_policy.setdefault(policy, []).append(result)

    finals = _final_values(rows, objective)
    decided: list[PolicyResult] = []
    for results in by_policy.values():
        of_policy = finals[finals["label"].isin([result.label for result in results])]
        decision = _decide_finals(results, of_policy, has_grids)
        if decision is None:
            decided += results
            continue
        decided += _answer_policy(results, decision, objective, timing, settings, find_soonest)
    return decided


def _waiting_batch_sizes(plan: Plan | None, policy: str, optimizer: str) -> frozenset[int]:
    """Return the batch sizes of a policy whose first rates are not chosen yet."""
    sizes = set[int]()
    for row in plan.waiting_searches if plan else ():
        if row.policy == policy and row.optimizer in (None, optimizer):
            sizes.add(row.batch_size)
    return frozenset(sizes)


def _make_checks(table: TrialTable, curve: StepsCurve | None, plan: Plan | None) -> list[Check]:
    """Make the checks of one policy, with those of its curve if there is a target."""
    evaluated = checks.check_rows(table)
    if curve is not None:
        evaluated += checks.check_curve(curve)
    elif table.has_target:
        for code in checks.CURVE_CHECKS:
            reason = "Not checked: the curves are missing."
            check = checks.build_check(code, reason, missing_columns=checks.MISSING_CURVES)
            evaluated.append(check)
    if plan and plan.settings.counts_examples:
        evaluated = [checks.about_examples(check) for check in evaluated]
    return evaluated


def _final_values(rows: pd.DataFrame, objective: Objective) -> pd.DataFrame:
    """Return the final trials that have a value, with the tokens, steps and seconds that they took.

    Those of a trial that reached the target end there, not at the last evaluation. Of a batch size
    without any value all trials are returned.
    """
    finals = rows[rows["stage"] == "final"]
    has_value = finals["value"].notna()
    arms = [finals["label"], finals["batch_size"]]
    finals = finals[has_value | ~has_value.groupby(arms).transform("any")].copy()
    trained = finals["token_budget"].astype(float)
    finals["tokens_taken"] = trained
    finals["seconds_per_token"] = finals["seconds_training"] / trained
    if trained.isna().any() and not objective.is_ratio:  # a table, whose trials have equal tokens
        finals["seconds_per_token"] = finals["seconds_training"]
    finals["steps_taken"] = finals["steps"].astype(float)
    if objective.is_ratio:
        tokens_to_target = finals["value"].map(objective.value)
        share = (tokens_to_target / trained).fillna(1.0)
        share = share.where(np.isfinite(share), 1.0)  # the trials that missed it
        for name in ("tokens_taken", "steps_taken", "seconds_training"):
            finals[name] *= share
    return finals


def rates_of_finals(
    results: Sequence[PolicyResult], finals: pd.DataFrame
) -> dict[tuple[str, int], TunedRate]:
    """Return the tuned rates by label and batch size, if the final trials used one of them."""
    used = finals.groupby(["label", "batch_size"])["learning_rate"].first().to_dict()
    rates = {}
    for result in results:
        for rate in result.rates:
            arm = (result.label, rate.batch_size)
            if rate.covers(used.get(arm, math.nan)):
                rates[arm] = rate
    return rates


@dataclass(frozen=True, eq=False)
class _Decided:
    """The decision about the optimizers of a policy together."""

    finals: pd.DataFrame  # as in `Comparison`
    index: pd.Index  # label and batch size of each arm
    decision: Decision
    decision_with_times: Decision  # as in `Comparison`
    reasons: tuple[str, ...] = ()  # why answers from it are provisional


def _decide_finals(
    results: Sequence[PolicyResult], finals: pd.DataFrame, has_grids: bool
) -> _Decided | None:
    """Decide about final trials; None if fewer than two batch sizes can be compared."""
    rates = rates_of_finals(results, finals)
    if not has_grids:
        decided = decide_trials(finals, rates)
        with_times = decide_trials(finals, rates, ERROR)
        if decided is None or with_times is None:
            return None
        index, decision = decided
        return _Decided(finals, index, decision, with_times[1])

    of_grids = decide_best_of_grids(finals, rates)
    of_grids_with_times = decide_best_of_grids(finals, rates, ERROR)
    if of_grids is None or of_grids_with_times is None:
        return None
    index, decision, noise = of_grids
    return _Decided(finals, index, decision, of_grids_with_times[1], (describe_noise(noise),))


def _answer_policy(
    results: list[PolicyResult],
    decided: _Decided,
    objective: Objective,
    timing: Timing | None,
    settings: AnswerSettings,
    find_soonest: FindSoonest | None,
) -> list[PolicyResult]:
    """Answer about the optimizers of a policy; the best one's answer ranks them."""
    finals = decided.finals
    index = decided.index
    decision = decided.decision
    decision_with_times = decided.decision_with_times
    budget = time_budget_of(finals)
    reasons = [*decided.reasons]
    if budget is not None:
        optimizers = {result.label: result.optimizer or None for result in results}
        arms_of_index = {key: Arm(optimizers[key[0]], int(key[1])) for key in index}
        ratios = time_ratios(finals, arms_of_index, timing)
        reasons += reasons_of_time_budget(finals, arms_of_index, ratios, budget)
        errors = errors_of_amounts(*ratios, _slopes_of(finals, index))
        decision = replace(decision_with_times, other_errors=errors)
        decision_with_times = decision
    elif "time_budget_seconds" in finals and finals["time_budget_seconds"].notna().any():
        reasons.append("The trials had different budgets of time, or some had none.")
    elif not objective.is_ratio and finals["valid_slope"].notna().any():
        tokens = finals.groupby(["label", "batch_size"])["token_budget"].max().reindex(index)
        log_ratios = token_ratios(tokens.to_list())
        errors = errors_of_amounts(log_ratios, log_ratios, _slopes_of(finals, index))
        decision = replace(decision, other_errors=errors)
        decision_with_times = replace(decision_with_times, other_errors=errors)

    answered = list[PolicyResult]()
    without_answer = list[PolicyResult]()
    for result in results:
        part = slice(*index.slice_locs(result.label, result.label))
        decision_of_part = decision.of(part)
        if np.isfinite(decision_of_part.mean).sum() < 2:
            without_answer.append(result)
            continue
        finals_of_result = finals[finals["label"] == result.label]
        sizes = [int(size) for _, size in index[part]]
        target = finals_of_result["target"].max()
        times = known_times(finals_of_result, sizes, result.optimizer or None, timing)
        if times.is_elsewhere and budget is not None:  # there, other tokens would take that time
            times = known_times(finals_of_result, sizes, result.optimizer or None, None)
        comparison = Comparison(
            policy=result.label,
            finals=finals_of_result,
            decision=decision_of_part,
            decision_with_times=decision_with_times.of(part),
            times=times,
            objective=objective,
            target=float(target) if objective.is_ratio else None,
            time_budget_seconds=budget,
            reasons=[*result.reasons, *reasons],
            scope=result.scope,
            optimizer=result.optimizer,
        )
        of_budgets = None
        if find_soonest is not None:
            of_budgets = find_soonest(replace(result, comparison=comparison))
        answer = build_answer(comparison, settings, of_budgets)
        answered.append(replace(result, comparison=comparison, answer=answer))

    if len(results) > 1 and answered:
        optimizers = {result.label: result.optimizer for result in results}
        arms = [Arm(optimizers[str(label)], int(size)) for label, size in index]
        answered = _rank_optimizers(answered, without_answer, arms, decision, objective)
    by_label = {result.label: result for result in (*answered, *without_answer)}
    return [by_label[result.label] for result in results]


def _slopes_of(finals: pd.DataFrame, index: pd.Index) -> list[float]:
    """Return the mean of the steepest slopes by label and batch size; NaN if one is not known."""
    slopes = finals.groupby(["label", "batch_size"])["valid_slope"]
    means: pd.Series = slopes.agg(pd.Series.mean, skipna=False)
    return means.reindex(index).to_list()


def _rank_optimizers(
    answered: list[PolicyResult],
    without_answer: list[PolicyResult],
    arms: list[Arm],
    decision: Decision,
    objective: Objective,
) -> list[PolicyResult]:
    """Add the ranking of the optimizers to the answer of the best one."""

    def least(result: PolicyResult) -> float:
        assert result.decision is not None
        return float(np.nanmin(result.decision.best_estimate))

    best, *others = sorted(answered, key=least)
    assert best.answer is not None
    other_answers = [other.answer for other in others if other.answer is not None]
    ranking = build_ranking(arms, decision, objective, other_answers)
    answer = replace(best.answer, optimizers=ranking)
    if without_answer:
        lacking = join([result.optimizer for result in without_answer])
        reason = f"Fewer than two batch sizes have results with {lacking}."
        answer = replace(answer, provisional=True, reasons=[*answer.reasons, reason])
    return [replace(best, answer=answer), *others]


def scope_of(trials: pd.DataFrame, label: str, plan: Plan | None = None) -> str:
    """Describe what was measured, as far as it is known."""
    trials = trials.assign(label=tables.policy_labels)
    trials = trials[trials["label"] == label]
    finals = trials[trials["stage"] == "final"]
    tuned = trials[trials["stage"] == "tune"]
    names = ["lr"]
    tokens = finals["tokens"].max()
    unit = "tokens"
    parts = []
    budget = None  # tokens of a tuning trial
    if plan:
        names = [*plan.settings.tuning.dimensions]
        tokens = plan.token_budget
        unit = plan.settings.token_unit
        if tokens is None:
            tokens = 0
        budget = plan.settings.tuning.budget
        parts = _parts_of_settings(plan.settings)
        if plan.tokens_per_sequence > 1:
            parts.append(f"sequences of {plan.tokens_per_sequence:,} tokens")

    has_target = bool(finals["target"].notna().any())
    if has_target:
        parts.append(f"target {finals['target'].max():g}")
    seconds = time_budget_of(finals)
    if seconds is not None:
        parts.append(f"{format_seconds(seconds)} of training steps")
    elif plan or (tokens > 0 and not has_target):
        least = finals["tokens"].min()
        start = f"{format_count(int(least))} to " if not plan and least < LIKE * tokens else ""
        parts.append(f"{start}{format_count(int(tokens))} {unit}")

    if tuned.groupby("batch_size")["learning_rate"].nunique().gt(1).any():
        counts = tables.format_range(tuned.groupby("batch_size").size())
        text = f"{' and '.join(names)} tuned by {counts} trials"
        if budget:
            text += f" of {format_count(budget)} {unit}"
        parts.append(text)

    seeds = tables.format_range(finals.groupby("batch_size")["seed"].nunique())
    parts.append(f"{seeds} seeds" if seeds != "1" else "one seed")
    return f"{', '.join(parts)}."


def _parts_of_settings(settings: Experiment) -> list[str]:
    if settings.workload.is_program:
        return [settings.model.name]
    parts = [f"model {settings.model.name}"]
    if settings.data:
        parts.append(f"data {settings.data}")
    parts.append(f"optimizer {join(settings.optimizer_names)}")
    parts.append(f"{settings.schedule.name} schedule")
    return parts
