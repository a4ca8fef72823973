"""Clocks that jump, and processes that are suspended, disorder nothing."""

import os
import signal
import time

import psutil
import pytest

from sweep.trial.lease import read_owner
from tests.faults.damage import INJECT, parameters
from tests.orchestration.clusters import IMPORTED, wait_until


@pytest.mark.fault("clock set back and forward")
@pytest.mark.parametrize("seed", parameters(range(5), [0]))
def test_lines_and_runs_stay_in_order(scene, monkeypatch, count, seed):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(INJECT), IMPORTED)))
    monkeypatch.setenv("CLOCK", str(seed))
    folder = scene.enter("planned")
    assert scene.command().run() == 0
    scene.judge()
    for trial in folder.trials():
        times = [line["time"] for line in trial.read_metrics()]
        assert times == sorted(times) and len(set(times)) > 1
    count("recovered")


@pytest.mark.fault("suspended and resumed")
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5, 60])  # less and more than a silent lease lives
@pytest.mark.parametrize("target", ["command", "worker", "session"])
def test_a_suspended_process_continues(scene, monkeypatch, count, target, seconds):
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    folder = scene.enter("planned")
    run = scene.command()
    run.start()
    wait_until(lambda: any(trial.checkpoints() for trial in folder.trials()), run)
    owners = [read_owner(trial.lease_path) for trial in folder.trials()]
    workers = [owner["pid"] for owner in owners if owner and not owner.get("ended")]
    children = [child.pid for child in psutil.Process(run.process.pid).children(recursive=True)]
    pids = {"command": [], "worker": workers, "session": children}[target]
    pids = pids if target == "worker" else [run.process.pid, *pids]
    for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0)):
        for pid in filter(psutil.pid_exists, pids):
            os.kill(pid, number)
        time.sleep(pause)
    assert run.wait() == 0
    scene.judge()
    count("recovered")
