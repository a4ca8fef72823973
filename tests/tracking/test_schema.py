"""A database whose making is interrupted is made again."""

import subprocess
import sys

from sweep.tracking.store import connect

KILLED_WHILE_MAKING_TABLES = """
import os, signal, sys
import mlflow.store.db.utils as utils
utils._upgrade_db = lambda engine: os.kill(os.getpid(), signal.SIGKILL)
import mlflow.store.tracking.sqlalchemy_store
from sweep.tracking.store import connect
connect(sys.argv[1]).search_experiments()
"""


def test_a_kill_while_tables_are_made_leaves_no_half_made_database(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-c", KILLED_WHILE_MAKING_TABLES, uri]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "mlflow.db").exists()
    assert [found.name for found in connect(uri).search_experiments()] == ["Default"]
