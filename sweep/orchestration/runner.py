"""Runs a plan to its end: prepares, holds the folder, runs the trials, mirrors, stops, resumes."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.errors import SweepError
from sweep.orchestration.costs import at_most_at_once, check_disk, estimate
from sweep.orchestration.executors import HERE, Place, build_executor
from sweep.orchestration.local import Executor
from sweep.orchestration.planning import (
    Planned,
    check_start,
    check_writable,
    plan_call,
    save_plan,
)
from sweep.orchestration.schedule import POLL_SECONDS, Schedule
from sweep.orchestration.tuning import Round, Tuning
from sweep.plan.growth import grow_plan
from sweep.plan.plan import Plan, load_plan
from sweep.plan.retry import is_to_run
from sweep.tracking.store import import_ahead
from sweep.trial.folder import Cause, State, SweepFolder, TrialStatus
from sweep.trial.lease import Lease, refuse_live_owner_elsewhere

MIRROR_SECONDS = 30.0  # for the tracking server at the end: at most, or without a sign of life
STORAGE_PAUSES = (1.0, 30.0)  # seconds until it is asked again: the first, the longest
LOG = logging.getLogger(__name__)


@dataclass
class Summary:
    """How a command ended."""

    folder: SweepFolder
    states: dict[str, TrialStatus]  # of the trials that the command named
    is_stopped: bool = False  # by somebody
    is_placeless: bool = False  # there was nowhere left to run
    untracked: str = ""  # what the tracking server did not get, in one sentence

    @property
    def is_interrupted(self) -> bool:
        """Whether the same command goes on with what is left; not where something failed."""
        causes = {one.cause for one in self.states.values() if one.state is State.FAILED}
        return self.is_stopped or (self.is_placeless and causes <= {Cause.DIVERGED})

    @property
    def exit_code(self) -> int:
        """0 complete, pruned or diverged; 1 any other failure; 130 interrupted."""
        if self.is_interrupted:
            return 130
        fine = all(
            status.state in (State.COMPLETE, State.PRUNED) or status.cause is Cause.DIVERGED
            for status in self.states.values()
        )
        return 0 if fine else 1


def run_sweep(
    experiment: str = "tinystories",
    *,
    out: str | Path | None = None,
    device: str = "auto",
    microbatch: int | None = None,
    tracking_uri: str | None = None,
    place: Place = HERE,
    **overrides: Any,
) -> Summary:
    """Run every trial of a sweep, or what is left of it; then `sweep.write_report(folder)`.

    Args:
        experiment: a shipped name or the path of a TOML file.
        out: the sweep's folder; results/<experiment> by default.
        device: auto, cpu, cuda, cuda:i or mps.
        microbatch: sequences per forward-backward; chosen by default.
        tracking_uri: of an MLflow store; one in the folder by default.
        place: where attempts run; processes of this machine by default.
        **overrides: fields of the experiment: budget, batches, model, data, lr, seeds, …

    Raises:
        SweepError: for bad input, before anything is written.
    """

    def ahead(folder: SweepFolder) -> None:
        import_ahead(folder, tracking_uri)

    planned, folder = plan_call(experiment, out, device, microbatch, overrides, ahead)
    check_writable(folder)
    if summary := finished_summary(planned, folder, tracking_uri):
        return summary
    ahead(folder)
    return run_plan(estimate(planned, folder), folder, place=place, tracking_uri=tracking_uri)


def finished_summary(
    planned: Planned,
    folder: SweepFolder,
    tracking_uri: str | None = None,
    also: frozenset[Cause] = frozenset(),
) -> Summary | None:
    """Recognise that nothing is left to do, from files alone; else None."""
    from sweep.tracking.record import is_mirrored, is_recorded

    if not planned.is_known or not is_recorded(folder, tracking_uri):
        return None
    states = {trial_id: folder.trial(trial_id).read_status() for trial_id in planned.requested}
    if any(is_to_run(status, also) for status in states.values()) or not is_mirrored(folder):
        return None
    return Summary(folder, states)


def check_trains(plan: Plan) -> None:
    """Refuse an experiment without an optimizer: it is there to be forecast and probed."""
    if plan.settings.optimizer.name == "none":
        raise SweepError(
            f"experiment {plan.experiment!r} has no optimizer and trains nothing. Ask "
            "`sweep forecast` or `sweep probe`, or give it an optimizer."
        )


def prepare(
    planned: Planned,
    folder: SweepFolder,
    on_progress: Callable[[str, float], None] | None = None,
) -> None:
    """Check the machine and tokenize the data, before anything of the sweep is written.

    Raises:
        SweepError: if the plan cannot be run here.
    """
    from sweep.data.tokens import prepare_data

    plan = planned.plan
    check_trains(plan)
    check_disk(plan, folder)
    if plan.data is not None:
        tokenizer = plan.science(plan.trials[0], 1.0).tokenizer
        assert tokenizer is not None
        path = folder.locate(plan.data_path)
        start = folder.locate(plan.init_path)
        prepare_data(plan.data, path, tokenizer, on_progress, start)
    check_start(plan, folder)


def run_plan(
    planned: Planned,
    folder: SweepFolder,
    *,
    executor: Executor | None = None,
    place: Place = HERE,
    tracking_uri: str | None = None,
    storage: str | None = None,
    also: frozenset[Cause] = frozenset(),
    on_prepare: Callable[[str, float], None] | None = None,
    on_change: Callable[[], None] = lambda: None,
    on_finished: Callable[[], None] = lambda: None,
) -> Summary:
    """Prepare the data, write the plan, and run the trials that the command names.

    Args:
        planned: the plan and the ids to run.
        folder: of the sweep.
        executor: where attempts run; by default what `place` names.
        place: where attempts run; fresh processes of this machine by default.
        tracking_uri: of an MLflow store; one in the folder by default.
        storage: URL of Optuna's; optuna.db in the folder by default.
        also: causes of failure that the user asked to retry.
        on_prepare: called with what is being prepared and the fraction done.
        on_change: called a few times a second, to show progress.
        on_finished: called when trials have ended and before tracking is closed: the report.

    Raises:
        SweepError: if the plan cannot be run here, or another runner works on this folder.
    """
    from sweep.tracking.mirror import Mirror

    with holding(folder):
        prepare(planned, folder, on_prepare)
        executor = executor or build_executor(place, planned.plan.execution, folder)
        mirror: Mirror | None = None
        try:
            if executor.queues:
                check_disk(at_most_at_once(planned.plan, len(executor.slots)), folder)
            plan = save_grown(planned.plan, folder)
            schedule = Schedule(plan, folder, executor)
            mirror = Mirror(folder, plan, tracking_uri, schedule.note_mlflow_run)
            tuning = None
            if planned.is_tuned:
                tuning = Tuning(planned.plan, schedule, storage, mirror.sweep_uid)
            mirror.start()
            with stopping_on_signals(schedule):
                requested = _run_rounds(planned, schedule, tuning, also, on_change, mirror.wake)
            on_finished()
            mirror.log_report()
        except BaseException:
            executor.stop()
            raise
        finally:
            executor.close()
            status = mirror.close(MIRROR_SECONDS, schedule.is_stopping) if mirror else None
    states = {trial_id: folder.trial(trial_id).read_status() for trial_id in requested}
    untracked = "" if status is None or status.is_complete else str(status)
    return Summary(folder, states, schedule.is_stopping, not schedule.has_place, untracked)


def _run_rounds(
    planned: Planned,
    schedule: Schedule,
    tuning: Tuning | None,
    also: frozenset[Cause],
    on_change: Callable[[], None],
    on_end: Callable[[], None],
) -> tuple[str, ...]:
    """Run what has its rate, then round after round of tuning; return the ids of all of it."""
    tried = {row.id for row in planned.plan.known_trials if tuning and row.stage == "tune"}
    first = [one for one in planned.requested if one not in tried]
    schedule.go(dict.fromkeys(first), also, on_change, on_end)
    added: list[str] = []
    while tuning and not schedule.is_ending and (following := _next_round(tuning, schedule)):
        if following.rows:
            rows = (*schedule.plan.trials, *following.rows)
            plan = schedule.plan.model_copy(update={"trials": rows})
            schedule.plan = save_grown(plan, schedule.folder)
            added += [str(row.id) for row in following.rows]
        schedule.go(following.pauses, also, on_change, on_end)
    return (*planned.requested, *added)


def _next_round(tuning: Tuning, schedule: Schedule) -> Round | None:
    """Ask what is next, again and again while the storage of the studies does not answer."""
    pause = STORAGE_PAUSES[0]
    while not schedule.is_stopping:
        try:
            return tuning.next_round(schedule.plan)
        except Exception as error:
            from sweep.orchestration.studies import is_without_answer

            if not is_without_answer(error):
                raise
            if pause == STORAGE_PAUSES[0]:
                LOG.warning("Optuna's storage does not answer. Tuning goes on when it does again.")
        end = time.monotonic() + pause
        while time.monotonic() < end and not schedule.is_stopping:
            time.sleep(POLL_SECONDS)
        pause = min(2 * pause, STORAGE_PAUSES[1])
    return None


def save_grown(plan: Plan, folder: SweepFolder) -> Plan:
    """Write a plan on top of the one that lies there, while the folder is held; return both."""
    stored = load_plan(folder)  # another command may have written it while this one prepared
    grown = grow_plan(stored, plan) if stored else plan
    save_plan(grown, folder)
    return grown


@contextlib.contextmanager
def holding(folder: SweepFolder) -> Iterator[None]:
    """Hold the sweep's lock; a command that ends before it wrote a plan leaves nothing behind.

    Raises:
        FolderInUse: if another runner holds it.
    """
    made = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
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
        for path in made:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


@contextlib.contextmanager
def stopping_on_signals(schedule: Schedule) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop the run; a second one kills."""
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
