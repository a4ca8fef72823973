"""Sweeps with workloads that may fail in known ways, and commands that run them."""

from pathlib import Path

import pytest

from sweep.config.execution import Services
from sweep.orchestration import runner
from tests.orchestration.clusters import IMPORTED, Command, run_in


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Make `faulty:Name` workloads importable, also in workers and commands."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    monkeypatch.setenv("FAULTY_FOLDER", str(tmp_path))


@pytest.fixture
def go(faulty, tmp_path):
    """The file that lets trials of faulty:WaitsForGo continue after step 50."""
    yield tmp_path / "go"
    (tmp_path / "go").touch()  # no worker is left waiting


@pytest.fixture
def command():
    """Make commands that run the trials of a folder; none outlives the test."""
    commands = []

    def make(folder, *options):
        commands.append(Command(folder, *options))
        return commands[-1]

    yield make
    for one in commands:
        one.kill()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a sweep of 100 steps at batch size 8 in a folder of tmp_path, with real workers."""
    monkeypatch.setattr(runner, "MIRROR_SECONDS", 300.0)  # MLflow is slow on a busy machine

    def run_here(executor=None, name="sweep", tracking_uri=None, **settings):
        fields = {"batches": "4,8", "budget": "800", **settings}
        return run_in(tmp_path / name, executor, Services(tracking_uri=tracking_uri), **fields)

    return run_here
