"""Trials as jobs, run for real: by submitit's local executor, and by a little SLURM."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sweep.config.experiment import load_experiment
from sweep.errors import SweepError
from sweep.orchestration import slurm_executor
from sweep.config.execution import Execution
from sweep.orchestration.executors import Place
from sweep.orchestration.planning import Planned, make_plan, save_plan
from sweep.orchestration.runner import Summary, run_plan
from sweep.orchestration.slurm_executor import NOTICE, SlurmExecutor, parse_request
from sweep.plan.retry import begin_attempt
from sweep.trial import lease
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder
from sweep.trial.lease import FileLock, is_locked, read_owner
from sweep.trial.metrics import read_metrics
from tests.orchestration.little_slurm import LittleSlurm

pytest.importorskip("submitit", reason="needs the extra slurm")
pytestmark = pytest.mark.slurm

HERE, ROOT = str(Path(__file__).parent), str(Path(__file__).parents[2])
STEPS, SECONDS = 100, 90.0
SEEN = 40  # steps of a trial that is about to wait for go
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


def plan_here(folder: SweepFolder, **fields) -> Planned:
    """Plan trials that checkpoint all the time."""
    fields = {"batches": "4", "budget": 4 * STEPS, "workload": "faulty:WaitsForGo", **fields}
    experiment = load_experiment("quadratic", fields)
    planned = make_plan(experiment, Execution(device="cpu"), folder)
    execution = planned.plan.execution.model_copy(update={"checkpoint_seconds": 0.01})
    save_plan(planned.plan.model_copy(update={"execution": execution}), folder)
    return make_plan(experiment, Execution(device="cpu"), folder)


@pytest.fixture
def run(tmp_path, go):
    """Plan trials and run them."""

    def run_here(name="sweep", place=LOCALLY, **fields) -> Summary:
        folder = SweepFolder(tmp_path / name)
        return run_plan(plan_here(folder, **fields), folder, place=place)

    return run_here


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Iterator[LittleSlurm]:
    """A little SLURM, whose commands are on PATH; it is asked often."""
    monkeypatch.setattr(slurm_executor, "ASK_SECONDS", 0.5)
    with LittleSlurm(tmp_path / "slurm") as little:
        monkeypatch.setenv("PATH", str(little.folder), prepend=os.pathsep)
        yield little


@pytest.fixture
def submit(tmp_path, go, cluster, monkeypatch) -> Iterator[Callable[..., list[Any]]]:
    """Submit the first attempts of trials to the little SLURM; return the executor, and futures."""
    monkeypatch.setattr(slurm_executor, "POLL_SECONDS", 0.1)
    built: list[SlurmExecutor] = []

    def submit_here(request=None, execution=None, **fields) -> list[Any]:
        folder = SweepFolder(tmp_path / "sweep")
        decided = plan_here(folder, **fields).plan.execution.model_copy(update=execution or {})
        built.append(SlurmExecutor(decided, folder, parse_request(request)))
        for trial in folder.trials():
            trial.write_status(begin_attempt(trial.read_status()))
        return [built[-1], *(built[-1].submit(trial, {}) for trial in folder.trials())]

    yield submit_here
    for executor in built:
        executor.kill()
        executor.close()


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


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come so far"
        time.sleep(0.05)


def until_waiting(folder: Path) -> TrialFolder:
    """Wait until a trial waits for go; return it."""

    def is_there(trial: TrialFolder) -> bool:
        lines = read_metrics(trial.metrics_path)
        has_begun = trial.read_status().state is State.RUNNING and is_locked(trial.lease_path)
        return bool(has_begun and lines and lines[-1]["step"] >= SEEN)

    found: list[TrialFolder] = []

    def look() -> bool:
        found.extend(filter(is_there, map(TrialFolder, folder.glob("trials/*"))))
        return bool(found)

    until(look)
    return found[0]


def assert_same(folder: SweepFolder, other: SweepFolder) -> None:
    for trial in folder.trials():
        weights = load_file(trial.weights_path)
        others = load_file(other.trial(trial.id).weights_path)
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert trial.losses_path.read_bytes() == other.trial(trial.id).losses_path.read_bytes()


def assert_went_on(trial: TrialFolder) -> None:
    """Assert that the attempt's second life began where its first one ended, not at the start."""
    lines = trial.log_path.read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("goes on from step "))
    assert int(line.split()[4]) >= SEEN
    steps = [line["step"] for line in read_metrics(trial.metrics_path)]
    assert steps == sorted(set(steps)) and steps[-1] == trial.read_config().steps


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
    assert_went_on(trial)
    assert_same(summary.folder, run("local", Place()).folder)


