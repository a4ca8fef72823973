"""The exceptions of sweep.

    SweepError            the user can act on it; the command line prints it and exits with 2
    ├── CorruptFile       a file on disk does not hold what was written to it
    ├── FolderInUse       another process works on this folder
    └── WorkerDied        a worker ended without a word; holds its exit code

    Superseded            not for users: a newer attempt owns the trial, this one must write nothing

A message names the subject, what must hold, what was given, and the remedy.
"""

from pathlib import Path


class SweepError(Exception):
    """A mistake or a condition that the user can act on."""


class CorruptFile(SweepError):
    """A file does not hold what was written to it."""


class FolderInUse(SweepError):
    """Another live process holds the lock of this folder."""


class WorkerDied(SweepError):
    """A worker process ended without reporting an outcome.

    Attributes:
        exit_code: as `multiprocessing.Process.exitcode`: negative for a signal.
        log: the trial's log, whose end shows the last words.
    """

    def __init__(self, exit_code: int | None, log: Path) -> None:
        super().__init__(f"worker ended with exit code {exit_code}; its log is {log}")
        self.exit_code = exit_code
        self.log = log


class Superseded(Exception):
    """A newer attempt holds a higher fencing number."""
