"""Growing a plan by batch sizes, seeds and rates; everything else is refused (DESIGN.md §6)."""

from typing import Any

from sweep.errors import SweepError
from sweep.plan.plan import Plan
from sweep.plan.steps import tokens_per_trial

# Settings that trials of one sweep may differ in, or that are identified in another way.
NOT_SHARED = {"batches", "seeds", "lr", "question", "data", "name", "init"}


def grow_plan(old: Plan, new: Plan) -> Plan:
    """Return `old` with the trials of `new`.

    Raises:
        SweepError: naming the difference, if anything but batch sizes, seeds and rates differs.
    """
    are_tuned = is_tuned(old) and is_tuned(new)
    difference = _first_difference(_shared(old, are_tuned), _shared(new, are_tuned))
    if difference:
        key, before, after = difference
        raise SweepError(
            f"a sweep may only grow by batch sizes, seeds and rates, but {key} would change "
            f"from {before!r} to {after!r}. Choose another --out for another experiment."
        )
    for stage, budget in (("report", None), ("tune", old.settings.tuning.budget)):
        _check_tokens(old, new, stage, budget or old.token_budget)
    present = {row.id for row in old.known_trials}
    added = tuple(row for row in new.known_trials if row.id not in present)
    trials = (*old.known_trials, *added)
    reported = {row.tokens for row in trials if row.stage == "report"}
    settings = old.settings
    if not is_tuned(old):
        settings = settings.model_copy(update={"tuning": new.settings.tuning})
    commands = (*old.commands, *(new.commands if added else ()))
    return old.model_copy(
        update={
            "settings": settings,
            "trials": trials,
            "commands": tuple(dict.fromkeys(commands)),
            "tokens_are_common": len(reported) == 1 if reported else old.tokens_are_common,
        }
    )


def is_tuned(plan: Plan) -> bool:
    """Return True if some rates of a plan are tuned."""
    return any(row.policy == "tuned" for row in plan.trials)


def with_decided_rates(new: Plan, old: Plan) -> Plan:
    """Return `new` with the rates that tuning already decided in `old`."""
    decided = {
        row.batch_size: row
        for row in old.known_trials
        if row.policy == "tuned" and row.stage == "report"
    }
    rows = []
    for row in new.trials:
        winner = decided.get(row.batch_size) if row.policy == "tuned" else None
        if winner is None:
            rows.append(row)
        elif row.stage == "report":
            assert winner.learning_rate is not None
            rows.append(new.with_rate(row, winner.learning_rate, winner.beta2, winner.weight_decay))
    return new.model_copy(update={"trials": tuple(rows)})


def _check_tokens(old: Plan, new: Plan, stage: str, budget: int) -> None:
    """Refuse batch sizes that would change the token count of trials already planned."""
    tokens: dict[int, int] = {}
    for row in old.trials:  # a confirmation at the full budget has more tokens than its search
        if row.stage == stage:
            tokens[row.batch_size] = min(row.tokens, tokens.get(row.batch_size, row.tokens))
    universe = sorted({row.batch_size for row in (*old.trials, *new.trials)})
    changed, _ = tokens_per_trial(budget, universe, old.tokens_per_sequence)
    for batch, count in tokens.items():
        if changed[batch] != count:
            raise SweepError(
                "added batch sizes must not change the common token count, but it would change "
                f"from {count} to {changed[batch]} at batch size {batch}. Choose sizes with the "
                "same least common multiple, or another --out."
            )


def _shared(plan: Plan, with_tuning: bool) -> dict[str, Any]:
    """Return the science that all trials of a sweep share."""
    excluded = NOT_SHARED if with_tuning else {*NOT_SHARED, "tuning"}
    settings = plan.settings.model_dump(mode="json", exclude=excluded)
    return {**settings, "data": plan.data, "start": plan.start, "code": plan.code}


def _first_difference(a: Any, b: Any, key: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b}):
            inner = f"{key}.{name}" if key else name
            if difference := _first_difference(a.get(name), b.get(name), inner):
                return difference
        return None
    return None if a == b else (key, a, b)
