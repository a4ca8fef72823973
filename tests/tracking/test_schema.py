"""A new database is a copy of an empty one, whose making may be interrupted or impossible."""

import subprocess
import sys

import pytest

from sweep.tracking.store import connect

KILLED_WHILE_MAKING_TABLES = """
import os, signal, sys
import mlflow.store.db.utils as utils
utils._upgrade_db = lambda engine: os.kill(os.getpid(), signal.SIGKILL)
import mlflow.store.tracking.sqlalchemy_store
from sweep.tracking.store import connect
connect(sys.argv[1]).search_experiments()
"""

WARM_UP = """
import threading
from sweep.tracking.store import warm_up
warm_up()
warm_up()
(thread,) = [one for one in threading.enumerate() if one.name == "warm-up"]
thread.join()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own."""
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_kill_while_tables_are_made_leaves_no_half_made_database(tmp_path, cache):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-c", KILLED_WHILE_MAKING_TABLES, uri]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "mlflow.db").exists()
    assert not list(cache.rglob("empty*"))
    assert [found.name for found in connect(uri).search_experiments()] == ["Default"]


def test_tables_are_made_once_in_the_cache_and_copied(tmp_path, cache):
    first, second = (f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second"))
    connect(first).create_experiment("one")
    (empty,) = cache.rglob("empty*")
    made = empty.stat().st_mtime_ns
    assert [found.name for found in connect(second).search_experiments()] == ["Default"]
    assert empty.stat().st_mtime_ns == made


def test_without_a_cache_tables_are_made_in_place(tmp_path, cache):
    cache.write_text("no folder")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert [found.name for found in connect(uri).search_experiments()] == ["Default"]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_command_warms_up_before_it_trains_and_may_fail_at_it(tmp_path, cache, is_refused):
    if is_refused:
        cache.write_text("no folder")
    command = [sys.executable, "-c", WARM_UP]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr
    assert len(list(tmp_path.rglob("empty*"))) == (0 if is_refused else 1)
