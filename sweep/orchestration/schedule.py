"""One command's trials: which start, where, and whether they start again."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from sweep.config.trial import TrialConfig
from sweep.errors import WorkerDied
from sweep.orchestration.local import Executor
from sweep.plan.plan import Plan
from sweep.plan.retry import (
    Outcome,
    begin_attempt,
    is_to_run,
    judge_death,
    status_after,
    tightened,
    within_bounds,
)
from sweep.plan.target import PATIENCE, last_step
from sweep.training.memory_limit import oom_kills
from sweep.training.process import FreshProcess
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder, TrialStatus
from sweep.trial.lease import LeaseWatch, is_locked, read_owner

POLL_SECONDS = 0.25
TOO_LATE = f"within {PATIENCE} times the least tokens that this batch size took"
REMEDY_SECONDS = 120.0  # at most, to forecast what would help a trial that does not fit


@dataclass
class Schedule:
    """One command's work on a sweep. Only this writes state.json."""

    plan: Plan
    folder: SweepFolder
    executor: Executor
    is_stopping: bool = False  # as somebody asked for
    _waiting: deque[TrialFolder] = field(default_factory=deque)
    _running: dict[Future[Outcome], tuple[TrialFolder, dict[str, str], int]] = field(
        default_factory=dict
    )
    _queued: list[TrialFolder] = field(default_factory=list)  # submitted, but not begun yet
    _retries: dict[str, Counter[Cause]] = field(default_factory=dict)
    _least: dict[int, float | None] = field(default_factory=dict)  # tokens to the target, by batch
    _watches: dict[str, LeaseWatch] = field(default_factory=dict)
    _pauses: Mapping[str, int | None] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def go(
        self,
        requested: Mapping[str, int | None],
        also: frozenset[Cause],
        on_change: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """Run trials until none is left or the command is stopped.

        Args:
            requested: the step to pause behind by trial id; None: the last.
            also: causes of failure that the user asked to retry.
            on_change: called a few times a second.
            on_end: called when an attempt has ended.
        """
        self._pauses = requested
        trials = [self.folder.trial(one) for one in self._in_order(requested)]
        self._waiting = deque(trial for trial in trials if self._settle(trial, also))
        while self._running or (self._waiting and not self.is_ending):
            for slot in self._free_slots():
                if self.is_ending or not (trial := self._next()):
                    break
                self._start(trial, slot)
            done, _ = wait(self._running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            self._note_begun()
            for future in done:
                trial, _, killed_before = self._running.pop(future)
                self._end(trial, future, killed_before)
                on_end()
            if not (done or self._running) and self._waiting:  # a bare worker holds them
                time.sleep(POLL_SECONDS / 5)
            on_change()

    @property
    def has_place(self) -> bool:
        """Whether the executor can run attempts; a cluster may be gone."""
        return bool(self.executor.slots)

    @property
    def is_ending(self) -> bool:
        """Whether no more attempts start."""
        return self.is_stopping or not self.has_place

    def _in_order(self, requested: Iterable[str]) -> list[str]:
        """Return ids as planned; where several trials run at a time, the longest first.

        Where no time is known, those of the most steps count as the longest.
        """
        if len(self.executor.slots) == 1:
            return list(requested)
        length = {
            str(row.id): (row.forecast_seconds or 0.0, row.steps) for row in self.plan.known_trials
        }
        return sorted(requested, key=length.__getitem__, reverse=True)

    def stop(self) -> None:
        """Let running attempts checkpoint and start no more; asked twice, kill them."""
        if self.is_stopping:
            self.executor.kill()
        self.is_stopping = True
        self.executor.stop()

    def prune(self, trial: TrialFolder, message: str, is_last_word: bool = True) -> None:
        """End a paused trial; its curve stays, and unless it is the last word its checkpoint."""
        self._update(trial, lambda s: s.changed(state=State.PRUNED, message=message))
        if is_last_word:
            trial.remove_checkpoints()

    def revive(self, trial: TrialFolder) -> None:
        """Let a pruned trial go on from its checkpoint, or begin anew where that is gone."""
        if not trial.checkpoints():
            trial.clear()
        self._update(
            trial, lambda s: s.changed(state=State.WAITING, message="", mlflow_run_id=None)
        )

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
        is_asked_for = status.state is State.FAILED and status.cause in also
        if not is_asked_for and status.state is not State.COMPLETE and self._has_ended(trial):
            return False
        if not is_to_run(status, also):
            return False
        if is_locked(trial.runner_lock_path):
            return True  # a bare worker's, which writes its state until it ends
        if status.state is State.RUNNING and self._watch(trial).is_alive():
            return True  # of an earlier runner, and goes on without it
        if status.cause is Cause.DIVERGED:  # asked for: anew, as another MLflow run
            trial.clear()
            self._update(trial, lambda s: s.changed(mlflow_run_id=None))
        self._update(trial, lambda s: s.changed(state=State.WAITING))
        return True

    def _watch(self, trial: TrialFolder) -> LeaseWatch:
        return self._watches.setdefault(trial.id, LeaseWatch(trial.lease_path))

    def _has_ended(self, trial: TrialFolder) -> bool:
        """Note the result of a trial that has one."""
        trial.listed()
        result = trial.read_result()
        if result is None:
            return False
        cause = Cause(result["cause"]) if result["cause"] else None
        state = State(result["state"])
        self._update(trial, lambda s: s.changed(state=state, cause=cause, message=""))
        self._note_reached(result)
        return True

    def _note_begun(self) -> None:
        """Note which of the submitted attempts have begun, by their leases."""
        for trial in list(self._queued):
            status = trial.read_status()
            if read_owner(trial.lease_path).get("fencing") == status.fencing:
                self._update(trial, lambda s: s.changed(state=State.RUNNING))
                self._queued.remove(trial)

    def _free_slots(self) -> list[dict[str, str]]:
        """Return the slots that nothing runs in; those of a cluster come and go."""
        free = list(self.executor.slots)
        for _, slot, _ in self._running.values():
            if slot in free:
                free.remove(slot)
        return free

    def _next(self) -> TrialFolder | None:
        """Take the first waiting trial that no worker of an earlier runner still holds."""
        held, found = [], None
        while self._waiting and found is None:
            trial = self._waiting.popleft()
            if self._watch(trial).is_alive() or is_locked(trial.runner_lock_path):
                held.append(trial)
            elif not self._has_ended(trial):  # without its runner, while this one waited
                found = trial
        self._waiting.extendleft(reversed(held))
        return found

    def _start(self, trial: TrialFolder, slot: dict[str, str]) -> None:
        config = trial.read_config()
        bounds = self.folder.read_bounds(config)
        pauses = (self._pauses.get(trial.id), self._last_step(config))
        pause = min((step for step in pauses if step is not None), default=None)

        def begin(status: TrialStatus) -> TrialStatus:
            begun = within_bounds(begin_attempt(status), config, bounds)
            state = State.WAITING if self.executor.queues else State.RUNNING
            return begun.changed(pause_step=pause, state=state)

        self._update(trial, begin)
        if self.executor.queues:
            self._queued.append(trial)
        self._running[self.executor.submit(trial, slot)] = (trial, slot, oom_kills())

    def _last_step(self, config: TrialConfig) -> int | None:
        """Return where a trial on its way to a target is given up; None where nothing bounds it."""
        if config.science.target is None:
            return None
        batch = config.science.batch_size
        if batch not in self._least:
            rows = (row for row in self.plan.known_trials if row.batch_size == batch)
            results = (self.folder.trial(str(row.id)).read_result() for row in rows)
            reached = [result["tokens_to_target"] for result in results if result]
            self._least[batch] = min((tokens for tokens in reached if tokens), default=None)
        least = self._least[batch]
        step_tokens = config.science.batch_size * config.tokens_per_sequence
        points = config.science.evaluation.points
        return last_step(least, step_tokens, config.steps, points) if least else None

    def _note_reached(self, result: dict[str, Any]) -> None:
        """Keep the least tokens of a batch size up to date, without reading all results again."""
        batch, tokens = result["batch_size"], result["tokens_to_target"]
        if tokens and batch in self._least:
            self._least[batch] = min(tokens, self._least[batch] or tokens)

    def _end(self, trial: TrialFolder, future: Future[Outcome], killed_before: int) -> None:
        """Judge an ended attempt by the retry table."""
        trial.listed()
        try:
            outcome = future.result()
        except WorkerDied as error:
            outcome = judge_death(error.exit_code, oom_kills() > killed_before, trial.log_path)
            if self.is_stopping:
                outcome = Outcome("stopped", "killed while stopping")
        if outcome.kind == "superseded":
            outcome = Outcome("lost", outcome.message)
        if outcome.kind == "complete" and not trial.result_path.exists():
            outcome = Outcome("lost", f"it left no {trial.result_path.name}")
        if trial in self._queued:
            self._queued.remove(trial)
        config, before = trial.read_config(), trial.read_status()
        retries = self._retries.setdefault(trial.id, Counter())
        again = False

        def change(status: TrialStatus) -> TrialStatus:
            nonlocal again
            after, again = status_after(status, outcome, config, retries)
            return after

        status = self._update(trial, change)
        if outcome.kind == Cause.OUT_OF_MEMORY:
            self._learn_from_out_of_memory(trial, before, status, config, again)
        if again:
            self._waiting.appendleft(trial)
            self._watches.pop(trial.id, None)
        if outcome.kind == "paused" and config.science.target is not None:
            self.prune(trial, f"pruned: {config.science.target:g} not reached {TOO_LATE}")
        if outcome.kind == "complete" and (result := trial.read_result()):
            self._note_reached(result)
            if not self.executor.queues:  # which may have been on another machine
                from sweep.orchestration.calibration import record_measurement

                record_measurement(self.plan, result)

    def _learn_from_out_of_memory(
        self,
        trial: TrialFolder,
        before: TrialStatus,
        status: TrialStatus,
        config: TrialConfig,
        again: bool,
    ) -> None:
        """Let later trials begin with what is left; where nothing is, say what would help."""
        if again:
            known = self.folder.read_bounds(config)
            self.folder.write_bounds(tightened(known, before, status, config))
            return
        with contextlib.suppress(WorkerDied):
            process = FreshProcess("sweep.memory.remedies:describe_remedies", config)
            remedies = process.result(timeout=REMEDY_SECONDS)
            self._update(trial, lambda s: s.changed(message=f"{s.message.rstrip('.')}. {remedies}"))
