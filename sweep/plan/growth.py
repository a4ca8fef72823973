"""How a plan grows: by batch sizes, seeds and rates, and by nothing else (DESIGN.md §6)."""

from typing import Any

from sweep.errors import SweepError
from sweep.plan.plan import Plan
from sweep.plan.steps import tokens_per_trial


def grow_plan(old: Plan, new: Plan) -> Plan:
    """Add the trials of `new` to `old`.

    Raises:
        SweepError: naming the difference, if anything but batch sizes, seeds and rates differs.
    """
    are_tuned = is_tuned(old) and is_tuned(new)
    difference = _first_difference(_shared(old, are_tuned), _shared(new, are_tuned))
    if difference:
        place, before, after = difference
        raise SweepError(
            f"a sweep may only grow by batch sizes, seeds and rates, but {place} would change "
            f"from {before!r} to {after!r}. Choose another --out for another experiment."
        )
    for stage, budget in (("report", None), ("tune", old.settings.tuning.budget)):
        _check_tokens(old, new, stage, budget or old.token_budget)
    present = {row.id for row in old.known_trials}
    added = tuple(row for row in new.known_trials if row.id not in present)
    commands = tuple(dict.fromkeys((*old.commands, *(new.commands if added else ()))))
    trials = (*old.known_trials, *added)
    reported = {row.tokens for row in trials if row.stage == "report"}
    settings = old.settings
    if not is_tuned(old):
        settings = settings.model_copy(update={"tuning": new.settings.tuning})
    return old.model_copy(
        update={
            "settings": settings,
            "trials": trials,
            "commands": commands,
            "tokens_are_common": len(reported) == 1 if reported else old.tokens_are_common,
        }
    )


def is_tuned(plan: Plan) -> bool:
    """Tell whether some rates of a plan are tuned."""
    return any(row.policy == "tuned" for row in plan.trials)


def with_decided_rates(new: Plan, old: Plan) -> Plan:
    """Give rows of `new` the rates that tuning has decided in `old`; decided stays decided."""
    decided = {
        row.batch_size: row
        for row in old.known_trials
        if row.policy == "tuned" and row.stage == "report"
    }
    rows = []
    for row in new.trials:
        known = decided.get(row.batch_size) if row.policy == "tuned" else None
        if known is None:
            rows.append(row)
        elif row.stage == "report":
            assert known.learning_rate is not None
            rows.append(new.with_rate(row, known.learning_rate, known.beta2, known.weight_decay))
    return new.model_copy(update={"trials": tuple(rows)})


def _check_tokens(old: Plan, new: Plan, stage: str, budget: int) -> None:
    """Refuse batch sizes with which trials that are planned already would have other tokens."""
    tokens: dict[int, int] = {}
    for row in old.trials:  # what confirms a rate that was tuned at fewer tokens has more
        if row.stage == stage:
            tokens[row.batch_size] = min(row.tokens, tokens.get(row.batch_size, row.tokens))
    universe = sorted({row.batch_size for row in (*old.trials, *new.trials)})
    again, _ = tokens_per_trial(budget, universe, old.tokens_per_sequence)
    for batch, count in tokens.items():
        if again[batch] != count:
            raise SweepError(
                f"added batch sizes must leave the common token count as it is, but it would "
                f"change from {count} to {again[batch]} at batch size {batch}. Choose sizes whose "
                "least common multiple stays, or another --out."
            )


def _shared(plan: Plan, with_tuning: bool) -> dict[str, Any]:
    """Return the science that all trials of a sweep share."""
    settings = plan.settings.model_dump(
        mode="json", exclude={"batches", "seeds", "lr", "question", "data", "name"}
    )
    if not with_tuning:
        settings.pop("tuning")
    if settings.get("grpo"):
        settings["grpo"].pop("init")  # a path; what lies there is `start`
    return {**settings, "data": plan.data, "start": plan.start}


def _first_difference(a: Any, b: Any, place: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            inner = f"{place}.{key}" if place else key
            if found := _first_difference(a.get(key), b.get(key), inner):
                return found
        return None
    return None if a == b else (place, a, b)
