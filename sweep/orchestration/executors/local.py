"""Run attempts as processes of this machine."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from sweep.config.execution import Execution
from sweep.config.settings import Settings
from sweep.errors import SweepError
from sweep.orchestration.executors.base import Executor
from sweep.plan.retry import Outcome
from sweep.training import attempt_trial
from sweep.training.process import Worker, outcome_of
from sweep.trial.folder import SweepFolder, TrialFolder

Slot = dict[str, str]  # environment


class LocalExecutor(Executor):
    """Runs attempts one after the other in one process per slot.

    User code, several devices and a trial whose last attempt failed get a process of their own.
    """

    name = "local"
    is_elsewhere = False
    shares_processes = True

    def __init__(self, settings: Settings, execution: Execution, folder: SweepFolder) -> None:
        devices = execution.devices
        self.slots = attempt_slots(execution)
        if not self.slots:
            raise SweepError(
                f"each trial needs {devices} GPUs, and this machine has fewer. Use a machine with "
                f"{devices} GPUs, or plan with fewer --devices-per-trial and another --out."
            )

        self._lock = threading.Lock()  # for the next two: an attempt ends in a thread
        self._running: dict[Worker, Slot] = {}
        self._idle: dict[Worker, Slot] = {}
        self._failed: set[str] = set()  # ids of trials whose last attempt failed
        self._threads = ThreadPoolExecutor(len(self.slots), "attempt")
        self._is_stopping = False

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        slot = dict(environment)
        may_share = folder.id not in self._failed and folder.read_config().may_share_process
        with self._lock:
            worker = self._take_worker(slot, may_share)
            self._running[worker] = slot
        worker.submit(attempt_trial, folder.path, None)
        if not may_share:
            worker.close()
        if self._is_stopping:
            worker.stop()
        return self._threads.submit(self._outcome_of, worker, folder, may_share)

    def _take_worker(self, slot: Slot, may_share: bool) -> Worker:
        """Return the process that waits on a slot, or start one; each slot has one at most."""
        self._forget_ended_workers()
        waiting = [worker for worker, other in [*self._idle.items()] if other == slot]
        processes = len(waiting) + [*self._running.values()].count(slot)
        if waiting and (may_share or processes >= self.slots.count(slot)):
            worker = waiting[0]
            del self._idle[worker]
            if may_share:
                return worker
            worker.end()
        return Worker(slot, ends_itself=True)

    def _forget_ended_workers(self) -> None:
        """Forget processes that ended while they waited; they would cost a trial an attempt."""
        for worker in [*self._idle]:
            if worker.has_ended():
                del self._idle[worker]
                worker.end()

    def _outcome_of(self, worker: Worker, folder: TrialFolder, may_share: bool) -> Outcome:
        """Wait for an attempt; keep its process for another one unless it failed."""
        outcome = outcome_of(worker, folder)
        has_ended_well = outcome.kind in ("complete", "diverged", "paused")
        is_kept = may_share and has_ended_well and outcome.leaves_process_usable
        with self._lock:
            slot = self._running.pop(worker)
            if is_kept:
                self._idle[worker] = slot
        if may_share and not is_kept:
            worker.end()
        if has_ended_well:
            self._failed.discard(folder.id)
            return outcome

        self._failed.add(folder.id)
        if may_share:
            # Another trial may be the reason. The attempt is then repeated as it was, with the same
            # microbatch, in a process of its own.
            has_other_reason = {
                "error": worker.calls > 1,
                "out_of_memory": worker.calls > 1 or self.slots.count(slot) > 1,
            }
            if has_other_reason.get(outcome.kind):
                return Outcome("preempted", outcome.message)
        return outcome

    def stop(self, force: bool = False) -> None:
        self._is_stopping = True
        for worker in list(self._running):
            if force:
                worker.kill()
            else:
                worker.stop()

    def release(self) -> None:
        while self._idle:
            worker, _ = self._idle.popitem()
            worker.end()

    def close(self) -> None:
        self._threads.shutdown()
        self.release()


def attempt_slots(execution: Execution) -> list[Slot]:
    """Return a slot for each trial that may run now.

    On `cuda` each group of as many visible GPUs as a trial needs has its slots, otherwise the
    machine has.
    """
    if execution.device != "cuda":
        return [{}] * execution.trials_at_once

    from sweep.training.device import visible_gpus  # imports torch

    devices = execution.devices
    names = visible_gpus()
    groups = [names[i : i + devices] for i in range(0, len(names) - devices + 1, devices)]
    slots = [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]
    return slots * execution.trials_at_once
