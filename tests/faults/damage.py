"""Faults that the tests inject: errors and kills at named points, wrong bytes, locked databases."""

import json
import os
import sqlite3
from pathlib import Path
from random import Random

import pytest

from sweep.resources import sha256_of_file
from tests.orchestration.clusters import IMPORTED

INJECT = Path(__file__).parent / "inject"
POINTS = {  # process, event and path
    "state": ("command", "os.rename", r"/state\.json$"),
    "plan": ("command", "os.rename", r"/plan\.json$"),
    "record of the mirror": ("command", "os.rename", r"/tracking\.json$"),
    "database": ("command", "sqlite3.connect", r"mlflow\.db"),
    "report": ("command", "os.rename", r"/report\.(md|html)$"),
    "table": ("command", "os.rename", r"/trials\.csv$"),
    "checkpoint": ("worker", "os.rename", r"/checkpoint-\d+-\d+$"),
    "seal of a checkpoint": ("worker", "os.rename", r"/checkpoint\.json$"),
    "log of metrics": ("worker", "os.rename", r"/metrics\.jsonl$"),
    "losses": ("worker", "os.rename", r"/valid_losses\.npy$"),
    "weights": ("worker", "os.rename", r"/weights\.safetensors$"),
    "result": ("worker", "os.rename", r"/result\.json$"),
    "lease": ("worker", "open", r"/lease\.json$"),
    "removal of a checkpoint": ("worker", "shutil.rmtree", r"/checkpoint-"),
}
WRONG_BYTES = [f"flip {number}" for number in range(20)]
WRONG_BYTES += ["truncated", "zeros", "junk", "empty", "absent"]


def parameters(cases, short):
    """Return parameters for a test; those that are not in `short` are slow."""
    cases = list(cases)
    assert all(case in cases for case in short)
    return [
        pytest.param(*values, marks=() if case in short else pytest.mark.slow)
        for case in cases
        for values in [case if isinstance(case, tuple) else (case,)]
    ]


class Fault:
    """An error (the name of an errno) or a kill at the given passage of a point.

    Passages are counted over all processes that start while the fault is set.
    """

    def __init__(
        self, monkeypatch, hits: Path, point: str, number: int, action: str, lasts: bool = False
    ) -> None:
        self.hits, self.number = hits, number
        process, event, path = POINTS[point]
        fault = {"process": process, "event": event, "path": path, "action": action}
        fault |= {"hits": str(hits), "number": number, "lasts": lasts}
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(INJECT), IMPORTED)))
        monkeypatch.setenv("FAULT", json.dumps(fault))

    def has_happened(self) -> bool:
        return self.hits.exists() and self.hits.stat().st_size >= self.number


def damage(path: Path, fault: str, rng: Random) -> None:
    """Put wrong bytes, one of `WRONG_BYTES`, into a file."""
    content = bytearray(path.read_bytes())
    path.unlink()
    match fault.partition(" ")[0]:
        case "flip":
            index, bit = divmod(rng.randrange(8 * len(content)), 8)
            content[index] ^= 1 << bit
        case "truncated":
            del content[rng.randrange(len(content)) :]
        case "zeros":
            content = bytes(len(content))
        case "junk":
            content = rng.randbytes(300)
        case "empty":
            content = b""
        case "absent":
            return
    path.write_bytes(content)


def lock_database(path: Path) -> sqlite3.Connection:
    """Lock a database exclusively until the connection is closed."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    return connection


def hash_files(folder: Path) -> dict[Path, str]:
    """Return the sha256 of every file of a folder, except its lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "sweep.lock")
    return {path: sha256_of_file(path) for path in files}
