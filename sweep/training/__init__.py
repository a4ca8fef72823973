"""The training engine; needs torch, numpy, pydantic, tokenizers and safetensors only."""

import contextlib
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sweep.errors import SweepError
from sweep.plan.retry import Outcome
from sweep.training.process import FreshProcess, ShouldStop, outcome_of
from sweep.trial.folder import TrialFolder
from sweep.trial.status import TrialStatus


def attempt_trial(path: Path, status: TrialStatus | None, should_stop: ShouldStop) -> Outcome:
    """Run an attempt here, logged to log.txt, until `should_stop` or `sweep stop` ends it."""
    from sweep.training import graph  # imports torch, as the next two
    from sweep.training.attempt import run_attempt
    from sweep.training.device import release_memory

    folder = TrialFolder(path)
    number = folder.read_status().fencing if status is None else status.fencing
    stops: list[str] = []
    has_ended = threading.Event()

    def watch() -> None:
        while not (stops or has_ended.wait(1.0)):
            with contextlib.suppress(OSError, SweepError):  # the file system may fail for a moment
                if folder.is_asked_to_stop(number):
                    stops.append("stopped")

    def how_to_end() -> str | None:
        word = should_stop()
        if word is None and stops:
            word = stops[0]
        return word

    threading.Thread(target=watch, name="stop", daemon=True).start()
    outcome = run_attempt(path, how_to_end, status, is_logged=True)
    has_ended.set()
    release_memory()  # for the next trial of this process
    return replace(outcome, leaves_process_usable=not graph.has_failed_capture)


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
