"""The training engine; needs torch, numpy, pydantic, tokenizers and safetensors only."""

import os
import socket
import threading
import time
from pathlib import Path

from sweep.plan.retry import Outcome
from sweep.training.process import ShouldStop, worker_environment
from sweep.trial.folder import TrialFolder, TrialStatus


def attempt_trial(path: Path, status: TrialStatus | None, should_stop: ShouldStop) -> Outcome:
    """Run an attempt of a trial in this process, with its output in log.txt."""
    from sweep.training.worker import run_attempt  # imports torch

    return run_attempt(path, should_stop, status, is_logged=True)


def run_cluster_attempt(path: Path, number: int, stops: list[str]) -> Outcome:
    """Run the attempt with this fencing number; signals and `ask_to_stop` append to `stops`."""
    folder = TrialFolder(path)
    if not folder.config_path.exists():
        problem = f"must be a folder that all machines share; {socket.gethostname()} cannot see it"
        return Outcome("error", f"{path} {problem}. Choose an --out on a shared file system.")

    def watch() -> None:
        while not folder.is_asked_to_stop(number):
            time.sleep(1.0)
        stops.append("stopped")

    os.environ.update(worker_environment())
    threading.Thread(target=watch, name="stop", daemon=True).start()
    status = folder.read_status().changed(fencing=number)
    return attempt_trial(path, status, lambda: stops[0] if stops else None)
