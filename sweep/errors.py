"""Exceptions, and functions that make texts safe to print and store.

A message says what must hold, what was given, and the remedy.
"""

import contextlib
import difflib
import re
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

# Control characters except tab and line feed, and those that reverse the direction of writing.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
ADDRESS = re.compile(  # or the parameters of one whose start is not shown
    r"(\w[\w+.-]{0,30})://([^\s'\"<>]*?)(?=[.,;:!)]*(?:[\s'\"<>]|\Z))|(?<=[/\w]\?)[^\s'\"]+=[^\s'\"]+"
)
MOST_CHARACTERS = 200  # shown of inputs in a message, and of another library's message
LONG = 40  # characters of an input that counts
# A text as Python quotes it, or characters without a space: a path, an address, a list of numbers.
LONG_INPUT = re.compile(
    rf"(?<![^\s(\[{{=:,])'(?:[^'\\]|\\.){{{LONG},}}'(?!\w)"
    rf'|(?<![^\s(\[{{=:,])"(?:[^"\\]|\\.){{{LONG},}}"(?!\w)'
    rf"|\S{{{LONG},}}",
    re.DOTALL,
)
WORD = re.compile(r"[^\W_]+")  # a word of a name such as evaluation.train_points
SYNONYMS = ({"lr", "learning_rate"}, {"seed", "seeds"}, {"batch_size", "batches"})
DATABASES = ("postgresql", "mysql", "mssql")
PUBLIC_PARAMETERS = re.compile(r"(ssl(mode|cert|key|rootcert)|user|host|port|driver)=")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a question about the name that means the same, or the most similar one, or ""."""
    for names in SYNONYMS:
        synonyms = (names - {name}).intersection(known)
        if name in names and synonyms:
            return f"Did you mean {min(synonyms)!r}?"
    similar = [other for other in known if _resembles(name, other)]
    close = difflib.get_close_matches(name, similar, 1)
    return f"Did you mean {close[0]!r}?" if close else ""


def _resembles(name: str, other: str) -> bool:
    """Return True if each word of a name is nearly one of the other's; else it means another."""
    words = WORD.findall(other)
    return all(difflib.get_close_matches(word, words, 1) for word in WORD.findall(name))


def without_secrets(text: object) -> str:
    """Remove what could be a password or a token from the addresses in a text."""
    return re.sub(r"\S+", _without_secrets_of_word, str(text))


def _without_secrets_of_word(match: re.Match[str]) -> str:
    word = match[0]
    may_be_address = "://" in word or "?" in word  # else a text of many megabytes would take long
    return ADDRESS.sub(_public_address, word) if may_be_address else word


def _public_address(match: re.Match[str]) -> str:
    """Keep the user name of databases, and those of their parameters that are no secrets."""
    scheme, rest = match.groups()
    if scheme is None:
        return ""

    address, *query = re.split("[?&;]", rest.partition("#")[0])
    is_database = scheme.startswith(DATABASES)
    credentials = re.match(r"([^:/@]*)(:[^@]*)?@", address)
    if credentials:
        user = f"{credentials[1]}@" if is_database and credentials[1] else ""
        address = user + address[credentials.end() :]

    public = []
    if is_database:
        public = [parameter for parameter in query if PUBLIC_PARAMETERS.match(parameter)]
    if not public:
        return f"{scheme}://{address}"
    return f"{scheme}://{address}?{'&'.join(public)}"


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text of at most so many characters: a longer one loses its middle."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 3]} … {text[len(text) - end :]}"


def list_some(texts: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Join the first texts of a list, and say how many more there are."""
    first = separator.join(texts[:most])
    return first if len(texts) <= most else f"{first} and {len(texts) - most} more"


def shorten(message: str) -> str:
    """Cut the long inputs of a message to MOST_CHARACTERS in all; the words between them stay."""
    inputs = LONG_INPUT.findall(message)
    if sum(map(len, inputs)) <= MOST_CHARACTERS:
        return message
    share = max(MOST_CHARACTERS // len(inputs), 4)
    return LONG_INPUT.sub(lambda match: cut(match[0], share), message)


def text_of(error: BaseException) -> str:
    """Return the whole text of an error, whose `str` may raise, in one line with its type."""
    return " ".join(" ".join(traceback.format_exception_only(error)).split())


def reason_of(error: Exception) -> str:
    """Return why a parser refused a text, with the line; of bytes that are not UTF-8, too."""
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"line {line} has bytes that are not {error.encoding.upper()}"
    return cut(" ".join(str(error).split())).rstrip(".") or type(error).__name__


def describe_error(error: BaseException) -> str:
    """Return what a message says of an error: its text, and its type and place if not ours."""
    if isinstance(error, SweepError):
        return str(error)
    return cut(text_of(error)).rstrip(".") + user_location(error)


def user_location(error: BaseException) -> str:
    """Return ` (FILE, line N)` of the last line of the user's code in a traceback, or ""."""
    libraries = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_library = "site-packages" in frame.filename or frame.filename.startswith(libraries)
        if not is_library:
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it, newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def printable(text: object) -> str:
    """Replace characters that could act on a terminal instead of being shown."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(text))


class SweepError(Exception):
    """A mistake or a condition that the user can act on; the command line exits with 2.

    Its message repeats at most MOST_CHARACTERS of an input.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten(message))


class CorruptFile(SweepError):
    """A file does not contain what was written to it."""


class FolderInUse(SweepError):
    """Another live process holds the lock of this folder."""


@contextlib.contextmanager
def user_code(requirement: str) -> Iterator[None]:
    """Raise SweepError with what must hold if the user's code raises in this block."""
    try:
        yield
    except SweepError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"{requirement}, but raised {describe_error(error)}"
        raise SweepError(f"{problem}. Correct it.") from error


class WorkerDied(SweepError):
    """A process ended without returning a result."""

    def __init__(
        self, exit_code: int, message: str = "", timed_out: bool = False, oom_killed: bool = False
    ) -> None:
        super().__init__(message or f"a process ended without a result, exit code {exit_code}")
        self.exit_code = exit_code  # negative for a signal
        self.timed_out = timed_out  # ended after a time limit
        self.oom_killed = oom_killed  # the kernel killed a process for memory meanwhile


class Superseded(Exception):
    """A newer attempt has a higher fencing number, so this one must not write; internal."""


class UnusableCheckpoint(Exception):
    """An intact checkpoint could not be restored; the next attempt starts without it; internal."""
