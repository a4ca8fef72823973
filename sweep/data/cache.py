"""What the cache folder needs: hashes that are taken once, locks, and its errors as sentences."""

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

from sweep.config.paths import cache_dir
from sweep.errors import SweepError
from sweep.trial.files import read_json, sha256_of, sha256_of_file, write_json

OnProgress = Callable[[str, float], None]  # what is being done, and the fraction done


def hash_file(path: Path) -> str:
    """Return the sha256 of a file, remembered by its path, size, time and inode."""
    path = path.absolute()
    status = path.stat()
    key = {
        "path": str(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
    }
    entry = cache_dir() / "hashes" / f"{sha256_of(key)[:24]}.json"
    with contextlib.suppress(OSError, SweepError, KeyError):
        return str(read_json(entry)["content_sha256"])
    digest = sha256_of_file(path)
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_json(entry, {**key, "content_sha256": digest})
    return digest


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an OS lock on a file, waiting for it; the lock of a killed process is free."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_error(error: OSError) -> SweepError:
    """Return the error for a cache folder that cannot be used."""
    return SweepError(
        f"the cache folder {str(cache_dir())!r} must be writable with enough space, but "
        f"{error.strerror or error}. Free some space, or set SWEEP_CACHE to another folder."
    )
