"""Run the trials of one command: which start, on which slot, and whether they start again."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from sweep.config.trial import TrialConfig
from sweep.errors import SweepError, WorkerDied
from sweep.memory.presets import describe_remedies
from sweep.orchestration.executors import Executor
from sweep.plan.plan import Plan
from sweep.plan.retry import (
    Outcome,
    begin_attempt,
    is_to_run,
    judge_death,
    microbatch_within,
    status_after,
)
from sweep.plan.tuning import PATIENCE, last_step
from sweep.training.memory_limit import oom_kills
from sweep.training.process import run_job
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder, TrialStatus
from sweep.trial.lease import LeaseWatch, is_locked, read_owner

POLL_SECONDS = 0.25


@dataclass(frozen=True)
class _Attempt:
    """A running attempt."""

    trial: TrialFolder
    slot: dict[str, str]
    oom_kills: int  # of this cgroup when the attempt started


@dataclass
class Schedule:
    """One command's work on a sweep. Nothing else writes state.json meanwhile."""

    plan: Plan
    folder: SweepFolder
    executor: Executor
    is_stopping: bool = False  # the user asked to stop
    _waiting: deque[TrialFolder] = field(default_factory=deque)
    _running: dict[Future[Outcome], _Attempt] = field(default_factory=dict)
    _queued: list[TrialFolder] = field(default_factory=list)  # submitted but not started yet
    _retries: dict[str, Counter[Cause]] = field(default_factory=dict)
    _microbatch_bound: int | None = None  # half of the least that ran out of memory
    _least_tokens: dict[int, float | None] = field(default_factory=dict)  # to target, by batch
    _watches: dict[str, LeaseWatch] = field(default_factory=dict)
    _pauses: Mapping[str, int | None] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def run(
        self,
        requested: Mapping[str, int | None],
        also: frozenset[Cause],
        on_change: Callable[[], None],
    ) -> None:
        """Run trials until none is left or the command is stopped.

        Args:
            requested: by trial id, the step to pause after; None: the last one.
            also: causes of failure that the user asked to retry.
            on_change: called a few times per second.
        """
        self._pauses = requested
        trials = [self.folder.trial(trial_id) for trial_id in self._in_order(requested)]
        self._waiting = deque(trial for trial in trials if self._prepare(trial, also))
        while self._running or (self._waiting and not self.is_ending):
            for slot in self._free_slots():
                if self.is_ending or not (trial := self._next()):
                    break
                self._start(trial, slot)
            done, _ = wait(self._running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            self._note_started()
            for future in done:
                self._end(self._running.pop(future), future)
            if not (done or self._running) and self._waiting:  # a bare worker holds the trial
                time.sleep(POLL_SECONDS / 5)
            on_change()

    @property
    def has_slots(self) -> bool:
        """Whether the executor can run attempts; a cluster may be gone."""
        return bool(self.executor.slots)

    @property
    def is_ending(self) -> bool:
        """Whether no more attempts start."""
        return self.is_stopping or not self.has_slots

    def stop(self) -> None:
        """Let running attempts checkpoint and start no more; kill them if called again."""
        if self.is_stopping:
            self.executor.kill()
        self.is_stopping = True
        self.executor.stop()

    def prune(self, trial: TrialFolder, message: str, keep_checkpoint: bool = False) -> None:
        """End a paused trial and keep its curve."""
        self._update(trial, state=State.PRUNED, message=message)
        if not keep_checkpoint:
            trial.remove_checkpoints()

    def revive(self, trial: TrialFolder) -> None:
        """Let a pruned trial continue from its checkpoint, or from the start without one."""
        if not trial.checkpoints():
            trial.clear()
        self._update(trial, state=State.WAITING, message="", mlflow_run_id=None)

    def note_mlflow_run(self, trial_id: str, run_id: str) -> None:
        """Record a trial's MLflow run. Called from the mirror's thread."""
        self._update(self.folder.trial(trial_id), mlflow_run_id=run_id)

    def _update(self, trial: TrialFolder, **changes: Any) -> TrialStatus:
        return self._change(trial, lambda status: status.changed(**changes))

    def _change(
        self, trial: TrialFolder, change: Callable[[TrialStatus], TrialStatus]
    ) -> TrialStatus:
        with self._writing:
            old = trial.read_status()
            status = change(old)
            if status != old or not trial.state_path.exists():
                trial.write_status(status)
            return status

    def _in_order(self, requested: Iterable[str]) -> list[str]:
        """Return ids as planned; if several trials run at a time, the longest first."""
        if len(self.executor.slots) == 1:
            return list(requested)
        length = {
            str(row.id): (row.forecast_seconds or 0.0, row.steps) for row in self.plan.known_trials
        }
        return sorted(requested, key=length.__getitem__, reverse=True)

    def _prepare(self, trial: TrialFolder, also: frozenset[Cause]) -> bool:
        """Bring state.json up to date with an earlier command; return True if the trial is to run.

        A trial that an earlier command's worker still runs is waited for.
        """
        status = trial.read_status()
        is_asked_for = status.state is State.FAILED and status.cause in also
        if not is_asked_for and status.state is not State.COMPLETE and self._has_ended(trial):
            return False
        if not is_to_run(status, also):
            return False
        if is_locked(trial.runner_lock_path):  # a bare worker writes state.json itself
            return True
        if status.state is State.RUNNING and self._watch(trial).is_alive():
            return True
        if status.cause is Cause.DIVERGED:  # starts again from step 0, as another MLflow run
            trial.clear()
            self._update(trial, mlflow_run_id=None)
        self._update(trial, state=State.WAITING)
        return True

    def _watch(self, trial: TrialFolder) -> LeaseWatch:
        return self._watches.setdefault(trial.id, LeaseWatch(trial.lease_path))

    def _has_ended(self, trial: TrialFolder) -> bool:
        """Record the result of a trial that has one."""
        trial.listed()
        result = trial.read_result()
        if result is None:
            return False
        cause = Cause(result["cause"]) if result["cause"] else None
        self._update(trial, state=State(result["state"]), cause=cause, message="")
        self._note_tokens_to_target(result)
        return True

    def _note_started(self) -> None:
        """Record which of the submitted attempts have started, by their leases."""
        for trial in list(self._queued):
            if read_owner(trial.lease_path).get("fencing") == trial.read_status().fencing:
                self._update(trial, state=State.RUNNING)
                self._queued.remove(trial)

    def _free_slots(self) -> list[dict[str, str]]:
        """Return the slots without an attempt; a cluster's slots come and go."""
        free = list(self.executor.slots)
        for attempt in self._running.values():
            if attempt.slot in free:
                free.remove(attempt.slot)
        return free

    def _next(self) -> TrialFolder | None:
        """Take the first waiting trial that no worker of an earlier command holds."""
        skipped, chosen = [], None
        while self._waiting and chosen is None:
            trial = self._waiting.popleft()
            if self._watch(trial).is_alive() or is_locked(trial.runner_lock_path):
                skipped.append(trial)
            elif not self._has_ended(trial):  # it may have ended while it waited here
                chosen = trial
        self._waiting.extendleft(reversed(skipped))
        return chosen

    def _start(self, trial: TrialFolder, slot: dict[str, str]) -> None:
        config = trial.read_config()
        pauses = (self._pauses.get(trial.id), self._last_step(config))
        pause = min((step for step in pauses if step is not None), default=None)
        state = State.WAITING if self.executor.queues else State.RUNNING

        def begin(status: TrialStatus) -> TrialStatus:
            size, bound = status.microbatch_size or config.microbatch_size, self._microbatch_bound
            if bound and size > bound:
                status = status.changed(microbatch_size=microbatch_within(bound, config))
            return begin_attempt(status).changed(pause_step=pause, state=state)

        self._change(trial, begin)
        if self.executor.queues:
            self._queued.append(trial)
        future = self.executor.submit(trial, slot)
        self._running[future] = _Attempt(trial, slot, oom_kills())

    def _last_step(self, config: TrialConfig) -> int | None:
        """Return the step at which a trial towards a target is given up; None if unbounded."""
        if config.science.target is None:
            return None
        batch = config.science.batch_size
        if batch not in self._least_tokens:
            rows = (row for row in self.plan.known_trials if row.batch_size == batch)
            results = [self.folder.trial(str(row.id)).read_result() for row in rows]
            tokens = [result["tokens_to_target"] for result in results if result]
            self._least_tokens[batch] = min((t for t in tokens if t), default=None)
        least = self._least_tokens[batch]
        step_tokens = batch * config.tokens_per_sequence
        points = config.science.evaluation.points
        return last_step(least, step_tokens, config.steps, points) if least else None

    def _note_tokens_to_target(self, result: dict[str, Any]) -> None:
        batch, tokens = result["batch_size"], result["tokens_to_target"]
        if tokens and batch in self._least_tokens:
            self._least_tokens[batch] = min(tokens, self._least_tokens[batch] or tokens)

    def _end(self, attempt: _Attempt, future: Future[Outcome]) -> None:
        """Judge an ended attempt by the retry table."""
        trial = attempt.trial
        trial.listed()
        outcome = self._outcome(attempt, future)
        if trial in self._queued:
            self._queued.remove(trial)
        config, before = trial.read_config(), trial.read_status()
        retries = self._retries.setdefault(trial.id, Counter())
        is_retried = False

        def change(status: TrialStatus) -> TrialStatus:
            nonlocal is_retried
            after, is_retried = status_after(status, outcome, config, retries)
            return after

        status = self._change(trial, change)
        if is_retried:
            self._waiting.appendleft(trial)
            self._watches.pop(trial.id, None)
        if outcome.kind == Cause.OUT_OF_MEMORY:
            half = (before.microbatch_size or config.microbatch_size) // 2
            if half:
                self._microbatch_bound = min(half, self._microbatch_bound or half)
            if not is_retried:
                with contextlib.suppress(SweepError):
                    remedies = run_job(describe_remedies, config)
                    self._update(trial, message=f"{status.message.rstrip('.')}. {remedies}")
        if outcome.kind == "paused" and config.science.target is not None:
            why = f"{PATIENCE} times the least tokens of its batch size did not reach"
            self.prune(trial, f"pruned: {why} {config.science.target:g}")
        if outcome.kind == "complete" and (result := trial.read_result()):
            self._note_tokens_to_target(result)
            if not self.executor.queues:  # it ran on this machine
                from sweep.orchestration.costs import record_measurement

                record_measurement(self.plan, result)

    def _outcome(self, attempt: _Attempt, future: Future[Outcome]) -> Outcome:
        trial = attempt.trial
        try:
            outcome = future.result()
        except WorkerDied as error:
            if self.is_stopping:
                return Outcome("stopped", "killed while stopping")
            memory_ran_out = oom_kills() > attempt.oom_kills
            return judge_death(error.exit_code, memory_ran_out, trial.log_path)
        if outcome.kind == "superseded":
            return Outcome("lost", outcome.message)
        if outcome.kind == "complete" and not trial.result_path.exists():
            return Outcome("lost", f"the attempt left no {trial.result_path.name}")
        return outcome
