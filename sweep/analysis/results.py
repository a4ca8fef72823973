"""The results of a sweep: the checks and the answer of each policy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from sweep.analysis.answer import (
    UNDECIDED,
    Answer,
    Metric,
    build_answer,
    decide_trials,
    describe,
    join,
)
from sweep.analysis.checks import (
    CURVE_CHECKS,
    FAIL,
    Check,
    build_check,
    check_crossings,
    check_fit,
    check_rows,
)
from sweep.analysis.critical_batch_size import StepsCurve, fit_curve, steps_to_target
from sweep.analysis.frames import (
    TRIAL_COLUMNS,
    SweepTables,
    find_gains,
    load_tables,
    report_trials,
)
from sweep.analysis.rates import TunedRate
from sweep.analysis.rules import prepare, rows_of_trials
from sweep.analysis.statistics import mean_of
from sweep.config.numbers import format_count
from sweep.errors import SweepError
from sweep.plan.decision import Decision, next_look
from sweep.plan.plan import LEAST_SEEDS, answering_command, command_with
from sweep.trial.folder import State

LOSS_METRIC = Metric()
TARGET_METRIC = Metric("tokens_to_target", unit="ratio")
TUNING_TRIALS = 8  # of a batch size, about
REQUIRED = ("stage", "policy", "batch_size", "seed", "learning_rate", "state")


@dataclass(frozen=True, eq=False)
class PolicyResult:
    label: str  # "tuned", "fixed 3e-4", "sqrt:0.001@32"
    checks: list[Check]
    rates: tuple[TunedRate, ...]  # empty unless the rates were tuned
    answer: Answer | None  # None with fewer than two batch sizes that have results
    curve: StepsCurve | None  # None without a target

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == FAIL]

    @property
    def blocking(self) -> list[Check]:
        """The failed checks that make a recommendation provisional."""
        return [check for check in self.failed if check.blocks_claims]

    @property
    def supports_curve(self) -> bool:
        """Whether the fitted curve of steps to a target may be read."""
        return not {check.code for check in self.failed} & {*CURVE_CHECKS}


class Sweep(SweepTables):
    """A sweep folder that was read; `plan`, `trials` and `curves` are its tables."""

    @cached_property
    def policies(self) -> tuple[PolicyResult, ...]:
        """Checks and answer of each policy, in the plan's order."""
        settings, plan = self.plan.settings, self.plan
        steps = None if settings.target is None else steps_to_target(self)
        metric = Metric(unit=settings.traits.loss_unit) if steps is None else TARGET_METRIC
        metric = replace(metric, tolerance=settings.tolerance)
        command = answering_command(plan) or ""
        results = judge_trials(self.trials, metric, steps, command, plan.has_looks)
        return tuple(self._with_scope(result) for result in results)

    @cached_property
    def other_curves(self) -> tuple[StepsCurve, ...]:
        """The leading policy's curves of other, higher targets, which the same trials passed."""
        result, curves = self.leading, []
        for target in self.plan.settings.answer.other_targets if result else ():
            assert result is not None
            steps = steps_to_target(self, target)
            curves.append(fit_curve(steps[steps["label"] == result.label], target))
        return tuple(curves)

    @property
    def leading(self) -> PolicyResult | None:
        """The policy that the report opens with: the one with tuned rates, if there is one."""
        return leading(self.policies)

    def answer(self) -> Answer | None:
        """Return the answer; None if fewer than two batch sizes have results."""
        return self.leading.answer if self.leading else None

    def sentences(self) -> list[str]:
        """What the sweep shows, in a few sentences: the answer, or what there is instead."""
        result = self.leading
        if result is None or result.answer is None:
            return [_without_answer(self)]
        lines = describe(result.answer)
        if reasons := result.answer.reasons:
            more = f" {len(reasons) - 1} more reasons are below." if len(reasons) > 1 else ""
            lines.append(f"This is provisional: {reasons[0]}{more}")
        if result.curve:
            lines += _describe_curve(result.curve, result.supports_curve)
        return lines

    def _with_scope(self, result: PolicyResult) -> PolicyResult:
        if result.answer is None:
            return result
        settle, seconds = _settle(self, result)
        scope = scope_of(self, result.label)
        answer = replace(result.answer, scope=scope, settle=settle, settle_seconds=seconds)
        return replace(result, answer=answer)


