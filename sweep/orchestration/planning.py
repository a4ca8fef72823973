"""Plan one budget of a command on this machine.

The execution is decided when plan.json is first written.
"""

import logging
import math
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.errors import SweepError
from sweep.orchestration.execution import (
    Machine,
    bound_by_memory,
    decide_execution,
    decide_graphs,
    inspect_machine,
    reason_for_eager_steps,
    share_device,
)
from sweep.orchestration.executors.build import find_executor
from sweep.orchestration.inputs import identify_inputs
from sweep.orchestration.inspection import inspect_plan
from sweep.orchestration.request import Request
from sweep.plan.growth import add_budget, grow_plan, may_add_budget
from sweep.plan.plan import Inputs, Plan, build_plan, load_plan, requested_ids
from sweep.plan.time_budget import tokens_in_time
from sweep.tracking.store import read_record
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.timing import Timing, write_timing

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """The plan of a folder after a command, and which of its trials the command names."""

    plan: Plan
    requested: tuple[str, ...]  # ids of the trials that the command names
    experiment: Experiment  # the command's; the plan's settings are those of the whole folder
    timing: Timing | None = None  # that fixed tokens, and is still to be written
    changes_answer: bool = False  # whether the command asks another question of the folder's trials
    deadline: float = math.inf  # when no further seeds start, by `time.monotonic`
    is_part: bool = False  # whether other folders have the other parts of the sweep

    @property
    def adds_seeds(self) -> bool:
        """True if seeds are added until the answer is clear."""
        return self.experiment.seeds == "auto" and not self.is_part

    def command_rows(self) -> Plan:
        """Return the plan with only the rows that this command names."""
        named = {None, *self.requested}
        rows = tuple(row for row in self.plan.trials if row.id in named)
        return self.plan.model_copy(update={"trials": rows})

    def with_tokens_by(self, timing: Timing) -> "Planned":
        """Return the plan with the tokens that trials of a budget of time have by these times."""
        known = {row.id for row in self.plan.known_trials}
        plan = self.plan.with_tokens(tokens_in_time(self.plan, timing))
        added = [str(row.id) for row in plan.known_trials if row.id not in known]
        return replace(self, plan=plan, requested=(*self.requested, *added), timing=timing)


def whole_plan(plans: Sequence[Planned]) -> Plan:
    """Return the plan of all budgets of a command, with only the rows that it names."""
    whole = plans[0].command_rows()
    for planned in plans[1:]:
        whole = whole.with_budget(planned.command_rows())
    return whole


def make_plan(request: Request, is_elsewhere: bool = False, before: Plan | None = None) -> Planned:
    """Plan one budget of a command, or extend its folder's plan.

    Args:
        request: of one budget.
        is_elsewhere: whether trials run on other machines, which the executor may imply.
        before: the plan of the folder with smaller budgets that are not written yet.
    """
    request, inputs = identify_inputs(request)
    experiment = request.experiment
    stored = before
    if stored is None or _is_for_others(stored, inputs.code, request.execution.gpu):
        stored = _find_plan(request.folder, inputs.code, request.execution.gpu)
    old = None if stored is None else stored.find_budget(experiment.budget)
    if stored is None:
        is_elsewhere = is_elsewhere or find_executor(request.services.executor).is_elsewhere
        chosen = request.execution
        machine = inspect_machine(chosen, is_elsewhere and chosen.device == "cuda")
        new = _plan_of_machine(request, inputs, machine)
        new = new.with_execution(**bound_by_memory(new, request.folder))
        new = share_device(new, request.folder, chosen.at_once, machine, is_elsewhere)
        new = _with_kind_of_steps(new, machine, request)
        if request.shard is not None:  # after what depends on all batch sizes is decided
            new = request.shard.restrict(new)
        plan = new
    else:
        _refuse_other_execution(request.execution, stored, request.folder)
        if experiment.precision == "auto":
            experiment = experiment.model_copy(update={"precision": stored.settings.precision})
        request = replace(request, experiment=experiment)
        new, plan = _grown_plan(request, inputs, stored)
    waiting = [row for row in new.trials if row.id is None]
    changes = {"trials": (*plan.known_trials, *waiting), "later_budgets": request.later_budgets}
    plan = plan.model_copy(update=changes)
    return Planned(
        plan,
        requested_ids(plan, new, experiment),
        experiment,
        changes_answer=old is not None and old.settings.answer != plan.settings.answer,
        deadline=request.deadline,
        is_part=request.shard is not None,
    )


def _refuse_other_execution(chosen: Execution, old: Plan, folder: SweepFolder) -> None:
    """Refuse choices that the folder has decided otherwise."""
    for name in sorted(chosen.model_fields_set):
        decided = getattr(old.execution, name)
        value = getattr(chosen, name)
        if value not in (decided, "auto"):
            raise SweepError(
                f"{name} was decided as {decided!r} when {folder.plan_path} was first written, "
                f"got {value!r}. Leave the flag out, or choose another --out."
            )
    if chosen.at_once == "auto" and not old.execution.at_once_reason:
        LOG.warning(
            f"--at-once auto changes nothing: {folder.plan_path} was written for one trial per "
            "device. Choose another --out."
        )


def _grown_plan(request: Request, inputs: Inputs, stored: Plan) -> tuple[Plan, Plan]:
    """Return the plan of a command for a folder that has one, and that of its budget with it."""
    folder = request.folder
    old = stored.find_budget(request.experiment.budget)

    def build(execution: Execution) -> tuple[Plan, Plan]:
        new = build_plan(
            request.experiment,
            execution,
            inputs,
            command=request.command,
            unrecorded=request.unrecorded,
            old=old,
        )
        if request.shard is not None:
            new = request.shard.restrict(new)
        return new, _merge_plan(stored, new, folder)

    new, plan = build(stored.execution)
    if old is not None:
        _warn_about_ended_trials(old, plan, folder)
    if old is None or len(plan.trials) > len(old.trials):
        if new.largest_step > stored.largest_step:
            new, plan = build(stored.execution.model_copy(update=bound_by_memory(new, folder)))
        workload = new.settings.workload
        if workload.has_known_model and (new.code or workload.samples):
            inspect_plan(new, folder)
    return new, plan


