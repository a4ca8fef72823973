"""User code that misbehaves fails its own trials only, and no process of it remains."""

import os
from pathlib import Path

import psutil
import pytest

from sweep.trial.folder import State
from tests.orchestration.clusters import IMPORTED, run_in

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
    "ReturnsNothing": (("FAILED", "diverged"), ""),
    **dict.fromkeys(
        ("LeavesAThread", "LeavesAChild", "LeavesAPythonChild", "HangsAtExit", "Prints",
         "ClosesItsOutput", "ChangesFolder", "ClearsTheEnvironment", "BreaksSearchPath", "Seeds",
         "IgnoresSignals", "Warns", "UsesManyThreads", "LeavesFiles"),
        (DONE, ""),
    ),
}  # fmt: skip
SHORT = ("RaisesUnprintable", "LeavesAThread", "LeavesAChild")


@pytest.mark.fault("misbehaving code")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in ENDS]
)
def test_a_mistake_of_the_user_costs_its_own_trials(tmp_path, monkeypatch, services, count, name):
    end, message = ENDS[name]
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parent), IMPORTED)))
    monkeypatch.setenv("ROGUE_SWEEP", str(tmp_path / "sweep"))
    services = services.model_copy(update={"stall_minutes": 0.1})
    fields = {"batches": "4,8", "budget": "800", "workload": f"rogue:{name}", "model": "quadratic"}
    summary = run_in(tmp_path / "sweep", services=services, **fields)
    statuses = summary.states.values()
    if end is not None:
        ends = {(str(status.state), status.cause and str(status.cause)) for status in statuses}
        assert ends == {end}, statuses
    text = summary.problem + " ".join(status.message for status in statuses)
    assert message in text and "\x1b" not in text and len(text) < 5000
    assert {status.state for status in statuses} <= {State.COMPLETE, State.FAILED, State.WAITING}
    sizes = [path.stat().st_size for path in (tmp_path / "sweep").rglob("log.txt")]
    assert max(sizes, default=0) < 2**27
    mine = psutil.Process(os.getpid()).children(recursive=True)
    assert not [child for child in mine if child.name() == "sleep"]
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "612"]
    ]
    count("recovered" if end == DONE else "refused")
