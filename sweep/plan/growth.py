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
    difference = _first_difference(_shared(old), _shared(new))
    if difference:
        place, before, after = difference
        raise SweepError(
            f"a sweep may only grow by batch sizes, seeds and rates, but {place} would change "
            f"from {before!r} to {after!r}. Choose another --out for another experiment."
        )
    tokens = {row.batch_size: row.tokens for row in old.trials}
    universe = sorted({*tokens, *(row.batch_size for row in new.trials)})
    again, _ = tokens_per_trial(old.token_budget, universe, old.tokens_per_sequence)
    for batch, count in tokens.items():
        if again[batch] != count:
            raise SweepError(
                f"added batch sizes must leave the common token count as it is, but it would "
                f"change from {count} to {again[batch]} at batch size {batch}. Choose sizes whose "
                "least common multiple stays, or another --out."
            )
    present = {row.id for row in old.known_trials}
    added = tuple(row for row in new.known_trials if row.id not in present)
    commands = tuple(dict.fromkeys((*old.commands, *(new.commands if added else ()))))
    trials = (*old.known_trials, *added)
    are_common = len({row.tokens for row in trials}) == 1
    return old.model_copy(
        update={"trials": trials, "commands": commands, "tokens_are_common": are_common}
    )


def _shared(plan: Plan) -> dict[str, Any]:
    """Return the science that all trials of a sweep share."""
    settings = plan.settings.model_dump(
        mode="json", exclude={"batches", "seeds", "lr", "question", "data", "name"}
    )
    return {**settings, "data": plan.data}


def _first_difference(a: Any, b: Any, place: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            inner = f"{place}.{key}" if place else key
            if found := _first_difference(a.get(key), b.get(key), inner):
                return found
        return None
    return None if a == b else (place, a, b)
