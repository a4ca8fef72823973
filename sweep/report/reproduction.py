"""The commands that repeat a sweep, from its plan alone, checked against its trial ids."""

import shlex
from pathlib import Path, PurePath
from typing import Any

from sweep.analysis.comparison import SEEDS_FOR_SPREAD, policy_label, short
from sweep.analysis.frames import Sweep
from sweep.config.experiment import load_experiment
from sweep.config.paths import experiments_dir
from sweep.errors import SweepError
from sweep.plan.plan import Plan, build_plan


def run_commands(sweep: Sweep) -> list[tuple[str, bool]]:
    """Return the commands that planned this sweep, in order.

    One for each policy and number of seeds. Beside each stands whether it was checked to give
    the very trial ids of this sweep; it is not where settings come from a file of the user's.
    """
    plan, groups = sweep.plan, dict[tuple[str, int], list[int]]()
    for (lr, batch), seeds in _reported_seeds(plan).items():
        groups.setdefault((lr, seeds), []).append(batch)
    commands = []
    for (lr, seeds), batches in groups.items():
        flags = _flags(plan, lr, seeds, batches)
        commands.append((_written(sweep, flags), _gives_these_trials(plan, flags)))
    return commands


def answering_command(sweep: Sweep) -> str:
    """Return the command that tunes the rate at each of these batch sizes, with enough seeds."""
    seeds = _reported_seeds(sweep.plan)
    batches = sorted({batch for _, batch in seeds})
    enough = max(SEEDS_FOR_SPREAD, *seeds.values())
    return _written(sweep, _flags(sweep.plan, "tuned", enough, batches))


def _reported_seeds(plan: Plan) -> dict[tuple[str, int], int]:
    """Return the number of reporting seeds by `--lr` and batch size; of `tuned` as asked for."""
    seeds: dict[tuple[str, int], int] = {}
    for row in plan.known_trials:
        assert row.learning_rate is not None
        label = policy_label(row.policy, row.learning_rate)
        lr = short(row.learning_rate) if row.policy == "fixed" else label
        asked = (plan.settings.seeds or SEEDS_FOR_SPREAD) if row.stage == "tune" else row.seed + 1
        seeds[lr, row.batch_size] = max(asked, seeds.get((lr, row.batch_size), 0))
    return seeds


def _flags(plan: Plan, lr: str, seeds: int, batches: list[int]) -> dict[str, Any]:
    """Return the flags in order: the question's, then what differs from the experiment's own."""
    settings = plan.settings
    flags: dict[str, Any] = {
        "budget": plan.token_budget,
        "batches": ",".join(str(batch) for batch in sorted(batches)),
        "lr": lr,
        "seeds": seeds,
    }
    wanted = {
        "workload": settings.workload,
        "model": settings.model.name,
        "vocabulary": getattr(settings.model, "vocabulary", None),
        "context": settings.model.context,
        "data": settings.data,
        "tokenizer": settings.tokenizer,
        "precision": settings.precision,
    }
    if settings.model.kind == "quadratic":
        wanted = {name: wanted[name] for name in ("workload", "model", "precision")}
    own = _own_settings(plan)
    return flags | {
        name: value
        for name, value in wanted.items()
        if value is not None and (name not in own or own[name] != value)
    }


def _own_settings(plan: Plan) -> dict[str, Any]:
    """Return what the named experiment has without flags; {} where it is not a shipped one."""
    settings = plan.settings
    try:
        bare = load_experiment(settings.name)
        chosen = {"workload": settings.workload, "model": settings.model.name}
        named = load_experiment(settings.name, chosen)
    except SweepError:
        return {}
    return {
        "workload": bare.workload,
        "model": bare.model.name,
        "vocabulary": getattr(named.model, "vocabulary", None),
        "context": named.model.context,
        "data": named.data,
        "tokenizer": named.tokenizer,
    }


def _gives_these_trials(plan: Plan, flags: dict[str, Any]) -> bool:
    """Plan what the flags say, on this sweep's data, and look for its ids in this sweep."""
    batches = tuple(sorted({row.batch_size for row in plan.trials}))
    try:
        experiment = load_experiment(plan.settings.name, flags)
        again = build_plan(experiment, plan.execution, data=plan.data, also_batches=batches)
    except SweepError:
        return False
    return {row.id for row in again.known_trials} <= {row.id for row in plan.known_trials}


def _written(sweep: Sweep, flags: dict[str, Any]) -> str:
    """Write the command; of an absolute path only its last part, the rest is the reader's."""
    name = sweep.plan.settings.name
    is_shipped = (experiments_dir() / f"{name}.toml").is_file()
    words = ["sweep", "run", name if is_shipped else f"{name}.toml"]
    for flag, value in flags.items():
        if flag == "data" and Path(str(value)).is_absolute():
            value = PurePath("PATH", Path(str(value)).name)
        words += [f"--{flag}", str(value)]
    return shlex.join([*words, "--out", f"results/{sweep.name}"])
