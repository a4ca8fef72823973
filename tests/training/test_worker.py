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


class Attempt:
    """Attempt 1 of a trial, in a process of its own."""

    def __init__(self, trial: TrialFolder) -> None:
        command = [sys.executable, "-c", PROGRAM, str(trial.path)]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment
        )

    def outcome(self) -> Outcome:
        output, _ = self.process.communicate()
        assert self.process.returncode == 0
        return Outcome(**json.loads(output))


@pytest.fixture
def trial(tmp_path) -> TrialFolder:
    """A trial that trains for longer than a test waits, before its first attempt."""
    folder = SweepFolder(tmp_path / "sweep")
    experiment = load_experiment("quadratic", {"batches": "4", "budget": 4_000_000})
    save_plan(make_plan(experiment, Execution(device="cpu"), folder).plan, folder)
    (found,) = folder.trials()
    found.write_status(begin_attempt(found.read_status()))
    return found


def start(trial: TrialFolder) -> Attempt:
    """Start the first attempt, and wait until it trains."""
    attempt = Attempt(trial)
    while not trial.metrics_path.exists():  # the timeout is the test's
        assert attempt.process.poll() is None
        time.sleep(0.05)
    return attempt


def test_a_file_in_its_folder_stops_it_after_a_checkpoint(trial):
    attempt = start(trial)
    trial.ask_to_stop(0)  # an older one
    trial.ask_to_stop(1)
    assert attempt.outcome().kind == "stopped"
    assert trial.checkpoints() and trial.is_asked_to_stop(1) and not trial.is_asked_to_stop(2)


def test_without_a_compiler_on_its_machine_a_trial_is_eager_and_says_so(
    tmp_path, monkeypatch, capfd
):
    folder = SweepFolder(tmp_path / "sweep")
    experiment = load_experiment("quadratic", {"batches": "4", "budget": "800"})
    plan = make_plan(experiment, Execution(device="cpu"), folder).plan
    compiled = plan.execution.model_copy(update={"compile": True})
    save_plan(plan.model_copy(update={"execution": compiled}), folder)
    (trial,) = folder.trials()
    trial.write_status(begin_attempt(trial.read_status()))
    monkeypatch.setattr(worker, "has_compiler", lambda _: False)
    assert worker.run_attempt(trial.path, lambda: None).kind == "complete"
    assert trial.read_result()["execution"]["compile"] is False
    assert "no compiler" in capfd.readouterr().out


def test_sigterm_means_preempted_and_sigint_nothing(trial):
    attempt = start(trial)
    attempt.process.send_signal(signal.SIGINT)
    attempt.process.send_signal(signal.SIGTERM)
    assert attempt.outcome().kind == "preempted"
    assert trial.checkpoints()


def test_with_a_newer_attempt_nothing_is_run_and_the_log_stays(trial):
    trial.log_path.write_text("of the newer one")
    trial.write_status(begin_attempt(trial.read_status()))
    assert Attempt(trial).outcome().kind == "superseded"
    assert trial.log_path.read_text() == "of the newer one" and not trial.lease_path.exists()


def test_a_trial_that_another_process_runs_is_left_to_it(trial):
    attempt = start(trial)
    second = Attempt(trial).outcome()
    assert second.kind == "superseded" and "in use by process" in second.message
    assert is_locked(trial.lease_path)
    trial.ask_to_stop(1)
    assert attempt.outcome().kind == "stopped"


def test_a_folder_that_is_not_shared_is_named(trial):
    shutil.rmtree(trial.path)
    outcome = Attempt(trial).outcome()
    assert outcome.kind == "error" and "shared file system" in outcome.message


@pytest.mark.parametrize("before", [False, True])
def test_a_cpu_worker_is_deterministic_and_restores_the_setting(before):
    torch.use_deterministic_algorithms(before)
    try:
        with worker.deterministic(torch.device("cpu"), has_user_code=True):
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
        with worker.deterministic(torch.device("cpu"), has_user_code=False):
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled() is before
    finally:
        torch.use_deterministic_algorithms(False)
