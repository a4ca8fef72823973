"""Processes of the local executor: which attempts share one, and which get their own."""

import os
import shutil
import signal
from collections import Counter
from dataclasses import replace

import psutil
import pytest

from sweep.config.execution import Execution, Services
from sweep.config.workloads import Command
from sweep.orchestration.executors.local import LocalExecutor
from sweep.plan.retry import Outcome, begin_attempt, status_after
from sweep.training import attempt_trial
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import is_locked, read_owner
from tests.commands import COMMAND, SCRIPT, Attempts
from tests.exactness.attempts import plan_trial
from tests.orchestration.clusters import wait_until

TINY = {"batches": "4", "budget": 400, "seeds": 3}
LONG = {"batches": "4", "budget": 40_000_000}  # trains for longer than a test waits


@pytest.fixture
def executor(tmp_path):
    executor = LocalExecutor(Services(), Execution(device="cpu"), SweepFolder(tmp_path))
    yield executor
    executor.stop(force=True)
    executor.close()


def planned(path, settings, name="quadratic"):
    plan_trial(path, name, settings)
    return SweepFolder(path).trials()


def start(executor, trial):
    trial.write_status(begin_attempt(trial.read_status()))
    return executor.submit(trial, {})


def run(executor, trial):
    """Run an attempt; return the kind of its outcome, and its process."""
    kind = start(executor, trial).result().kind
    return kind, read_owner(trial.lease_path)["pid"]


def test_trials_run_in_one_process_which_ends_with_the_executor(tmp_path, executor):
    ends = [run(executor, trial) for trial in planned(tmp_path / "a", TINY)]
    assert {kind for kind, _ in ends} == {"complete"}
    ((process,),) = [{pid for _, pid in ends}]
    assert psutil.pid_exists(process)
    executor.release()
    assert not psutil.pid_exists(process)


def test_code_of_the_user_gets_a_process_of_its_own_each_time(tmp_path, executor, faulty):
    settings = {**TINY, "workload": "faulty:Slow"}
    trials = planned(tmp_path / "a", settings)
    ends = [run(executor, trial) for trial in trials]
    assert {kind for kind, _ in ends} == {"complete"}
    assert len({pid for _, pid in ends}) == len(trials)
    assert not any(psutil.pid_exists(pid) for _, pid in ends)


