"""Executors on this machine: a fresh process per attempt, or none at all for tests.

An executor is what has `submit(folder) -> Future[Outcome]`, `stop()` and `close()`.
"""

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol

from sweep.errors import SweepError
from sweep.plan.retry import Outcome
from sweep.training.process import FreshProcess, attempt_trial
from sweep.trial.folder import TrialFolder


class Executor(Protocol):
    """Where attempts run."""

    @property
    def slots(self) -> list[dict[str, str]]:
        """The environment of each attempt that may be submitted at the same time.

        Empty: nothing can be any more, and the command stops.
        """

    @property
    def queues(self) -> bool:
        """Whether what was submitted may wait for a device."""

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        """Start the newest attempt of a trial; the future fails with WorkerDied if it does."""

    def stop(self) -> None:
        """Ask all attempts to checkpoint and end."""

    def kill(self) -> None:
        """End all attempts at once."""

    def close(self) -> None:
        """Wait for what is left."""


class LocalExecutor:
    """A fresh process per attempt.

    Args:
        device: of the trials; each visible CUDA device without a number makes a slot.
        devices: that a trial takes; so many make a slot then.
    """

    queues = False

    def __init__(self, device: str, devices: int = 1) -> None:
        self.slots = attempt_slots(device, devices)
        if not self.slots:
            raise SweepError(
                f"each trial of this sweep takes {devices} devices, and fewer are visible here. "
                "Run it on a machine that has them, or choose another --out."
            )
        self._attempts: set[FreshProcess] = set()
        self._watchers: list[threading.Thread] = []
        self._is_stopping = False

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        """Start the newest attempt of a trial in a process of its own."""
        process = FreshProcess(
            attempt_trial, folder.path, environment=environment, ends_itself=True
        )
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()
        self._attempts.add(process)
        if self._is_stopping:
            process.stop()
        watcher = threading.Thread(target=self._watch, args=(process, future), daemon=True)
        self._watchers.append(watcher)
        watcher.start()
        return future

    def _watch(self, process: FreshProcess, future: Future[Outcome]) -> None:
        try:
            outcome = process.result()
        except Exception as error:  # WorkerDied, or what nobody thought of
            future.set_exception(error)
        else:
            future.set_result(outcome)
        finally:
            self._attempts.discard(process)

    def stop(self) -> None:
        """Ask all attempts to checkpoint and end."""
        self._is_stopping = True
        for process in list(self._attempts):
            process.stop()

    def kill(self) -> None:
        """End all attempts at once, with SIGKILL."""
        for process in list(self._attempts):
            process.kill()

    def close(self) -> None:
        """Wait for what is left."""
        for watcher in self._watchers:
            watcher.join()


class InlineExecutor:
    """Runs attempts in this process, one after another: for tests and for debugging."""

    queues = False

    def __init__(self) -> None:
        self.slots: list[dict[str, str]] = [{}]
        self._is_stopping = False

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        """Run the attempt now."""
        from sweep.training.worker import run_attempt

        future: Future[Outcome] = Future()
        future.set_result(
            run_attempt(folder.path, lambda: "stopped" if self._is_stopping else None)
        )
        return future

    def stop(self) -> None:
        """Let the next question of an attempt be answered by stopped."""
        self._is_stopping = True

    kill = stop

    def close(self) -> None:
        """Nothing is left."""


def attempt_slots(device: str, devices: int = 1) -> list[dict[str, str]]:
    """Return the environment of each attempt that may run at a time: one per so many devices."""
    if device != "cuda":
        return [{}]
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    groups = [names[i : i + devices] for i in range(0, len(names) - devices + 1, devices)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]
