"""Clocks that are set back or forward do not disorder what is logged."""

import random
import time

import pytest

from sweep.tracking.store import connect, default_tracking_uri
from sweep.trial.folder import State, SweepFolder
from tests.fakes.executors import InlineExecutor
from tests.orchestration.clusters import run_in


@pytest.mark.fault("clock set back and forward")
def test_lines_and_runs_stay_in_order(tmp_path, monkeypatch, count):
    rng, real = random.Random(0), time.time
    monkeypatch.setattr("sweep.training.loop.time.time", lambda: real() + rng.uniform(-1e6, 1e6))
    fields = {"batches": "4", "budget": "400"}
    summary = run_in(tmp_path / "sweep", InlineExecutor(), **fields)
    assert {status.state for status in summary.states.values()} == {State.COMPLETE}
    folder = SweepFolder(tmp_path / "sweep")
    times = [line["time"] for line in folder.trials()[0].read_metrics()]
    assert times == sorted(times) and len(set(times)) > 1
    client = connect(default_tracking_uri(folder))
    (experiment,) = [e for e in client.search_experiments() if e.name != "Default"]
    for run in client.search_runs([experiment.experiment_id]):
        assert run.info.start_time <= run.info.end_time
    count("recovered")
