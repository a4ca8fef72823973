"""The exceptions of sweep. A message says what must hold, what was given, and the remedy."""

import re

# Control characters but tab and line feed, and those that reverse the direction of writing.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: object) -> str:
    """Replace characters that could act on a terminal instead of being shown."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(text))


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


class UnusableCheckpoint(Exception):
    """An intact checkpoint could not be restored; the next attempt starts without it; internal."""
