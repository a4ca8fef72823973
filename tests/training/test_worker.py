"""Attempts that a cluster starts: by folder and number, with signal handlers of its own."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from sweep.plan.retry import Outcome, begin_attempt
from sweep.training import run_cluster_attempt, worker
from sweep.training.process import FreshProcess, ShouldStop
from sweep.trial.folder import TrialFolder
from sweep.trial.lease import is_locked
from tests.exactness.attempts import plan_trial
from tests.fakes.executors import InlineExecutor


def run_as_a_cluster_does(path: Path, _: ShouldStop) -> Outcome:
    stops: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: stops.append("preempted"))
    return run_cluster_attempt(path, 1, stops)


def start(trial: TrialFolder) -> FreshProcess:
    return FreshProcess(run_as_a_cluster_does, trial.path)


def planned(path: Path, budget: int, **execution: object) -> TrialFolder:
    settings = {"batches": "4", "budget": budget}
    trial = plan_trial(path, "quadratic", settings, **execution)
    trial.write_status(begin_attempt(trial.read_status()))
    return trial


@pytest.fixture
def trial(tmp_path) -> TrialFolder:
    return planned(tmp_path / "sweep", 4_000_000)  # trains for longer than a test waits


@pytest.fixture
def attempt(trial) -> FreshProcess:
    process = start(trial)
    while not trial.metrics_path.exists():  # the test's own time limit applies
        time.sleep(0.05)
    return process


def test_a_file_in_its_folder_stops_it_after_a_checkpoint(trial, attempt):
    trial.ask_to_stop(0)  # an older attempt
    second = start(trial).result()  # leaves the trial to the first
    assert second.kind == "superseded" and "in use by process" in second.message
    assert is_locked(trial.lease_path)
    trial.ask_to_stop(1)
    assert attempt.result().kind == "stopped"
    assert trial.checkpoints() and trial.is_asked_to_stop(1) and not trial.is_asked_to_stop(2)


def test_sigterm_means_preempted_and_sigint_nothing(trial, attempt):
    os.kill(attempt.pid, signal.SIGINT)
    os.kill(attempt.pid, signal.SIGTERM)
    assert attempt.result().kind == "preempted"
    assert trial.checkpoints()


def test_after_a_newer_attempt_nothing_is_run_and_the_log_stays(trial):
    trial.log_path.write_text("of the newer one")
    trial.write_status(begin_attempt(trial.read_status()))
    assert start(trial).result().kind == "superseded"
    assert trial.log_path.read_text() == "of the newer one" and not trial.lease_path.exists()


def test_a_folder_that_is_not_shared_is_named(trial):
    shutil.rmtree(trial.path)
    outcome = start(trial).result()
    assert outcome.kind == "error" and "shared file system" in outcome.message


def test_without_a_compiler_on_its_machine_a_trial_is_eager(tmp_path, monkeypatch, capfd):
    trial = planned(tmp_path / "sweep", 800, compile=True)
    monkeypatch.setattr(worker, "has_compiler", lambda _: False)
    assert InlineExecutor().submit(trial, {}).result().kind == "complete"
    assert trial.read_result()["execution"]["compile"] is False
    assert "no compiler" in capfd.readouterr().out


def test_a_cpu_worker_is_deterministic_and_an_inline_executor_restores_the_setting(tmp_path):
    trial, before = planned(tmp_path / "sweep", 800), torch.get_deterministic_debug_mode()
    assert InlineExecutor().submit(trial, {}).result().kind == "complete"
    assert torch.get_deterministic_debug_mode() == before
    try:
        trial.clear()
        worker.run_attempt(trial.path, lambda: None)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.set_deterministic_debug_mode(before)
