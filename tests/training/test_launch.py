"""How an attempt in several processes ends: all of them, whatever happens to one, and why."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from sweep.cli import sweep
from sweep.errors import WorkerDied
from sweep.plan.retry import Outcome, begin_attempt
from sweep.training.launch import first_cause
from sweep.training.process import FreshProcess, attempt_trial
from sweep.trial.files import read_metrics
from sweep.trial.folder import State, SweepFolder, TrialFolder
from tests.training.several_devices import (
    STEPS,
    assert_same_trial,
    attempt,
    complete,
    gone_on_from,
    planned,
)

BROKEN = ("error", "RuntimeError: connection closed by peer")
OWN = ("error", "ValueError: a shape does not fit")
FULL = ("out_of_memory", "OutOfMemoryError: 2 GiB")


@pytest.mark.parametrize(
    ("said", "exit_codes", "kind", "message"),
    [
        ({0: (10.0, BROKEN)}, {1: -9}, "lost", "process 1 of the trial"),
        ({}, {1: -11}, "lost", "process 1 of the trial"),
        ({0: (10.0, OWN)}, {0: 1}, "error", "a shape does not fit"),
        ({0: (10.0, OWN), 1: (10.2, BROKEN)}, {1: 1}, "error", "a shape"),
        ({0: (10.0, BROKEN), 1: (10.1, FULL)}, {0: 1}, "out_of_memory", "2 GiB"),
    ],
)
def test_the_first_cause_is_reported_and_not_its_consequences(said, exit_codes, kind, message):
    ends = {
        rank: {"time": when, **vars(Outcome(*outcome))} for rank, (when, outcome) in said.items()
    }
    outcome = first_cause(exit_codes, ends, memory_ran_out=False)
    assert outcome.kind == kind and message in outcome.message


def test_a_process_that_the_kernel_killed_for_memory_ran_out_of_it():
    assert first_cause({1: -signal.SIGKILL}, {}, memory_ran_out=True).kind == "out_of_memory"


def run(out: Path, workload: str, zero: int = 2, *more: str) -> tuple[int, TrialFolder]:
    """Run a sweep of one trial on two processes, of which one is meddled with."""
    arguments = [
        *("run", "quick", "--batches", "8", "--budget", str(8 * 64 * STEPS), "--microbatch", "2"),
        *("--workload", f"meddling:{workload}", "--devices-per-trial", "2", "--zero", str(zero)),
        *("--device", "cpu", "--out", str(out), "--yes", "--quiet", *more),
    ]
    result = CliRunner().invoke(sweep, arguments, standalone_mode=False)
    return result.return_value, SweepFolder(out).trials()[0]


@pytest.mark.slow
def test_a_killed_process_ends_the_attempt_and_the_trial_goes_on(tmp_path, meddling):
    code, trial = run(tmp_path / "out", "Killed")
    status = trial.read_status()
    assert (code, status.state, status.attempts) == (0, State.COMPLETE, 2)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_killed_process_is_seen_and_costs_the_trial_only_what_follows_its_checkpoint(
    tmp_path, meddling, alone, zero
):
    always = {"checkpoint_seconds": 0.0}
    trial = planned(tmp_path / "out", 2, zero, execution=always, workload="meddling:Killed")
    found = attempt(trial)
    assert time.time() - (tmp_path / "meddled").stat().st_mtime < 30  # as the project promises
    assert found.kind == "lost" and "process 1 of the trial: " in found.message
    complete(trial)
    assert gone_on_from(trial) == [20]
    assert_same_trial(trial, alone)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_memory_that_runs_out_in_one_process_halves_the_microbatch_of_all(tmp_path, meddling, zero):
    code, trial = run(tmp_path / "out", "OutOfMemory", zero)
    status = trial.read_status()
    assert (code, status.state, status.attempts) == (0, State.COMPLETE, 2)
    assert status.microbatch_size == 1


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_memory_that_runs_out_behind_the_last_checkpoint_costs_no_training(
    tmp_path, meddling, zero
):
    code, trial = run(tmp_path / "out", "OutOfMemoryAtTheEnd", zero, "--keep", "checkpoints")
    status = trial.read_status()
    assert (code, status.state, status.attempts) == (0, State.COMPLETE, 2)
    assert gone_on_from(trial) == [STEPS] and status.microbatch_size == 1
    (kept,) = trial.checkpoints()
    assert kept.step == STEPS and kept.path.is_dir() and trial.weights_path.exists()


@pytest.mark.slow
def test_what_one_process_raises_is_what_the_trial_says(tmp_path, meddling):
    code, trial = run(tmp_path / "out", "Raising")
    status = trial.read_status()
    assert (code, status.state, status.attempts) == (1, State.FAILED, 1)
    assert status.message == "RuntimeError: one of two has had enough"


class Running:
    """A trial in two processes that goes on for long, until it is stopped or killed."""

    def __init__(self, path: Path) -> None:
        often = {"sequences": 8, "noise_points": 0, "train_points": 10_000}
        long = {"budget": 8 * 64 * 100_000, "evaluation": often}
        self.trial = planned(path, 2, 2, **long)
        self.trial.write_status(begin_attempt(self.trial.read_status()))
        self.process = FreshProcess(attempt_trial, self.trial.path, ends_itself=True)
        wait_for(lambda: read_metrics(self.trial.metrics_path))
        launcher = psutil.Process(self.process.pid)
        self.ranks = [c for c in launcher.children() if "spawn_main" in " ".join(c.cmdline())]
        assert len(self.ranks) == 2


def wait_for(is_so: Callable[[], object]) -> None:
    while not is_so():  # the timeout is the test's
        time.sleep(0.05)


@pytest.mark.slow
def test_a_stop_lets_all_processes_checkpoint_and_end(tmp_path):
    running = Running(tmp_path)
    for rank in running.ranks:  # as a batch system may send it to a whole process group
        rank.terminate()
    running.process.stop()
    assert running.process.result().kind == "stopped"
    assert running.trial.checkpoints()
    wait_for(lambda: not any(rank.is_running() for rank in running.ranks))


@pytest.mark.slow
def test_signals_that_reach_processes_before_they_can_ignore_them_end_none(tmp_path):
    trial = planned(tmp_path, 2)
    trial.write_status(begin_attempt(trial.read_status()))
    process = FreshProcess(attempt_trial, trial.path, ends_itself=True)
    launcher, told = psutil.Process(process.pid), set()

    def all_are_told() -> bool:
        for child in launcher.children():
            if child.pid not in told and "spawn_main" in " ".join(child.cmdline()):
                for number in (signal.SIGUSR2, signal.SIGTERM):
                    child.send_signal(number)
                told.add(child.pid)
        return len(told) == 2

    wait_for(all_are_told)
    assert process.result().kind == "complete", trial.log_path.read_text()


@pytest.mark.slow
def test_processes_end_with_the_one_that_launched_them(tmp_path):
    running = Running(tmp_path)
    running.process.kill()
    with pytest.raises(WorkerDied):
        running.process.result()
    wait_for(lambda: not any(rank.is_running() for rank in running.ranks))