def load_sweep(path: str | Path) -> Sweep:
    """Read a sweep folder without starting or changing anything.

    Raises:
        SweepError: if the folder holds no readable plan.json.
    """
    tables = load_tables(path)
    return Sweep(**vars(tables))


def leading(results: Sequence[PolicyResult]) -> PolicyResult | None:
    ordered = sorted(results, key=lambda result: (not result.rates, result.answer is None))
    return ordered[0] if ordered else None


def answer(
    trials: pd.DataFrame,
    metric: str = "final_valid_loss",
    direction: str = "minimize",
    tolerance: float = 0.01,
    unit: str | None = None,
) -> Answer | None:
    """Answer from a table of trials; None if fewer than two batch sizes have results.

    Args:
        trials: stage, policy, batch_size, seed, learning_rate, state and the metric; also
            seconds_training, and the other columns of trials.csv if they are known.
        direction: minimize or maximize.
        tolerance: how far from the best is good enough, in the unit of the metric.
        unit: by default that of the column loss_unit, if there is one.
    """
    if direction not in ("minimize", "maximize"):
        raise SweepError(f"direction must be minimize or maximize, got {direction!r}.")
    _check_table(trials, metric)
    if unit is None:
        units = trials["loss_unit"].dropna().to_list() if "loss_unit" in trials else []
        unit = str(units[0]) if units and metric == "final_valid_loss" else ""
    sign = -1 if direction == "maximize" else 1
    table = trials.assign(final_valid_loss=sign * trials[metric].astype(float))
    table = table.reindex(columns=list(TRIAL_COLUMNS))
    results = judge_trials(table, Metric(metric, direction, unit, tolerance))
    result = leading(results)
    return result.answer if result else None


def _check_table(trials: pd.DataFrame, metric: str) -> None:
    """Refuse a table of which rows would be left out, or counted twice, without a word."""
    if missing := sorted({*REQUIRED, metric} - {*trials}):
        raise SweepError(f"trials must have the column {missing[0]}. Add it.")
    columns = ("batch_size", "learning_rate", metric)
    sizes, rates, values = (pd.to_numeric(trials[name], errors="coerce") for name in columns)
    is_allowed = {
        "stage must be report or tune": trials["stage"].isin(["report", "tune"]),
        f"state must be one of {', '.join(State)}": trials["state"].isin([*State, np.nan]),
        "policy must be a name": trials["policy"].notna(),
        "batch_size must be a positive whole number": (sizes >= 1) & (sizes % 1 == 0),
        "learning_rate must be a positive number": (rates > 0) & np.isfinite(rates),
        f"{metric} must be a number or empty": values.notna() | trials[metric].isna(),
    }
    for rule, is_met in is_allowed.items():
        if not is_met.all():
            value = trials.loc[~is_met, rule.partition(" ")[0]].iloc[0]
            raise SweepError(f"{rule}, got {value} in row {int((~is_met).to_numpy().argmax())}.")
    reports = report_trials(trials)
    if (twice := reports.duplicated(["label", "batch_size", "seed"])).any():
        row = reports[twice].iloc[0]
        raise SweepError(
            "trials must have one reporting trial of each policy, batch size and seed, got several "
            f"of {row['label']}, {row['batch_size']}, seed {row['seed']}. Give other rates the "
            "stage tune, and number the seeds."
        )
    cells = reports.groupby(["label", "batch_size"])["learning_rate"].nunique()
    if len(several := cells[cells > 1]):
        raise SweepError(
            f"The reporting trials of a policy must have one learning_rate at each batch size, got "
            f"{several.iloc[0]} at batch size {several.index[0][1]}."
        )


