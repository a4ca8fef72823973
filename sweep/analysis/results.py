"""The results of a sweep: the checks and the answer of each policy."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sweep.analysis import checks, frames
from sweep.analysis.answer import Answer, Ranking, build_answer, decide_trials, describe, join
from sweep.analysis.any_table import Table, read_one_table
from sweep.analysis.cells import LOSSES, short_text
from sweep.analysis.checks import Check
from sweep.analysis.checks.table import prepare, read_execution, rows_of_trials
from sweep.analysis.critical_batch_size import StepsCurve, fit_curve, steps_to_target
from sweep.analysis.next_step import Judged, NextStep, next_step
from sweep.analysis.rates import TunedRate
from sweep.config.numbers import MOST_BATCHES, format_count
from sweep.config.objective import LOSS, TOKENS_TO_TARGET, Objective
from sweep.decision.decision import Decision
from sweep.decision.proposal import answering_command, check_of_command
from sweep.errors import SweepError
from sweep.plan.plan import Plan
from sweep.plan.policies import is_tuned
from sweep.trial.status import State

UNCHECKED = (
    "Whether the trials were evaluated early and often enough is not known, because curves are "
    "missing."
)
REQUIRED = ("stage", "policy", "batch_size", "seed", "learning_rate", "state")


@dataclass(frozen=True, eq=False)
class PolicyResult:
    label: str  # "tuned", "fixed 3e-4", "sqrt:0.001@32"; "muon, tuned" with several optimizers
    policy: str  # the label without the optimizer
    optimizer: str  # "" if there is only one
    checks: list[Check]
    rates: tuple[TunedRate, ...]  # empty unless the rates were tuned
    decision: Decision | None  # None with fewer than two batch sizes that have results
    answer: Answer | None  # the same
    curve: StepsCurve | None  # None without a target

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


class Sweep(frames.SweepTables):
    """A sweep folder that was read; `plan`, `trials` and `curves` are its tables."""

    @cached_property
    def compared(self) -> pd.DataFrame:
        """The trials with the objective in place of the final loss."""
        return frames.with_objective(self.trials, self.plan.settings.objective)

    @cached_property
    def policies(self) -> tuple[PolicyResult, ...]:
        """Checks and answer of each policy, in the plan's order."""
        step = self.next_step
        if step is None:
            return tuple(self._judged)
        return tuple(
            replace(result, answer=_with_step(result.answer, step)) if result.answer else result
            for result in self._judged
        )

    @cached_property
    def next_step(self) -> NextStep | None:
        """The command that would settle what the answer leaves open; None without an answer."""
        if not any(result.answer for result in self._judged):
            return None
        if not any(is_tuned(row.policy) for row in self.plan.known_trials):
            return next_step(self, None)
        tuned = [result for result in self._judged if is_tuned(result.policy)]
        return next_step(
            self,
            Judged(
                checks=[check for result in tuned for check in result.checks],
                rates=[rate for result in tuned for rate in result.rates],
                answers=[result.answer for result in tuned if result.answer],
            ),
        )

    @cached_property
    def _judged(self) -> list[PolicyResult]:
        """Checks and answer of each policy, without the next step."""
        settings = self.plan.settings
        steps = None if settings.target is None else steps_to_target(self)
        trials = frames.with_objective(self.trials, settings.objective, settings.objective.sign)
        results = judge_trials(trials, settings.objective, steps, self.plan)
        if not settings.workload.is_program:
            return results
        command = check_of_command(self.plan) or "sweep check"
        added = checks.checks_of_command(self.checked, command)
        return [replace(result, checks=[*result.checks, *added]) for result in results]

    @cached_property
    def other_curves(self) -> tuple[StepsCurve, ...]:
        """The leading policy's curves of other, higher targets, which the same trials passed."""
        result, targets = self.leading, self.plan.settings.answer.other_targets
        if result is None or self.lacks_curves:
            return ()
        steps = [steps_to_target(self, target) for target in targets]
        rows = [trials[trials["label"] == result.label] for trials in steps]
        return tuple(map(fit_curve, rows, targets))

    @property
    def leading(self) -> PolicyResult | None:
        """The policy that the report opens with: the one with tuned rates, if there is one."""
        return leading(self.policies)

    def answer(self) -> Answer | None:
        """Return the answer; None if fewer than two batch sizes have results."""
        return self.leading.answer if self.leading else None

    def sentences(self) -> list[str]:
        """Return the answer in a few sentences, or a description of the sweep without one."""
        result = self.leading
        if result is None or result.answer is None:
            return [_without_answer(self)]
        lines = describe(result.answer)
        most = self.plan.settings.answer.max_seeds
        seeds = max(row.seeds for row in result.answer.batch_sizes)
        if not result.answer.decided and seeds >= most:
            lines.append(f"The sweep ended at {seeds} seeds, its limit (--max-seeds).")
        if result.curve:
            lines += _describe_curve(result.curve)
        return lines

    @property
    def report(self) -> Path:
        """The page of the report, next to report.md, trials.csv and answer.json."""
        return self.path / "report.html"

    def __repr__(self) -> str:
        return f"<sweep {self.name}: {len(self.trials)} trials>"

    def _repr_html_(self) -> str:
        lines, answer = map(html.escape, self.sentences()), self.answer()
        return "<br>".join([*lines, answer._repr_html_() if answer else ""])


