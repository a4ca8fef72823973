"""Extend the plan of a folder by batch sizes, seeds and rates."""

from typing import Any

from sweep.errors import SweepError, cut
from sweep.plan.course import tokens_per_trial
from sweep.plan.plan import Plan
from sweep.plan.policies import is_tuned

# Settings that trials of one sweep may differ in, or that are identified in another way.
NOT_SHARED = {
    *("batches", "seeds", "lr", "question", "data", "name", "init", "answer", "noise_scale"),
}
ESTIMATES = {"epochs", "disk_bytes", "forecast_factor", "forecast_reason"}  # kept when a plan grows


def grow_plan(old: Plan, new: Plan, folder: object = "This folder") -> Plan:
    """Return `old` with the trials of `new`, which may add batch sizes, seeds and rates only."""
    was_tuned = any(is_tuned(row.policy) for row in old.trials)
    searches = any(is_tuned(row.policy) for row in new.trials)
    excluded = NOT_SHARED if was_tuned and searches else {*NOT_SHARED, "tuning"}
    before, after = (
        plan.settings.model_dump(mode="json", exclude=excluded)
        | {"data": plan.data, "start": plan.start, "code": plan.code}
        for plan in (old, new)
    )
    if difference := _first_difference(before, after):
        raise SweepError(
            f"{folder} holds a sweep of {old.experiment}, which may grow by batch sizes, seeds and "
            f"rates only, but {difference}. Choose another --out for another question."
        )
    batches = {row.batch_size for row in (*old.trials, *new.trials)}
    tokens, are_common = tokens_per_trial(old.token_budget, batches, old.tokens_per_sequence)
    budget = (was_tuned and old.settings.tuning.budget) or old.token_budget
    tuning_tokens, _ = tokens_per_trial(budget, batches, old.tokens_per_sequence, True)
    for row in old.trials:
        if row.tokens not in (tokens[row.batch_size], tuning_tokens[row.batch_size]):
            raise SweepError(
                "added batch sizes must not change the others, but batch size "
                f"{row.batch_size} would no longer have {row.steps} steps. Choose another --out."
            )
    present = {row.id for row in old.known_trials}
    added = tuple(row for row in new.known_trials if row.id not in present)
    adds = added or new.has_looks  # seeds follow
    noise_scale = old.settings.noise_scale
    if new.settings.noise_scale.measure:
        noise_scale = new.settings.noise_scale
    settings = {
        "answer": new.settings.answer,
        "noise_scale": noise_scale,
        "seeds": new.settings.seeds,
        "tuning": (old if was_tuned else new).settings.tuning,
    }
    unrecorded = {*old.unrecorded, *(new.unrecorded if adds else ())}
    seeds = {(row.policy, row.learning_rate, row.arm): row.seed for row in old.known_trials}
    has_more_seeds = any(
        row.seed > seeds.get((row.policy, row.learning_rate, row.arm), row.seed) for row in added
    )
    return old.model_copy(
        update={
            "settings": old.settings.model_copy(update=settings),
            "has_looks": old.has_looks or new.has_looks or has_more_seeds,
            "trials": (*old.known_trials, *added),
            "commands": tuple(dict.fromkeys(old.commands + (new.commands if adds else ()))),
            "unrecorded": tuple(sorted(unrecorded)),
            "tokens_are_common": are_common,
            "data_path": new.data_path,
            "init_path": new.init_path,
            "code_path": new.code_path,
            **new.model_dump(include=ESTIMATES, exclude_none=True),
        }
    )


def _first_difference(old: Any, new: Any, key: str = "") -> str:
    """Describe the first changed value by its key, such as `optimizer.clip`; "" if none."""
    if old != new and (file := key.removeprefix("code.files.")) != key:
        return f"{file} has changed"
    if not (isinstance(old, dict) and isinstance(new, dict)):
        changes = f"would change from {cut(repr(old))} to {cut(repr(new))}"
        return "" if old == new else f"{key} {changes}"
    names = sorted({*old, *new})
    pairs = ((old.get(name), new.get(name), f"{key}.{name}".lstrip(".")) for name in names)
    return next(filter(None, (_first_difference(*pair) for pair in pairs)), "")
