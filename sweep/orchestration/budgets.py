"""Plan the budgets of a command one after the other, each by what the smaller ones tell."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sweep.config.experiment import Experiment, OwnRate
from sweep.decision.budgets import (
    TunedArm,
    estimate_best_batch_size,
    predict_batch_sizes,
    predict_rate,
)
from sweep.errors import SweepError
from sweep.orchestration.estimates import estimate
from sweep.orchestration.looks import trial_value
from sweep.orchestration.planning import Planned, make_plan
from sweep.orchestration.request import Request
from sweep.orchestration.timing import fix_tokens_by_file
from sweep.plan.course import tokens_per_trial
from sweep.plan.plan import Plan, load_plan
from sweep.plan.policies import parse_policy
from sweep.trial.folder import SweepFolder

MOST_SIZES = 9  # batch sizes of a budget, up to which more are added beyond an edge


def following_requests(request: Request) -> Iterator[Request]:
    """Yield the request of a budget, and again with more batch sizes while they are to follow.

    With `--batches auto` they follow while the best one is at an edge of those that have ended.
    """
    before = None
    following = with_predictions(request)
    while before is None or following.experiment.batches != before:
        yield following
        if not request.experiment.chooses_batches:
            return
        before = following.experiment.batches
        following = with_predictions(request)


def make_plans(request: Request, is_elsewhere: bool = False) -> list[Planned]:
    """Plan each budget of a command, ascending, as far as they are known before any has run."""
    whole = load_plan(request.folder)
    plans = []
    for of_budget in request.by_budget():
        of_budget = with_predictions(of_budget, whole)
        planned = make_plan(of_budget, is_elsewhere, before=whole)
        whole = planned.plan if whole is None else whole.with_budget(planned.plan)
        plans.append(planned)
    return plans


def estimate_plans(plans: Sequence[Planned], request: Request) -> list[Planned]:
    """Return the plans of budgets with their tokens, as far as they are known, and estimates."""
    estimated = []
    for planned in plans:
        planned = fix_tokens_by_file(planned, request.services)
        estimated.append(replace(planned, plan=estimate(planned.plan, request.folder)))
    return estimated


def with_predictions(request: Request, stored: Plan | None = None) -> Request:
    """Return the request of a budget, whose first search begins where other budgets predict it.

    With no budget before, `--batches auto` has the batch sizes of the experiment whose tokens are
    equal.

    Args:
        request: that of one budget.
        stored: the plan of the other budgets; by default the folder's.
    """
    if stored is None:
        stored = load_plan(request.folder)
    experiment = request.experiment
    tokens = experiment.token_budget
    if tokens is None or experiment.target is not None:
        return request
    if stored is None:
        if experiment.chooses_batches:
            sizes = _with_equal_tokens(experiment.batches, tokens, experiment.tokens_per_sequence)
            experiment = experiment.model_copy(update={"batches": sizes})
        return replace(request, experiment=experiment)
    is_of_tokens = all(plan.token_budget is not None for plan in stored.by_budget)
    if not is_of_tokens or stored.settings.target is not None:
        return request  # which is refused, because it asks another question
    present = stored.find_budget(experiment.budget)
    if experiment.chooses_batches:
        if present is not None:
            wanted = _bracketing_sizes(present, request.folder)
            sizes = _possible_sizes(wanted, stored, experiment, tokens)
        else:
            best = _best_by_budget(stored, request.folder)
            wanted = [*predict_batch_sizes(best, tokens)]
            sizes = _possible_sizes(wanted, stored, experiment, tokens)
        experiment = experiment.model_copy(update={"batches": sizes})
    predicted = None if present is not None else _predicted_rate(stored, experiment)
    if predicted is not None and stored.is_part:
        raise SweepError(
            "the first rates of a further budget follow from the results of all parts. Merge the "
            "parts, and run this in a copy of the merged folder."
        )
    if predicted is not None:
        tuning = experiment.tuning.model_copy(update={"own_rate": predicted})
        experiment = experiment.model_copy(update={"tuning": tuning})
    return replace(request, experiment=experiment)


def _with_equal_tokens(
    sizes: Sequence[int], budget: int, tokens_per_sequence: int
) -> tuple[int, ...]:
    """Leave out the largest batch sizes with which tokens would differ; all stay if that fails."""
    for count in range(len(sizes), 1, -1):
        fewer = tuple(sorted(sizes)[:count])
        if fewer[-1] * tokens_per_sequence > budget:
            continue
        if tokens_per_trial(budget, fewer, tokens_per_sequence)[1]:
            return fewer
    return tuple(sizes)


def _bracketing_sizes(plan: Plan, folder: SweepFolder) -> list[int]:
    """Return the batch sizes of a budget, with more beyond an edge at which the best one is.

    None are added while a final trial has no result, once there are many, or if the present ones
    would need other tokens.
    """
    sizes = sorted({row.batch_size for row in plan.trials})
    losses = _mean_losses(plan, folder)
    is_whole = losses.keys() == {*sizes} and not plan.awaits_rates
    if not is_whole or len(sizes) >= MOST_SIZES:
        return sizes
    best = min(sizes, key=lambda size: losses[size])
    added: set[int] = set()
    if best == sizes[0]:
        added = {max(1, best // 2), max(1, best // 4)}
    elif best == sizes[-1]:
        added = {2 * best, 4 * best}
    budget = plan.budget_tokens
    extended = {*sizes, *added}
    extended = {size for size in extended if size * plan.tokens_per_sequence <= budget}
    tokens, _ = tokens_per_trial(budget, extended, plan.tokens_per_sequence)
    finals = [row for row in plan.known_trials if row.stage == "final"]
    if any(row.tokens != tokens[row.batch_size] for row in finals):
        return sizes  # the others would need other tokens
    return sorted(extended)


def _mean_losses(plan: Plan, folder: SweepFolder) -> dict[int, float]:
    """Return the mean loss of each batch size, of those whose final trials all have a result."""
    values: dict[int, list[float]] = {}
    for row in plan.known_trials:
        if row.stage == "final":
            value = trial_value(folder, row, plan.settings.objective)
            values.setdefault(row.batch_size, []).append(math.nan if value is None else value)
    means = {size: float(np.mean(of_size)) for size, of_size in sorted(values.items())}
    return {size: mean for size, mean in means.items() if not math.isnan(mean)}


def _possible_sizes(
    sizes: Sequence[int], stored: Plan, experiment: Experiment, tokens: int
) -> tuple[int, ...]:
    """Return batch sizes that devices and groups can split, and that take at least a step."""
    unit = stored.execution.devices * experiment.workload.sequences_per_group
    rounded = {max(1, round(size / unit)) * unit for size in sizes}
    possible = sorted(size for size in rounded if size * experiment.tokens_per_sequence <= tokens)
    if len(possible) < 2:
        raise SweepError(
            f"batches auto needs two batch sizes that fit a budget of {tokens} tokens. Raise "
            "--budget, or list batch sizes."
        )
    return tuple(possible)


def _best_by_budget(stored: Plan, folder: SweepFolder) -> dict[int, float]:
    """Return the best batch size by budget, as far as results tell.

    Without results of a budget, it is the middle of its batch sizes.
    """
    best = {}
    for plan in stored.by_budget:
        means = _mean_losses(plan, folder)
        if any(map(math.isfinite, means.values())):
            best[plan.budget_tokens] = estimate_best_batch_size(means)
        else:
            sizes = plan.settings.batches
            best[plan.budget_tokens] = float(sizes[len(sizes) // 2])
    return best


def _predicted_rate(stored: Plan, experiment: Experiment) -> OwnRate | None:
    """Return the rate of the smallest batch size at a budget by the tuned ones of others."""
    policy = parse_policy(experiment.lr)
    tokens = experiment.token_budget
    if not policy.is_tuned or tokens is None:
        return None
    optimizer = experiment.optimizer_names[0]
    tuned = []
    for plan in stored.by_budget:
        for row in plan.known_trials:
            is_final = row.stage == "final" and row.policy == policy.name
            if is_final and row.learning_rate and row.optimizer in (None, optimizer):
                tuned.append(TunedArm(plan.budget_tokens, row.batch_size, row.learning_rate))
    if not tuned:
        return None
    arms = list(dict.fromkeys(tuned))
    smallest = min(experiment.batches)
    rate = predict_rate(arms, tokens, smallest, lambda size: policy.rate_at(size, optimizer))
    return OwnRate(lr=f"sqrt:{rate}@{smallest}", optimizer=optimizer)