def go_after(seconds: float, folder: Path, go: Path) -> None:
    until_waiting(folder)
    time.sleep(seconds)
    go.touch()


def test_a_job_whose_time_is_up_goes_on_in_its_next_life(run, go, meanwhile, tmp_path):
    meanwhile(go_after, 35, tmp_path / "sweep", go)  # notice comes 30 s before the minute is over
    summary = run(place=Place("slurm", slurm="cluster=local,time=1m"))
    (trial,) = summary.folder.trials()
    assert (trial.read_status().state, trial.read_status().attempts) == (State.COMPLETE, 1)
    assert trial.log_path.read_text().count("attempt 1: ") == 2
    assert "timed-out" in trial.log_path.read_text()
    assert_went_on(trial)


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
    assert_went_on(trial)


def give_notice(cluster: LittleSlurm, folder: Path, go: Path) -> None:
    """Give notice to the job of a trial that waits for go."""
    owner = read_owner(until_waiting(folder).lease_path)
    (job,) = (job for job in cluster.jobs.values() if job.step == owner["pid"])
    cluster.give_notice(job.name)
    go.touch()


def test_an_array_of_jobs_gives_the_same_weights_as_processes(
    run, go, cluster, meanwhile, tmp_path
):
    fields = {"batches": "4,8,16", "budget": 16 * STEPS}
    meanwhile(give_notice, cluster, tmp_path / "jobs", go)
    jobs = run("jobs", Place("slurm", slurm="partition=gpu"), **fields)
    assert jobs.exit_code == 0
    trials = jobs.folder.trials()
    states = {(trial.read_status().state, trial.read_status().attempts) for trial in trials}
    assert states == {(State.COMPLETE, 1)}
    (flags,) = cluster.submitted
    assert (flags["array"], flags["partition"]) == ("0-2%3", "gpu")
    until(lambda: {job.state for job in cluster.jobs.values()} == {"COMPLETED"})
    assert sorted(job.lives for job in cluster.jobs.values()) == [1, 1, 2]
    assert_went_on(*(one for one in trials if one.log_path.read_text().count("attempt 1") == 2))
    assert_same(jobs.folder, run("local", Place(), **fields).folder)


def test_where_jobs_are_not_requeued_the_command_is_told_of_the_preemption(
    submit, cluster, go, tmp_path
):
    cluster.requeues = False
    _, future = submit()
    trial = until_waiting(tmp_path / "sweep")
    cluster.give_notice("1000")
    go.touch()
    assert future.result(SECONDS).kind == "preempted" and trial.checkpoints()
    assert "its job was not requeued" in trial.log_path.read_text()


def test_without_accounting_a_killed_worker_is_seen_by_its_lease(submit, cluster, tmp_path):
    cluster.accounts = False
    _, future = submit()
    trial = until_waiting(tmp_path / "sweep")
    os.kill(read_owner(trial.lease_path)["pid"], signal.SIGKILL)
    outcome = future.result(SECONDS)
    assert outcome.kind == "lost" and str(trial.log_path) in outcome.message


def test_without_accounting_a_worker_elsewhere_is_seen_by_its_counter(
    submit, cluster, monkeypatch, tmp_path
):
    monkeypatch.setattr(lease, "DEAD_SECONDS", 1.0)
    cluster.accounts = False
    cluster.resize(0)
    _, future = submit()
    (trial,) = SweepFolder(tmp_path / "sweep").trials()
    with FileLock(trial.lease_path, {"host": "elsewhere", "fencing": 1, "counter": 7}):
        assert future.result(SECONDS).kind == "lost"


