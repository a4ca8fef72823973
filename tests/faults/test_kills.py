"""Kill processes at named points and at random; the same command then ends the sweep."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from sweep.trial.lease import read_owner
from tests.orchestration.clusters import IMPORTED

INJECT = Path(__file__).parent / "inject"
POINTS = {  # process, event and path; each is met several times
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
CASES = [(point, number) for point in POINTS for number in (1, 2)]
SHORT = [("checkpoint", 2)]


@pytest.fixture
def command(scene, monkeypatch, tmp_path):
    """Run the command with a fault; return its exit code."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(INJECT), IMPORTED)))
    run = scene.command()

    def with_fault(**fault):
        scene.enter("planned")
        fault["once"] = str(tmp_path / "once")
        monkeypatch.setenv("FAULT", json.dumps(fault))
        code = run.run()
        assert (tmp_path / "once").exists(), "the point was never met"
        return code, run

    yield with_fault
    run.kill()


@pytest.mark.fault("killed at a named point")
@pytest.mark.parametrize(
    ("point", "number"),
    [pytest.param(*case, marks=() if case in SHORT else pytest.mark.slow) for case in CASES],
)
def test_a_kill_at_a_named_point_costs_nothing(scene, command, count, point, number):
    process, event, path = POINTS[point]
    code, run = command(process=process, event=event, path=path, number=number, action="kill")
    if code:
        assert run.run() == 0
    scene.judge()
    count("recovered")


@pytest.mark.fault("killed at random")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["command", "worker", "both", "session"])
def test_random_kills_cost_nothing(scene, monkeypatch, count, target):
    rng, kills = random.Random(target), 0
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    while kills < 25:
        scene.enter("planned")
        run, code = scene.command(), None
        while code != 0:
            run.start()
            while target == "worker" and run.process.poll() is None and not workers(scene.folder):
                time.sleep(0.02)  # there is none while the command starts
            deadline = time.monotonic() + rng.uniform(0.0, 2.0 if target == "worker" else 8.0)
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
