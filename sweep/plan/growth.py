"""Extend the plan of a folder by budgets, batch sizes, seeds and rates."""

from collections.abc import Iterable, Sequence
from typing import Any

from sweep.config.numbers import refuse_close_budgets
from sweep.errors import SweepError, cut
from sweep.plan.course import tokens_per_trial
from sweep.plan.plan import Plan, PlannedTrial
from sweep.plan.policies import is_tuned

# Settings that trials of one sweep may differ in, or that are identified in another way.
NOT_SHARED = {
    "batches",
    "seeds",
    "lr",
    "question",
    "data",
    "name",
    "init",
    "answer",
    "noise_scale",
}
FILES = "code.files."  # keys of the hashes of user code
ESTIMATES = {"epochs", "disk_bytes", "forecast_factor", "forecast_reason"}  # kept when a plan grows


def may_add_budget(stored: Plan, new: Plan) -> bool:
    """Return True if a plan is of another budget of the same question, a number of tokens."""
    plans = (*stored.by_budget, new)
    are_tokens = all(plan.token_budget is not None for plan in plans)
    has_target = any(plan.settings.target is not None for plan in plans)
    return are_tokens and not has_target and stored.find_budget(new.settings.budget) is None


def add_budget(stored: Plan, new: Plan, folder: object = "This folder") -> Plan:
    """Return the plan of a further budget, with what it shares with the `stored` ones."""
    refuse_close_budgets(sorted(plan.budget_tokens for plan in (*stored.by_budget, new)))
    other = stored.by_budget[-1]
    excluded = {*NOT_SHARED, "budget"}
    was_tuned = any(is_tuned(row.policy) for row in stored.trials)
    if not (was_tuned and any(is_tuned(row.policy) for row in new.trials)):
        excluded.add("tuning")
    settings = other.settings
    sequences = {"sequences": new.settings.evaluation.sequences}
    evaluation = settings.evaluation.model_copy(update=sequences)
    other = other.model_copy(
        update={"settings": settings.model_copy(update={"evaluation": evaluation})}
    )
    difference = _first_difference(
        _shared_settings(other, excluded), _shared_settings(new, excluded)
    )
    if difference:
        raise SweepError(
            f"{folder} holds a sweep of {stored.experiment}, which may grow by budgets, batch "
            f"sizes, seeds and rates only, but {difference}. Choose another --out for another "
            "question."
        )
    if not new.settings.noise_scale.measure:
        noise = {"noise_scale": settings.noise_scale}
        new = new.model_copy(update={"settings": new.settings.model_copy(update=noise)})
    return new.model_copy(
        update={
            "sweep_uid": stored.sweep_uid,
            "execution": stored.execution,
            "model": stored.model,
            "commands": tuple(dict.fromkeys((*stored.commands, *new.commands))),
            "unrecorded": tuple(sorted({*stored.unrecorded, *new.unrecorded})),
        }
    )


def grow_plan(old: Plan, new: Plan, folder: object = "This folder") -> Plan:
    """Return `old` with the trials of `new`, which may add batch sizes, seeds and rates only.

    It may also ask for the noise scale, which trials that start later then measure.
    """
    was_tuned = any(is_tuned(row.policy) for row in old.trials)
    searches = any(is_tuned(row.policy) for row in new.trials)
    excluded = NOT_SHARED if was_tuned and searches else {*NOT_SHARED, "tuning"}
    _refuse_other_times(old, new)
    difference = _first_difference(_shared_settings(old, excluded), _shared_settings(new, excluded))
    if difference:
        raise SweepError(
            f"{folder} holds a sweep of {old.experiment}, which may grow by batch sizes, seeds and "
            f"rates only, but {difference}. Choose another --out for another question."
        )

    are_common = _refuse_other_tokens(old, new)
    present = {row.id for row in old.known_trials}
    added = tuple(row for row in new.known_trials if row.id not in present)
    known = (*old.known_trials, *added)

    noise_scale = old.settings.noise_scale
    if new.settings.noise_scale.measure:
        noise_scale = new.settings.noise_scale
    commands = old.commands
    unrecorded = {*old.unrecorded}
    measures_more = noise_scale != old.settings.noise_scale
    follow = new.has_looks or new.awaits_times  # trials that are not known yet
    if added or measures_more or follow:
        commands += new.commands
        unrecorded |= {*new.unrecorded}

    tuning = old.settings.tuning if was_tuned else new.settings.tuning
    if searches:
        tuning = tuning.model_copy(update={"centred_by": new.settings.tuning.centred_by})
    settings = {
        "answer": new.settings.answer,
        "noise_scale": noise_scale,
        "seeds": new.settings.seeds,
        "tuning": tuning,
    }
    return old.model_copy(
        update={
            "settings": old.settings.model_copy(update=settings),
            "has_looks": old.has_looks or new.has_looks or _has_more_seeds(old, added),
            "trials": (*known, *_waiting_searches(old, new, known)),
            "commands": tuple(dict.fromkeys(commands)),
            "unrecorded": tuple(sorted(unrecorded)),
            "tokens_are_common": are_common,
            "data_path": new.data_path,
            "init_path": new.init_path,
            "code_path": new.code_path,
            **new.model_dump(include=ESTIMATES, exclude_none=True),
        }
    )


