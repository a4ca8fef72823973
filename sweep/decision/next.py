"""Decide which trials come next from those of a sweep that have ended.

`sweep run --seeds auto` trains what `next_trials` returns, and the report proposes the same. Both
give it the same records, one from the trial folders, the other from the table of trials.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sweep.config.arms import Arm
from sweep.config.experiment import Experiment
from sweep.decision.curves import Floats
from sweep.decision.decision import ALPHA, LOOKS, Counts, Decision, Flags, decide
from sweep.decision.equal_amounts import (
    ERROR,
    errors_of_amounts,
    log_ratios_of_steps,
    mean_slope,
    ratios_of_trials,
    token_ratios,
)
from sweep.decision.question import Question, undecided_of
from sweep.decision.rates import NEIGHBOURS, RatePoints, rate_points, rates_between, stack_points
from sweep.decision.trials import TrialRecord, TrialTime, losses_by_rate, tuning_records
from sweep.plan.plan import TUNING_SEED, Plan, PlannedTrial, finals_of
from sweep.plan.policies import is_tuned, parse_policy
from sweep.plan.rate_search import CONFIRMATION, EXTENSIONS, GRID, REFINEMENTS
from sweep.trial.timing import Timing

TUNING_SEEDS = 4  # most tuning seeds of the rates near the best
MOST_EQUAL_SEEDS = LOOKS[1]  # a coarse metric may give a few seeds the same value by chance


def next_trials(
    plan: Plan,
    experiment: Experiment,
    records: Sequence[TrialRecord],
    timing: Timing | None = None,
) -> list[PlannedTrial]:
    """Return the trials that `--seeds auto` adds; none once the answer is as clear as it can get.

    None either while a final trial is open, because the same command runs it first, if one has no
    result, or if so many seeds gave one result that the training seems to ignore its seed.

    Args:
        plan: the plan of the sweep, with all its trials.
        experiment: what the command asks for: policy, batch sizes, tolerance and most seeds.
        records: how the trials of the plan ended; other policies are not used.
        timing: measured steps, which a budget of time and the soonest batch size need.
    """
    arms = experiment.arms
    rows = finals_of(parse_policy(experiment.lr), plan.known_trials, arms)
    losses = _final_losses(arms, rows, records)
    if losses is None or len(experiment.batches) < 2:
        return []
    if any(map(_is_repeated, losses)):
        return []

    templates = [_first_of(arm, rows) for arm in arms]
    near_best = [rate_points(losses_by_rate(records, template)) for template in templates]
    between = [rates_between(points) for points in near_best]
    points = stack_points(near_best)
    has_rates = np.isfinite(points.losses).any()
    rates = [row.learning_rate if row.learning_rate else math.nan for row in templates]
    steps = timing if asks_for_soonest(experiment) else None
    has_times = steps is not None or experiment.time_budget_seconds is not None
    error = ERROR if has_times else ALPHA
    decision = decide(losses, points if has_rates else None, np.log(rates), LOOKS, error)
    if plan.has_unequal_amounts:
        ids = {row.id for row in rows}
        finals = [record for record in records if record.row.id in ids]
        errors = _errors_of_amounts(plan, templates, finals, timing)
        decision = replace(decision, other_errors=errors)

    seeds = np.isfinite(losses).sum(-1)
    tuning_seeds = points.seeds.astype(int)
    is_refinable = np.array([len(rates) > 0 for rates in between])
    chosen = []
    for start in range(0, len(arms), len(experiment.batches)):
        of_optimizer = slice(start, start + len(experiment.batches))
        of_sizes = decision.of(of_optimizer)
        if steps is not None:
            ratios = log_ratios_of_steps(steps, arms[of_optimizer])
            if ratios is not None:
                of_sizes = of_sizes.in_time(ratios)
        trainings = next_trainings(
            decision=of_sizes,
            seeds=seeds[of_optimizer],
            tuning_seeds=tuning_seeds[of_optimizer],
            is_refinable=is_refinable[of_optimizer],
            tolerance=experiment.objective.margin,
            most_seeds=experiment.answer.max_seeds,
            question=experiment.answer.question,
            pursues=experiment.answer.pursues,
        )
        chosen.append(trainings)
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


def _errors_of_amounts(
    plan: Plan,
    templates: Sequence[PlannedTrial],
    finals: Sequence[TrialRecord],
    timing: Timing | None,
) -> tuple[Floats, Floats]:
    """Return what unequal times, or tokens, of the final trials add to the errors of losses."""
    times: dict[Arm, list[TrialTime]] = {}
    slopes: list[float] = []
    for template in templates:
        of_arm = [
            record
            for record in finals
            if record.row.arm == template.arm
            and record.value is not None
            and math.isfinite(record.value)
        ]
        times[template.arm] = [record.time for record in of_arm if record.time is not None]
        slopes.append(mean_slope([record.slope for record in of_arm]))
    if plan.token_budget is not None:
        ratios = token_ratios([template.tokens for template in templates])
        return errors_of_amounts(ratios, ratios, slopes)
    return errors_of_amounts(*ratios_of_trials(times, timing), slopes)


def asks_for_soonest(experiment: Experiment) -> bool:
    """Return True if the question is which batch size reaches a target the soonest."""
    answer = experiment.answer
    is_about_time = answer.pursues in ("auto", "time")
    return experiment.target is not None and is_about_time and answer.question == "which"


def next_trainings(
    decision: Decision,
    seeds: Counts,
    tuning_seeds: Counts,
    is_refinable: Flags,  # whether there are rates left between the best one and its neighbours
    tolerance: float,
    most_seeds: int,
    question: Question,
    pursues: str,
) -> tuple[Counts, Counts, Flags]:
    """Return the seeds and tuning seeds that each batch size should have, and which need rates.

    Three kinds of batch sizes get more: those whose verdicts the question needs, those that keep
    them from being within the tolerance, and the best of all. Nothing changes once the question is
    answered, or if nothing may decide more. All arrays have the shape (..., k).

    Tuning comes first if verdicts may change were the rates known exactly. With the question
    `which`, the error of the rates must also be the larger one. A corner of the curve gets rates
    next to the best one. A regret that is not known to within half of the tolerance gets such rates
    if the curve does not fit, else tuning seeds.

    Seeds follow if they may decide, if need be with the tuning that is left.
    """
    may_add_rates, may_add_seeds = _tunable(decision, tuning_seeds, is_refinable, tolerance)
    may_tune = may_add_rates | may_add_seeds
    of_seeds = decision.reach(without_noise=True, known_rates=may_tune)
    of_rates = decision.reach(without_noise=False, known_rates=may_tune)
    may_be_within = of_seeds[1] <= tolerance
    asked = undecided_of(decision, question, pursues, tolerance, may_be_within)
    needs_seeds = _needed(decision, asked, of_seeds, tolerance)
    needs_tuning = _needed(decision, asked, of_rates, tolerance)
    if question == "which":  # the larger error first; for all verdicts, this decides fewer
        may_follow = needs_seeds & (seeds < most_seeds)
        is_first = _is_more_than_noise(decision, needs_tuning)
        needs_tuning &= is_first | ~may_follow.any(-1, keepdims=True)

    needs_rates = needs_tuning & may_add_rates
    doubled = np.minimum(2 * tuning_seeds, TUNING_SEEDS)
    wanted = np.where(needs_tuning & may_add_seeds, doubled, tuning_seeds)
    is_tuning = (needs_tuning & may_tune).any(-1, keepdims=True)

    fewest = np.where(needs_seeds, seeds, most_seeds).min(-1, keepdims=True)
    look = np.vectorize(next_look)(fewest, most_seeds)
    grown = np.where(needs_seeds, np.maximum(seeds, look), seeds)
    return np.where(is_tuning, seeds, grown), wanted, needs_rates


def _tunable(
    decision: Decision, tuning_seeds: Counts, is_refinable: Flags, tolerance: float
) -> tuple[Flags, Flags]:
    """Return the batch sizes that further rates would tell more of, and further tuning seeds."""
    rates = decision.rates
    if rates is None:
        none = np.zeros(tuning_seeds.shape, bool)
        return none, none
    spread = rates.regret_high - rates.regret_low
    is_unclear = (spread > tolerance / 2) & np.isfinite(spread)
    may_add_rates = (is_unclear & rates.misfits) | rates.has_corner
    may_add_rates &= (tuning_seeds == 1) & is_refinable
    return may_add_rates, is_unclear & ~may_add_rates & (tuning_seeds < TUNING_SEEDS)


def _needed(
    decision: Decision, asked: Flags, reach: tuple[Floats, Floats], tolerance: float
) -> Flags:
    """Return the batch sizes that need trainings of a kind, (..., k).

    Args:
        decision: the present one.
        asked: those whose verdicts the question needs.
        reach: the ends of the gaps that such trainings could lead to at best.
        tolerance: the difference of compared values that matters.
    """
    low, high = reach
    may_be_within = asked & (high <= tolerance)
    may_be_outside = asked & (low > tolerance)

    # A batch size is within only if it is so against each other one.
    keeps_open = (may_be_within[..., :, None] & (decision.differences[1] > tolerance)).any(-2)
    is_compared = np.isfinite(decision.mean)
    is_decided = decision.is_within(tolerance) | decision.is_outside(tolerance)
    needed = may_be_within | may_be_outside | (keeps_open & is_compared & ~is_decided)

    estimate = np.where(is_compared, decision.best_estimate, np.inf)
    is_best = estimate == estimate.min(-1, keepdims=True)
    return np.asarray(needed | (is_best & needed.any(-1, keepdims=True)))


def _is_more_than_noise(decision: Decision, is_in: Flags) -> Flags:
    """Return whether a regret is known less well than any difference over seeds, (..., 1).

    Only the batch sizes that are in count, (..., k), and only regrets that are bounded.
    """
    if decision.rates is None:
        return np.zeros((*is_in.shape[:-1], 1), bool)
    spread = decision.rates.regret_high - decision.rates.regret_low
    is_pair = is_in[..., :, None] & is_in[..., None, :] & ~np.eye(is_in.shape[-1], dtype=bool)
    of_rates = np.where(is_in & np.isfinite(spread), spread, 0.0).max(-1)
    of_seeds = np.where(is_pair, decision.half_width, 0.0).max((-2, -1))
    return np.asarray(of_rates > of_seeds)[..., None]


def next_look(seeds: int, most_seeds: int) -> int:
    """Return the number of seeds at the next look; the same number after the last one."""
    for look in (*LOOKS, most_seeds):
        if seeds < look <= most_seeds:
            return look
    return seeds


def _final_losses(
    arms: Sequence[Arm], rows: Sequence[PlannedTrial], records: Sequence[TrialRecord]
) -> Floats | None:
    """Return the losses of the final trials by arm and seed; None while one is open or missing."""
    if {row.arm for row in rows} != {*arms}:
        return None
    values = {record.row.id: record.value for record in records}
    losses = np.full((len(arms), max(row.seed for row in rows) + 1), np.nan)
    for row in rows:
        value = values.get(row.id)
        if value is None:
            return None
        losses[arms.index(row.arm), row.seed] = value
    return losses


def _first_of(arm: Arm, rows: Sequence[PlannedTrial]) -> PlannedTrial:
    return next(row for row in rows if row.arm == arm)


def _is_repeated(losses: Floats) -> bool:
    """Return True if all seeds of a batch size gave one result, and more would repeat it."""
    finite = losses[np.isfinite(losses)]
    return len(finite) >= MOST_EQUAL_SEEDS and len(np.unique(finite)) == 1


def _rates_of(
    points: RatePoints, records: Sequence[TrialRecord], final: PlannedTrial
) -> list[float]:
    """Return the rates of the points as they were tried: their logarithms are rounded."""
    log_rates = points.log_rates[np.isfinite(points.losses)]
    rows = [record.row for record in tuning_records(records, final)]
    tried = {row.learning_rate for row in rows if row.learning_rate is not None}
    return [rate for rate in sorted(tried) if np.isclose(math.log(rate), log_rates, 1e-9).any()]


def _trial_like(
    plan: Plan, row: PlannedTrial, *, seed: int, rate: float | None = None
) -> PlannedTrial:
    """Return a row with another seed, and another rate if one is given."""
    row = row.model_copy(update={"seed": seed})
    if rate is None:
        rate = row.learning_rate
    return plan.with_rate(row, 0.0 if rate is None else rate)


def most_trials(plan: Plan) -> dict[Arm, int]:
    """Return the most trials of each arm with `--seeds auto`."""
    tuned = {row.arm for row in plan.trials if is_tuned(row.policy)}
    tuning = plan.settings.tuning
    searched = len(GRID) + 2 * EXTENSIONS + REFINEMENTS
    is_joint = len(tuning.dimensions) > 1
    if is_joint:
        searched = max(searched, tuning.trials)
    if is_joint or tuning.budget:  # the winner and its neighbours at the full budget
        searched += len(CONFIRMATION) + 2 * EXTENSIONS + REFINEMENTS
    refined = (TUNING_SEEDS - 1) * (2 * NEIGHBOURS + 1) + REFINEMENTS

    final = plan.settings.answer.max_seeds
    most = {row.arm: final for row in plan.trials}
    for arm in tuned:
        most[arm] = final + searched + refined
    return most