def answer_of(
    path: Path, metric: str, direction: str, tolerance: float | None
) -> tuple[Answer | None, list[str]]:
    """Return the answer of a table of trials or of a sweep folder, and its sentences."""
    if path.is_dir():
        sweep = load_sweep(path)
        return sweep.answer(), sweep.sentences()
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise SweepError(f"{path} must be a CSV file or a sweep folder ({error}).") from None
    made = answer(table, metric, direction, 0.01 if tolerance is None else tolerance)
    missing = (
        "Nothing can be compared: no policy has results of two batch sizes, which are trials of "
        "stage report and state COMPLETE."
    )
    return made, describe(made) if made else [missing]


def judge_trials(
    trials: pd.DataFrame,
    metric: Metric = LOSS_METRIC,
    steps: pd.DataFrame | None = None,
    tuning_command: str = "",
    has_looks: bool = False,
) -> list[PolicyResult]:
    """Check each policy of a trials.csv and answer; `steps` are those of `steps_to_target`."""
    rows, results = rows_of_trials(trials), []
    for label, own in rows.groupby("label", sort=False):
        table, curve = prepare(own), None
        checks = check_rows(table, tuning_command)
        if steps is not None:
            curve = fit_curve(steps[steps["label"] == label], own["target"].max())
            checks += check_fit(curve) + check_crossings(curve)
        elif own["has_target"].any():
            missing, evidence = ("metrics.jsonl",), "Not checked: the curves are missing."
            checks += [build_check(c, evidence, missing_columns=missing) for c in CURVE_CHECKS]
        has_ended = (own["state"].isin(["COMPLETE", "PRUNED"])) | own["has_diverged"]
        reports = own[(own["stage"] == "report") & has_ended]
        loss = reports["final_valid_loss"].mask(reports["has_diverged"], math.inf).astype(float)
        reports = reports.assign(value=loss).dropna(subset=["value"])
        result = PolicyResult(str(label), checks, table.rates, None, curve)
        if decided := decide_trials(reports, table.rates, has_looks):
            checks += _check_rates(*decided, reports)
            reasons = [  # the tuning command follows as the next step
                f"{check.evidence} {check.remedy.removesuffix(tuning_command)}".strip()
                for check in result.blocking
            ]
            made = build_answer(str(label), reports, *decided, metric, reasons)
            result = replace(result, answer=made)
        results.append(result)
    return results


def _check_rates(sizes: list[int], made: Decision, reports: pd.DataFrame) -> list[Check]:
    """Compare the rates used with the intervals of the best ones."""
    bounds = made.rates
    if bounds is None:
        return []
    used = np.log(reports.groupby("batch_size")["learning_rate"].first().reindex(sizes).to_numpy())
    rounding = 0.005  # rates are written with three digits
    is_off = (used < bounds.optimum_low - rounding) | (used > bounds.optimum_high + rounding)
    texts = [
        f"{size}: {math.exp(rate):.3g}, best {math.exp(low):.3g} to {math.exp(high):.3g}"
        for size, rate, low, high in zip(
            sizes, used, bounds.optimum_low, bounds.optimum_high, strict=True
        )
        if math.isfinite(low)
    ]
    off = [size for size, is_it in zip(sizes, is_off, strict=True) if is_it]
    evidence = f"Rates used, and intervals of the best ones: {'; '.join(texts) or 'none'}."
    return [build_check("rate_off_optimum", evidence, bool(off), off)]


