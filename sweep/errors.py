"""The exceptions of sweep. A message says what must hold, what was given, and the remedy."""


class SweepError(Exception):
    """A mistake or a condition that the user can act on; the command line exits with 2."""


class CorruptFile(SweepError):
    """A file does not contain what was written to it."""


class FolderInUse(SweepError):
    """Another live process holds the lock of this folder."""


class WorkerDied(SweepError):
    """A process ended without returning a result."""

    def __init__(self, exit_code: int, message: str = "", timed_out: bool = False) -> None:
        super().__init__(message or f"a process ended without a result, exit code {exit_code}")
        self.timed_out = timed_out  # whether it was ended after a time limit
        self.exit_code = exit_code  # negative for a signal


class Superseded(Exception):
    """A newer attempt has a higher fencing number, so this one must not write; internal."""
