"""JSON files that are written atomically and carry a hash of their content, and metrics.jsonl."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sweep.config.metrics import MetricNames
from sweep.errors import CorruptFile, SweepError, causes_of, printable, reason_of, text_of
from sweep.resources import read_toml, sha256_of_file
from sweep.version import FORMAT_VERSION, READERS

MAX_JSON_BYTES = 1 << 26  # a plan of 10,000 trials has 1 << 23
MAX_CURVE_BYTES = MAX_JSON_BYTES  # limit of metrics.jsonl for its writers and its reader
SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # ends a journal that names another file
POSITION = {"time": int | float, "step": int, "tokens": int}  # keys that are not metrics
STORAGE_REMEDIES: dict[int, str] = {
    getattr(errno, name): remedy for name, remedy in read_toml(__file__, "storage.toml").items()
}


def cache_dir() -> Path:
    """Return `SWEEP_CACHE`, or `sweep` in the XDG cache folder. Does not create it."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("SWEEP_CACHE") or f"{base}/sweep").expanduser().absolute()
    except RuntimeError as error:  # the user has no home
        raise SweepError("a cache needs a home folder. Set SWEEP_CACHE to a folder.") from error


def require_cache() -> Path:
    """Return the cache folder, which is created; refuse one that cannot be written."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        problem = f"must be a folder that can be written, got {error.strerror!r}"
        raise SweepError(
            f"the cache {folder} {problem}. Set SWEEP_CACHE to another one."
        ) from error
    return folder


def canonical_json(data: Any) -> str:
    """Return JSON in the form that is hashed."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_of(data: Any) -> str:
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def find_sha256(path: Path) -> str | None:
    return sha256_of_file(path) if path.exists() else None


def seal(data: dict[str, Any]) -> dict[str, Any]:
    rest = {"format_version": FORMAT_VERSION, **data}
    return {**rest, "sha256": sha256_of(rest)}


def load_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; huge integers become floats. Raise ValueError if it is none."""
    try:
        data = json.loads(text, parse_int=lambda n: int(n) if len(n) < 20 else float(n))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError("it is not an object")
    if re.search(rb"\\u[dD]", text):  # raises for half a surrogate pair
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it has half a surrogate pair") from error
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Read a sealed JSON file; raise FileNotFoundError, or CorruptFile if it has changed."""
    remedy = "Restore it, or start again."
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CorruptFile(f"{path} must have at most {MAX_JSON_BYTES >> 20} MiB. {remedy}")
    try:
        data = load_json(path.read_bytes())
    except ValueError as error:
        reason = reason_of(error)
        raise CorruptFile(f"{path} must be JSON, but {reason}. {remedy}") from error
    try:
        sha256 = data.pop("sha256")
        version = data["format_version"]
        if sha256 != sha256_of(data):
            raise ValueError
    except (ValueError, KeyError) as error:
        raise CorruptFile(f"{path} does not match its sha256. {remedy}") from error
    if version != FORMAT_VERSION:
        problem = f"must have format_version {FORMAT_VERSION}, got {version!r}"
        reader = READERS.get(version) if isinstance(version, int) else None
        remedy = f"Read it with version {reader} of sweep, or choose" if reader else "Choose"
        raise SweepError(f"{path} {problem}. {remedy} another --out.")
    return data


def find_json(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_json(path: Path, data: dict[str, Any], fence: Callable[[], None] | None = None) -> None:
    """Write a sealed JSON file atomically; `fence` runs before the rename."""
    text = json.dumps(seal(data), indent=1, allow_nan=False) + "\n"
    with replacing(path, fence) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path, fence: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yield a temporary path that durably replaces `path`, unless the block or `fence` raises."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        sync(part)
        if fence:
            fence()
        part.replace(path)
    except OSError as error:
        if not error.filename:  # as errors of writing
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_problem(error: BaseException | None, path: Path) -> str | None:
    """Return a sentence if a full or closed disk, or a limit of the system, led to an error.

    It names the file of the error, or else `path`.
    """
    for cause in causes_of(error):
        number: int = getattr(cause, "errno", None) or 0
        match = re.search(r"\(os error (\d+)\)", text_of(cause))  # from safetensors
        if match:
            number = int(match[1])
        remedy = STORAGE_REMEDIES.get(number)
        if remedy:
            name = getattr(cause, "filename", None) or path
            return f"{name} cannot be written: {os.strerror(number)}. {remedy}."
    return None


# s3://bucket/name, which a path writes with one slash.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def refuse_links(folder: Path) -> None:
    """Refuse a folder, if it exists, that could make a command use a file outside of it.

    Such are links that leave it, devices, pipes, and journals that make SQLite delete a file.
    """
    if not str(folder).isprintable():
        raise SweepError(f"the name of a folder must be plain text, got {printable(folder)!r}.")

    if ADDRESS.match(str(folder)):
        address = str(folder).replace(":/", "://", 1)  # a path has lost one of its slashes
        raise SweepError(
            f"a folder must be one of a file system, got the address {address!r}. Use a local "
            "folder, and copy it when the command has ended; `sweep merge` joins copies of parts."
        )
    root = folder.resolve()
    pending = [str(folder)]
    while pending:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in list(os.scandir(pending.pop())):
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False) or _is_link_within(entry, root):
                    refuse_super_journal(Path(entry.path))
                else:
                    expected = f"a plain file, or a link that stays within {folder}"
                    raise SweepError(f"{entry.path} must be {expected}. Remove it.")


