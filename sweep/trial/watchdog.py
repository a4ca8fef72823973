"""End a process without progress: training steps, batches of evaluations or tokenized text."""

import contextlib
import faulthandler
import time
from pathlib import Path

LOG_END_BYTES = 1 << 16  # holds the stacks of all threads

_watchdogs: list["Watchdog"] = []  # at most one, as faulthandler has one timer


class Watchdog(contextlib.AbstractContextManager["Watchdog"]):
    """Ends this process after `minutes`, and 10 times the longest pause so far, without progress.

    Its timer, a thread of faulthandler, writes the stack, even if native code holds Python's lock.
    """

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self._longest = 0.0
        self._last = time.monotonic()
        self._arm()
        _watchdogs[:] = [self]

    def _arm(self) -> None:
        self._armed = time.monotonic()
        seconds = max(self._seconds, 10 * self._longest)
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # the log

    def progress(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        if now - self._armed > self._seconds / 100:
            self._arm()

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        _watchdogs.clear()


def progress() -> None:
    """Report progress to the watchdog of this process, if it has one."""
    for watchdog in _watchdogs:
        watchdog.progress()


def has_stalled(exit_code: int, log: Path) -> bool:
    """Return True if the watchdog ended the newest attempt, with this exit code and log."""
    if exit_code != 1 or not log.exists():
        return False
    end = log.read_bytes()[-LOG_END_BYTES:]
    return b"Timeout (" in end.rpartition(b"\nattempt ")[2]
