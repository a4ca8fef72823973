"""The mirror: brings an MLflow store to what the trial folders say, again and again.

Runs in a daemon thread of the orchestrator (`start`, `wake`, `close`), or once (`sync`). A
store that is slow, down or coming back costs training nothing: what it did not accept stays in
the folders and is sent later.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sweep.plan.plan import Plan
from sweep.tracking.delivery import Delivery, OutOfTime
from sweep.tracking.record import is_mirrored, load_record
from sweep.tracking.store import check_tracking_uri, one_sentence
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import is_locked, read_owner

POLL_SECONDS = 5.0
PAUSES = (1.0, 30.0)  # seconds after a failure: the first, the longest

__all__ = ["Mirror", "MirrorStatus", "is_mirrored"]


@dataclass(frozen=True)
class MirrorStatus:
    """What the store does not hold yet, and why."""

    trials: int = 0  # with something not mirrored
    lines: int = 0  # of their metrics.jsonl
    error: str | None = None  # the first since the store last accepted everything

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to send."""
        return not self.trials and self.error is None

    def __str__(self) -> str:
        if self.is_complete:
            return "MLflow holds everything."
        why = f" ({self.error})" if self.error else ""
        return (
            f"MLflow lacks {self.lines} lines of {self.trials} trials{why}. Nothing is lost: "
            "the same command again, or `sweep report`, sends them."
        )


class Mirror:
    """Keeps one sweep's MLflow runs.

    Args:
        folder: of the sweep.
        plan: used until plan.json is there; a plan.json that grows is read again.
        tracking_uri: a server or a database; None: as recorded, else SQLite in the folder.
        on_run_created: called in the mirror's thread with a trial's id and its MLflow run id.

    Raises:
        SweepError: if the address cannot be one.
    """

    def __init__(
        self,
        folder: SweepFolder,
        plan: Plan,
        tracking_uri: str | None,
        on_run_created: Callable[[str, str], None] | None = None,
    ) -> None:
        self.folder = folder
        record = load_record(folder, check_tracking_uri(tracking_uri) if tracking_uri else None)
        self._delivery = Delivery(folder, plan, record, on_run_created)
        self._error: str | None = None
        self._had_error = self._is_report_whole = self._closing = False
        self._pass, self._woken = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Mirror in a daemon thread from now on."""
        self._thread = threading.Thread(target=self._loop, name="mirror", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that something changed on disk; a pass follows soon."""
        self._woken.set()

    def log_report(self) -> None:
        """Say that the report on disk is whole; the next pass keeps it with the parent run."""
        self._is_report_whole = True
        self.wake()

    def close(self, timeout: float) -> MirrorStatus:
        """Send what is left, for at most so many seconds, and end the thread."""
        self._delivery.deadline = time.monotonic() + timeout
        self._closing = True
        self.wake()
        if self._thread is None:
            self.start()
        assert self._thread is not None
        self._thread.join(timeout)
        return self.status

    def sync(self) -> bool:
        """Do one pass here and now; tell whether the store then holds everything settled.

        While another process runs the sweep, that one mirrors and this does nothing.
        """
        lock = self.folder.lock_path
        is_run = is_locked(lock)
        if is_run and self._thread is None and read_owner(lock).get("pid") != os.getpid():
            return is_mirrored(self.folder)
        return self._attempt(is_alive=is_run or self._thread is not None, with_report=True)

    @property
    def status(self) -> MirrorStatus:
        """What is not mirrored as of now; reads the folders, asks nobody."""
        trials = lines = 0
        for row in self._delivery.plan.known_trials:
            trial = self.folder.trial(str(row.id))
            entry, status = self._delivery.record.trials.get(trial.id), trial.read_status()
            if entry is not None and entry.covers(status):
                continue
            missing = _count_lines(trial, entry.offset if entry else 0)
            if missing or status.state.is_finished:
                trials, lines = trials + 1, lines + missing
        return MirrorStatus(trials, lines, self._error)

    def _loop(self) -> None:
        pause = PAUSES[0]
        while True:
            self._woken.clear()
            closing = self._closing
            done = self._attempt(is_alive=not closing, with_report=closing)
            left = self._delivery.deadline - time.monotonic()
            if left <= 0 or (closing and done):
                return
            if done:
                pause = PAUSES[0]
                self._woken.wait(POLL_SECONDS)
                continue
            until = time.monotonic() + min(pause, left)
            while time.monotonic() < until and self._closing == closing:
                time.sleep(0.05)
            pause = PAUSES[0] if self._closing else min(2 * pause, PAUSES[1])

    def _attempt(self, is_alive: bool, with_report: bool) -> bool:
        with self._pass:
            if not is_alive and self._had_error:
                self._delivery.disconnect()  # look again for runs that a lost answer made twice
            try:
                trouble = self._delivery.run(is_alive, with_report or self._is_report_whole)
                self._is_report_whole = False
            except OutOfTime:
                trouble = self._error or "there was no time left"
            except Exception as error:
                # Nothing that a store can do may reach training; the status says it.
                trouble = one_sentence(error)
            if trouble is None:
                self._error = None
            else:
                self._had_error, self._error = True, self._error or trouble
                self._delivery.disconnect()
            return trouble is None


def _count_lines(trial: TrialFolder, offset: int) -> int:
    missing = trial.settled_length() - offset
    if missing <= 0:
        return 0
    with trial.metrics_path.open("rb") as file:
        file.seek(offset)
        return file.read(missing).count(b"\n")