def test_without_accounting_a_job_that_waits_again_is_not_taken_for_dead(
    submit, cluster, go, tmp_path
):
    cluster.accounts = False
    _, future = submit()
    trial = until_waiting(tmp_path / "sweep")
    cluster.resize(0)
    cluster.give_notice("1000")
    go.touch()
    until(lambda: cluster.jobs["1000"].state == "PENDING")
    time.sleep(20 * slurm_executor.POLL_SECONDS)
    assert not future.done()
    cluster.resize(1)
    assert future.result(SECONDS).kind == "complete"
    assert_went_on(trial)


def test_a_suspended_job_has_not_ended(submit, cluster, go, tmp_path):
    _, future = submit()
    until_waiting(tmp_path / "sweep")
    subprocess.run(["scontrol", "suspend", "1000"], check=True)
    go.touch()
    questions = len(cluster.asked)
    until(lambda: len(cluster.asked) > questions + 3)
    assert not future.done()
    subprocess.run(["scontrol", "resume", "1000"], check=True)
    assert future.result(SECONDS).kind == "complete"


def test_these_states_are_no_ends(submit, cluster):
    cluster.resize(0)
    _, *futures = submit(batches="4,8,16,32,64")
    until(lambda: len(cluster.jobs) == len(futures))
    states = ("SUSPENDED", "RESIZING", "REQUEUED", "COMPLETING", "PREEMPTED")
    for job, state in zip(cluster.jobs.values(), states, strict=True):
        job.state = state
    questions = len(cluster.asked)
    until(lambda: len(cluster.asked) > questions + 3)
    assert not any(future.done() for future in futures)
    for name in cluster.jobs:
        cluster.end(name, "NODE_FAIL")
    assert {future.result(SECONDS).kind for future in futures} == {"lost"}


def test_the_state_of_a_job_that_slurm_ended_tells_how(submit, cluster, monkeypatch):
    monkeypatch.setattr(slurm_executor, "PREEMPTED_SECONDS", 0.0)
    monkeypatch.setattr(slurm_executor, "ASK_SECONDS", 30.0)
    cluster.resize(0)
    _, *futures = submit(batches="4,8,16,32,64,128")
    until(lambda: len(cluster.jobs) == len(futures))
    kinds = {
        "CANCELLED by 1000": "error",
        "NODE_FAIL": "lost",
        "OUT_OF_MEMORY": "out_of_memory",
        "PREEMPTED": "preempted",
        "TIMEOUT": "preempted",
        "PENDING": None,
    }
    for name, state in zip(cluster.jobs, kinds, strict=True):
        cluster.end(name, state)
    *ended, waiting = futures
    found = [future.result(SECONDS).kind for future in ended]
    assert dict(zip(kinds, [*found, None], strict=True)) == kinds and not waiting.done()
    assert len(cluster.asked) < len(ended)  # about all at once, and not all the time


def test_stopping_cancels_what_waits_and_lets_what_runs_checkpoint(submit, cluster, go, tmp_path):
    cluster.resize(1)
    slurm, *futures = submit(batches="4,8", budget=8 * STEPS)
    trial = until_waiting(tmp_path / "sweep")
    slurm.stop()
    until(lambda: cluster.jobs["1000_1"].state == f"CANCELLED by {os.getuid()}")
    time.sleep(2)  # the attempt looks for the file once a second
    go.touch()
    assert [future.result(SECONDS).kind for future in futures] == ["stopped", "stopped"]
    assert trial.checkpoints()[0].step < STEPS
    until(lambda: cluster.jobs["1000_0"].state == "COMPLETED")


def test_what_is_asked_for_reaches_slurm(submit, cluster):
    cluster.resize(0)
    words = "partition=gpu, account=lab, qos=high, constraint=h100, time=2d, memory=32GiB"
    submit(words, {"device": "cuda", "devices": 2, "threads": 6})
    until(lambda: cluster.submitted)
    (flags,) = cluster.submitted
    asked = {
        "account": "lab",
        "constraint": "h100",
        "cpus-per-task": "12",
        "gpus-per-node": "2",
        "mem": "32GB",
        "partition": "gpu",
        "qos": "high",
        "signal": "USR2@90",
        "time": "2880",
    }
    assert {name: flags[name] for name in asked} == asked and "array" not in flags


