"""An attempt that a cluster starts on some machine: it knows its trial's folder and its number.

It is asked to stop by a file in that folder, so that it needs nobody: not even the command that
started it, without which it goes on to its end. What it leaves there is what the next one finds.
"""

import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from sweep.errors import Superseded
from sweep.plan.retry import Outcome
from sweep.training.worker import run_logged_attempt
from sweep.trial.folder import TrialFolder

POLL_SECONDS = 1.0  # between two looks for the file; every step would be too often


def run_remote_attempt(
    path: Path, number: int, notices: Sequence[signal.Signals] = (signal.SIGTERM,)
) -> Outcome:
    """Run one attempt in this process, which is its own.

    Args:
        path: of the trial's folder, which every machine sees at the same place.
        number: the attempt's fencing number; with a newer one nothing is run.
        notices: signals by which the cluster says that it takes this machine away.
    """
    folder = TrialFolder(path)
    if not folder.config_path.exists():
        return Outcome(
            "error",
            f"{path} must be a folder that all machines share, but {socket.gethostname()} does "
            "not see it. Choose an --out on a shared file system.",
        )
    try:
        folder.fence(number)()
    except Superseded as error:
        return Outcome("superseded", str(error))
    asked: list[str] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ray's way to end what has not begun yet
    for notice in notices:
        signal.signal(notice, lambda *_: asked.append("preempted"))
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(POLL_SECONDS):
            if folder.is_asked_to_stop(number):
                asked.append("stopped")
                return

    threading.Thread(target=look, name="stop", daemon=True).start()
    try:
        return run_logged_attempt(path, lambda: asked[0] if asked else None, number)
    finally:
        ended.set()
