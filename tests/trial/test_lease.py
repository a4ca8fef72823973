"""Locks die with their owner; counters decide where locks are not shared."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest

from sweep.errors import FolderInUse, SweepError
from sweep.trial import lease
from sweep.trial.files import canonical_json, seal
from sweep.trial.lease import Lease, LeaseWatch, is_locked, read_owner, refuse_live_owner_elsewhere

HOLD = """
import sys, time
from pathlib import Path
from sweep.trial.lease import Lease
lock = Lease(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A live process that holds tmp_path/sweep.lock."""
    path = tmp_path / "sweep.lock"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"locked\n"
    yield process, path
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_held_lock_names_its_owner_and_is_free_once_the_owner_is_killed(holder):
    process, path = holder
    assert is_locked(path)
    with pytest.raises(FolderInUse, match=f"process {process.pid}"):
        Lease(path)
    process.kill()
    process.wait()
    assert not is_locked(path)
    with Lease(path):
        assert is_locked(path)


def test_looking_at_a_lock_does_not_take_it(tmp_path):
    path = tmp_path / "l"
    with Lease(path):
        assert is_locked(path) and is_locked(path)
    assert not is_locked(path)
    assert not is_locked(tmp_path / "missing")


def test_a_lease_raises_its_counter_and_outlives_a_write_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.02)
    failures, pwrite, path = [OSError(5, "an I/O error")] * 2, os.pwrite, tmp_path / "lease.json"

    def fails_twice(*arguments):
        if threading.current_thread().name == "lease" and failures:
            raise failures.pop()
        return pwrite(*arguments)

    monkeypatch.setattr(lease.os, "pwrite", fails_twice)
    with Lease(path, fencing=3):
        deadline = time.monotonic() + 300
        while read_owner(path).get("counter", 0) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert read_owner(path)["fencing"] == 3
        assert LeaseWatch(path).is_alive()
    assert not failures
    assert not LeaseWatch(path).is_alive()


def test_on_another_machine_a_counter_that_stands_still_is_dead(tmp_path, monkeypatch):
    path, now = tmp_path / "lease.json", [0.0]
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])

    write_elsewhere(path, counter=1)
    watch = LeaseWatch(path)
    assert watch.is_alive()
    now[0] = 19.0
    assert watch.is_alive()
    write_elsewhere(path, counter=2)
    now[0] = 38.0
    assert watch.is_alive()
    now[0] = 58.1
    assert not watch.is_alive()


def write_elsewhere(path, **owner):
    owner = {"host": "elsewhere", "pid": 1, "folder": path.parent.name, **owner}
    path.write_text(canonical_json(seal(owner)))


def test_on_another_machine_a_lease_that_was_given_up_is_dead_at_once(tmp_path):
    path = tmp_path / "lease.json"
    with Lease(path, fencing=3):
        pass
    owner = read_owner(path)
    assert owner["ended"]
    write_elsewhere(path, **{**owner, "host": "elsewhere"})
    assert not LeaseWatch(path).is_alive()


def test_an_owner_on_another_machine_is_refused_while_it_raises_its_counter(tmp_path, monkeypatch):
    path, now = tmp_path / "sweep.lock", [0.0]
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lease.time, "sleep", lambda seconds: write_elsewhere(path, counter=1))
    write_elsewhere(path, counter=0)
    with pytest.raises(FolderInUse, match="process 1 on elsewhere"):
        refuse_live_owner_elsewhere(path)
    monkeypatch.setattr(lease.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    refuse_live_owner_elsewhere(path)
    assert 20 <= now[0] <= 21


@pytest.mark.parametrize("change", [{"folder": "another"}, {"fencing": "1"}, {"pid": -1}])
def test_the_lease_of_another_trial_or_with_nonsense_has_no_owner(tmp_path, change):
    path = tmp_path / "lease.json"
    write_elsewhere(path, counter=1)
    assert read_owner(path)
    write_elsewhere(path, **change)
    assert read_owner(path) == {}


def test_a_torn_owner_line_is_not_an_error(tmp_path):
    (tmp_path / "l").write_bytes(b'{"pid": 1, "ho')
    assert read_owner(tmp_path / "l") == {}


@pytest.mark.parametrize("name", ["ENOLCK", "EOPNOTSUPP", "ENOSYS", "EACCES", "EIO"])
def test_a_file_system_without_locks_is_not_a_busy_folder(tmp_path, monkeypatch, name):
    def fail(*_):
        number = getattr(errno, name)
        raise OSError(number, os.strerror(number))

    path = tmp_path / "sweep.lock"
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", fail)
    for take in (Lease, is_locked, refuse_live_owner_elsewhere, LeaseWatch(path).is_alive):
        path.touch()
        with pytest.raises(SweepError) as refused:
            take() if take.__name__ == "is_alive" else take(path)
        assert not isinstance(refused.value, FolderInUse)
        assert os.strerror(getattr(errno, name)) in str(refused.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_that_another_process_holds_is_the_only_sign_of_one(holder):
    _, path = holder
    with path.open("rb+") as file:
        assert not lease.try_lock(file, path, fcntl.LOCK_SH)
    free = path.with_name("free")
    with free.open("wb") as file:
        assert lease.try_lock(file, free, fcntl.LOCK_EX)
