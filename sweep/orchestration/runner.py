"""Runs the trials of a plan to their end: schedules, watches, retries, stops, resumes."""

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweep.config.experiment import load_experiment
from sweep.errors import SweepError, WorkerDied
from sweep.orchestration.local import Executor, LocalExecutor
from sweep.orchestration.planning import (
    Logistics,
    Planned,
    check_disk,
    check_writable,
    default_out,
    estimate,
    make_plan,
    save_plan,
)
from sweep.plan.commands import typed_command
from sweep.plan.growth import grow_plan
from sweep.plan.plan import Plan, load_plan
from sweep.plan.retry import Outcome, begin_attempt, is_to_run, judge_death, status_after
from sweep.training.memory_limit import oom_kills
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder, TrialStatus
from sweep.trial.lease import FileLock, LeaseWatch

POLL_SECONDS = 0.25
MIRROR_SECONDS = 30.0  # at most, for the tracking server at the end


@dataclass
class Summary:
    """How a command ended."""

    folder: SweepFolder
    states: dict[str, TrialStatus]  # of the trials that the command named
    is_interrupted: bool = False
    untracked: str = ""  # what the tracking server did not get, in one sentence

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
    **overrides: Any,
) -> Summary:
    """Run every trial of a sweep, or what is left of it; then `sweep.write_report(folder)`.

    Args:
        experiment: a shipped name or the path of a TOML file.
        out: the sweep's folder; results/<experiment> by default.
        device: auto, cpu, cuda, cuda:i or mps.
        microbatch: sequences per forward-backward; chosen by default.
        tracking_uri: of an MLflow store; one in the folder by default.
        **overrides: fields of the experiment: budget, batches, model, data, lr, seeds, …

    Raises:
        SweepError: for bad input, before anything is written.
    """
    settings = load_experiment(experiment, overrides)
    folder = SweepFolder(Path(out) if out else default_out(settings))
    check_writable(folder)
    command = typed_command(experiment, {**overrides, "out": out})
    planned = make_plan(settings, Logistics(device, microbatch), folder, command)
    if summary := finished_summary(planned, folder, tracking_uri):
        return summary
    return run_plan(estimate(planned, folder), folder, tracking_uri=tracking_uri)


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
    if any(row.id is None for row in plan.trials):
        raise SweepError(
            "lr tuned can be planned but not yet run by this version. Use a number, "
            "sqrt:RATE@BATCH or linear:RATE@BATCH."
        )
    check_disk(plan, folder)
    if plan.data is not None:
        tokenizer = plan.science(plan.trials[0], 1.0).tokenizer
        assert tokenizer is not None
        path = folder.locate(plan.data_path)
        text = prepare_data(plan.data, path, tokenizer, on_progress)
        text.check_window(plan.tokens_per_sequence)


