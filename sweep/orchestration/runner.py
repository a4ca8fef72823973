"""Run a plan to its end: prepare, hold the folder, run the trials, mirror, stop, resume."""

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sweep.config.hub import weights_folder
from sweep.config.trial import tokenizer_of
from sweep.data.tokens import prepare_data
from sweep.errors import FolderInUse, SweepError
from sweep.orchestration import planning
from sweep.orchestration.costs import check_disk
from sweep.orchestration.executors.base import Executor
from sweep.orchestration.executors.build import build_executor, check_services
from sweep.orchestration.looks import next_trials
from sweep.orchestration.schedule import Scheduler
from sweep.plan.plan import PlannedTrial
from sweep.plan.retry import is_to_run
from sweep.signals import handle_unless_ignored
from sweep.tracking.mirror import Mirror
from sweep.tracking.store import check_answers, is_mirrored, read_record, recorded_uri
from sweep.trial.files import remove
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import Lease, refuse_live_owner_elsewhere
from sweep.trial.status import Cause, State, TrialStatus, overall_state

LOG = logging.getLogger(__name__)
MIRROR_SECONDS = 30.0  # limit on the mirror's last pass


@dataclass
class Summary:
    folder: SweepFolder
    states: dict[str, TrialStatus]  # by id of the trials that the command named
    is_interrupted: bool = False  # the user stopped it, or its machines are gone
    problem: str = ""  # one sentence about a failure of the storage that stopped it
    untracked: str = ""  # one sentence about what the tracking server did not get

    @property
    def exit_code(self) -> int:
        """0 complete, pruned or diverged; 1 any other failure; 130 interrupted."""
        if self.problem:
            return 1
        if self.is_interrupted:
            return 130
        ends = [(status.state, status.cause) for status in self.states.values()]
        return 0 if overall_state(ends) is State.COMPLETE else 1


def rows_to_run(
    planned: planning.Planned, retried_causes: frozenset[Cause] = frozenset()
) -> tuple[PlannedTrial, ...]:
    """Return the rows that a command trains: those without a rate yet, and unfinished trials."""
    find, rows = planned.request.folder.trial, planned.command_rows().trials
    pairs = ((row, row.id and find(row.id).read_status()) for row in rows)
    return tuple(row for row, status in pairs if not status or is_to_run(status, retried_causes))


def finished_summary(
    planned: planning.Planned, retried_causes: frozenset[Cause] = frozenset()
) -> Summary | None:
    """Return the summary of a sweep with nothing left to do, from files alone; else None."""
    folder, uri = planned.request.folder, planned.request.services.tracking_uri
    states = {trial_id: folder.trial(trial_id).read_status() for trial_id in planned.requested}
    if rows_to_run(planned, retried_causes) or not is_mirrored(folder, uri):
        return None
    has_more = planned.adds_seeds and next_trials(planned, planned.plan)
    return None if has_more else Summary(folder, states)


def check_request(planned: planning.Planned) -> None:
    """Refuse an experiment that trains nothing, and a folder or services that cannot be used."""
    services = planned.request.services
    planning.check_writable(planned.request.folder.path)
    if planned.plan.settings.optimizer.name == "none":
        problem = "has no optimizer and trains nothing. Give it one, or use `sweep forecast`"
        raise SweepError(f"experiment {planned.plan.experiment!r} {problem}.")
    check_services(services)
    if services.tracking_uri:
        check_answers(services.tracking_uri)
    if services.storage and planned.is_tuned:
        from sweep.orchestration.tuning import open_storage  # imports optuna

        open_storage(services.storage)


def prepare(planned: planning.Planned) -> None:
    """Refuse a store that only the folder names, and prepare text that needs no download.

    Estimates count its tokens.
    """
    folder, services = planned.request.folder, planned.request.services
    if services.tracking_uri is None:
        recorded_uri(folder, read_record(folder))
    if (planned.plan.data or {}).get("name") in ("path", "synthetic"):
        with holding(folder):
            _get_inputs(planned)


def _get_inputs(planned: planning.Planned) -> None:
    """Get data and weights, and check prompts, before anything of the sweep is written."""
    folder = planned.request.folder
    plan, tokenizer = folder.located(planned.plan), tokenizer_of(planned.plan.settings)
    if plan.start and plan.init_path:
        weights_folder(plan.init_path)
    if plan.data and tokenizer:
        text = prepare_data(plan.data, plan.data_path, tokenizer, LOG.info, plan.init_path)
        if plan.settings.workload.samples:
            planning.inspect_plan(plan, folder)  # its prompts
        else:
            text.check_window(plan.tokens_per_sequence)
            asked = planned.request.experiment.evaluation.sequences or 0
            windows = (len(text.valid) - 1) // plan.tokens_per_sequence
            if asked > windows and plan.settings.target is None:
                LOG.warning(
                    f"The validation split has {windows:,} sequences, so evaluations take all of "
                    f"them, not evaluation.sequences ({asked:,})."
                )
    if folder.stop_path.exists():
        raise KeyboardInterrupt