def test_what_sbatch_goes_on_to_refuse_is_told_and_nothing_more_is_submitted(submit, monkeypatch):
    monkeypatch.setattr(slurm_executor, "REFUSED_SECONDS", 0.1)
    monkeypatch.setattr(slurm_executor, "PATIENCE_SECONDS", 1.0)
    slurm, future = submit("partition=moon")
    outcomes = [future.result(SECONDS)]
    (trial,) = slurm._folder.trials()
    while outcomes[-1].kind == "preempted" and len(outcomes) < 100:
        trial.write_status(begin_attempt(trial.read_status()))
        outcomes.append(slurm.submit(trial, {}).result(SECONDS))
    assert len(outcomes) > 2 and outcomes[-1].kind == "error" and not slurm.slots
    assert all("invalid partition specified: moon" in one.message for one in outcomes)


def test_a_slurm_that_refuses_for_a_while_costs_no_trial(run, cluster, monkeypatch, go):
    monkeypatch.setattr(slurm_executor, "REFUSED_SECONDS", 0.1)
    cluster.refuses = 2
    go.touch()
    summary = run(place=Place("slurm", slurm="at_once=1"), batches="4,8")
    assert {status.state for status in summary.states.values()} == {State.COMPLETE}
    assert {status.attempts for status in summary.states.values()} == {1}


def test_a_slurm_that_refuses_for_good_fails_what_it_was_asked_for(run, cluster, monkeypatch):
    monkeypatch.setattr(slurm_executor, "REFUSED_SECONDS", 0.1)
    monkeypatch.setattr(slurm_executor, "PATIENCE_SECONDS", 1.0)
    place = Place("slurm", slurm="partition=moon,at_once=2")
    summary = run(place=place, batches="4,8,16", budget=1600)
    states = sorted((one.state, one.cause, one.attempts) for one in summary.states.values())
    failed = (State.FAILED, Cause.ERROR, 0)
    assert states == [failed, failed, (State.WAITING, None, 0)]
    assert (summary.exit_code, summary.is_interrupted) == (1, False)


@pytest.mark.parametrize(("failures", "kind"), [(3, "complete"), (10**6, "lost")])
def test_a_file_system_that_fails_ends_no_watch(submit, cluster, go, monkeypatch, failures, kind):
    monkeypatch.setattr(slurm_executor, "PATIENCE_SECONDS", 5.0)
    left, look = [failures], slurm_executor._live_attempt

    def fails(trial):
        if left[0] and cluster.submitted:
            left[0] -= 1
            raise OSError(116, "Stale file handle")
        return look(trial)

    monkeypatch.setattr(slurm_executor, "_live_attempt", fails)
    go.touch()
    _, future = submit()
    outcome = future.result(SECONDS)
    assert outcome.kind == kind and ("Stale" in outcome.message) is (kind == "lost")


def test_a_job_that_somebody_cancelled_is_not_submitted_again(run, cluster, meanwhile, go):
    def cancel() -> None:
        until(lambda: cluster.jobs)
        subprocess.run([cluster.folder / "scancel", "1000"], check=True)
        cluster.resize(4)

    cluster.resize(0)
    go.touch()
    meanwhile(cancel)
    tuning = {"lr": "tuned", "tuning": {"trials": 5}}
    summary = run(place=Place("slurm"), **tuning)
    cancelled = [one for one in summary.states.values() if "CANCELLED" in one.message]
    assert {(one.cause, one.attempts) for one in cancelled} == {(Cause.ERROR, 1)}
    assert len(cluster.submitted) == 1 and summary.exit_code == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes=4", "slurm must be KEY=VALUE"),
        ("partition", "slurm must be KEY=VALUE"),
        ("time=4", "slurm's time must be like"),
        ("time=0h", "slurm's time must be like"),
        ("time=4m", "at least 5m"),
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
