"""Command lines: the one that planned a sweep, and the one that would answer its question."""

import shlex
from collections.abc import Mapping
from typing import Any

from sweep.plan.plan import Plan
from sweep.plan.tuning import GRID

ANSWERING_SEEDS = 3
REPLACED = ("--batches", "--lr", "--seeds")


def typed_command(experiment: str, flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a `sweep run`; flags that are None or False are left out."""
    words = ["sweep", "run", experiment]
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list | tuple):
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(str(value))
    return tuple(words)


def answering_command(plan: Plan) -> str | None:
    """Return the command that tunes the rate at each batch size; None if the plan does so."""
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
    seeds = str(_answering_seeds(plan))
    words += ["--batches", ",".join(map(str, batches)), "--lr", "tuned", "--seeds", seeds]
    return shlex.join(words)


def answering_cost(
    plan: Plan, seconds: Mapping[int, float | None], done: Mapping[int, int] | None = None
) -> tuple[int, float | None]:
    """Return the least cost of the answering command: trainings, and their seconds if known.

    Args:
        plan: of the sweep.
        seconds: of one training by batch size, estimated or measured.
        done: trainings that are already complete, by batch size.
    """
    each = len(GRID) + _answering_seeds(plan)
    left = {row.batch_size: each for row in plan.trials}
    left = {batch: max(0, each - (done or {}).get(batch, 0)) for batch in left}
    costs = [(count, seconds.get(batch)) for batch, count in left.items() if count]
    totals = [count * each_seconds for count, each_seconds in costs if each_seconds is not None]
    return sum(left.values()), sum(totals) if len(totals) == len(costs) else None


def _answering_seeds(plan: Plan) -> int:
    return max(ANSWERING_SEEDS, len({r.seed for r in plan.trials if r.stage == "report"}))
