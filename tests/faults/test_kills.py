"""Kill processes at named points and at random; the same command then ends the sweep."""

import contextlib
import os
import random
import signal
import time

import psutil
import pytest

from sweep.trial.lease import read_owner
from tests.faults.damage import POINTS, Fault, parameters
from tests.orchestration.clusters import IMPORTED

CASES = [(point, number) for point in POINTS for number in (1, 2)]
SHORT = [("checkpoint", 2)]


@pytest.mark.fault("killed at a named point")
@pytest.mark.parametrize(("point", "number"), parameters(CASES, SHORT))
def test_a_kill_at_a_named_point_costs_nothing(scene, monkeypatch, tmp_path, count, point, number):
    scene.enter("planned")
    fault = Fault(monkeypatch, tmp_path / "hits", point, number, "kill")
    codes = [scene.command().run()]
    assert fault.has_happened()
    if codes[0]:
        codes.append(scene.command().run())
    assert codes[-1] == 0
    scene.judge()
    count("recovered")


@pytest.mark.fault("killed at random")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["command", "worker", "both", "session"])
def test_random_kills_cost_nothing(scene, monkeypatch, count, target):
    rng, kills = random.Random(target), 0
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    scene.enter("planned")
    started = time.monotonic()
    assert scene.command().run() == 0
    seconds = (time.monotonic() - started) * (0.3 if target == "worker" else 1.3)
    while kills < 25:
        scene.enter("planned")
        run, code = scene.command(), None
        while code != 0:
            run.start()
            while target == "worker" and run.process.poll() is None and not workers(scene.folder):
                time.sleep(0.02)  # there is none while the command starts
            deadline = time.monotonic() + rng.uniform(0.0, seconds)
            while run.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            kills += kill(run, target)
            code = run.process.wait()
        scene.judge()
    count("recovered", kills)


def workers(folder):
    owners = [read_owner(trial.lease_path) for trial in folder.trials()]
    return [owner["pid"] for owner in owners if owner and not owner.get("ended")]


def kill(run, target):
    """Kill processes of a command; return True if any was alive."""
    if run.process.poll() is not None:
        return False
    root, running = run.process.pid, workers(run.folder)
    family = [child.pid for child in psutil.Process(root).children(True)]
    pids = {"command": [root], "worker": running, "both": [root, *running]}
    is_killed = False
    for pid in pids.get(target, [root, *family]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            is_killed = True
    return is_killed
