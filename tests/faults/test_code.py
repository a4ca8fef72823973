"""User code that misbehaves fails its own trials only, and no process of it remains."""

import os
from pathlib import Path

import psutil
import pytest

from sweep.trial.folder import SweepFolder
from sweep.trial.status import State
from tests.faults.damage import parameters
from tests.faults.judge import science
from tests.orchestration.clusters import IMPORTED, run_in

HERE = Path(__file__).parent
DONE, ERROR, LOST = ("COMPLETE", None), ("FAILED", "error"), ("FAILED", "lost")
ENDS = {  # of the trials; a part of the message
    "Raises": (ERROR, "ValueError: a mistake in two lines"),
    "RaisesMuch": (ERROR, "ValueError: xxx"),
    "RaisesUnprintable": (ERROR, "Unprintable"),
    "RaisesChained": (ERROR, "outer"),
    "RaisesGroup": (ERROR, "several"),
    "RaisesKeyboardInterrupt": (ERROR, "KeyboardInterrupt"),
    "Exits": (ERROR, "SystemExit"),
    "ExitsAtOnce": (LOST, "exit code 0"),
    "Aborts": (LOST, "SIGABRT"),
    "Crashes": (LOST, "SIGSEGV"),
    "RunsOutOfMemory": (("FAILED", "out_of_memory"), ""),
    "Recurses": (ERROR, "RecursionError"),
    "Loops": (LOST, "--stall-minutes"),
    "HangsInNativeCode": (LOST, "--stall-minutes"),
    "TakesAllDescriptors": (("WAITING", None), "ulimit -n"),
    "DeletesItsFolder": (None, ""),
    "ReturnsAFloat": (ERROR, ""),
    "ReturnsNaN": (("FAILED", "diverged"), ""),
    "ReturnsText": (ERROR, ""),
    "ReturnsNothing": (ERROR, "evaluate_finally must return a FinalEvaluation, got NoneType"),
    **dict.fromkeys(
        ("LeavesAThread", "LeavesAChild", "LeavesAPythonChild", "HangsAtExit", "Prints",
         "ClosesItsOutput", "ChangesFolder", "ClearsTheEnvironment", "BreaksSearchPath", "Seeds",
         "IgnoresSignals", "Warns", "UsesManyThreads", "LeavesFiles"),
        (DONE, ""),
    ),
}  # fmt: skip
SHORT = ("RaisesUnprintable", "LeavesAThread", "LeavesAChild")


@pytest.fixture
def run_code(monkeypatch, tmp_path, services):
    """Return a function that runs a sweep of a workload of rogue.py."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(HERE), IMPORTED)))

    def run(name):
        folder = SweepFolder(tmp_path / name)
        monkeypatch.setenv("ROGUE_SWEEP", str(folder.path))
        fields = {"batches": "4,8", "budget": "800", "workload": f"rogue:{name}"}
        stalls = services.model_copy(update={"stall_minutes": 0.1})
        return folder, run_in(folder.path, services=stalls, **fields)

    return run


def numbers(folder):
    """Return the numbers of the trials in the order of their batch sizes."""
    trials = [science(trial) for trial in folder.trials()]
    for trial in trials:
        del trial["result"]["id"]
    return sorted(trials, key=lambda trial: trial["result"]["batch_size"])


@pytest.mark.fault("misbehaving code")
@pytest.mark.parametrize("name", parameters(ENDS, SHORT))
def test_a_mistake_of_the_user_costs_its_own_trials(run_code, count, name):
    end, message = ENDS[name]
    folder, summary = run_code(name)
    statuses = summary.states.values()
    if end is not None:
        ends = {(str(status.state), status.cause and str(status.cause)) for status in statuses}
        assert ends == {end}, statuses
    text = summary.problem + " ".join(status.message for status in statuses)
    assert message in text and "\x1b" not in text and len(text) < 5000
    assert {status.state for status in statuses} <= {State.COMPLETE, State.FAILED, State.WAITING}
    sizes = [path.stat().st_size for path in folder.path.rglob("log.txt")]
    printed = 200 * 2**20 if name == "Prints" else 0  # the log keeps all
    assert printed <= max(sizes, default=0) < printed + 2**27
    processes = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "612"] not in processes
    if end == DONE:
        assert numbers(folder) == numbers(run_code("Rogue")[0])
    count("recovered" if end == DONE else "refused")