def _merge_plan(stored: Plan, new: Plan, folder: SweepFolder) -> Plan:
    """Return the plan of a budget, which a folder has or which is added to it."""
    old = stored.find_budget(new.settings.budget)
    if old is None and may_add_budget(stored, new):
        return add_budget(stored, new, folder.path)
    return grow_plan(stored if old is None else old, new, folder.path)


def _warn_about_ended_trials(old: Plan, plan: Plan, folder: SweepFolder) -> None:
    """Warn of trials that ended before the plan made them measure the noise scale."""
    trials = [
        folder.trial(str(row.id))
        for row in old.known_trials
        if plan.measures_noise(row) and not old.measures_noise(row)
    ]
    ended = [trial.id for trial in trials if trial.find_result() is not None]
    if ended:
        LOG.warning(
            f"Trials that ended without measuring the noise scale are not repeated: {len(ended)} "
            f"of {len(trials)} have none. Add seeds, or choose another --out."
        )


def first_plan(request: Request, inputs: Inputs, is_elsewhere: bool) -> Plan:
    """Plan a new sweep of single trials, without bounds by a forecast of memory."""
    machine = inspect_machine(request.execution, is_elsewhere)
    return _with_kind_of_steps(_plan_of_machine(request, inputs, machine), machine, request)


def _plan_of_machine(request: Request, inputs: Inputs, machine: Machine) -> Plan:
    """Plan a new sweep, before it is decided which trials run at once and which steps compile."""
    experiment = request.experiment
    execution = decide_execution(experiment, request.execution, machine)
    if experiment.precision == "auto":
        is_half = execution.device_type == "cuda" and experiment.model.supports_half_precision
        precision = "bf16" if is_half else "fp32"
        experiment = experiment.model_copy(update={"precision": precision})
    plan = build_plan(experiment, execution, inputs, command=request.command)
    plan = plan.model_copy(update={"later_budgets": request.later_budgets})
    if not experiment.workload.has_known_model:
        return plan
    return plan.model_copy(update={"model": inspect_plan(plan, request.folder)})


def _with_kind_of_steps(plan: Plan, machine: Machine, request: Request) -> Plan:
    """Decide whether steps are compiled or CUDA graphs, which depends on the trials at once."""
    if not plan.settings.workload.has_known_model:
        return plan
    shares_processes = find_executor(request.services.executor).shares_processes
    reason = reason_for_eager_steps(plan, machine, shares_processes)
    text = f"eager: {reason}" if reason else "torch.compile"
    return plan.with_execution(compile=not reason, compile_reason=text, **decide_graphs(plan))


def _find_plan(folder: SweepFolder, code: Any, gpu: str | None) -> Plan | None:
    """Return the plan of a folder; None if it is to be replaced.

    Args:
        folder: the folder.
        code: hashes of the user's code; a plan of other code is replaced before any trial has a
            result.
        gpu: a GPU that is planned for without being here; a plan for another one, or for this
            machine, is replaced before any trial has begun.
    """
    plan = load_plan(folder)
    if plan is None or not _is_for_others(plan, code, gpu):
        return plan
    if any(map(TrialFolder.find_result, folder.trials())):
        return plan
    has_begun = any(trial.state_path.exists() for trial in folder.trials())
    return plan if has_begun and plan.code == code else None


def _is_for_others(plan: Plan, code: Any, gpu: str | None) -> bool:
    """Return True if a plan is of other code, or for another machine than this command."""
    return plan.code != code or plan.execution.gpu != gpu


def save_plan(plan: Plan, folder: SweepFolder, timing: Timing | None = None) -> Plan:
    """Write the plan of one budget into the folder's, and config.json of every trial that has none.

    If there is a `timing`, it has fixed their tokens, and is written too.
    """
    # another command may have written it meanwhile
    stored = _find_plan(folder, plan.code, plan.execution.gpu)
    if stored is not None:
        plan = _merge_plan(stored, plan, folder)
    elif folder.plan_path.exists():
        LOG.warning(f"The plan in {folder.plan_path}, of which no trial has begun, is replaced.")
    folder.path.mkdir(parents=True, exist_ok=True)
    if not plan.sweep_uid:  # new, or written again after the user removed it
        uid = read_record(folder).get("sweep_uid")
        if not uid:
            uid = uuid.uuid4().hex
        plan = plan.model_copy(update={"sweep_uid": uid})

    for row in plan.known_trials:
        trial = folder.trial(str(row.id))
        is_replaced = stored is None and trial.find_result() is None
        if is_replaced or not trial.config_path.exists():
            trial.write_config(plan.trial_config(row, folder.name))

    saved = plan.model_copy(update={"trials": (*plan.known_trials, *plan.waiting_searches)})
    if timing is not None:  # first: with its tokens, the plan would not be timed again
        write_timing(folder, timing.model_copy(update={"sweep_uid": plan.sweep_uid}))
    whole = saved if stored is None else stored.with_budget(saved)
    write_json(folder.plan_path, whole.model_dump(mode="json"))
    return plan


def refuse_unwritable(out: Path) -> None:
    """Refuse a folder that cannot be written, before anything is prepared; writes nothing."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise SweepError(
            f"out must be a folder that can be written, got {str(out)!r}. Choose another --out."
        )
