"""Run the trials of one command: which start, on which slot, and whether they start again."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
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
from sweep.trial.lease import LeaseWatch

POLL_SECONDS = 0.25


@dataclass
class Schedule:
    """One command's work on a sweep. Nothing else writes state.json meanwhile."""

    plan: Plan
    folder: SweepFolder
    executor: Executor
    is_stopping: bool = False  # the user asked to stop
    _waiting: deque[TrialFolder] = field(default_factory=deque)
    # Trial, slot, and the cgroup's count of out-of-memory kills when the attempt started.
    _running: dict[Future[Outcome], tuple[TrialFolder, dict[str, str], int]] = field(
        default_factory=dict
    )
    _retries: dict[str, Counter[Cause]] = field(default_factory=dict)
    _microbatch_bound: int | None = None  # half of the least that ran out of memory
    _watches: dict[str, LeaseWatch] = field(default_factory=dict)
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
        ids = list(requested)
        if len(self.executor.slots) != 1:  # the longest first
            rows = self.plan.known_trials
            length = {str(row.id): (row.forecast_seconds or 0.0, row.steps) for row in rows}
            ids.sort(key=length.__getitem__, reverse=True)
        trials = map(self.folder.trial, ids)
        self._waiting = deque(trial for trial in trials if self._prepare(trial, also))
        while self._running or (self._waiting and not self.is_ending):
            free = list(self.executor.slots)  # a cluster's slots come and go
            for _, slot, _ in self._running.values():
                if slot in free:
                    free.remove(slot)
            for slot in free:
                if self.is_ending or not (trial := self._next()):
                    break
                self._start(trial, slot, requested[trial.id])
            done, _ = wait(self._running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                self._end(future)
            if not (done or self._running) and self._waiting:  # a bare worker holds the trial
                time.sleep(POLL_SECONDS / 5)
            on_change()

    @property
    def is_ending(self) -> bool:
        """Whether no more attempts start: the command is stopping, or its cluster is gone."""
        return self.is_stopping or not self.executor.slots

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
        self._update(trial, state=State.WAITING, message="")

    def _update(self, trial: TrialFolder, **changes: Any) -> None:
        self._change(trial, lambda status: status.changed(**changes))

    def _change(
        self, trial: TrialFolder, change: Callable[[TrialStatus], TrialStatus]
    ) -> TrialStatus:
        with self._writing:
            old = trial.read_status()
            status = change(old)
            if status != old or not trial.state_path.exists():
                trial.write_status(status)
            return status

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
        if not self._is_held(trial):
            if status.cause is Cause.DIVERGED:  # starts again from step 0, as another MLflow run
                trial.clear()
            self._update(trial, state=State.WAITING)
        return True

    def _is_held(self, trial: TrialFolder) -> bool:
        """Return True if a bare worker or an earlier command's worker runs the trial."""
        return self._watches.setdefault(trial.id, LeaseWatch(trial.lease_path)).is_alive()

    def _has_ended(self, trial: TrialFolder) -> bool:
        """Record the result of a trial that has one."""
        trial.listed()
        result = trial.read_result()
        if result is None:
            return False
        cause = Cause(result["cause"]) if result["cause"] else None
        self._update(trial, state=State(result["state"]), cause=cause, message="")
        return True

    def _next(self) -> TrialFolder | None:
        """Take the first waiting trial that no other worker holds."""
        for trial in list(self._waiting):
            if not self._is_held(trial):
                self._waiting.remove(trial)
                if not self._has_ended(trial):  # it may have ended while it waited here
                    return trial
        return None

    def _start(self, trial: TrialFolder, slot: dict[str, str], pause_step: int | None) -> None:
        config = trial.read_config()
        steps = [step for step in (pause_step, self._last_step(config)) if step is not None]

        def begin(status: TrialStatus) -> TrialStatus:
            size, bound = status.microbatch_size or config.microbatch_size, self._microbatch_bound
            if bound and size > bound:
                status = status.changed(microbatch_size=microbatch_within(bound, config))
            return begin_attempt(status).changed(pause_step=min(steps, default=None))

        self._change(trial, begin)
        future = self.executor.submit(trial, slot)
        self._running[future] = trial, slot, oom_kills()

    def _last_step(self, config: TrialConfig) -> int | None:
        """Return the step at which a trial towards a target is given up; None if unbounded."""
        if config.science.target is None:
            return None
        batch = config.science.batch_size
        rows = (row for row in self.plan.known_trials if row.batch_size == batch)
        results = (self.folder.trial(str(row.id)).read_result() or {} for row in rows)
        tokens = [
            result["tokens_to_target"] for result in results if result.get("tokens_to_target")
        ]
        if not tokens:
            return None
        points = config.science.evaluation.points
        return last_step(min(tokens), batch * config.tokens_per_sequence, config.steps, points)

    def _end(self, future: Future[Outcome]) -> None:
        """Judge an ended attempt by the retry table."""
        trial, _, killed_before = self._running.pop(future)
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
            outcome = Outcome("lost", f"the attempt left no {trial.result_path.name}")
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
        if outcome.kind == Cause.OUT_OF_MEMORY and is_retried:  # later trials start smaller
            half = max(1, (before.microbatch_size or config.microbatch_size) // 2)
            self._microbatch_bound = min(half, self._microbatch_bound or half)
        elif outcome.kind == Cause.OUT_OF_MEMORY:
            with contextlib.suppress(SweepError):
                remedies = run_job(describe_remedies, config)
                self._update(trial, message=f"{status.message.rstrip('.')}. {remedies}")
        elif outcome.kind == "paused" and config.science.target is not None:
            reason = f"{PATIENCE} times the least tokens of its batch size did not reach"
            self.prune(trial, f"pruned: {reason} {config.science.target:g}")
