"""Run a plan to its end: prepare, hold the folder, run the trials, mirror, stop, resume."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.config.execution import Services
from sweep.config.trial import tokenizer_of
from sweep.errors import SweepError
from sweep.orchestration.costs import check_disk, estimate
from sweep.orchestration.executors import Executor, build_executor
from sweep.orchestration.planning import (
    Planned,
    check_writable,
    inspect_plan,
    read_request,
    save_plan,
)
from sweep.orchestration.schedule import POLL_SECONDS, Schedule
from sweep.plan.plan import Plan, grow_plan, load_plan
from sweep.plan.retry import is_to_run
from sweep.trial.folder import Cause, State, SweepFolder, TrialStatus
from sweep.trial.lease import Lease, refuse_live_owner_elsewhere

if TYPE_CHECKING:
    from sweep.orchestration.tuning import Round, Tuning

MIRROR_SECONDS = 30.0  # for the last pass of the mirror
STOPPING_MIRROR_SECONDS = 10.0  # the same, if the user stopped the command
STORAGE_SECONDS = 5.0  # between two attempts to reach Optuna's storage
LOCAL = Services()
LOG = logging.getLogger(__name__)


@dataclass
class Summary:
    """How a command ended."""

    folder: SweepFolder
    states: dict[str, TrialStatus]  # of the trials that the command named
    is_stopped: bool = False  # by the user
    lacks_slots: bool = False  # the executor had no machines left
    untracked: str = ""  # one sentence about what the tracking server did not get

    @property
    def is_interrupted(self) -> bool:
        """Whether the same command would continue."""
        causes = {s.cause for s in self.states.values() if s.state is State.FAILED}
        return self.is_stopped or (self.lacks_slots and causes <= {Cause.DIVERGED})

    @property
    def exit_code(self) -> int:
        """0 complete, pruned or diverged; 1 any other failure; 130 interrupted."""
        if self.is_interrupted:
            return 130
        is_fine = all(
            status.state in (State.COMPLETE, State.PRUNED) or status.cause is Cause.DIVERGED
            for status in self.states.values()
        )
        return 0 if is_fine else 1


def run_sweep(
    experiment: str = "tinystories", *, out: str | Path | None = None, **settings: Any
) -> Summary:
    """Run the unfinished trials of a sweep; afterwards call `sweep.write_report(folder)`.

    Args:
        experiment: a shipped name or the path of a TOML file.
        out: the sweep's folder; results/<experiment> by default.
        **settings: any setting of `sweep run` by name: budget, batches, model, lr, device,
            executor, tracking_uri, …

    Raises:
        SweepError: for bad input, before anything is written.
    """
    request = read_request(experiment, settings, out)
    check_writable(request.folder.path)
    planned = request.plan()
    if summary := finished_summary(planned, request.folder, request.services):
        return summary
    return run_plan(estimate(planned, request.folder), request.folder, request.services)


def finished_summary(
    planned: Planned,
    folder: SweepFolder,
    services: Services = LOCAL,
    also: frozenset[Cause] = frozenset(),
) -> Summary | None:
    """Return the summary of a sweep with nothing left to do, from files alone; else None."""
    from sweep.tracking.store import is_mirrored

    states = {trial_id: folder.trial(trial_id).read_status() for trial_id in planned.requested}
    is_open = planned.is_tuned or any(is_to_run(status, also) for status in states.values())
    if is_open or not is_mirrored(folder, services.tracking_uri):
        return None
    return Summary(folder, states)


def check_trains(plan: Plan) -> None:
    """Refuse an experiment without an optimizer, which is only for memory forecasts."""
    if plan.settings.optimizer.name == "none":
        raise SweepError(
            f"experiment {plan.experiment!r} has no optimizer and trains nothing. Use "
            "`sweep forecast` or `sweep probe`, or give it an optimizer."
        )


def prepare(
    planned: Planned,
    folder: SweepFolder,
    on_progress: Callable[[str], None] = lambda work: None,
) -> None:
    """Check the machine and tokenize the data, before anything of the sweep is written."""
    from sweep.data.tokens import prepare_data

    plan = planned.plan
    check_trains(plan)
    check_disk(plan, folder)
    if plan.data is None:
        return
    here, tokenizer = plan.located(folder), tokenizer_of(plan.settings)
    text = prepare_data(plan.data, here.data_path, tokenizer, on_progress, here.init_path)
    if plan.settings.traits.samples:
        inspect_plan(plan, folder)  # its prompts
    else:
        text.check_window(plan.tokens_per_sequence)


def run_plan(
    planned: Planned,
    folder: SweepFolder,
    services: Services = LOCAL,
    *,
    executor: Executor | None = None,
    also: frozenset[Cause] = frozenset(),
    on_prepare: Callable[[str], None] = lambda work: None,
    on_change: Callable[[], None] = lambda: None,
    on_finished: Callable[[], None] = lambda: None,
) -> Summary:
    """Prepare the data, write the plan, and run the trials that the command names.

    Args:
        executor: in place of the one that `services` names.
        also: causes of failure that the user asked to retry.
        on_prepare: called with a description of each part of the preparation.
        on_change: called a few times per second, to show progress.
        on_finished: called after the trials, before tracking is closed: writes the report.
    """
    from sweep.tracking.mirror import Mirror

    with holding(folder):
        prepare(planned, folder, on_prepare)
        executor = executor or build_executor(services, planned.plan.execution, folder)
        mirror: Mirror | None = None
        try:
            check_disk(planned.plan, folder, len(executor.slots))
            schedule = Schedule(save_grown(planned.plan, folder), folder, executor)
            mirror = Mirror(folder, schedule.plan, services.tracking_uri)
            tuning = None
            if planned.is_tuned:
                from sweep.orchestration.tuning import Tuning

                tuning = Tuning(planned.plan, schedule, services.storage, mirror.sweep_uid)
            mirror.start()
            with _stopping_on_signals(schedule):
                requested = _run_rounds(planned, schedule, tuning, also, on_change)
            on_finished()
        except BaseException:
            executor.stop()
            raise
        finally:
            executor.close()
            seconds = STOPPING_MIRROR_SECONDS if mirror and schedule.is_stopping else MIRROR_SECONDS
            untracked = mirror.close(seconds) if mirror else ""
    states = {trial_id: folder.trial(trial_id).read_status() for trial_id in requested}
    return Summary(folder, states, schedule.is_stopping, not executor.slots, untracked)


def _run_rounds(
    planned: Planned,
    schedule: Schedule,
    tuning: "Tuning | None",
    also: frozenset[Cause],
    on_change: Callable[[], None],
) -> list[str]:
    """Run the trials with known rates, then rounds of tuning; return the ids of all of them."""
    requested = list(planned.requested)
    tried = {row.id for row in planned.plan.known_trials if tuning and row.stage == "tune"}
    schedule.run(dict.fromkeys(i for i in requested if i not in tried), also, on_change)
    while tuning and not schedule.is_ending and (following := _next_round(tuning, schedule)):
        if following.rows:
            rows = (*schedule.plan.trials, *following.rows)
            plan = schedule.plan.model_copy(update={"trials": rows})
            schedule.plan = save_grown(plan, schedule.folder)
            requested += [str(row.id) for row in following.rows]
        schedule.run(following.pauses, also, on_change)
    return requested


def _next_round(tuning: "Tuning", schedule: Schedule) -> "Round | None":
    """Ask for the next round; retry while the storage of the studies does not answer."""
    from sweep.orchestration.studies import is_without_answer

    is_warned = False
    while not schedule.is_stopping:
        try:
            return tuning.next_round(schedule.plan)
        except Exception as error:
            if not is_without_answer(error):
                raise
        if not is_warned:
            LOG.warning("Optuna's storage does not answer. Tuning continues when it does.")
        is_warned, end = True, time.monotonic() + STORAGE_SECONDS
        while time.monotonic() < end and not schedule.is_stopping:
            time.sleep(POLL_SECONDS)
    return None


def save_grown(plan: Plan, folder: SweepFolder) -> Plan:
    """Write a plan together with the one on disk, while the folder is held; return both."""
    stored = load_plan(folder)  # another command may have written it during preparation
    grown = grow_plan(stored, plan) if stored else plan
    save_plan(grown, folder)
    return grown


@contextlib.contextmanager
def holding(folder: SweepFolder) -> Iterator[None]:
    """Hold the sweep's lock. If no plan is written, leave no new folder.

    Raises:
        FolderInUse: if another command holds it.
    """
    created = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        refuse_live_owner_elsewhere(folder.lock_path)
        with Lease(folder.lock_path):
            try:
                yield
            finally:
                if not folder.plan_path.exists():
                    folder.lock_path.unlink(missing_ok=True)
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


@contextlib.contextmanager
def _stopping_on_signals(schedule: Schedule) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop the schedule; a second one kills the attempts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: schedule.stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
