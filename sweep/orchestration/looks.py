"""`--seeds auto`: which trials the answer needs next, decided from the folder alone."""

import math
from operator import attrgetter

import numpy as np

from sweep.config.objective import Objective
from sweep.orchestration.planning import Planned
from sweep.plan.curves import rate_points, rates_between, stack_points
from sweep.plan.decision import LOOKS, decide, next_trainings
from sweep.plan.plan import TUNING_SEED, Plan, PlannedTrial, reports_of
from sweep.plan.rates import parse_policy
from sweep.trial.folder import Cause, State, SweepFolder


def next_trials(planned: Planned, plan: Plan) -> list[PlannedTrial]:
    """Return the seeds and tuning seeds to add; none once the answer is as clear as it can get.

    None either while a reporting trial waits, or if one failed: the next command runs it again.
    """
    experiment, folder = planned.request.experiment, planned.request.folder
    objective = plan.settings.objective
    cells, count = experiment.cells, len(experiment.batches)
    reports = reports_of(parse_policy(experiment.lr), plan.known_trials, cells)
    values = [trial_value(folder, row, objective) for row in reports]
    if count < 2 or {row.cell for row in reports} != {*cells} or None in values:
        return []
    losses = np.full((len(cells), max(row.seed for row in reports) + 1), np.nan)
    for row, value in zip(reports, values, strict=True):
        losses[cells.index(row.cell), row.seed] = value
    templates = [next(row for row in reports if row.cell == cell) for cell in cells]
    tuning = [_tuning_trials(plan, template) for template in templates]
    points, between = None, [list[float]()] * len(cells)
    if all(tuning):
        near_best = [rate_points(_losses_by_rate(folder, rows, objective)) for rows in tuning]
        points, between = stack_points(near_best), [rates_between(row) for row in near_best]
    used = np.log([row.learning_rate or math.nan for row in templates])
    made = decide(losses, points, used, LOOKS)
    seeds = np.isfinite(losses).sum(-1)
    tuning_seeds = np.ones_like(seeds) if points is None else points.seeds.astype(int)
    is_refinable = np.array([bool(rates) for rates in between])
    limits = experiment.objective.margin, experiment.answer.max_seeds
    parts = [slice(start, start + count) for start in range(0, len(cells), count)]
    wanted, wanted_tuning, needs_rates = np.hstack(
        [
            next_trainings(made.of(p), seeds[p], tuning_seeds[p], is_refinable[p], *limits)
            for p in parts  # one for each optimizer
        ]
    )
    added = []
    for index, template in enumerate(templates):
        for seed in range(seeds[index], wanted[index]):
            row = template.model_copy(update={"seed": seed})
            added.append(plan.with_rate_of(template, row))
        near = np.exp(points.log_rates[index]) if points else np.array([])
        rows = [row for row in tuning[index] if row.seed == TUNING_SEED]
        rows = [row for row in rows if np.isclose(near, row.learning_rate or 0.0, 1e-9).any()]
        for seed in range(TUNING_SEED + tuning_seeds[index], TUNING_SEED + wanted_tuning[index]):
            copies = [row.model_copy(update={"seed": seed}) for row in rows]
            added += [plan.with_rate_of(row, row) for row in copies]
        for rate in between[index] if needs_rates[index] else ():
            added.append(plan.with_rate(rows[0], rate))
    present = {row.id for row in plan.known_trials}
    return [row for row in added if row.id not in present]


def trial_value(folder: SweepFolder, row: PlannedTrial, objective: Objective) -> float | None:
    """Return a trial's value of the objective, less is better; of a ratio its logarithm.

    It is infinite if the trial diverged or missed the target, NaN if tuning pruned it, and None if
    the trial has not ended, or failed.
    """
    trial = folder.trial(str(row.id))
    status = trial.read_status()
    if status.cause is Cause.DIVERGED:
        return math.inf
    if status.state is State.PRUNED:
        return math.inf if objective.is_ratio else math.nan
    if status.state is not State.COMPLETE:
        return None
    result = trial.find_result() or {}
    value = result.get(objective.name)
    if objective.is_ratio:
        return math.log(value) if value else math.inf
    return math.inf if value is None else objective.sign * float(value)


def _tuning_trials(plan: Plan, report: PlannedTrial) -> list[PlannedTrial]:
    """Return the tuning trials like a reporting trial, apart from rate and seed."""
    key = attrgetter("cell", "tokens", "beta2", "weight_decay", "policy")
    return [r for r in plan.known_trials if r.stage == "tune" and key(r) == key(report)]


def _losses_by_rate(
    folder: SweepFolder, rows: list[PlannedTrial], objective: Objective
) -> dict[float, dict[int, float]]:
    tried: dict[float, dict[int, float]] = {}
    for row in rows:
        value = trial_value(folder, row, objective)
        if value is not None:
            tried.setdefault(row.learning_rate or 0.0, {})[row.seed] = value
    return tried