def _is_link_within(entry: os.DirEntry[str], root: Path) -> bool:
    return entry.is_symlink() and Path(os.path.realpath(entry.path)).is_relative_to(root)


def refuse_super_journal(path: Path) -> None:
    """Refuse a rollback journal that names a file, which SQLite would delete."""
    if path.name.endswith("-journal") and path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - len(SUPER_JOURNAL)))
            if file.read() == SUPER_JOURNAL:
                raise SweepError(f"{path} must be the journal of one database. Remove it.")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def with_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite, which JSON lacks, by None."""
    finite = {}
    for key, value in fields.items():
        is_missing = isinstance(value, float) and not math.isfinite(value)
        finite[key] = None if is_missing else value
    return finite


class MetricsLog:
    """Appends to metrics.jsonl, of which it keeps the first `length` bytes.

    `fence` raises if this attempt must not write.
    """

    def __init__(self, path: Path, length: int, fence: Callable[[], None]) -> None:
        start = _read_start(path, length)
        with replacing(path, fence) as part:
            part.write_bytes(start)  # a new file: older attempts cannot write to it
        self.path = path
        self.length = length
        self._digest = hashlib.sha256(start)
        self.sha256 = self._digest.hexdigest()  # hash of all bytes so far
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._names = MetricNames()

    def append(self, line: dict[str, Any]) -> None:
        """Append time, step, tokens and metrics; values that are not finite become null.

        Raises:
            SweepError: if `read_metrics` would refuse the file.
        """
        for name in line.keys() - POSITION:
            self._names.add(name)
        text = json.dumps(with_nulls(line), allow_nan=False)
        data = f"{text}\n".encode()
        check_curve_bytes(self.length + len(data))

        if os.write(self._fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._digest.update(data)
        self.sha256 = self._digest.hexdigest()
        self.length += len(data)

    def flush(self) -> None:
        """Make the lines durable."""
        os.fsync(self._fd)

    def close(self) -> None:
        self.flush()
        os.close(self._fd)


def check_curve_bytes(count: int) -> None:
    """Refuse to write a larger metrics.jsonl than `read_metrics` reads."""
    if count > MAX_CURVE_BYTES:
        problem = f"must have at most {MAX_CURVE_BYTES >> 20} MiB"
        raise SweepError(f"the curves of a trial {problem}. Log fewer metrics, or less often.")


def read_metrics(path: Path, length: int | None = None) -> list[dict[str, Any]]:
    """Read the complete lines of the file, or of its first `length` bytes."""
    if path.exists() and path.stat().st_size > MAX_CURVE_BYTES:
        raise CorruptFile(f"{path} must have at most {MAX_CURVE_BYTES >> 20} MiB.")
    points = []
    for number, line in enumerate(_read_start(path, length).splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            continue  # it is being written
        try:
            point = load_json(line)
            if not _is_point(point):
                raise ValueError("it is not a point of curves")
        except ValueError as error:
            reason = reason_of(error).replace("line 1 column", "column")
            raise CorruptFile(f"{path} is damaged in line {number}: {reason}.") from error
        points.append(point)
    return points


def _is_point(line: dict[str, Any]) -> bool:
    for name, kind in POSITION.items():
        if not isinstance(line.get(name), kind):
            return False
    for name, value in line.items():
        if name not in POSITION and not ("/" in name and name.isprintable()):
            return False
        is_number = isinstance(value, int | float) and abs(value) < math.inf
        if value is not None and not is_number:
            return False
    return True


def is_start_intact(path: Path, length: int, sha256: str | None) -> bool:
    data = _read_start(path, length)
    return len(data) == length and hashlib.sha256(data).hexdigest() == sha256


def _read_start(path: Path, length: int | None) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        return file.read(length)