def load_sweep(path: str | Path) -> Sweep:
    """Read a sweep folder without starting or changing anything.

    Raises:
        SweepError: if the folder holds no readable plan.json.
    """
    return Sweep(**vars(frames.load_tables(path)))


def leading(results: Sequence[PolicyResult]) -> PolicyResult | None:
    def order(result: PolicyResult) -> tuple[bool, bool, bool]:
        is_ranking = bool(result.answer and result.answer.optimizers)
        return result.answer is None, not result.rates, not is_ranking

    return min(results, key=order, default=None)


def answer(
    trials: pd.DataFrame | str | Path,
    metric: str = "final_valid_loss",
    direction: str = "minimize",
    tolerance: float | None = None,
) -> Answer | None:
    """Answer from a table of trials; None if fewer than two batch sizes have results.

    Args:
        trials: a table, or a CSV or Markdown file: stage, policy, batch_size, seed, learning_rate,
            state and the metric, by the headers of docs/audit.md; also seconds_training, and the
            other columns of trials.csv if they are known. With a column target, the final loss is
            replaced by the tokens to the target.
        direction: minimize or maximize.
        tolerance: how far from the best is good enough, in the unit of the metric, by default 0.01;
            for the tokens to a target a share of them, by default 0.05.
    """
    source = trials if isinstance(trials, pd.DataFrame) else Path(trials)
    return _answer_table(read_one_table(source, metric), direction, tolerance)


def _answer_table(table: Table, direction: str, tolerance: float | None) -> Answer | None:
    if direction not in ("minimize", "maximize"):
        raise SweepError(f"direction must be minimize or maximize, got {direction!r}.")
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise SweepError(f"tolerance must be a positive number, got {tolerance:g}. Try 0.01.")
    trials = _trials_of(table)
    metric = table.metric
    units = trials["loss_unit"].dropna().to_list()
    unit = str(units[0]) if units and metric == LOSS.name else ""
    compared = Objective(metric, direction, unit, tolerance or LOSS.tolerance)
    is_loss = table.titles[metric] in {table.titles.get(name) for name in LOSSES}
    if metric == LOSS.name and trials["target"].notna().any():
        compared = replace(TOKENS_TO_TARGET, tolerance=tolerance or TOKENS_TO_TARGET.tolerance)
    else:
        trials = trials.assign(final_valid_loss=compared.sign * trials[metric], target=math.nan)
    result = leading(judge_trials(trials.reindex(columns=list(frames.TRIAL_COLUMNS)), compared))
    made = result.answer if result else None
    if made is None:
        return None
    size = f"The tolerance of {compared.tolerance:g}"
    if not is_loss:
        made = replace(made, scope=f"{made.scope} {size} is in the unit of {short_text(metric)}.")
    reason = ""
    if not is_loss and tolerance is None:
        reason = f"{size} is in the unit of {short_text(metric)}, and not known to suit it."
    elif unit not in ("", "nats") and tolerance is None and not table.is_own:
        reason = f"{size} is not known to suit the unit {unit}."
    if reason:
        reasons = [*made.reasons, f"{reason} Choose it with --tolerance."]
        made = replace(made, provisional=True, reasons=reasons)
    return made


