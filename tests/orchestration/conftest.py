"""A sweep of the quadratic workload, or of one that fails in a known way."""

from pathlib import Path

import pytest

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.orchestration import runner
from sweep.orchestration.planning import make_plan
from sweep.orchestration.runner import Summary, run_plan
from sweep.trial.folder import SweepFolder
from tests.orchestration.clusters import IMPORTED


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Make `faulty:Name` workloads importable, also in workers and commands."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    monkeypatch.setenv("FAULTY_FOLDER", str(tmp_path))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a sweep of 100 steps at batch size 8 in a folder of tmp_path, with real workers."""
    monkeypatch.setattr(runner, "MIRROR_SECONDS", 300.0)  # MLflow is slow on a busy machine

    def run_here(
        executor=None, also=frozenset(), logistics=None, name="sweep", **settings
    ) -> Summary:
        folder = SweepFolder(tmp_path / name)
        fields = {"batches": "4,8", "budget": "800", **settings}
        experiment = load_experiment("quadratic", fields)
        planned = make_plan(experiment, logistics or Execution(device="cpu"), folder)
        return run_plan(planned, folder, executor=executor, also=also)

    return run_here
