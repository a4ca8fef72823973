"""Run the trials of one command: which start, on which slot, and whether they start again."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from sweep.config.execution import STALL_MINUTES
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.orchestration.executors.base import Executor
from sweep.orchestration.planning import save_plan
from sweep.plan import retry
from sweep.plan.course import Course
from sweep.plan.plan import Plan, PlannedTrial
from sweep.plan.target import PATIENCE, last_step
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import LeaseWatch
from sweep.trial.status import Cause, State

POLL_SECONDS = 0.25


FRAGMENTATION = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps if much is reserved but not allocated."
)


class Scheduler:
    """The trials of one command. Only the scheduler writes state.json while it runs."""

    def __init__(
        self,
        plan: Plan,
        folder: SweepFolder,
        executor: Executor,
        retried_causes: frozenset[Cause] = frozenset(),  # causes of failure to retry
        on_change: Callable[[], None] = lambda: None,
        stall_minutes: float = STALL_MINUTES,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.executor = executor
        self.retried_causes = retried_causes
        self.on_change = on_change
        self.stall_minutes = stall_minutes

        self.is_stopping = False  # the user asked to stop, or the storage failed
        self.problem = ""  # sentence about a failure of the storage
        self._waiting: list[TrialFolder] = []
        self._running: dict[Future[retry.Outcome], tuple[TrialFolder, dict[str, str]]] = {}
        self._failures: defaultdict[str, Counter[Cause]] = defaultdict(Counter)
        self._microbatch_bound: int | None = None  # after trials that ran out of memory
        self._watches: dict[str, LeaseWatch] = {}

    def run(self, requested: Mapping[str, int | None]) -> None:
        """Run trials, by id with the step to pause after (None: the last), until all have ended."""
        self._queue(requested)
        while self._running or (self._waiting and not self.is_ending):
            self.is_asked_to_stop()
            for slot in self._free_slots():
                following = None if self.is_ending else self._next()
                if following is None:
                    break
                self._start(following, slot, requested[following.id])

            if not self._running and self._waiting:  # other workers hold the trials
                time.sleep(POLL_SECONDS)
            for future in wait(self._running, POLL_SECONDS, FIRST_COMPLETED).done:
                self._end(future)
            self.on_change()

    def _queue(self, requested: Mapping[str, int | None]) -> None:
        """Queue the requested trials that are to run, in the order in which they start."""
        rows = {str(row.id): row for row in self.plan.known_trials}
        ids = list(requested)
        if len(self.executor.slots) == 1:
            # A seed at all batch sizes, then the next: load that comes and goes hits all alike.
            ids.sort(key=lambda trial_id: rows[trial_id].seed)
        else:  # the longest first
            length = {i: (row.forecast_seconds or 0.0, row.steps) for i, row in rows.items()}
            ids.sort(key=length.__getitem__, reverse=True)

        self._waiting = []
        for trial in map(self.folder.trial, ids):
            status = trial.read_status()
            if not retry.is_to_run(status, self.retried_causes):
                continue
            self._waiting.append(trial)
            if not self._is_held(trial):
                if status.cause is Cause.DIVERGED:  # from step 0, as another MLflow run
                    trial.clear()
                self._update(trial, state=State.WAITING)

    def _free_slots(self) -> list[dict[str, str]]:
        free = list(self.executor.slots)  # a cluster's slots come and go
        for _, slot in self._running.values():
            if slot in free:
                free.remove(slot)
        return free

    def add(self, rows: Sequence[PlannedTrial]) -> dict[str, int | None]:
        """Add trials to the plan, also on disk; return what `run` needs to run them to the end."""
        if rows:
            plan = self.plan.model_copy(update={"trials": (*self.plan.trials, *rows)})
            self.plan = save_plan(plan, self.folder)
        return {str(row.id): None for row in rows}

    @property
    def is_ending(self) -> bool:
        """True if no more attempts start: the command is stopping, or its cluster is gone."""
        return self.is_stopping or not self.executor.slots

    def is_asked_to_stop(self) -> bool:
        """Return True once the user asked to stop; a request in the folder is passed on."""
        if self.folder.stop_path.exists() and not self.is_stopping:
            self.stop()
        return self.is_stopping

    def stop(self) -> None:
        """Ask running attempts to checkpoint, and start no more; kill them if called again."""
        is_second = self.is_stopping
        self.is_stopping = True  # before the next line, which a second signal may interrupt
        self.executor.stop(force=is_second)

    def prune(self, trial: TrialFolder, message: str, keep_checkpoint: bool = False) -> None:
        """End a paused trial and keep its curve."""
        self._update(trial, state=State.PRUNED, message=message)
        if not keep_checkpoint:
            trial.remove_checkpoints()

    def revive(self, trial: TrialFolder) -> None:
        """Make a pruned trial continue from its checkpoint, or from the start without one."""
        if not trial.checkpoints():
            trial.clear()
        self._update(trial, state=State.WAITING, message="")

    def _update(self, trial: TrialFolder, **changes: Any) -> None:
        status = trial.read_status()
        changed = status.changed(**changes)
        if changed != status or not trial.state_path.exists():
            trial.write_status(changed)

    def _is_held(self, trial: TrialFolder) -> bool:
        """Return True if a bare worker or an earlier command's worker runs the trial."""
        return self._watches.setdefault(trial.id, LeaseWatch(trial.lease_path)).is_alive()

    def _next(self) -> TrialFolder | None:
        """Take the first waiting trial that has no result and that no other worker holds."""
        for trial in list(self._waiting):
            if not self._is_held(trial):
                self._waiting.remove(trial)
                trial.listed()
                if not trial.find_result():
                    return trial
                trial.write_status(trial.read_status().changed(message=""))  # with its result
        return None

    def _start(self, trial: TrialFolder, slot: dict[str, str], pause_step: int | None) -> None:
        config = self._read_config(trial)
        status = trial.read_status()

        bound = self._microbatch_bound
        if bound and (status.microbatch_size or config.microbatch_size) > bound:
            status = status.changed(microbatch_size=retry.microbatch_within(bound, config))

        ends = [step for step in (pause_step, self._last_step(config)) if step is not None]
        status = retry.begin_attempt(status).changed(
            pause_step=min(ends, default=None), stall_minutes=self.stall_minutes
        )
        trial.write_status(status)

        future = self.executor.submit(trial, slot)
        self._running[future] = trial, slot

    def _read_config(self, trial: TrialFolder) -> TrialConfig:
        """Read config.json; write it again if it is damaged, gone, or not as planned."""
        row = next(row for row in self.plan.known_trials if row.id == trial.id)
        planned = self.plan.trial_config(row, self.folder.name)
        try:
            config = trial.read_config()
            # The id covers the science; --noise may have been added to the folder.
            names = ("tokens_per_sequence", "steps", "warmup_steps", "noise_scale")
            if all(getattr(config, name) == getattr(planned, name) for name in names):
                return config
        except SweepError:
            if not self.folder.plan_path.exists():
                raise  # the folder was moved or deleted
        trial.write_config(planned)
        return trial.read_config()

    def _last_step(self, config: TrialConfig) -> int | None:
        """Return the step at which a trial towards a target is given up; None if unbounded."""
        if config.science.target is None:
            return None

        arms = {row.id: row.arm for row in self.plan.known_trials}
        crossings = []
        for row in self.plan.known_trials:
            if row.arm == arms[config.id]:
                result = self.folder.trial(str(row.id)).find_result()
                if result is not None and result.tokens_to_target:
                    crossings.append(result.tokens_to_target)
        if not crossings:
            return None
        points = config.science.evaluation.points
        return last_step(min(crossings), Course.of_trial(config), points)

    def _end(self, future: Future[retry.Outcome]) -> None:
        trial, _ = self._running.pop(future)
        trial.listed()
        outcome = future.result()
        if outcome.kind == "lost" and self.is_stopping:
            outcome = retry.Outcome("stopped", "killed while stopping")
        lacks_result = outcome.kind == "complete" and not trial.find_result()
        if outcome.kind == "superseded" or lacks_result:
            outcome = retry.Outcome("lost", outcome.message or "the attempt left no result.json")

        config = self._read_config(trial)
        before = trial.read_status()
        status, is_retried = retry.status_after(before, outcome, config, self._failures[trial.id])
        trial.write_status(status)
        if outcome.kind == "storage":
            self.problem = outcome.message
            self.stop()

        ran_out_of_memory = outcome.kind == Cause.OUT_OF_MEMORY
        if is_retried:
            self._waiting.insert(0, trial)
        elif ran_out_of_memory:
            remedy = config.science.workload.memory_remedy
            if config.execution.device_type == "cuda":
                remedy += f" {FRAGMENTATION}"
            self._update(trial, message=f"{status.message.rstrip('.')}. {remedy}")

        if ran_out_of_memory and is_retried:
            self._lower_microbatch_bound(before.microbatch_size or config.microbatch_size)
        elif outcome.kind == "paused" and config.science.target is not None:
            reason = f"above {config.science.target:g} after {PATIENCE} times the tokens"
            self.prune(trial, f"pruned: {reason} of the fastest trial at this batch size")

    def _lower_microbatch_bound(self, microbatch_size: int) -> None:
        """Lower the bound on later trials' microbatches below a size that ran out of memory."""
        bound = retry.bound_after_out_of_memory(microbatch_size)
        if self._microbatch_bound is None or bound < self._microbatch_bound:
            self._microbatch_bound = bound