def _trials_of(table: Table) -> pd.DataFrame:
    """Return the rows as trials; refuse a table of which a row or a cell would not count.

    A row that failed, or whose state is not known, counts as a missing result.
    """
    required = {name: "status" if name == "state" else name for name in REQUIRED}
    required[table.metric] = table.metric
    if missing := [name for name, column in required.items() if column not in table.titles]:
        what = "column" if len(missing) == 1 else "columns"
        not_read = f" Not read: {'; '.join(table.not_read)}." if table.ambiguous else ""
        problem = f"trials must have the {what} {join(missing)}"
        raise SweepError(f"{problem}.{not_read} Add the {what}, or correct the headers.")
    if table.ambiguous:
        problem = f"each header must have one meaning, got {'; '.join(table.not_read)}"
        raise SweepError(f"{problem}. Rename or remove it.")
    if table.unread:
        raise SweepError(f"each cell must be empty or readable, got {table.unread[0]}. Correct it.")
    if table.left_out:
        raise SweepError(f"each row must be a trial, got {table.left_out[0]}. Correct it.")
    for name in ("model", "model_size", "dataset", "schedule"):
        if table.rows[name].nunique() > 1:
            values = short_text(", ".join(sorted({*table.rows[name]})))
            problem = f"{short_text(table.titles[name])} must be the same in all rows"
            raise SweepError(f"{problem}, got {values}. Give each a table of its own.")
    trials = table.trials().assign(label=frames.policy_labels)
    is_tuning = trials["stage"] == "tune"
    keys = ["stage", "label", "batch_size"]
    rate_counts = trials.groupby(keys)["learning_rate"].transform("nunique")
    rules = {
        "stage must be report or tune": trials["stage"].notna(),
        "policy must be a name": trials["policy"].notna(),
        "state must be given": table.rows["status"] != "",
        "seed must be given": is_tuning | trials["seed"].notna(),
        "has_looks must be True, False or empty": trials["has_looks"].isin(["True", "False", None]),
        "learning_rate must be a positive number": trials["learning_rate"] > 0,
        "tokens_to_target must be positive or empty": ~(trials["tokens_to_target"] <= 0),
        "execution must be a JSON object or empty": trials["execution"].map(read_execution).notna(),
        "learning_rate must be equal in reporting trials of one policy and batch size": (
            is_tuning | (rate_counts <= 1)
        ),
        "seed must differ between reporting trials of one policy and batch size": (
            is_tuning | ~trials.duplicated([*keys, "seed"])
        ),
        "loss_unit must be the same in all rows": trials["loss_unit"].nunique() <= 1,
        "epochs must be the same in all rows": table.is_own or trials["epochs"].nunique() <= 1,
        "tokens_per_sequence must be the same in all rows": (
            trials["tokens_per_sequence"].nunique() <= 1
        ),
    }
    for rule, is_met in rules.items():
        is_broken = pd.Series(~np.asarray(is_met, dtype=bool), trials.index)
        if is_broken.any():
            name = rule.partition(" ")[0]
            cells = table.rows["status"] if name == "state" else trials[name]
            cell = cells[is_broken].iloc[0]
            got = "an empty cell" if cell in (None, "") else short_text(str(cell))
            where = f"{table.unit} {is_broken.idxmax()}"
            raise SweepError(f"{rule}, got {got} in {where}. Correct it.")
    if trials["batch_size"].nunique() > MOST_BATCHES:
        raise SweepError(f"trials must have at most {MOST_BATCHES} batch sizes. Leave out some.")
    return trials.drop(columns="label").astype({"batch_size": "int64"}).reset_index(drop=True)


class TableAnswer(NamedTuple):
    """The answer of a table of trials or of a sweep folder."""

    answer: Answer | None
    sentences: list[str]
    notes: list[str]  # what was read of a table


def answer_of(path: Path, metric: str, direction: str, tolerance: float | None) -> TableAnswer:
    """Return the answer of a table of trials or of a sweep folder."""
    if not path.is_dir():
        table = read_one_table(path, metric)
    else:
        sweep = load_sweep(path)
        if (metric, direction, tolerance) == (LOSS.name, LOSS.direction, None):
            return TableAnswer(sweep.answer(), sweep.sentences(), [])
        table = read_one_table(sweep.trials, metric)
    made = _answer_table(table, direction, tolerance)
    missing = (
        "Nothing can be compared: no policy has results of two batch sizes, which are trials of "
        "stage report and state COMPLETE."
    )
    return TableAnswer(made, describe(made) if made else [missing], table.notes)


