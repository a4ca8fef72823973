"""The commands of a sweep: those that were typed, and the one that answers the question."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweep.plan.plan import Plan
from sweep.plan.tuning import GRID

ANSWERING_SEEDS = 3
REPLACED = ("--batches", "--lr", "--seeds")


def typed_command(experiment: str, flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a `sweep run`; flags that are None or False were not given."""
    words = ["sweep", "run", experiment]
    for name, value in flags.items():
        if value is not None and value is not False:
            given = value if isinstance(value, str | bool | Path) else _written(value)
            words += [f"--{name.replace('_', '-')}", *([] if given is True else [str(given)])]
    return tuple(words)


def _written(value: Any) -> str:
    """Write a value of the Python interface as the command line would read it."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def answering_command(plan: Plan) -> str | None:
    """Return the command that tunes the rate at each batch size; None where this plan does so."""
    batches = sorted({row.batch_size for row in plan.trials})
    tuned = [row for row in plan.trials if row.policy == "tuned" and row.stage == "report"]
    seeds_of = {batch: {r.seed for r in tuned if r.batch_size == batch} for batch in batches}
    if tuned and min(map(len, seeds_of.values())) >= ANSWERING_SEEDS:
        return None
    old = plan.commands[-1] if plan.commands else ("sweep", "run", plan.settings.name)
    words = [
        word
        for before, word in zip(("", *old), old, strict=False)
        if word not in REPLACED and before not in REPLACED
    ]
    seeds = max(ANSWERING_SEEDS, _seeds(plan))
    words += ["--batches", ",".join(map(str, batches)), "--lr", "tuned", "--seeds", str(seeds)]
    return shlex.join(words)


def answering_cost(
    plan: Plan, seconds: Mapping[int, float | None], done: Mapping[int, int] | None = None
) -> tuple[int, float | None]:
    """Return what the answering command costs at least: trainings, and their seconds.

    Args:
        plan: of the sweep.
        seconds: of one training by batch size, estimated or measured.
        done: of these trainings, by batch size.
    """
    each = len(GRID) + max(ANSWERING_SEEDS, _seeds(plan))
    left = {row.batch_size: each for row in plan.trials}
    left = {batch: max(0, each - (done or {}).get(batch, 0)) for batch in left}
    costs = [(count, seconds.get(batch)) for batch, count in left.items() if count]
    known = [count * one for count, one in costs if one is not None]
    return sum(left.values()), sum(known) if len(known) == len(costs) else None


def _seeds(plan: Plan) -> int:
    return len({row.seed for row in plan.trials if row.stage == "report"})