def _waiting_searches(old: Plan, new: Plan, known: Sequence[PlannedTrial]) -> list[PlannedTrial]:
    """Return the tuning trials of both plans that wait for a rate, once for each arm.

    Those of an arm with trials among the `known` ones wait no more.
    """
    begun = {(row.policy, row.arm) for row in known if row.stage == "tune"}
    waiting = list[PlannedTrial]()
    for plan in (old, new):
        rows = [row for row in plan.waiting_searches if (row.policy, row.arm) not in begun]
        begun |= {(row.policy, row.arm) for row in rows}
        waiting += rows
    return waiting


def _refuse_other_times(old: Plan, new: Plan) -> None:
    """Refuse tokens of a budget of time that differ from those which were fixed first."""
    if old.token_budget is not None or old.settings.budget != new.settings.budget:
        return
    fixed = {row.arm: row.tokens for row in old.trials}
    if any(row.tokens != fixed.get(row.arm, row.tokens) for row in new.trials):
        raise SweepError("another command has timed these batch sizes. Run the command again.")


def _refuse_other_tokens(old: Plan, new: Plan) -> bool:
    """Refuse new trials with which others would need other tokens; return whether all are equal."""
    batches = {row.batch_size for row in (*old.trials, *new.trials)}
    for plan in (old, new):
        if plan.is_part:  # whose tokens are those of the whole sweep
            batches |= {*plan.settings.batches}
    if old.token_budget is None:
        return len({row.tokens for row in (*old.trials, *new.trials)}) == 1

    tokens, are_common = tokens_per_trial(old.token_budget, batches, old.tokens_per_sequence)
    tuning_tokens, _ = tokens_per_trial(
        _tuning_budget(old) or old.token_budget,
        batches,
        old.tokens_per_sequence,
        is_of_tuning=True,
    )
    for row in old.trials:
        if row.tokens not in (tokens[row.batch_size], tuning_tokens[row.batch_size]):
            raise SweepError(
                "added batch sizes must not change the others, but batch size "
                f"{row.batch_size} would no longer have {row.steps} steps. Choose another --out."
            )
    return are_common


def _tuning_budget(plan: Plan) -> int | None:
    """Return the tokens of tuning trials; None if they have the sweep's, or there are none."""
    was_tuned = any(is_tuned(row.policy) for row in plan.trials)
    return plan.settings.tuning.budget if was_tuned else None


def _shared_settings(plan: Plan, excluded: set[str]) -> dict[str, Any]:
    """Return the settings and identities that all trials of a sweep share."""
    settings = plan.settings.model_dump(mode="json", exclude=excluded)
    if "tuning" in settings:  # these only choose the rates that later searches begin with
        del settings["tuning"]["own_rate"], settings["tuning"]["centred_by"]
    return settings | {"data": plan.data, "start": plan.start, "code": plan.code}


def _has_more_seeds(old: Plan, added: Iterable[PlannedTrial]) -> bool:
    """Return True if some rate of an arm gets further seeds, after results may have been seen."""
    seeds = {(row.policy, row.learning_rate, row.arm): row.seed for row in old.known_trials}
    for row in added:
        last_seed = seeds.get((row.policy, row.learning_rate, row.arm))
        if last_seed is not None and row.seed > last_seed:
            return True
    return False


def _first_difference(old: Any, new: Any, key: str = "") -> str:
    """Describe the first changed value by its key, such as `optimizer.clip`; "" if none."""
    if old == new:
        return ""
    if key.startswith(FILES):
        return f"{key.removeprefix(FILES)} has changed"
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"{key} would change from {cut(repr(old))} to {cut(repr(new))}"

    for name in sorted({*old, *new}):
        longer = f"{key}.{name}".lstrip(".")
        difference = _first_difference(old.get(name), new.get(name), longer)
        if difference:
            return difference
    return ""
