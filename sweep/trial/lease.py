"""Who works on a folder: OS locks that die with their owner, and a counter for other machines.

A lock file holds one line of sealed JSON about its owner, overwritten in place.
"""

import contextlib
import fcntl
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from sweep.errors import CorruptFile, FolderInUse
from sweep.trial.files import canonical_json, parse_sealed, seal

BEAT_SECONDS = 5.0  # between two raises of the counter
DEAD_SECONDS = 20.0  # not raised for this long, by the watcher's clock: dead
LINE_BYTES = 512


class FileLock:
    """An OS lock on a file, with a line in it that says who holds it; not inherited.

    Raises:
        FolderInUse: on construction, if another live process holds it.
    """

    def __init__(self, path: Path, owner: dict[str, Any] | None = None) -> None:
        self.path = path
        for _ in range(10):  # `is_locked` holds a lock for an instant
            if self._try():
                break
            time.sleep(0.02)
        else:
            raise self._in_use()
        self.write(owner or {})

    def _try(self) -> bool:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(self._fd), self.path.stat()):
                return True  # else its last owner has just removed the file
        os.close(self._fd)
        return False

    def _in_use(self) -> FolderInUse:
        held = read_owner(self.path)
        is_sweep = self.path.name == "sweep.lock"
        remedy = f", or end it with `sweep stop {self.path.parent}`" if is_sweep else ""
        return FolderInUse(
            f"{self.path.parent} is in use by process {held.get('pid', '?')} on "
            f"{held.get('host', 'another machine')}. Wait for it{remedy}."
        )

    def write(self, owner: dict[str, Any]) -> None:
        """Say who holds the lock: pid and host are added."""
        line = canonical_json(seal({"pid": os.getpid(), "host": socket.gethostname(), **owner}))
        os.pwrite(self._fd, line.encode().ljust(LINE_BYTES - 1) + b"\n", 0)

    def release(self) -> None:
        """Give the lock up; the file stays."""
        os.close(self._fd)

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(path: Path) -> bool:
    """Tell whether a live process of this machine holds the lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def read_owner(path: Path) -> dict[str, Any]:
    """Return what the last owner wrote, or {} where it cannot be read just now."""
    try:
        return parse_sealed(path.read_bytes(), str(path))
    except (OSError, CorruptFile):
        return {}


class Lease:
    """A worker's hold on its trial: the lock on lease.json and a thread that raises its counter."""

    def __init__(self, path: Path, fencing: int) -> None:
        self._lock = FileLock(path, {"fencing": fencing, "counter": 0})
        self._fencing = fencing
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        counter = 0
        while not self._ended.wait(BEAT_SECONDS):
            counter += 1
            self._lock.write({"fencing": self._fencing, "counter": counter})

    def release(self) -> None:
        """End the thread and give the lock up."""
        self._ended.set()
        self._thread.join()
        self._lock.release()


class LeaseWatch:
    """A watcher's view of one lease, judged by the watcher's own monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: dict[str, Any] = {}
        self._changed = time.monotonic()

    def is_alive(self) -> bool:
        """Tell whether the owner lives: on this machine by its lock, elsewhere by its counter."""
        owner = read_owner(self._path)
        if not owner:
            return is_locked(self._path)
        if owner.get("host") == socket.gethostname():
            return is_locked(self._path)
        if owner != self._seen:
            self._seen, self._changed = owner, time.monotonic()
        return time.monotonic() - self._changed < DEAD_SECONDS