def _settle(sweep: SweepTables, result: PolicyResult) -> tuple[str | None, float | None]:
    """Return the command that would settle what the answer leaves open, and its least seconds."""
    assert result.answer is not None
    plan, rows = sweep.plan, result.answer.batch_sizes
    complete = sweep.trials[sweep.trials["state"] == "COMPLETE"].astype({"seconds_total": float})
    seconds = complete.groupby("batch_size")["seconds_total"].median()
    tuning = TUNING_TRIALS + LEAST_SEEDS
    if not result.rates:
        return answering_command(plan), float(seconds.sum() * tuning)
    if any(check.code == "missing_batch_size" for check in result.blocking):
        return command_with(plan), None
    best, most = result.answer.recommended, plan.settings.answer.max_seeds
    if any(check.code == "learning_rate_at_edge" for check in result.blocking):
        return None, None  # the check's remedy says what to do
    undecided = [row for row in rows if row.tolerance_verdict == UNDECIDED]
    if undecided or result.blocking:
        open_rows = [row for row in rows if row in undecided or row.batch_size == best]
        more = {row.batch_size: next_look(row.seeds, most) - row.seeds for row in open_rows}
        added = sum(count * float(seconds[size]) for size, count in more.items())
        return (command_with(plan, seeds="auto"), added) if added else (None, None)
    sizes, candidates = [row.batch_size for row in rows], result.answer.candidates
    if sizes[0] in candidates and sizes[0] > 1:
        batches, nearest = [sizes[0] // 2, *sizes], sizes[0]
    elif sizes[-1] in candidates:
        batches, nearest = [*sizes, 2 * sizes[-1]], sizes[-1]
    else:
        return None, None
    command = command_with(plan, batches=batches, seeds="auto")
    return command, float(seconds[nearest]) * tuning


def _describe_curve(curve: StepsCurve, is_supported: bool) -> list[str]:
    measured = [
        f"{estimate:.3g} sequences ({excess:.0%})"
        for excess, estimate in curve.excess.items()
        if estimate is not None
    ]
    lines = []
    if measured:
        text = "exceed their least at batch size"
        lines.append(f"The tokens to a loss of {curve.target:g} {text} {join(measured)}.")
    if curve.fit and is_supported:
        lines.append(
            f"To a validation loss of {curve.target:g} the critical batch size is "
            f"{curve.fit.b_crit:.4g} sequences: training there takes twice the least tokens and "
            "twice the least steps."
        )
    return lines


def _without_answer(sweep: SweepTables) -> str:
    """Describe a sweep that has fewer than two batch sizes with results."""
    reports = report_trials(sweep.trials)
    complete = reports[reports["state"] == "COMPLETE"]
    if complete.empty:
        states = reports["state"].fillna("unknown").value_counts()
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        return f"Nothing can be compared yet: {counts or 'no reporting trial is planned'}."
    size = complete["batch_size"].iloc[0]
    gains = [gain for gain in find_gains(sweep)] if sweep.plan.settings.traits.samples else []
    if gains and gains[0]["difference"] is not None:
        gain = gains[0]["difference"]
        return f"At batch size {size} training changed the mean reward by {gain:+.3f}."
    loss = mean_of(complete["final_valid_loss"].astype(float).to_list())
    return f"At batch size {size} the final validation loss is {loss:.4f}. Nothing is compared."


def scope_of(sweep: SweepTables, label: str) -> str:
    settings, plan, reports = sweep.plan.settings, sweep.plan, report_trials(sweep.trials)
    reports = reports[reports["label"] == label]
    parts = [f"model {settings.model.name}", f"data {settings.data or settings.workload}"]
    parts += [f"{format_count(plan.token_budget)} tokens", f"optimizer {settings.optimizer.name}"]
    parts.append(f"{settings.schedule.name} schedule")
    tuned = sweep.trials[(sweep.trials["stage"] == "tune") & (sweep.trials["policy"] == "tuned")]
    if set(reports["policy"]) == {"tuned"} and len(tuned):
        names = " and ".join(settings.tuning.dimensions)
        parts.append(f"{names} tuned by {_range(tuned.groupby('batch_size').size())} trials")
    seeds = _range(reports.groupby("batch_size")["seed"].nunique())
    parts.append(f"{seeds} seeds" if seeds != "1" else "one seed")
    other = "Other budgets were not measured; larger ones tend to favour larger batch sizes."
    return f"{', '.join(parts)}. {other}"


def _range(counts: pd.Series) -> str:
    """Write `9 to 26`, or `9` if all counts are equal."""
    return " to ".join(dict.fromkeys(map(str, (counts.min(), counts.max()))))
