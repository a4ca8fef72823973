"""The training engine; needs torch, numpy, pydantic, tokenizers and safetensors only."""

import contextlib
import os
import socket
import threading
from pathlib import Path

from sweep.errors import SweepError
from sweep.plan.retry import Outcome
from sweep.training.process import ShouldStop, worker_environment
from sweep.trial.folder import TrialFolder, TrialStatus


def attempt_trial(path: Path, status: TrialStatus | None, should_stop: ShouldStop) -> Outcome:
    """Run an attempt here, logged to log.txt, until `should_stop` or `sweep stop` ends it."""
    from sweep.training.worker import run_attempt  # imports torch

    folder = TrialFolder(path)
    number = (status or folder.read_status()).fencing
    is_asked = threading.Event()

    def watch() -> None:
        while not is_asked.wait(1.0):
            with contextlib.suppress(OSError, SweepError):  # the file system may fail for a moment
                if folder.is_asked_to_stop(number):
                    is_asked.set()

    def answer() -> str | None:
        return should_stop() or ("stopped" if is_asked.is_set() else None)

    threading.Thread(target=watch, name="stop", daemon=True).start()
    return run_attempt(path, answer, status, is_logged=True)


def run_cluster_attempt(path: Path, number: int, stops: list[str]) -> Outcome:
    """Run the attempt with this fencing number; signals append to `stops`."""
    folder = TrialFolder(path)
    if not folder.config_path.exists():
        problem = f"must be a folder that all machines share; {socket.gethostname()} cannot see it"
        return Outcome("error", f"{path} {problem}. Choose an --out on a shared file system.")
    os.environ.update(worker_environment())
    status = folder.read_status().changed(fencing=number)
    return attempt_trial(path, status, lambda: stops[0] if stops else None)
