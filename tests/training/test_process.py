"""Functions in fresh processes, and the helper that forks them."""

import functools
import inspect
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from sweep.errors import SweepError, WorkerDied
from sweep.training.process import FreshProcess, Worker, run_job, worker_environment
from sweep.trial.files import cache_dir

HERE = Path(__file__).parent


def double(number, should_stop):
    return 2 * number


def describe(should_stop):
    return os.environ.get("ONLY_THERE"), os.getcwd(), "torch" in sys.modules


def die(should_stop):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(should_stop):
    raise ValueError("no such number")


def wait_for_a_word(should_stop):
    while (word := should_stop()) is None:
        time.sleep(0.01)
    return word


def sleep(path, should_stop):
    path.write_text(f"{os.getpid()} {pid_of_the_server(should_stop)}")
    time.sleep(600)


def modules_that_an_optimizer_imports(should_stop):
    import torch

    before = {*sys.modules}
    torch.optim.AdamW([torch.zeros(1)])
    return len({*sys.modules} - before)


def optional_packages(should_stop):
    extras = {"chess", "liger_kernel", "peft", "psycopg", "ray", "submitit", "transformers"}
    return sorted(extras & {*sys.modules})


def pid_of_the_server(should_stop):
    return psutil.Process().parents()[1].pid


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def wait_for(is_so):
    while not is_so():  # the test's own time limit applies
        time.sleep(0.02)


def test_results_deaths_and_exceptions_come_back():
    assert FreshProcess(double, 21).result() == 42
    with pytest.raises(WorkerDied) as died:
        FreshProcess(die).result()
    assert died.value.exit_code == -signal.SIGKILL
    with pytest.raises(WorkerDied, match="ValueError: no such number"):
        FreshProcess(fail).result()


def test_a_worker_calls_one_function_after_the_other_and_ends_when_it_is_told_to():
    worker = Worker()
    for number in (1, 2):
        worker.submit(double, number)
        assert worker.result() == 2 * number
    worker.submit(wait_for_a_word)
    worker.stop()
    assert worker.result() == "stopped"
    assert psutil.pid_exists(worker.pid)
    worker.end()
    assert not psutil.pid_exists(worker.pid)


def test_a_worker_that_was_told_to_end_during_a_call_takes_no_further_one():
    worker = Worker()
    worker.submit(wait_for_a_word)
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.result() == "preempted"
    assert worker.has_ended()  # at once, before its exit code has arrived
    worker.end()
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.parametrize("function", [die, fail])
def test_a_worker_that_died_or_raised_has_ended(function):
    worker = Worker()
    worker.submit(double, 1)
    assert worker.result() == 2
    worker.submit(function)
    with pytest.raises(WorkerDied):
        worker.result()
    assert not psutil.pid_exists(worker.pid)
    worker.end()


