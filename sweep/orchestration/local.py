"""Executors on this machine: a fresh process per attempt, or none at all for tests.

An executor is what has `submit(folder) -> Future[Outcome]`, `stop()` and `close()`.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from sweep.errors import WorkerDied
from sweep.plan.retry import Outcome
from sweep.trial.folder import TrialFolder

# What the fork server imports once for all attempts: building an optimizer imports the second.
PRELOADED = ("sweep.training.worker", "torch._dynamo")


class Executor(Protocol):
    """Where attempts run."""

    slots: list[dict[str, str]]  # environment of each attempt that may run at the same time

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        """Start the newest attempt of a trial; the future fails with WorkerDied if it does."""

    def stop(self) -> None:
        """Ask all attempts to checkpoint and end."""

    def kill(self) -> None:
        """End all attempts at once."""

    def close(self) -> None:
        """Wait for what is left."""


class LocalExecutor:
    """A fresh process per attempt, from a fork server that has imported torch.

    Args:
        device: of the trials; each visible CUDA device without a number makes a slot.
    """

    def __init__(self, device: str) -> None:
        method = (
            "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        )
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(list(PRELOADED))
        self.slots = _slots(device)
        self._attempts: dict[Any, Connection] = {}  # process -> our end of its pipe
        self._is_stopping = False

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        """Start the newest attempt of a trial in a process of its own."""
        ours, theirs = self._context.Pipe()
        settings = {**os.environ, **environment}  # the fork server may be older than they are
        process = self._context.Process(
            target=_work, args=(folder.path, theirs, settings), name=f"sweep-{folder.id}"
        )
        with no_main_module():
            process.start()
        theirs.close()
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()
        self._attempts[process] = ours
        if self._is_stopping:
            self.stop()
        threading.Thread(
            target=self._watch, args=(process, ours, folder, future), daemon=True
        ).start()
        return future

    def _watch(
        self, process: Any, ours: Connection, folder: TrialFolder, future: Future[Outcome]
    ) -> None:
        wait([ours, process.sentinel])
        outcome = None
        with contextlib.suppress(EOFError, OSError):
            if ours.poll(0):
                outcome = ours.recv()
        process.join()
        del self._attempts[process]
        ours.close()
        if outcome is not None:
            future.set_result(outcome)
        else:
            future.set_exception(WorkerDied(process.exitcode, folder.log_path))

    def stop(self) -> None:
        """Ask all attempts to checkpoint and end."""
        self._is_stopping = True
        for connection in list(self._attempts.values()):
            with contextlib.suppress(OSError):
                connection.send("stop")

    def kill(self) -> None:
        """End all attempts at once, with SIGKILL."""
        for process in list(self._attempts):
            process.kill()

    def close(self) -> None:
        """Wait for what is left."""
        for process in list(self._attempts):
            process.join()


class InlineExecutor:
    """Runs attempts in this process, one after another: for tests and for debugging."""

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


def _slots(device: str) -> list[dict[str, str]]:
    """One trial per device at a time; all cores are one device."""
    if device != "cuda":
        return [{}]
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names]


@contextlib.contextmanager
def no_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script again in the worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(path: Path, pipe: Connection, environment: dict[str, str]) -> None:
    """Run one attempt: the body of a worker process."""
    import faulthandler

    from sweep.training.worker import redirect_output, run_attempt

    os.environ.clear()
    os.environ.update(environment)
    asked: list[str] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner decides
    signal.signal(signal.SIGTERM, lambda *_: asked.append("preempted"))
    redirect_output(TrialFolder(path))
    faulthandler.enable()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()  # a word means stop, and so does a runner that is gone
        asked.append("stopped")

    threading.Thread(target=listen, daemon=True).start()
    outcome = run_attempt(path, lambda: asked[0] if asked else None)
    with contextlib.suppress(OSError):
        pipe.send(outcome)
