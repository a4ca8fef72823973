"""JSON files that are written atomically and carry a hash of their content.

Every file has `format_version` and `sha256`, the hash of the canonical rest.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sweep.config.trial import FORMAT_VERSION
from sweep.errors import CorruptFile, SweepError


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
