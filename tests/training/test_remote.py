"""Attempts that a cluster starts, from their folder and their number."""

import os
import shutil
import time

import pytest

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.orchestration.planning import make_plan, save_plan
from sweep.plan.retry import begin_attempt
from sweep.training import worker
from sweep.training.process import FreshProcess
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import is_locked


def attempt(path, number, should_stop):
    from sweep.training.remote import run_numbered_attempt

    return run_numbered_attempt(path, number, [])


@pytest.fixture
def trial(tmp_path, monkeypatch) -> TrialFolder:
    """A trial that trains for longer than a test waits, before its first attempt."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    folder = SweepFolder(tmp_path / "sweep")
    experiment = load_experiment("quadratic", {"batches": "4", "budget": 4_000_000})
    save_plan(make_plan(experiment, Execution(device="cpu"), folder).plan, folder)
    (found,) = folder.trials()
    found.write_status(begin_attempt(found.read_status()))
    return found


def start(trial: TrialFolder) -> FreshProcess:
    """Start the first attempt, and wait until it trains."""
    process = FreshProcess("test_remote:attempt", trial.path, 1)
    deadline = time.monotonic() + 60
    while not trial.metrics_path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def test_a_file_in_its_folder_stops_it_behind_a_checkpoint(trial):
    process = start(trial)
    trial.ask_to_stop(0)  # an older one
    trial.ask_to_stop(1)
    assert process.result(timeout=60).kind == "stopped"
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


def test_with_a_newer_attempt_nothing_is_run_and_the_log_stays(trial):
    trial.log_path.write_text("of the newer one")
    trial.write_status(begin_attempt(trial.read_status()))
    outcome = FreshProcess("test_remote:attempt", trial.path, 1).result(timeout=60)
    assert outcome.kind == "superseded"
    assert trial.log_path.read_text() == "of the newer one" and not trial.lease_path.exists()


def test_a_trial_that_another_process_holds_is_left_to_it(trial):
    process = start(trial)
    second = FreshProcess("test_remote:attempt", trial.path, 1).result(timeout=60)
    assert second.kind == "superseded" and "in use by process" in second.message
    assert is_locked(trial.lease_path)
    trial.ask_to_stop(1)
    assert process.result(timeout=60).kind == "stopped"


def test_a_folder_that_is_not_shared_is_named(trial):
    shutil.rmtree(trial.path)
    outcome = FreshProcess("test_remote:attempt", trial.path, 1).result(timeout=60)
    assert outcome.kind == "error" and str(trial.path) in outcome.message
