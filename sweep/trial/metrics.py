"""metrics.jsonl: one line per log point, truncated to the checkpoint on resume."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweep.trial.files import replacing, sha256_of_file


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