def run_plan(
    planned: Planned,
    folder: SweepFolder,
    *,
    executor: Executor | None = None,
    tracking_uri: str | None = None,
    also: frozenset[Cause] = frozenset(),
    on_prepare: Callable[[str, float], None] | None = None,
    on_change: Callable[[], None] = lambda: None,
    on_finished: Callable[[], None] = lambda: None,
) -> Summary:
    """Prepare the data, write the plan, and run the trials that the command names.

    Args:
        planned: the plan and the ids to run.
        folder: of the sweep.
        executor: where attempts run; fresh local processes by default.
        tracking_uri: of an MLflow store; one in the folder by default.
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
        stored = load_plan(folder)  # another command may have written it while this one prepared
        plan = grow_plan(stored, planned.plan) if stored else planned.plan
        save_plan(plan, folder)
        executor = executor or LocalExecutor(plan.execution.device)
        run = Run(plan, folder, executor)
        mirror = Mirror(folder, plan, tracking_uri, run.note_mlflow_run)
        mirror.start()
        try:
            with stopping_on_signals(run):
                run.go(planned.requested, also, on_change, mirror.wake)
            on_finished()
            mirror.log_report()
        finally:
            executor.stop()
            executor.close()
            status = mirror.close(MIRROR_SECONDS)
    states = {trial_id: folder.trial(trial_id).read_status() for trial_id in planned.requested}
    untracked = "" if status.is_complete else str(status)
    return Summary(folder, states, run.is_stopping, untracked)


@contextlib.contextmanager
def holding(folder: SweepFolder) -> Iterator[None]:
    """Hold the sweep's lock; a command that ends before it wrote a plan leaves nothing behind.

    Raises:
        FolderInUse: if another runner holds it.
    """
    made = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.lock_path):
            try:
                yield
            finally:
                if not folder.plan_path.exists():
                    folder.lock_path.unlink(missing_ok=True)
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


@dataclass
class Run:
    """One command's work on a sweep. Only this writes state.json."""

    plan: Plan
    folder: SweepFolder
    executor: Executor
    is_stopping: bool = False
    _waiting: list[TrialFolder] = field(default_factory=list)
    _running: dict[Future[Outcome], tuple[TrialFolder, dict[str, str], int]] = field(
        default_factory=dict
    )
    _retries: dict[str, Counter[Cause]] = field(default_factory=dict)
    _watches: dict[str, LeaseWatch] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def go(
        self,
        requested: tuple[str, ...],
        also: frozenset[Cause],
        on_change: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """Run trials until none is left or the command is stopped."""
        self._waiting = [self.folder.trial(trial_id) for trial_id in requested]
        self._waiting = [trial for trial in self._waiting if self._settle(trial, also)]
        free = list(self.executor.slots)
        while self._running or (self._waiting and not self.is_stopping):
            while free and not self.is_stopping and (trial := self._next()):
                self._start(trial, free.pop(0))
            done, _ = wait(self._running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                trial, slot, killed_before = self._running.pop(future)
                free.append(slot)
                self._end(trial, future, killed_before)
                on_end()
            if not self._running and self._waiting:
                time.sleep(POLL_SECONDS / 5)
            on_change()

    def stop(self) -> None:
        """Let running attempts checkpoint and start no more; asked twice, kill them."""
        if self.is_stopping:
            self.executor.kill()
        self.is_stopping = True
        self.executor.stop()

    def note_mlflow_run(self, trial_id: str, run_id: str) -> None:
        """Record a trial's MLflow run; called by the mirror's thread."""
        self._update(self.folder.trial(trial_id), lambda s: s.changed(mlflow_run_id=run_id))

    def _update(
        self, trial: TrialFolder, change: Callable[[TrialStatus], TrialStatus]
    ) -> TrialStatus:
        with self._writing:
            old = trial.read_status()
            status = change(old)
            if status != old or not trial.state_path.exists():
                trial.write_status(status)
            return status

    def _settle(self, trial: TrialFolder, also: frozenset[Cause]) -> bool:
        """Bring state.json up to date with what an earlier runner did not note; is it to run?"""
        status = trial.read_status()
        result = trial.read_result() if status.state is not State.COMPLETE else None
        if result is not None and not (status.state is State.FAILED and status.cause in also):
            cause = Cause(result["cause"]) if result["cause"] else None
            state = State(result["state"])
            self._update(trial, lambda s: s.changed(state=state, cause=cause, message=""))
            return False
        if not is_to_run(status, also):
            return False
        if status.cause is Cause.DIVERGED:  # asked for: anew, as another MLflow run
            trial.clear()
            self._update(trial, lambda s: s.changed(mlflow_run_id=None))
        self._update(trial, lambda s: s.changed(state=State.WAITING))
        return True

    def _next(self) -> TrialFolder | None:
        """Take the first waiting trial that no worker of an earlier runner still holds."""
        for trial in self._waiting:
            watch = self._watches.setdefault(trial.id, LeaseWatch(trial.lease_path))
            if not watch.is_alive():
                self._waiting.remove(trial)
                return trial
        return None

    def _start(self, trial: TrialFolder, slot: dict[str, str]) -> None:
        self._update(trial, begin_attempt)
        self._running[self.executor.submit(trial, slot)] = (trial, slot, oom_kills())

    def _end(self, trial: TrialFolder, future: Future[Outcome], killed_before: int) -> None:
        """Judge an ended attempt by the retry table."""
        try:
            outcome = future.result()
        except WorkerDied as error:
            outcome = judge_death(error.exit_code, oom_kills() > killed_before, trial.log_path)
            if self.is_stopping:
                outcome = Outcome("stopped", "killed while stopping")
        if outcome.kind == "superseded":
            outcome = Outcome("lost", outcome.message)
        config = trial.read_config()
        retries = self._retries.setdefault(trial.id, Counter())
        again = False

        def change(status: TrialStatus) -> TrialStatus:
            nonlocal again
            after, again = status_after(status, outcome, config, retries)
            return after

        self._update(trial, change)
        if again:
            self._waiting.insert(0, trial)
            self._watches.pop(trial.id, None)
        if outcome.kind == "complete" and (result := trial.read_result()):
            from sweep.orchestration.calibration import record_measurement

            record_measurement(self.plan, result)


@contextlib.contextmanager
def stopping_on_signals(run: Run) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop the run; a second one kills."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: run.stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
