"""Attempts that a cluster starts, and attempts in several processes: their ends and the causes."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from click.testing import CliRunner

from sweep.cli import sweep
from sweep.errors import WorkerDied
from sweep.plan.retry import Outcome, begin_attempt
from sweep.training import __main__ as bare_worker
from sweep.training import attempt as engine
from sweep.training import attempt_trial, run_cluster_attempt
from sweep.training.launch import first_cause
from sweep.training.process import FreshProcess, ShouldStop
from sweep.trial.files import read_metrics
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import is_locked
from sweep.trial.status import State
from tests.exactness.attempts import continued_from, plan_trial
from tests.fakes.executors import InlineExecutor
from tests.training.several_devices import (
    STEPS,
    assert_same_trial,
    attempt,
    complete,
    planned,
    start,
)

BROKEN = Outcome("error", "RuntimeError: connection closed by peer")
LOST = Outcome("lost", "the worker ended without reporting: killed by SIGKILL")
OWN = Outcome("error", "ValueError: a shape does not fit")
FULL = Outcome("out_of_memory", "OutOfMemoryError: 2 GiB")


def wait_for(is_so: Callable[[], object]) -> None:
    while not is_so():  # the test's own time limit applies
        time.sleep(0.05)


def run_as_a_cluster_does(path: Path, _: ShouldStop) -> Outcome:
    return run_cluster_attempt(path, 1, {signal.SIGTERM: "preempted"})


def start_on_a_cluster(trial: TrialFolder) -> FreshProcess:
    return FreshProcess(run_as_a_cluster_does, trial.path)


def planned_quadratic(path: Path, budget: int, **execution: object) -> TrialFolder:
    settings = {"batches": "4", "budget": budget}
    trial = plan_trial(path, "quadratic", settings, **execution)
    trial.write_status(begin_attempt(trial.read_status()))
    return trial


@pytest.fixture
def trial(tmp_path) -> TrialFolder:
    return planned_quadratic(tmp_path / "sweep", 4_000_000)  # trains for longer than a test waits


@pytest.fixture
def running(trial) -> FreshProcess:
    process = start_on_a_cluster(trial)
    wait_for(trial.metrics_path.exists)
    return process


def test_a_file_in_its_folder_stops_it_after_a_checkpoint(trial, running):
    trial.ask_to_stop(0)  # an older attempt
    second = start_on_a_cluster(trial).result()  # leaves the trial to the first
    assert second.kind == "superseded" and "in use by process" in second.message
    assert is_locked(trial.lease_path)
    trial.ask_to_stop(1)
    assert running.result().kind == "stopped"
    assert trial.checkpoints() and trial.is_asked_to_stop(1) and not trial.is_asked_to_stop(2)


def test_sigterm_means_preempted_and_sigint_nothing(trial, running):
    os.kill(running.pid, signal.SIGINT)
    os.kill(running.pid, signal.SIGTERM)
    assert running.result().kind == "preempted"
    assert trial.checkpoints()


def test_after_a_newer_attempt_nothing_is_run_and_the_log_stays(trial):
    trial.log_path.write_text("of the newer one")
    trial.write_status(begin_attempt(trial.read_status()))
    assert start_on_a_cluster(trial).result().kind == "superseded"
    assert trial.log_path.read_text() == "of the newer one" and not trial.lease_path.exists()


def test_a_folder_that_is_not_shared_is_named(trial):
    shutil.rmtree(trial.path)
    outcome = start_on_a_cluster(trial).result()
    assert outcome.kind == "error" and "shared file system" in outcome.message


def test_without_a_compiler_on_its_machine_a_trial_is_eager(tmp_path, monkeypatch, capfd):
    trial = planned_quadratic(tmp_path / "sweep", 800, compile=True)
    monkeypatch.setattr(engine.machine, "has_compiler", lambda _: False)
    assert InlineExecutor().submit(trial, {}).result().kind == "complete"
    assert trial.read_result().execution["compile"] is False
    assert "no compiler" in capfd.readouterr().out


def test_the_instruction_sets_of_all_attempts_are_recorded(tmp_path, monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    trial = planned_quadratic(tmp_path / "sweep", 800)
    status = trial.read_status()
    FreshProcess(attempt_trial, trial.path, status.changed(pause_step=50)).result()
    variables = {"MKL_CBWR": "COMPATIBLE"}
    process = FreshProcess(attempt_trial, trial.path, status, environment=variables)
    assert process.result().kind == "complete" and continued_from(trial) == [50]
    first, second = trial.read_result().execution["instruction_sets"]
    assert first.startswith(torch.backends.cpu.get_cpu_capability())
    assert second == f"{first} MKL_CBWR=COMPATIBLE"


def test_a_cpu_worker_is_deterministic_and_an_inline_executor_restores_the_setting(tmp_path):
    trial, before = planned_quadratic(tmp_path / "sweep", 800), torch.get_deterministic_debug_mode()
    assert InlineExecutor().submit(trial, {}).result().kind == "complete"
    assert torch.get_deterministic_debug_mode() == before
    try:
        trial.clear()
        engine.run_attempt(trial.path, lambda: None)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.set_deterministic_debug_mode(before)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([BROKEN, LOST], "killed by SIGKILL"),
        ([LOST, FULL, BROKEN], "2 GiB"),
        ([OWN, BROKEN], "a shape"),
        ([Outcome("complete"), Outcome("complete")], ""),
    ],
)
def test_the_first_cause_counts(ends, message):
    assert message in first_cause(ends).message


def run(out: Path, workload: str, zero: int = 2, *more: str) -> tuple[int, TrialFolder]:
    arguments = [
        *("run", "quick", "--batches", "8", "--budget", str(8 * 64 * STEPS), "--microbatch", "2"),
        *("--workload", f"custom:{workload}", "--devices-per-trial", "2"),
        *("--zero", str(zero), "--device", "cpu", "--out", str(out), "--yes", "--quiet", *more),
    ]
    result = CliRunner().invoke(sweep, arguments, standalone_mode=False)
    return result.return_value, SweepFolder(out).trials()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "zero", "microbatch_size"),
    [("Killed", 2, None), ("OutOfMemory", 0, 1), ("OutOfMemory", 2, 1), ("OutOfMemory", 3, 1)],
)
def test_a_fault_of_one_process_ends_the_attempt_and_the_trial_continues(
    tmp_path, faults, workload, zero, microbatch_size
):
    code, trial = run(tmp_path / "out", workload, zero)
    status = trial.read_status()
    assert (code, status.state, status.attempts) == (0, State.COMPLETE, 2)
    assert status.microbatch_size == microbatch_size


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_killed_process_costs_the_trial_only_the_steps_since_its_checkpoint(
    tmp_path, faults, alone, zero
):
    always = {"checkpoint_seconds": 0.0}
    trial = planned(tmp_path / "out", 2, zero, execution=always, workload="custom:Killed")
    outcome = attempt(trial)
    assert outcome.kind == "lost" and "killed by SIG" in outcome.message
    complete(trial)
    assert continued_from(trial) == [20]
    assert_same_trial(trial, alone)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_memory_that_runs_out_after_the_last_checkpoint_costs_no_training(tmp_path, faults, zero):
    code, trial = run(tmp_path / "out", "OutOfMemoryAtTheEnd", zero, "--keep", "checkpoints")
    status = trial.read_status()
    assert (code, status.state, status.attempts) == (0, State.COMPLETE, 2)
    assert continued_from(trial) == [STEPS] and status.microbatch_size == 1
    assert [kept.step for kept in trial.checkpoints()] == [STEPS] and trial.weights_path.exists()


@pytest.mark.slow
def test_the_exception_of_one_process_is_the_message_of_the_trial(tmp_path, faults):
    code, trial = run(tmp_path / "out", "Raising")
    status = trial.read_status()
    assert (code, status.state, status.attempts) == (1, State.FAILED, 1)
    assert status.message.startswith("RuntimeError: one of two failed (custom.py, line ")


def test_a_models_parameters_are_counted_without_building_it_again(tmp_path, faults, monkeypatch):
    model = {"kind": "object", "name": "custom:Tied", "vocabulary": 512, "context": 64}
    trial, custom, built = planned(tmp_path, model=model, budget=1024), import_module("custom"), []
    build = custom.Tied
    monkeypatch.setattr(custom, "Tied", lambda **sizes: built.append(1) or build(**sizes))
    assert InlineExecutor().submit(trial, {}).result().kind == "complete"
    assert trial.read_result().parameters == 512 * 32 + 2 * (32 * 32 + 32) and built == [1]


def test_a_stop_counts_although_the_attempt_runs_out_of_memory(trial, monkeypatch):
    handlers, started = [], []
    full = SimpleNamespace(stop=lambda: None, result=lambda: handlers[0](15, None) or FULL)
    monkeypatch.setattr(bare_worker, "FreshProcess", lambda *_, **__: started.append(1) or full)
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append(handler))
    monkeypatch.setattr(sys, "argv", ["", str(trial.path)])
    assert bare_worker.main() == 130 and len(started) == 1


class Running:
    def __init__(self, path: Path) -> None:
        often = {"sequences": 8, "train_points": 10_000}
        self.trial = planned(path, 2, 2, budget=8 * 64 * 100_000, evaluation=often)
        self.process = start(self.trial)
        wait_for(lambda: read_metrics(self.trial.metrics_path))
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.ranks = [process for process in family if not process.children()]
        assert len(self.ranks) == 2


@pytest.mark.slow
def test_a_stop_makes_all_processes_save_a_checkpoint_and_end(tmp_path):
    running = Running(tmp_path)
    for rank in running.ranks:  # as a batch system may send it to a whole process group
        rank.terminate()
    running.process.stop()
    assert running.process.result().kind == "stopped"
    assert running.trial.checkpoints()
    wait_for(lambda: not any(rank.is_running() for rank in running.ranks))


@pytest.mark.slow
def test_processes_end_with_the_one_that_launched_them(tmp_path):
    running = Running(tmp_path)
    running.process.kill()
    with pytest.raises(WorkerDied):
        running.process.result()
    wait_for(lambda: not any(rank.is_running() for rank in running.ranks))
