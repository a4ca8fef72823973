"""Attempts that a cluster starts: by folder and number, with signal handlers of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.orchestration.planning import make_plan, save_plan
from sweep.plan.retry import Outcome, begin_attempt
from sweep.training import worker
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import is_locked
from tests.fakes.executors import InlineExecutor

PROGRAM = """
import json, os, signal, sys
from dataclasses import asdict
from pathlib import Path
from sweep.training.process import run_cluster_attempt
stops, stdout = [], os.fdopen(os.dup(1), "w")  # the attempt's own output goes to log.txt
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: stops.append("preempted"))
outcome = run_cluster_attempt(Path(sys.argv[1]), 1, stops)
stdout.write(json.dumps(asdict(outcome)))
"""


def start(trial: TrialFolder) -> subprocess.Popen[str]:
    """Start attempt 1 of a trial in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(trial.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


def outcome_of(process: subprocess.Popen[str]) -> Outcome:
    output, _ = process.communicate()
    assert process.returncode == 0
    return Outcome(**json.loads(output))


def planned(path, budget: int, **execution: object) -> TrialFolder:
    folder = SweepFolder(path)
    experiment = load_experiment("quadratic", {"batches": "4", "budget": budget})
    plan = make_plan(experiment, Execution(device="cpu"), folder).plan
    chosen = plan.execution.model_copy(update=execution)
    save_plan(plan.model_copy(update={"execution": chosen}), folder)
    (trial,) = folder.trials()
    trial.write_status(begin_attempt(trial.read_status()))
    return trial


@pytest.fixture
def trial(tmp_path) -> TrialFolder:
    """A trial that trains for longer than a test waits, before its first attempt."""
    return planned(tmp_path / "sweep", 4_000_000)


@pytest.fixture
def attempt(trial) -> subprocess.Popen[str]:
    """The first attempt of the trial, which trains."""
    process = start(trial)
    while not trial.metrics_path.exists():  # the test's own time limit applies
        assert process.poll() is None
        time.sleep(0.05)
    return process


def test_a_file_in_its_folder_stops_it_after_a_checkpoint(trial, attempt):
    trial.ask_to_stop(0)  # an older attempt
    second = outcome_of(start(trial))  # leaves the trial to the first
    assert second.kind == "superseded" and "in use by process" in second.message
    assert is_locked(trial.lease_path)
    trial.ask_to_stop(1)
    assert outcome_of(attempt).kind == "stopped"
    assert trial.checkpoints() and trial.is_asked_to_stop(1) and not trial.is_asked_to_stop(2)


def test_sigterm_means_preempted_and_sigint_nothing(trial, attempt):
    attempt.send_signal(signal.SIGINT)
    attempt.send_signal(signal.SIGTERM)
    assert outcome_of(attempt).kind == "preempted"
    assert trial.checkpoints()


def test_after_a_newer_attempt_nothing_is_run_and_the_log_stays(trial):
    trial.log_path.write_text("of the newer one")
    trial.write_status(begin_attempt(trial.read_status()))
    assert outcome_of(start(trial)).kind == "superseded"
    assert trial.log_path.read_text() == "of the newer one" and not trial.lease_path.exists()


def test_a_folder_that_is_not_shared_is_named(trial):
    shutil.rmtree(trial.path)
    outcome = outcome_of(start(trial))
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
