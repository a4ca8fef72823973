"""JSON files that are written atomically and carry a hash of their content, and metrics.jsonl."""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sweep.config.trial import FORMAT_VERSION
from sweep.errors import CorruptFile, SweepError


def cache_dir() -> Path:
    """Return `SWEEP_CACHE`, or `sweep` in the XDG cache folder. Does not create it."""
    if chosen := os.environ.get("SWEEP_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "sweep"


def canonical_json(data: Any) -> str:
    """Return JSON in the form that is hashed."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_of(data: Any) -> str:
    """Return the hex sha256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def sha256_of_file(path: Path, length: int | None = None) -> str:
    """Return the hex sha256 of a file, or of its first `length` bytes."""
    digest = hashlib.sha256()
    remaining = path.stat().st_size if length is None else length
    with path.open("rb") as file:
        while remaining > 0 and (chunk := file.read(min(remaining, 1 << 20))):
            digest.update(chunk)
            remaining -= len(chunk)
    return digest.hexdigest()


def seal(data: dict[str, Any]) -> dict[str, Any]:
    """Add `format_version` and `sha256` to a document."""
    rest = {key: value for key, value in data.items() if key != "sha256"}
    rest = {"format_version": FORMAT_VERSION, **rest}
    return {**rest, "sha256": sha256_of(rest)}


def parse_sealed(text: str | bytes, subject: str) -> dict[str, Any]:
    """Read a sealed document.

    Raises:
        CorruptFile: if it is not JSON, or not what was sealed.
        SweepError: if another version of sweep wrote it.
    """
    try:
        data = json.loads(text)
        given = data.pop("sha256")
        version = data["format_version"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptFile(
            f"{subject} must be a JSON document with a sha256, but it is damaged. "
            "Restore it from a copy, or move the folder away and start again."
        ) from error
    if version != FORMAT_VERSION:
        raise SweepError(
            f"{subject} must have format_version {FORMAT_VERSION}, got {version!r}. "
            "Use the version of sweep that wrote it."
        )
    if given != sha256_of(data):
        raise CorruptFile(
            f"{subject} does not match its sha256: it was changed or damaged. "
            "Restore it from a copy, or move the folder away and start again."
        )
    return dict(data)


def read_json(path: Path) -> dict[str, Any]:
    """Read a sealed JSON file.

    Raises:
        FileNotFoundError: if it does not exist.
        CorruptFile: if it is damaged.
    """
    return parse_sealed(path.read_bytes(), str(path))


def write_json(path: Path, data: dict[str, Any], check: Callable[[], None] | None = None) -> None:
    """Write a sealed JSON file atomically; `check` runs before the rename."""
    text = json.dumps(seal(data), indent=1, allow_nan=False) + "\n"
    with replacing(path, check) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path, check: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yield a temporary path; on success it durably replaces `path`.

    Args:
        check: called between writing and renaming; raises to keep the old file.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        if check:
            check()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class MetricsLog:
    """Appends to metrics.jsonl.

    Opening it copies the first `length` bytes to a new file, so that a handle of an older attempt
    cannot write to it.

    Args:
        path: of metrics.jsonl.
        length: bytes up to the checkpoint; 0 for a new trial.
        check: raises if this attempt must not write.
    """

    def __init__(self, path: Path, length: int, check: Callable[[], None]) -> None:
        with replacing(path, check) as part:
            copy_start(path, part, length)
        self.path, self.length = path, length
        self._digest = hashlib.sha256(path.read_bytes())
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    @property
    def sha256(self) -> str:
        """Hash of all bytes so far."""
        return self._digest.hexdigest()

    def append(self, line: dict[str, Any]) -> None:
        """Append one line of time, step, tokens and metrics; non-finite values become null."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in line.items()
        }
        data = (json.dumps(clean, allow_nan=False) + "\n").encode()
        written = os.write(self._fd, data)
        if written != len(data):
            raise OSError(f"{self.path}: wrote {written} of {len(data)} bytes; is the disk full?")
        self._digest.update(data)
        self.length += len(data)

    def close(self) -> None:
        """Make the lines durable and close the file."""
        os.fsync(self._fd)
        os.close(self._fd)

    def flush(self) -> None:
        """Make the lines durable."""
        os.fsync(self._fd)


class SilentLog(MetricsLog):
    """The log of ranks other than 0, which writes nothing."""

    def __init__(self) -> None:
        self.length = 0

    @property
    def sha256(self) -> str:
        """Empty."""
        return ""

    def append(self, line: dict[str, Any]) -> None:
        """Do nothing."""

    close = flush = lambda self: None


def copy_start(source: Path, target: Path, length: int) -> None:
    """Copy the first `length` bytes of a file; a missing file counts as empty."""
    with target.open("wb") as out:
        if length and source.exists():
            with source.open("rb") as file:
                shutil.copyfileobj(file, out)
            out.truncate(length)


def read_metrics(path: Path, start: int = 0, end: int | None = None) -> list[dict[str, Any]]:
    """Read the lines between two byte offsets, without an incomplete last line."""
    return [line for line, _ in read_metrics_with_offsets(path, start, end)]


def read_metrics_with_offsets(
    path: Path, start: int = 0, end: int | None = None
) -> list[tuple[dict[str, Any], int]]:
    """Read complete lines, each with the byte offset after it."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        data = file.read() if end is None else file.read(max(0, end - start))
    lines, offset = [], start
    for raw in data.splitlines(keepends=True):
        offset += len(raw)
        if raw.endswith(b"\n"):
            lines.append((json.loads(raw), offset))
    return lines


def is_start_intact(path: Path, length: int, sha256: str) -> bool:
    """Return True if the first `length` bytes have this hash."""
    if length == 0 and not path.exists():
        return sha256 == hashlib.sha256().hexdigest()
    return (
        path.exists() and path.stat().st_size >= length and sha256_of_file(path, length) == sha256
    )
