"""Trials as jobs, run for real by submitit's local executor."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sweep.config.experiment import load_experiment
from sweep.errors import SweepError
from sweep.orchestration.execution import Logistics
from sweep.orchestration.executors import Place
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.runner import Summary, run_plan
from sweep.orchestration.slurm_executor import NOTICE, parse_request
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder
from sweep.trial.lease import is_locked, read_owner
from sweep.trial.metrics import read_metrics

pytest.importorskip("submitit", reason="needs the extra slurm")
pytestmark = pytest.mark.slurm

HERE, ROOT = str(Path(__file__).parent), str(Path(__file__).parents[2])
STEPS, SECONDS = 100, 90.0
LOCALLY = Place("slurm", slurm="cluster=local")


@pytest.fixture
def go(tmp_path, monkeypatch) -> Iterator[Path]:
    """The file that lets trials of faulty:WaitsForGo go on behind step 50."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((HERE, ROOT)))
    monkeypatch.setenv("FAULTY_FOLDER", str(tmp_path))
    monkeypatch.syspath_prepend(HERE)
    path = tmp_path / "go"
    yield path
    path.touch()  # nothing is left waiting


@pytest.fixture
def run(tmp_path, go):
    """Plan trials that checkpoint all the time, and run them."""

    def run_here(name="sweep", place=LOCALLY, **fields) -> Summary:
        folder = SweepFolder(tmp_path / name)
        fields = {"batches": "4", "budget": 4 * STEPS, "workload": "faulty:WaitsForGo", **fields}
        experiment = load_experiment("quadratic", fields)
        planned = make_plan(experiment, Logistics(device="cpu"), folder)
        execution = planned.plan.execution.model_copy(update={"checkpoint_seconds": 0.01})
        save_plan(planned.plan.model_copy(update={"execution": execution}), folder)
        planned = make_plan(experiment, Logistics(device="cpu"), folder)
        return run_plan(planned, folder, place=place)

    return run_here