def run_plan(
    planned: planning.Planned,
    *,
    executor: Executor | None = None,
    retried_causes: frozenset[Cause] = frozenset(),  # causes of failure to retry
    on_change: Callable[[], None] = lambda: None,  # called a few times per second
    on_finished: Callable[[], object] = lambda: None,  # after the trials, while tracking is open
) -> Summary:
    """Prepare the data, write the plan, run the requested trials and all later rounds."""
    requested = dict.fromkeys(planned.requested)
    folder, services = planned.request.folder, planned.request.services
    with contextlib.ExitStack() as stack:
        stack.enter_context(holding(folder))
        executor = executor or build_executor(services, planned.plan.execution, folder)
        stack.callback(executor.close)
        check_disk(planned.plan, folder, len(executor.slots))
        _get_inputs(planned)
        plan = planning.save_plan(planned.plan, folder)
        arguments = plan, folder, executor, retried_causes, on_change, services.stall_minutes
        schedule = Scheduler(*arguments)
        mirror = Mirror(folder, plan, services.tracking_uri)
        mirror.start()
        try:
            with _stopping_on_signals(schedule):
                for pauses in _rounds(planned, schedule):
                    requested |= dict.fromkeys(pauses)
                    schedule.run(pauses)
                    if schedule.is_ending:
                        break
            on_finished()
        except BaseException:
            executor.stop()
            raise
        finally:
            untracked = mirror.close(10.0 if schedule.is_stopping else MIRROR_SECONDS)
    states = {trial_id: folder.trial(trial_id).read_status() for trial_id in requested}
    return Summary(folder, states, schedule.is_ending, schedule.problem, untracked)


def _rounds(planned: planning.Planned, schedule: Scheduler) -> Iterator[dict[str, int | None]]:
    """Yield the trials with known rates, then rounds of tuning and of seeds, each when it starts.

    A round maps ids of trials to the step that they pause after; None: the last.
    """
    known = planned.plan.known_trials if planned.is_tuned else ()
    tried = {row.id for row in known if row.stage == "tune"}
    yield dict.fromkeys(i for i in planned.requested if i not in tried)
    if planned.is_tuned:
        from sweep.orchestration.tuning import Tuning

        tuning = Tuning(planned.plan, schedule, planned.request.services.storage)
        while pauses := tuning.next_round():
            yield pauses
    started, hours = time.monotonic(), planned.request.experiment.answer.max_hours or math.inf
    while planned.adds_seeds and (rows := next_trials(planned, schedule.plan)):
        if time.monotonic() - started >= 3600 * hours:
            break
        yield schedule.add(rows)


def _take_lease(folder: SweepFolder, is_new: bool) -> Lease:
    """Take the sweep's lock; if the file system has no locks, leave nothing in a new folder."""
    try:
        return Lease(folder.lock_path)
    except FolderInUse:
        raise
    except SweepError:
        if is_new:
            folder.lock_path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def holding(folder: SweepFolder) -> Iterator[None]:
    """Hold the sweep's lock, or raise FolderInUse. If no plan is written, leave no new folder."""
    created = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        refuse_live_owner_elsewhere(folder.lock_path)
        with _take_lease(folder, is_new=bool(created)):
            folder.stop_path.unlink(missing_ok=True)  # meant for an earlier command
            for part in folder.half_written():
                remove(part)
            try:
                yield
            finally:
                if not folder.plan_path.exists():
                    folder.lock_path.unlink(missing_ok=True)
                    folder.stop_path.unlink(missing_ok=True)
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


@contextlib.contextmanager
def _stopping_on_signals(schedule: Scheduler) -> Iterator[None]:
    """Stop the schedule on Ctrl-C and SIGTERM; a second signal kills the attempts."""

    def stop(*_: object) -> None:
        is_second = schedule.is_stopping
        schedule.stop()
        LOG.warning("Aborting." if is_second else "Saving. Press Ctrl-C again to abort.")

    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            before = handle_unless_ignored(number, stop)
            stack.callback(signal.signal, number, before)
        yield
