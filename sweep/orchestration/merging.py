"""Join the folders of a sweep's parts, which ran apart: `sweep merge DIR… --out DIR`."""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sweep.errors import SweepError, cut
from sweep.orchestration.holding import holding
from sweep.plan.growth import add_budget, grow_plan, may_add_budget
from sweep.plan.plan import Plan, parse_plan
from sweep.trial.damage import find_damage
from sweep.trial.files import remove, write_json
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import is_locked
from sweep.trial.result import Result
from sweep.trial.status import State
from sweep.trial.timing import Timing, read_timing

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Merged:
    """The result of a merge."""

    plan: Plan
    copied: int  # trials
    present: int  # trials that the folder already had
    unfinished: int  # trials of the plan that have no result


def merge_sweeps(parts: Sequence[SweepFolder], out: SweepFolder) -> Merged:
    """Copy the trials of several folders of one sweep into another one, which then has its plan.

    A merge that was interrupted is repeated. Nothing in the parts changes.

    Raises:
        SweepError: if the parts belong to different sweeps, a command runs in one, files of one are
            damaged, or a trial has different results in two of them.
    """
    for part in parts:
        if part.path.resolve() == out.path.resolve():
            raise SweepError(f"--out must be another folder than the parts, got {out.path}.")
        if is_locked(part.lock_path):
            raise SweepError(f"{part.path} is in use by a command. Wait for it, or stop it.")
        others = [other for other in parts if other is not part]
        missing = _trials_without_folder(part, others)
        damage = find_damage(part, without=missing)
        if damage:
            raise SweepError(f"{part.path} must be intact, but {cut(damage[0])} Copy it again.")
    _refuse_other_timings(parts)
    folders = [out, *parts] if out.plan_path.exists() else [*parts]  # what exists stays itself
    plans = [_plan_of(folder) for folder in folders]
    plan = plans[0]
    for folder, other in zip(folders[1:], plans[1:], strict=True):
        plan = _joined(plan, other, folder)
    sources = _sources_of(folders)
    with holding(out):
        copied = 0
        for trial_id, source in sources.items():
            if source.path.parent != out.trials_path:
                copied += _copy_trial(source, out.trial(trial_id), out.name)
        rows = (*plan.known_trials, *plan.waiting_searches)
        saved = plan.model_copy(update={"trials": rows})
        write_json(out.plan_path, saved.model_dump(mode="json"))
    states = [out.trial(trial_id).read_status().state for trial_id in sources]
    unfinished = sum(not state.is_finished for state in states)
    return Merged(plan, copied, len(sources) - copied, unfinished)


def _trials_without_folder(part: SweepFolder, others: Sequence[SweepFolder]) -> frozenset[str]:
    """Return the trials whose folders a user has removed, and that another part has."""
    missing = {trial.id for trial in part.trials() if not trial.path.exists()}
    elsewhere = {trial.id for other in others for trial in other.trials() if trial.path.exists()}
    return frozenset(missing & elsewhere)


def _refuse_other_timings(parts: Sequence[SweepFolder]) -> None:
    """Refuse parts of a budget of time whose tokens come from different measurements of steps."""
    first: Timing | None = None
    for part in parts:
        plan = _plan_of(part)
        if plan.settings.time_budget_seconds is None:
            return
        timing = read_timing(part, plan.sweep_uid)
        if timing is None:
            raise SweepError(f"{part.path} must have the timing.json that fixed its tokens.")
        if first is None:
            first = timing
        if (timing.measured_at, timing.arms) != (first.measured_at, first.arms):
            raise SweepError(
                f"{part.path} and {parts[0].path} must have the tokens of one timing.json. Run the "
                "parts again, all with the same --timing."
            )


def _plan_of(folder: SweepFolder) -> Plan:
    return folder.located(parse_plan(folder.require_plan(), str(folder.plan_path)))


def _joined(plan: Plan, other: Plan, folder: SweepFolder) -> Plan:
    """Return the plan of two parts."""
    if plan.code != other.code:
        raise SweepError(
            f"{folder.path} was trained by other code of yours. Merge equal code only."
        )
    for of_budget in other.by_budget:
        old = plan.find_budget(of_budget.settings.budget)
        if old is None and may_add_budget(plan, of_budget):
            plan = plan.with_budget(add_budget(plan, of_budget, folder.path))
        else:
            plan = plan.with_budget(grow_plan(plan if old is None else old, of_budget, folder.path))
    return plan


def _sources_of(folders: Sequence[SweepFolder]) -> dict[str, TrialFolder]:
    """Return the folder of each trial; the one with a result, or the furthest one.

    Raises:
        SweepError: if a trial has different results.
    """
    sources: dict[str, TrialFolder] = {}
    for folder in folders:
        for trial in folder.trials():
            if not trial.path.exists():  # another folder has it
                continue
            known = sources.get(trial.id)
            if known is None:
                sources[trial.id] = trial
                continue
            _refuse_conflict(known, trial)
            if _progress_of(trial) > _progress_of(known):
                sources[trial.id] = trial
    return sources


def _refuse_conflict(first: TrialFolder, second: TrialFolder) -> None:
    results = first.find_result(), second.find_result()
    if None in results:
        return
    one, other = results
    assert one is not None and other is not None
    if _measured(one) != _measured(other):  # equal ones: it was trained twice
        raise SweepError(
            f"trial {first.id} must have one result, got {first.path} and {second.path}. Leave one "
            "of them out, or remove the trial from one."
        )


def _measured(result: Result) -> tuple[object, ...]:
    """Return what two trainings of one trial must agree in."""
    losses = result.final_valid_loss, result.final_train_loss
    return result.state, *losses, sorted(result.final_valid.items())


def _progress_of(trial: TrialFolder) -> tuple[bool, bool, int]:
    """Return how far a trial is: with a result, pruned, and the bytes of its curve."""
    length = trial.metrics_path.stat().st_size if trial.metrics_path.exists() else 0
    is_pruned = trial.read_status().state is State.PRUNED
    return trial.find_result() is not None, is_pruned, length


def _copy_trial(source: TrialFolder, target: TrialFolder, sweep: str) -> bool:
    """Copy a trial into a sweep, with absolute paths; return whether that was needed."""
    if target.path.exists():
        _refuse_conflict(source, target)
        if _progress_of(target) >= _progress_of(source):
            return False
        remove(target.path)
    part = target.path.with_name(f".{target.id}.part")
    remove(part)
    part.parent.mkdir(parents=True, exist_ok=True)
    ignored = shutil.ignore_patterns("lease.json", "stop.json", ".*.part")
    shutil.copytree(source.path, part, ignore=ignored)
    if source.config_path.exists():
        config = source.read_config().model_copy(update={"sweep": sweep})
        TrialFolder(part).write_config(config)
    part.rename(target.path)
    return True


def merge_paths(parts: Sequence[Path], out: Path) -> Merged:
    """Merge folders by their paths, as `merge_sweeps`."""
    if len({path.resolve() for path in parts}) < len(parts):
        raise SweepError("each folder must be named once. Leave the copies out.")
    return merge_sweeps([SweepFolder(path) for path in parts], SweepFolder(out))
