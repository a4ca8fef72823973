"""Decide which trials come next from those of a sweep that have ended.

`sweep run --seeds auto` trains what `next_trials` returns, and the report proposes the same. Both
give it the same records, one from the trial folders, the other from the table of trials.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from sweep.config.experiment import Experiment
from sweep.config.objective import Objective
from sweep.plan.curves import Floats, RatePoints, rate_points, rates_between, stack_points
from sweep.plan.decision import LOOKS, decide, next_trainings
from sweep.plan.plan import TUNING_SEED, Plan, PlannedTrial, reports_of
from sweep.plan.rates import parse_policy
from sweep.trial.status import Cause, State, has_failed

MOST_EQUAL_SEEDS = LOOKS[1]  # a coarse metric may give a few seeds the same value by chance


@dataclass(frozen=True)
class TrialRecord:
    """A planned trial, and how it ended."""

    row: PlannedTrial
    state: State
    cause: Cause | None
    value: float | None  # `compared_value`; None if the trial has none

    @property
    def is_open(self) -> bool:
        """True if the next command runs the trial, which waits or can be tried again."""
        return not self.state.is_finished or has_failed(self.state, self.cause)

    @property
    def is_diverged(self) -> bool:
        return self.cause is Cause.DIVERGED


def compared_value(
    state: State, cause: Cause | None, metric: float | None, objective: Objective
) -> float | None:
    """Return the value that batch sizes are compared by; less is better.

    It is the logarithm of a ratio. It is infinite if the trial diverged, missed the target or has
    no finite metric, NaN if tuning pruned it, and None if the trial has not ended, or failed.
    """
    if cause is Cause.DIVERGED:
        return math.inf
    if state is State.PRUNED:
        return math.inf if objective.is_ratio else math.nan
    if state is not State.COMPLETE:
        return None
    if metric is None or not math.isfinite(metric):
        return math.inf
    if objective.is_ratio:
        return math.log(metric) if metric > 0 else math.inf
    return objective.sign * metric


def next_trials(
    plan: Plan, experiment: Experiment, records: Sequence[TrialRecord]
) -> list[PlannedTrial]:
    """Return the trials that `--seeds auto` adds; none once the answer is as clear as it can get.

    None either while a reporting trial is open, because the same command runs it first, or if so
    many seeds gave one result that the training seems to ignore its seed.

    Args:
        plan: the plan of the sweep, with all its trials.
        experiment: what the command asks for: policy, batch sizes, tolerance and most seeds.
        records: how the trials of the plan ended; other policies are not used.
    """
    cells, batch_count = experiment.cells, len(experiment.batches)
    by_id = {record.row.id: record for record in records}
    rows = reports_of(parse_policy(experiment.lr), plan.known_trials, cells)
    reports = [by_id[row.id] for row in rows if row.id in by_id]
    has_all = len(reports) == len(rows) and {row.cell for row in rows} == {*cells}
    if batch_count < 2 or not has_all:
        return []

    losses = np.full((len(cells), max(row.seed for row in rows) + 1), np.nan)
    for report in reports:
        if report.value is None:
            return []
        losses[cells.index(report.row.cell), report.row.seed] = report.value
    if any(map(_is_repeated, losses)):
        return []

    templates = [next(row for row in rows if row.cell == cell) for cell in cells]
    near_best = [rate_points(_losses_by_rate(records, template)) for template in templates]
    between = [rates_between(points) for points in near_best]
    is_tuned = any(np.isfinite(points.losses).any() for points in near_best)
    points = stack_points(near_best) if is_tuned else None

    used = np.log([row.learning_rate or math.nan for row in templates])
    decision = decide(losses, points, used, LOOKS)
    seeds = np.isfinite(losses).sum(-1)
    tuning_seeds = stack_points(near_best).seeds.astype(int)
    is_refinable = np.array([bool(rates) for rates in between])
    parts = [slice(start, start + batch_count) for start in range(0, len(cells), batch_count)]
    chosen = [
        next_trainings(
            made=decision.of(part),
            seeds=seeds[part],
            tuning_seeds=tuning_seeds[part],
            is_refinable=is_refinable[part],
            tolerance=experiment.objective.margin,
            most_seeds=experiment.answer.max_seeds,
        )
        for part in parts  # one for each optimizer
    ]
    wanted_seeds, wanted_tuning, needs_rates = np.hstack(chosen)

    added: list[PlannedTrial] = []
    for index, template in enumerate(templates):
        for seed in range(seeds[index], wanted_seeds[index]):
            added.append(_trial_like(plan, template, seed=seed))
        tuning = template.model_copy(update={"stage": "tune"})
        for seed in range(tuning_seeds[index], wanted_tuning[index]):
            for rate in _rates_of(near_best[index], records, template):
                added.append(_trial_like(plan, tuning, seed=TUNING_SEED + seed, rate=rate))
        if needs_rates[index]:
            for rate in between[index]:
                added.append(_trial_like(plan, tuning, seed=TUNING_SEED, rate=rate))
    present = {row.id for row in plan.known_trials}
    return [row for row in added if row.id not in present]


def _is_repeated(losses: Floats) -> bool:
    """Return True if all seeds of a batch size gave one result, and more would repeat it."""
    finite = losses[np.isfinite(losses)]
    return len(finite) >= MOST_EQUAL_SEEDS and len(np.unique(finite)) == 1


def tuning_records(records: Sequence[TrialRecord], report: PlannedTrial) -> list[TrialRecord]:
    """Return the tuning trials like a reporting trial, apart from rate and seed.

    One that diverged on fewer tokens would have diverged later too, so it counts.
    """
    key = attrgetter("cell", "beta2", "weight_decay", "policy")
    alike = [r for r in records if r.row.stage == "tune" and key(r.row) == key(report)]
    return [
        record
        for record in alike
        if record.row.tokens == report.tokens
        or (record.row.tokens < report.tokens and record.is_diverged)
    ]


def _losses_by_rate(
    records: Sequence[TrialRecord], report: PlannedTrial
) -> dict[float, dict[int, float]]:
    losses: dict[float, dict[int, float]] = {}
    for record in tuning_records(records, report):
        if record.value is not None:
            rate = record.row.learning_rate or 0.0
            losses.setdefault(rate, {})[record.row.seed] = record.value
    return losses


def _rates_of(
    points: RatePoints, records: Sequence[TrialRecord], report: PlannedTrial
) -> list[float]:
    """Return the rates of the points as they were tried: their logarithms are rounded."""
    log_rates = points.log_rates[np.isfinite(points.losses)]
    tried = sorted({r.row.learning_rate or 0.0 for r in tuning_records(records, report)})
    return [rate for rate in tried if np.isclose(math.log(rate), log_rates, 1e-9).any()]


def _trial_like(
    plan: Plan, row: PlannedTrial, *, seed: int, rate: float | None = None
) -> PlannedTrial:
    row = row.model_copy(update={"seed": seed})
    return plan.with_rate(row, rate or row.learning_rate or 0.0)
