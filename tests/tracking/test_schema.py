"""A new database: made in one piece, or ahead and copied."""

import subprocess
import sys

from sweep.tracking import store
from sweep.tracking.store import connect

KILLED_WHILE_MAKING_TABLES = """
import os, signal, sys
import mlflow.store.db.utils as utils
utils._upgrade_db = lambda engine: os.kill(os.getpid(), signal.SIGKILL)
import mlflow.store.tracking.sqlalchemy_store
from sweep.tracking.store import connect
connect(sys.argv[1]).search_experiments()
"""

AHEAD = """
import sys, threading
from pathlib import Path
from sweep.tracking import store
from sweep.trial.folder import SweepFolder
for _ in range(2):
    store.import_ahead(SweepFolder(Path(sys.argv[1])), sys.argv[2] or None)
(thread,) = [one for one in threading.enumerate() if one.name == "import-ahead"]
thread.join()
assert "mlflow" in sys.modules
store._make_tables = lambda path: (print("made in place"), path.touch())
print(store.connect(sys.argv[3]).search_experiments()[0].name)
"""


def test_a_kill_while_tables_are_made_leaves_no_half_made_database(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-c", KILLED_WHILE_MAKING_TABLES, uri]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "mlflow.db").exists()
    assert [found.name for found in connect(uri).search_experiments()] == ["Default"]


def ahead(folder, tracking_uri, uri):
    command = [sys.executable, "-c", AHEAD, str(folder), tracking_uri, uri]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
    assert not done.stderr
    return done.stdout.split("\n")[:-1]


def test_tables_made_ahead_are_copied(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert ahead(tmp_path, "", uri) == ["Default"]
    (experiment,) = connect(uri).search_experiments()
    assert experiment.artifact_location == f"{tmp_path}/mlruns/0"  # as if they were made in place


def test_none_are_made_for_a_server_or_for_a_store_that_exists(tmp_path):
    uris = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
    assert ahead(tmp_path, "http://127.0.0.1:1", uris[0])[0] == "made in place"
    (tmp_path / "mlflow.db").touch()
    assert ahead(tmp_path, "", uris[1])[0] == "made in place"


def test_what_fails_ahead_is_done_by_connect(tmp_path, monkeypatch):
    def failing(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_make_tables", failing)
        thread = store._Ahead(makes_tables=True)
        thread.start()
        thread.join()
    monkeypatch.setattr(store, "_ahead", thread)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert [found.name for found in connect(uri).search_experiments()] == ["Default"]
