"""The exceptions of sweep.

    SweepError            the user can act on it; the command line prints it and exits with 2
    ├── CorruptFile       a file on disk is damaged
    ├── FolderInUse       another process works on this folder
    └── WorkerDied        a process ended without returning a result

    Superseded            internal: a newer attempt owns the trial, so this one must not write

A message says what must hold, what was given, and the remedy.
"""


class SweepError(Exception):
    """A mistake or a condition that the user can act on."""


class CorruptFile(SweepError):
    """A file does not contain what was written to it."""


class FolderInUse(SweepError):
    """Another live process holds the lock of this folder."""


class WorkerDied(SweepError):
    """A process ended without returning a result.

    Attributes:
        exit_code: negative for a signal.
        timed_out: whether we ended the process after a time limit.
    """

    def __init__(self, exit_code: int, message: str = "", timed_out: bool = False) -> None:
        super().__init__(message or f"a process ended without a result, exit code {exit_code}")
        self.timed_out = timed_out
        self.exit_code = exit_code


class Superseded(Exception):
    """A newer attempt has a higher fencing number."""