def test_environment_and_folder_are_those_of_the_request(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = FreshProcess(describe, environment={"ONLY_THERE": "yes"})
    assert process.result() == ("yes", str(tmp_path), True)
    assert FreshProcess(describe).result()[0] is None


def test_stop_signals_and_timeouts_end_it(tmp_path):
    process = FreshProcess(wait_for_a_word)
    process.stop()
    assert process.result() == "stopped"
    process = FreshProcess(wait_for_a_word)
    os.kill(process.pid, signal.SIGINT)  # ignored
    os.kill(process.pid, signal.SIGTERM)
    assert process.result() == "preempted"
    with pytest.raises(WorkerDied) as died:
        FreshProcess(sleep, tmp_path / "pid").result(timeout=0.5)
    assert died.value.timed_out and died.value.exit_code == -signal.SIGKILL


def test_a_job_has_no_time_limit_unless_the_caller_can_do_without_its_result():
    assert inspect.signature(run_job).parameters["seconds"].default is None
    assert run_job(time.sleep, 0.5) is None
    with pytest.raises(SweepError) as refused:
        run_job(time.sleep, 60, seconds=0.2)
    assert refused.value.__cause__.timed_out


def test_several_threads_may_start_processes():
    with ThreadPoolExecutor(4) as pool:
        processes = list(pool.map(functools.partial(FreshProcess, double), range(4)))
    assert [process.result() for process in processes] == [0, 2, 4, 6]


def test_a_helper_that_was_killed_is_replaced():
    helper, survivor = FreshProcess(pid_of_the_server).result(), FreshProcess(wait_for_a_word)
    os.kill(helper, signal.SIGKILL)
    os.waitid(os.P_PID, helper, os.WEXITED | os.WNOWAIT)
    assert FreshProcess(double, 21).result() == 42
    survivor.stop()
    assert survivor.result() == "stopped"


def run_script(path, text, *arguments):
    """Run a script with the names of this file; modules next to it come first."""
    path.write_text(f"from test_process import *\n{text}")
    folders = [str(path.parent), str(HERE), os.getcwd()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.Popen(
        [sys.executable, "-W", "default::ResourceWarning", str(path), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_script_without_a_main_guard_runs_once_and_leaves_nothing_open(tmp_path):
    script = 'print("once")\nprint(FreshProcess(double, 21).result())\n'
    output, errors = run_script(tmp_path / "script.py", script).communicate()
    assert output.split() == ["once", "42"] and not errors


@pytest.mark.parametrize(  # `sleep` does not notice that it is stopped
    "stop", ["process.stop()\n", pytest.param("", marks=pytest.mark.slow)]
)
def test_processes_and_helper_end_with_a_parent_that_was_killed(tmp_path, stop):
    script, written = "process = FreshProcess(sleep, Path(sys.argv[1]))\n", tmp_path / "pids"
    script += f"{stop}process.result()\n"
    parent = run_script(tmp_path / "script.py", script, written)
    wait_for(lambda: written.exists() and written.read_text())
    child, helper = map(int, written.read_text().split())
    assert psutil.pid_exists(helper) and psutil.pid_exists(child)
    parent.kill()
    parent.communicate()
    wait_for(lambda: not psutil.pid_exists(child) and not psutil.pid_exists(helper))


# Python imports this before anything else. Calls are written at each fork, the server's first.
COUNT_DRIVER_CALLS = """
import os, pathlib, sys
if "--serve" in sys.orig_argv:
    import torch
    import torch.utils.flop_counter  # warns of a build with CUDA that lacks triton
    torch.version.cuda = "12.8"
    calls = []
    def count(owner, name):
        function = getattr(owner, name)
        def counted(*arguments, **named):
            calls.append(name)
            return function(*arguments, **named)
        setattr(owner, name, counted)
    for name in ("is_available", "device_count", "is_initialized", "_lazy_init"):
        count(torch.cuda, name)
    for name in ("_cuda_init", "_cuda_getDeviceCount"):
        if hasattr(torch._C, name):  # builds with CUDA
            count(torch._C, name)
    log = pathlib.Path(__file__).with_name("calls")
    def write():
        with log.open("a") as file:
            print("calls:", *calls, file=file)
    os.register_at_fork(before=write)
"""


def test_the_server_is_ready_for_optimizers_and_never_asks_the_driver_before_a_fork(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(COUNT_DRIVER_CALLS)
    liger = tmp_path / "liger_kernel" / "transformers"
    liger.mkdir(parents=True)
    (liger / "functional.py").write_text(
        "import torch\n\nliger_fused_linear_cross_entropy = torch.cuda.is_available()\n"
    )
    script = "print(FreshProcess(modules_that_an_optimizer_imports).result())\n"
    script += "print(*FreshProcess(optional_packages).result())\n"
    output, errors = run_script(tmp_path / "script.py", script).communicate()
    assert output.split() == ["0"] and not errors
    first_fork = (tmp_path / "calls").read_text().splitlines()[0]
    assert first_fork == "calls:"


def test_ctrl_c_while_the_helper_imports_torch_shows_no_traceback(tmp_path):
    script = """
import threading
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
threading.Timer(0.5, lambda: os.killpg(0, signal.SIGINT)).start()
print(FreshProcess(double, 21).result())  # the helper imports for longer
"""
    output, errors = run_script(tmp_path / "script.py", script).communicate()
    assert output.split() == ["interrupted", "42"] and not errors


def test_workers_get_settings_that_the_user_has_not_set(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    settings = worker_environment()
    assert settings["GOMP_SPINCOUNT"] == "3000"
    assert Path(settings["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(cache_dir())
    monkeypatch.setenv("GOMP_SPINCOUNT", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert not {"GOMP_SPINCOUNT", "TORCHINDUCTOR_CACHE_DIR"} & set(worker_environment())
