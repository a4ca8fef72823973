"""The exceptions of sweep, and texts that are safe to print and to keep.

A message says what must hold, what was given, and the remedy.
"""

import re
import traceback

# Control characters except tab and line feed, and those that reverse the direction of writing.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# Parts of addresses: a token or a password of a server or of a database, and in parameters.
SECRETS = re.compile(
    r"(?<=http://)[^@/?#\s]*@|(?<=https://)[^@/?#\s]*@|(?<=://)([^:@/?#\s]*):[^@/?#\s]*(?=@)"
    r"|(?<=[?&])(?!sslkey=)[^=&\s]*(?:pass|secret|token|key|sig|auth)[^=&\s]*=[^&\s'\"]*&?",
    re.IGNORECASE,
)


def without_secrets(text: object) -> str:
    """Remove passwords and tokens from the addresses in a text; a database's user name stays."""
    return SECRETS.sub(lambda match: match[1] or "", str(text))


def describe(error: BaseException) -> str:
    """Return the type and the text of an error, whose `str` may raise."""
    return "".join(traceback.format_exception_only(error)).strip()


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

    timed_out = False  # whether it was ended after a time limit
    memory_ran_out = False  # whether the kernel killed a process for memory meanwhile

    def __init__(self, exit_code: int, message: str = "") -> None:
        super().__init__(message or f"a process ended without a result, exit code {exit_code}")
        self.exit_code = exit_code  # negative for a signal


class Superseded(Exception):
    """A newer attempt has a higher fencing number, so this one must not write; internal."""


class UnusableCheckpoint(Exception):
    """An intact checkpoint could not be restored; the next attempt starts without it; internal."""