def test_a_command_gets_a_process_of_its_own_each_time(tmp_path, executor, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    Attempts(tmp_path / "a", COMMAND, seeds=3)  # plans them
    trials = SweepFolder(tmp_path / "a").trials()
    ends = [run(executor, trial) for trial in trials]
    assert {kind for kind, _ in ends} == {"complete"}
    assert len({pid for _, pid in ends}) == len(trials) == 3
    assert not any(psutil.pid_exists(pid) for _, pid in ends)


def test_only_one_process_without_code_of_the_user_may_be_shared(tmp_path):
    config = planned(tmp_path / "a", TINY)[0].read_config()
    assert config.may_share_process
    assert not config.with_microbatch(4, devices=2).may_share_process
    changes = [{"code": {"files": {}}}, {"workload": Command.model_construct()}]
    for change in changes:
        science = config.science.model_copy(update=change)
        assert not config.model_copy(update={"science": science}).may_share_process


def test_an_attempt_that_died_runs_again_in_a_process_of_its_own(tmp_path, executor):
    first, second, third = planned(tmp_path / "a", TINY)
    (long,) = planned(tmp_path / "b", LONG)
    _, shared = run(executor, first)
    future = start(executor, long)
    wait_until(lambda: is_locked(long.lease_path))
    assert read_owner(long.lease_path)["pid"] == shared
    os.kill(shared, signal.SIGKILL)
    assert future.result().kind == "lost"
    _, next_shared = run(executor, second)
    assert next_shared != shared

    future = start(executor, long)
    wait_until(lambda: is_locked(long.lease_path))
    alone = read_owner(long.lease_path)["pid"]
    assert alone != next_shared
    executor.stop()
    assert future.result().kind == "stopped"
    assert not psutil.pid_exists(alone) and not psutil.pid_exists(next_shared)
    assert run(executor, third)[0] == "stopped"


def test_a_process_that_died_while_it_waited_costs_no_attempt(tmp_path, executor):
    first, second, _ = planned(tmp_path / "a", TINY)
    _, waiting = run(executor, first)
    supervisor = psutil.Process(waiting).parent()
    os.kill(waiting, signal.SIGKILL)
    wait_until(lambda: supervisor.status() == psutil.STATUS_ZOMBIE)  # it has reported the end
    kind, other = run(executor, second)
    assert kind == "complete" and other != waiting


def test_memory_that_runs_out_after_another_trial_counts_only_if_it_comes_again(tmp_path, executor):
    settings = {"batches": "8", "budget": 8 * 64 * 2, "seeds": 1}
    first, *_ = planned(tmp_path / "a", TINY)
    chosen = Execution(device="cpu", device_memory_bytes=40 << 20)
    large = plan_trial(tmp_path / "b", "quick", settings, chosen, device_memory_bytes=1 << 20)
    _, shared = run(executor, first)
    assert run(executor, large) == ("preempted", shared)
    status, is_retried = status_after(
        large.read_status(), Outcome("preempted"), large.read_config(), Counter()
    )
    assert is_retried and status.microbatch_size is None
    kind, alone = run(executor, large)
    assert kind == "out_of_memory" and alone != shared


def test_memory_that_runs_out_while_others_may_run_counts_only_if_it_comes_again(tmp_path):
    settings = {"batches": "8", "budget": 8 * 64 * 2, "seeds": 1}
    chosen = Execution(device="cpu", device_memory_bytes=40 << 20)
    large = plan_trial(tmp_path / "a", "quick", settings, chosen, device_memory_bytes=1 << 20)
    two = Execution(device="cpu", at_once=2)
    executor = LocalExecutor(Services(), two, SweepFolder(tmp_path))
    kinds = [run(executor, large)[0] for _ in range(2)]
    executor.close()
    assert kinds == ["preempted", "out_of_memory"]


def leave_unusable(path, status, should_stop):
    outcome = attempt_trial(path, status, should_stop)
    return replace(outcome, leaves_process_usable=False)


def test_a_process_that_cannot_be_used_again_ends(tmp_path, executor, monkeypatch):
    monkeypatch.setattr("sweep.orchestration.executors.local.attempt_trial", leave_unusable)
    ends = [run(executor, trial) for trial in planned(tmp_path / "a", TINY)]
    assert {kind for kind, _ in ends} == {"complete"}
    assert len({pid for _, pid in ends}) == len(ends)
    assert not any(psutil.pid_exists(pid) for _, pid in ends)


def test_a_process_that_is_told_to_end_while_it_waits_ends(tmp_path, executor):
    first, second, _ = planned(tmp_path / "a", TINY)
    _, waiting = run(executor, first)
    supervisor = psutil.Process(waiting).parent()
    os.kill(waiting, signal.SIGTERM)
    wait_until(lambda: supervisor.status() == psutil.STATUS_ZOMBIE)
    kind, other = run(executor, second)
    assert kind == "complete" and other != waiting


def test_each_trial_prints_to_its_own_log(tmp_path, executor):
    trials = planned(tmp_path / "a", TINY)
    for trial in trials:
        run(executor, trial)
    logs = [trial.log_path.read_text() for trial in trials]
    assert [log.count("attempt 1:") for log in logs] == [1, 1, 1]
    process = psutil.Process(read_owner(trials[-1].lease_path)["pid"])
    assert not [file for file in process.open_files() if file.path.endswith("log.txt")]


def test_an_error_after_another_trial_counts_only_if_it_comes_again(tmp_path, executor):
    first, second, _ = planned(tmp_path / "a", TINY)
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "valid"):
        (text / f"{name}.txt").write_text("a cat sat on a mat. " * 2000)
    (broken,) = planned(
        tmp_path / "b", {"batches": "4", "budget": 4096, "data": str(text)}, "quick"
    )
    shutil.rmtree(text)
    _, shared = run(executor, first)
    assert run(executor, broken) == ("preempted", shared)
    kind, alone = run(executor, broken)
    assert kind == "error" and alone != shared
    assert run(executor, second)[0] == "complete"