def judge_trials(
    trials: pd.DataFrame,
    objective: Objective = LOSS,
    steps: pd.DataFrame | None = None,
    plan: Plan | None = None,
) -> list[PolicyResult]:
    """Check each policy of a trials.csv and answer; `steps` are those of `steps_to_target`."""
    rows, by_policy, about = rows_of_trials(trials), dict[str, list[PolicyResult]](), {}
    tuning_command = (answering_command(plan) if plan else None) or ""
    has_ended = (rows["state"].isin([State.COMPLETE, State.PRUNED])) | rows["has_diverged"]
    reports = rows[(rows["stage"] == "report") & has_ended]
    loss = reports["final_valid_loss"].mask(reports["has_diverged"], math.inf).astype(float)
    reports = reports.assign(value=loss).dropna(subset=["value"])
    if rows["has_target"].any():  # without the time from the target to the last evaluation
        share = np.exp(reports["value"]) / reports["token_budget"].astype(float)
        reports["seconds_training"] *= share.fillna(1.0)
    has_optimizers = rows["optimizer"].nunique() > 1
    for label, own in rows.groupby("label", sort=False):
        table, curve = prepare(own), None
        judged = checks.check_rows(table, tuning_command)
        if steps is not None:
            curve = fit_curve(steps[steps["label"] == label], own["target"].max())
            judged += checks.check_curve(curve)
        elif own["has_target"].any():
            judged += [
                checks.build_check(
                    code,
                    "Not checked: the curves are missing.",
                    missing_columns=checks.MISSING_CURVES,
                )
                for code in checks.CURVE_CHECKS
            ]
        if plan and plan.settings.token_unit == "examples":
            judged = [checks.about_examples(check) for check in judged]
        optimizer = str(own["optimizer"].iloc[0]) if has_optimizers else ""
        result = PolicyResult(
            label=str(label),
            policy=frames.policy_names(own)[0],
            optimizer=optimizer,
            checks=judged,
            rates=table.rates,
            decision=None,
            answer=None,
            curve=curve,
        )
        reasons = [  # the tuning command follows as the next step
            f"{check.evidence} {check.remedy.removesuffix(tuning_command)}".strip()
            for check in result.blocking
        ]
        if result.unchecked:
            reasons.append(UNCHECKED)
        about[result.label] = reasons, scope_of(trials, result.label, plan)
        by_policy.setdefault(result.policy, []).append(result)
    decided = (_decide_policy(own, reports, objective, about) for own in by_policy.values())
    return [result for results in decided for result in results]


def _rates_of_reports(
    results: list[PolicyResult], reports: pd.DataFrame
) -> dict[tuple[str, int], TunedRate]:
    """Return the tuned rates by label and batch size, if the reporting trials used one of them."""
    used = reports.groupby(["label", "batch_size"])["learning_rate"].first().to_dict()
    rates = {(result.label, rate.batch_size): rate for result in results for rate in result.rates}
    return {cell: rate for cell, rate in rates.items() if rate.covers(used.get(cell, math.nan))}


def _decide_policy(
    results: list[PolicyResult], reports: pd.DataFrame, objective: Objective, about: dict[str, Any]
) -> list[PolicyResult]:
    """Decide about the optimizers of a policy together; the best one's answer ranks them."""
    reports = reports[reports["label"].isin([result.label for result in results])]
    rates = _rates_of_reports(results, reports)
    if (decided := decide_trials(reports, rates)) is None:
        return results
    (cells, made), answered = decided, []
    for index, (result, label) in enumerate([(result, result.label) for result in results]):
        decision, own = made.of(slice(*cells.slice_locs(label, label))), reports["label"] == label
        if np.isfinite(decision.mean).sum() > 1:
            reasons, scope = about[label]
            answer = build_answer(
                label,
                reports[own],
                decision,
                objective,
                reasons,
                scope,
                optimizer=result.optimizer,
            )
            results[index] = replace(result, decision=decision, answer=answer)
            answered.append((float(np.nanmin(decision.best_estimate)), index, answer))
    if len(results) > 1 and answered:
        (_, best, answer), *others = sorted(answered)
        optimizers = {result.label: result.optimizer for result in results}
        named = [(optimizers[str(label)], int(size)) for label, size in cells]
        ranking = Ranking.of(named, made, objective, [other for _, _, other in others])
        if lacking := [result.optimizer for result in results if result.answer is None]:
            reason = f"Fewer than two batch sizes have results with {join(lacking)}."
            answer = replace(answer, provisional=True, reasons=[*answer.reasons, reason])
        results[best] = replace(results[best], answer=replace(answer, optimizers=ranking))
    return results