@pytest.fixture
def meanwhile() -> Iterator:
    """Call something in a thread, which has ended by the end of the test."""
    threads = []

    def start(function, *arguments) -> None:
        threads.append(threading.Thread(target=function, args=arguments))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def until_waiting(folder: Path) -> TrialFolder:
    """Wait until a trial waits for go; return it."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for trial in map(TrialFolder, folder.glob("trials/*")):
            lines = read_metrics(trial.metrics_path)
            is_there = lines and lines[-1]["step"] >= 40 and is_locked(trial.lease_path)
            if is_there and trial.read_status().state is State.RUNNING:
                return trial
        time.sleep(0.05)
    raise AssertionError("no trial got there")


def assert_same(folder: SweepFolder, other: SweepFolder) -> None:
    for trial in folder.trials():
        weights = load_file(trial.weights_path)
        others = load_file(other.trial(trial.id).weights_path)
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert trial.losses_path.read_bytes() == other.trial(trial.id).losses_path.read_bytes()


def test_an_array_of_jobs_gives_the_same_weights_as_processes(run, go):
    go.touch()
    jobs, processes = run("jobs", batches="4,8,16"), run("local", Place(), batches="4,8,16")
    assert jobs.exit_code == 0
    states = {trial.read_status() for trial in jobs.folder.trials()}
    assert {(status.state, status.attempts) for status in states} == {(State.COMPLETE, 1)}
    assert_same(jobs.folder, processes.folder)


def preempt(folder: Path, go: Path) -> None:
    trial = until_waiting(folder)
    os.kill(read_owner(trial.lease_path)["pid"], NOTICE)
    go.touch()


def test_a_preempted_job_checkpoints_and_puts_itself_back_into_the_queue(
    run, go, meanwhile, tmp_path
):
    meanwhile(preempt, tmp_path / "sweep", go)
    summary = run()
    (trial,) = summary.folder.trials()
    assert (trial.read_status().state, trial.read_status().attempts) == (State.COMPLETE, 1)
    assert trial.log_path.read_text().count("attempt 1: ") == 2  # in two jobs' lives
    steps = [line["step"] for line in read_metrics(trial.metrics_path)]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    assert_same(summary.folder, run("local", Place()).folder)


def go_after(seconds: float, folder: Path, go: Path) -> None:
    until_waiting(folder)
    time.sleep(seconds)
    go.touch()


def test_a_job_whose_time_is_up_goes_on_in_its_next_life(run, go, meanwhile, tmp_path):
    meanwhile(go_after, 40, tmp_path / "sweep", go)  # notice comes 30 s before the minute is over
    summary = run(place=Place("slurm", slurm="cluster=local,time=1m"))
    (trial,) = summary.folder.trials()
    assert (trial.read_status().state, trial.read_status().attempts) == (State.COMPLETE, 1)
    assert trial.log_path.read_text().count("attempt 1: ") == 2
    assert "timed-out" in trial.log_path.read_text()


def test_a_job_that_dies_twice_is_lost_and_named(run):
    summary = run(workload="faulty:DiesAlways")
    (trial,) = summary.folder.trials()
    status = trial.read_status()
    assert (status.state, status.cause, status.attempts) == (State.FAILED, Cause.LOST, 2)
    assert str(trial.log_path) in status.message and summary.exit_code == 1


def test_out_of_memory_shrinks_the_microbatch_in_the_next_job(run):
    summary = run(workload="faulty:OutOfMemoryAboveTwo", batches="8")
    (trial,) = summary.folder.trials()
    assert trial.read_result()["microbatch_size"] == 2 and trial.read_status().attempts == 3


@pytest.fixture
def command(run, go, tmp_path) -> Iterator:
    """`sweep run --executor slurm`, in a process of its own, on what `run` left unfinished."""
    started = []

    def start() -> subprocess.Popen:
        flags = ["--workload", "faulty:WaitsForGo", "--batches", "4", "--budget", str(4 * STEPS)]
        flags += ["--out", str(tmp_path / "sweep"), "--device", "cpu", "--quiet"]
        words = [sys.executable, "-m", "sweep", "run", "quadratic", *flags]
        words += ["--executor", "slurm", "--slurm", "cluster=local"]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_jobs_outlive_a_killed_command_and_are_found_by_the_next(command, go, tmp_path):
    first = command()
    trial = until_waiting(tmp_path / "sweep")
    worker = read_owner(trial.lease_path)["pid"]
    first.kill()
    first.wait()
    second = command()
    deadline = time.monotonic() + SECONDS
    while read_owner(tmp_path / "sweep" / "sweep.lock").get("pid") != second.pid:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    go.touch()
    assert second.wait(SECONDS) == 0
    assert (trial.read_status().state, trial.read_status().attempts) == (State.COMPLETE, 1)
    assert read_owner(trial.lease_path)["pid"] == worker


def test_a_stopped_command_leaves_checkpoints_and_no_jobs(command, go, tmp_path):
    first = command()
    trial = until_waiting(tmp_path / "sweep")
    first.send_signal(signal.SIGTERM)
    while not trial.stop_path.exists():
        time.sleep(0.05)
    time.sleep(2)  # the attempt looks for the file once a second
    go.touch()
    assert first.wait(SECONDS) == 130
    assert trial.read_status().state is State.WAITING and trial.checkpoints()[0].step < STEPS
    assert command().wait(SECONDS) == 0
    assert (trial.read_status().state, trial.read_status().attempts) == (State.COMPLETE, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes=4", "slurm must be KEY=VALUE"),
        ("partition", "slurm must be KEY=VALUE"),
        ("time=4", "slurm's time must be like"),
        ("time=0h", "slurm's time must be like"),
        ("memory=big", "slurm's memory must be"),
        ("cluster=moon", "slurm or local"),
    ],
)
def test_what_slurm_cannot_be_asked_for_is_refused(text, message):
    with pytest.raises(SweepError, match=message):
        Place("slurm", slurm=text).check()


def test_what_is_asked_for_reaches_submitit_under_its_names():
    asked = parse_request("partition=gpu, time=2d, memory=32GiB, cores=8, at_once=4")
    assert asked == {
        "slurm_partition": "gpu",
        "timeout_min": 2880,
        "mem_gb": 32.0,
        "cpus_per_task": 8,
        "at_once": 4,
        "cluster": "slurm",
    }


def test_without_slurm_the_command_says_where_to_go(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SweepError, match="must be called where srun is"):
        run(place=Place("slurm"))
