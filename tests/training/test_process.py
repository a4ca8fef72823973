"""Functions in fresh processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from sweep.errors import WorkerDied
from sweep.training.process import FreshProcess


def double(number, should_stop):
    return 2 * number


def die(should_stop):
    os.kill(os.getpid(), signal.SIGKILL)


def wait_until_told(should_stop):
    while (word := should_stop()) is None:
        time.sleep(0.01)
    return word


def has_inductor(should_stop):
    return "torch._inductor.compile_fx" in sys.modules


def sleep(path, should_stop):
    path.write_text(str(os.getpid()))
    time.sleep(60)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


def test_a_result_comes_back_and_a_death_is_named():
    assert FreshProcess("test_process:double", 21).result() == 42
    with pytest.raises(WorkerDied) as died:
        FreshProcess("test_process:die").result()
    assert died.value.exit_code == -signal.SIGKILL


def test_inductor_is_imported_once_told_for_the_processes_that_follow():
    code = """
from sweep.training.process import FreshProcess, import_inductor_ahead
print(FreshProcess("test_process:has_inductor").result())
import_inductor_ahead()
import_inductor_ahead()
print([FreshProcess("test_process:has_inductor").result() for _ in range(2)])
"""
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed.split("\n") == ["False", "[True, True]", ""]


def test_it_can_be_told_to_stop_and_is_killed_after_a_timeout(tmp_path):
    process = FreshProcess("test_process:wait_until_told")
    process.stop()
    assert process.result() == "stopped"
    with pytest.raises(WorkerDied):
        FreshProcess("test_process:sleep", tmp_path / "pid").result(timeout=0.5)


def test_it_does_not_outlive_a_parent_that_was_killed(tmp_path):
    pid = tmp_path / "pid"
    program = (
        "import sys; from pathlib import Path; from sweep.training.process import FreshProcess; "
        "FreshProcess('test_process:sleep', Path(sys.argv[1])).result()"
    )
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    parent = subprocess.Popen([sys.executable, "-c", program, str(pid)], env=environment)
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int(pid.read_text()), 0)
            time.sleep(0.05)


def test_ctrl_c_while_the_server_imports_torch_shows_no_traceback():
    code = """
import os, signal, threading
from sweep.training.process import FreshProcess
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
threading.Timer(1.0, lambda: os.killpg(0, signal.SIGINT)).start()
process = FreshProcess("os:getpid")  # waits for the server, which imports for longer
try:
    process.result(60)
except Exception as error:  # os.getpid takes no arguments
    print(type(error).__name__)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, start_new_session=True
    )
    assert done.stdout.split() == ["interrupted", "WorkerDied"] and not done.stderr