def _with_step(answer: Answer, step: NextStep) -> Answer:
    return replace(
        answer,
        settle=step.command,
        settle_seconds=step.seconds,
        settle_reason=step.reason or None,
    )


def _describe_curve(curve: StepsCurve) -> list[str]:
    most = "at most " if curve.is_excess_bound else ""
    measured = [
        f"by {100 * excess:.0f} % at {most}{estimate:.3g} sequences per step"
        for excess, estimate in curve.excess.items()
        if estimate is not None and checks.supports_crossings(curve)
    ]
    lines = []
    if measured:
        text = f"Measured: the tokens to a loss of {curve.target:g} exceed their least"
        lines.append(f"{text} {join(measured)}.")
    if curve.fit and checks.supports_fit(curve):
        lines.append(
            f"Fitted: by the curve S_min + E_min/B, which is {100 * curve.fit.largest_misfit:.1f} "
            f"% off at most, the critical batch size is {curve.fit.b_crit:.3g} sequences; it takes "
            "twice the least tokens and twice the least steps of the curve."
        )
    return lines


def _without_answer(sweep: Sweep) -> str:
    """Describe a sweep that has fewer than two batch sizes with results."""
    reports = frames.report_trials(sweep.compared)
    complete = reports[reports["state"] == State.COMPLETE]
    if complete.empty:
        states = reports["cause"].fillna(reports["state"]).fillna("unknown").value_counts()
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        is_tuning = (sweep.trials["stage"] == "tune").any()
        none = f"{'the rates are not tuned' if is_tuning else 'no trial is planned'} yet"
        remedy = " Lower the learning rate." if [*states.index] == ["diverged"] else ""
        return f"Nothing can be compared: {counts or none}.{remedy}"
    size, label = complete[["batch_size", "label"]].iloc[0]
    complete = complete[(complete["batch_size"] == size) & (complete["label"] == label)]
    gains = frames.find_gains(sweep) if sweep.plan.settings.workload.samples else []
    if gains and gains[0]["difference"] is not None:
        gain = gains[0]["difference"]
        return f"At batch size {size} training changed the mean reward by {gain:+.3f}."
    unknown = ""
    if sweep.plan.settings.workload.samples and sweep.lacks_curves and not gains:
        unknown = f" How training changed the reward is not known: {frames.CURVES} is missing."
    loss = frames.mean_of(complete["final_valid_loss"].astype(float).to_list())
    title = sweep.plan.settings.evaluated.title
    return f"At batch size {size} the {title} is {loss:.4f}. Nothing is compared.{unknown}"


def scope_of(trials: pd.DataFrame, label: str, plan: Plan | None = None) -> str:
    """Describe what was measured, as far as it is known."""
    own = trials.assign(label=frames.policy_labels)
    own = own[own["label"] == label]
    reports, tuned = (own[own["stage"] == stage] for stage in ("report", "tune"))
    names, tokens, parts, unit = ["lr"], reports["tokens"].max(), [], "tokens"
    if plan:
        settings, tokens, unit = plan.settings, plan.token_budget, plan.settings.token_unit
        names = [*settings.tuning.dimensions]
        parts = [settings.model.name]
        if not settings.workload.is_program:
            parts = [f"model {parts[0]}"] + [f"data {settings.data}"] * bool(settings.data)
            parts.append(f"optimizer {join(settings.optimizer_names)}")
            parts.append(f"{settings.schedule.name} schedule")
    has_target = bool(reports["target"].notna().any())
    if has_target:
        parts.append(f"target {reports['target'].max():g}")
    if plan or (tokens > 0 and not has_target):
        parts.append(f"{format_count(int(tokens))} {unit}")
    if tuned.groupby("batch_size")["learning_rate"].nunique().gt(1).any():
        counts = frames.format_range(tuned.groupby("batch_size").size())
        text = f"{' and '.join(names)} tuned by {counts} trials"
        budget = plan.settings.tuning.budget if plan else None
        parts.append(f"{text} of {format_count(budget)} {unit}" if budget else text)
    seeds = frames.format_range(reports.groupby("batch_size")["seed"].nunique())
    parts.append(f"{seeds} seeds" if seeds != "1" else "one seed")
    other = "Other budgets were not measured; larger ones tend to favour larger batch sizes."
    return f"{', '.join(parts)}. {other}"
