"""Run an attempt that a cluster started on this machine, from its folder and its number alone."""

import socket
import threading
from pathlib import Path

from sweep.errors import Superseded
from sweep.plan.retry import Outcome
from sweep.training.worker import run_logged_attempt
from sweep.trial.folder import TrialFolder

POLL_SECONDS = 1.0  # between two checks for stop.json; a check after every step would be slow


def run_numbered_attempt(path: Path, number: int, stops: list[str]) -> Outcome:
    """Run one attempt in this process, until it ends or is asked to checkpoint and end.

    Args:
        path: the trial's folder, on a file system that all machines share.
        number: the attempt's fencing number; nothing runs if there is a newer attempt.
        stops: why to stop; empty until then. A signal handler or stop.json appends to it.
    """
    folder = TrialFolder(path)
    if not folder.config_path.exists():
        return Outcome(
            "error",
            f"{path} must be on a file system that all machines share, but it does not exist on "
            f"{socket.gethostname()}. Choose another --out.",
        )
    try:
        folder.fence(number)()
    except Superseded as error:
        return Outcome("superseded", str(error))
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.wait(POLL_SECONDS):
            if folder.is_asked_to_stop(number):
                stops.append("stopped")
                return

    threading.Thread(target=poll, name="stop", daemon=True).start()
    try:
        return run_logged_attempt(path, lambda: stops[0] if stops else None, number)
    finally:
        is_over.set()
