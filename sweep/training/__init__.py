"""The training engine; needs torch, numpy, pydantic, tokenizers and safetensors only."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from sweep.errors import SweepError
from sweep.plan.retry import Outcome
from sweep.training.process import FreshProcess, ShouldStop, outcome_of
from sweep.trial.folder import TrialFolder
from sweep.trial.status import TrialStatus


def attempt_trial(path: Path, status: TrialStatus | None, should_stop: ShouldStop) -> Outcome:
    """Run an attempt here, logged to log.txt, until `should_stop` or `sweep stop` ends it."""
    from sweep.training.attempt import run_attempt  # imports torch

    folder = TrialFolder(path)
    number = (status or folder.read_status()).fencing
    stops: list[str] = []

    def watch() -> None:
        while not stops:
            time.sleep(1.0)
            with contextlib.suppress(OSError, SweepError):  # the file system may fail for a moment
                if folder.is_asked_to_stop(number):
                    stops.append("stopped")

    threading.Thread(target=watch, name="stop", daemon=True).start()
    return run_attempt(path, lambda: should_stop() or next(iter(stops), None), status, True)


def run_cluster_attempt(path: Path, number: int, words: Mapping[signal.Signals, str]) -> Outcome:
    """Run the attempt with this fencing number in a fresh process; signals stop it with `words`."""
    folder = TrialFolder(path)
    if not folder.config_path.exists():
        problem = f"must be a folder that all machines share; {socket.gethostname()} cannot see it"
        return Outcome("error", f"{path} {problem}. Choose an --out on a shared file system.")
    status = folder.read_status().changed(fencing=number)
    process = FreshProcess(attempt_trial, path, status)
    for received, word in words.items():
        signal.signal(received, lambda *_, word=word: process.stop(word))
    return outcome_of(process, folder)
