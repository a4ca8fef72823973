"""Leases on folders: an OS lock for this machine, and a counter for other machines."""

import contextlib
import fcntl
import os
import socket
import threading
import time
from pathlib import Path
from typing import IO, Any

from sweep.errors import FolderInUse, SweepError
from sweep.trial.files import canonical_json, read_json, seal

BEAT_SECONDS = 5.0  # between two increments of the counter
DEAD_SECONDS = 20.0  # without an increment, by the watcher's clock


def try_lock(
    file: int | IO[Any], path: Path, operation: int, remedy: str = "Choose another --out"
) -> bool:
    """Take a lock of an open file without waiting; return False if a live process holds it.

    Any other failure is one of the file system, and would make a free folder look busy for ever.
    """
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        problem = f"{path} must be on a file system with locks (flock), got {error.strerror!r}"
        mount = "or mount the file system with locks"
        raise SweepError(f"{problem}. {remedy}, {mount}.") from error
    return True


class Lease(contextlib.AbstractContextManager["Lease"]):
    """A lock, with an incremented counter; raises FolderInUse if a live process holds it."""

    def __init__(self, path: Path, fencing: int = 0) -> None:
        for _ in range(10):  # `is_locked` takes the lock for an instant
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            is_kept = False
            try:
                is_kept = try_lock(self._fd, path, fcntl.LOCK_EX) and _is_at(self._fd, path)
            finally:
                if not is_kept:
                    os.close(self._fd)
            if is_kept:
                break
            time.sleep(0.02)
        else:
            raise _in_use(path)

        self._owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "fencing": fencing,
            "folder": path.absolute().parent.name,
        }
        self._ended = threading.Event()
        self._write(counter=0)
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def _write(self, **fields: Any) -> None:
        line = canonical_json(seal({**self._owner, **fields}))
        os.pwrite(self._fd, line.encode().ljust(511) + b"\n", 0)  # overwrites the last line
        os.fsync(self._fd)  # a network file system shows it to other machines only then

    def _beat(self) -> None:
        counter = 0
        while not self._ended.wait(BEAT_SECONDS):
            counter += 1
            with contextlib.suppress(OSError):  # the file system may be back at the next beat
                self._write(counter=counter)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._write(ended=True)
        os.close(self._fd)


def _is_at(file: int, path: Path) -> bool:
    """Return True if this open file is still at its path; its last owner may have removed it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Return True if a live process of this machine holds the lock."""
    with contextlib.suppress(OSError), path.open("rb+") as file:
        return not try_lock(file, path, fcntl.LOCK_SH)
    return False


def read_owner(path: Path) -> dict[str, Any]:
    """Return the last line that an owner wrote; empty if it is damaged, or of another folder."""
    with contextlib.suppress(OSError, SweepError):
        owner = read_json(path)
        numbers = (owner.get(name, 0) for name in ("pid", "fencing", "counter"))
        # A sweep's folder may have another name on another machine; a trial's is its id.
        is_own = path.name != "lease.json" or owner.get("folder") == path.absolute().parent.name
        if is_own and all(isinstance(number, int) and number >= 0 for number in numbers):
            return owner
    return {}


class LeaseWatch:
    """Judges whether an owner lives: on this machine by its lock, elsewhere by its counter."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: dict[str, Any] = {}
        self._changed = time.monotonic()

    def is_alive(self) -> bool:
        owner = read_owner(self._path) or self._seen  # unreadable now: as last read
        if not owner or owner.get("host") == socket.gethostname():
            return is_locked(self._path)
        if owner != self._seen:
            self._seen = owner
            self._changed = time.monotonic()
        return not owner.get("ended") and time.monotonic() - self._changed < DEAD_SECONDS


def refuse_live_owner_elsewhere(path: Path) -> None:
    """Raise FolderInUse if an owner on another machine increments its counter within 20 s."""
    watch = LeaseWatch(path)
    before = read_owner(path)
    while watch.is_alive() and before.get("host") != socket.gethostname():
        if read_owner(path).get("counter", 0) > before.get("counter", 0):
            raise _in_use(path)
        time.sleep(BEAT_SECONDS / 10)


def _in_use(path: Path) -> FolderInUse:
    owner = read_owner(path)
    process = f"process {owner.get('pid', '?')} on {owner.get('host', 'another machine')}"
    return FolderInUse(f"{path.parent} is in use by {process}. Wait for it, or call `sweep stop`.")
