"""Trials as jobs: of submitit's local executor and of a fake SLURM cluster."""

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from sweep.api import run_sweep
from sweep.config.execution import Services
from sweep.errors import SweepError
from sweep.orchestration.executors import slurm
from sweep.orchestration.executors.build import refuse_unusable_services, services_table
from sweep.orchestration.executors.slurm import SlurmExecutor, SlurmSettings, parse_request
from sweep.orchestration.runner import run_plan
from sweep.plan.retry import begin_attempt
from sweep.trial import lease
from sweep.trial.files import canonical_json, seal
from sweep.trial.lease import read_owner
from sweep.trial.status import Cause, State
from tests.orchestration.clusters import (
    SECONDS,
    STEPS,
    assert_resumed,
    assert_same,
    checkpointed,
    plan_trials,
    planned,
    wait_for_trial,
    wait_until,
)
from tests.orchestration.little_slurm import LittleSlurm

pytest.importorskip("submitit", reason="needs the extra slurm")
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]  # many processes on a busy machine

LOCALLY = services_table()(executor="slurm", slurm="cluster=local")
ON_SLURM = services_table()(executor="slurm")
COMMAND = "echo {batch_size} {learning_rate} {seed} {steps}"
OPTIONS = ("--executor", "slurm", "--slurm", "cluster=local", "--device", "cpu")


@pytest.fixture
def run(tmp_path, go):
    def run_here(name, services, **fields):
        folder = plan_trials(tmp_path / name, **fields)
        return run_plan(planned(folder, services), folder, services)

    return run_here


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A fake SLURM whose commands are on PATH; sacct is called every second."""
    import submitit

    watcher = type(submitit.SlurmJob.watcher)(delay_s=1)
    monkeypatch.setattr(submitit.SlurmJob, "watcher", watcher)
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(slurm, "RETRY_SECONDS", 0.1)
    with LittleSlurm(tmp_path / "slurm") as little:
        monkeypatch.setenv("PATH", str(little.folder), prepend=os.pathsep)
        yield little


@pytest.fixture
def submit(tmp_path, go, cluster):
    """Submit the first attempts of trials; return the executor, the sweep and the futures."""
    executors = []

    def submit_here(request=None, execution=None, **fields):
        folder = plan_trials(tmp_path / "jobs", **fields)
        decided = planned(folder).plan.execution.model_copy(update=execution or {})
        executors.append(SlurmExecutor(SlurmSettings(slurm=request), decided, folder))
        for trial in folder.trials():
            trial.write_status(begin_attempt(trial.read_status()))
        return executors[-1], folder, [executors[-1].submit(t, {}) for t in folder.trials()]

    yield submit_here
    for executor in executors:
        executor.stop(force=True)
        executor.close()


def test_a_preempted_job_requeues_itself_and_ends_with_the_same_weights(run, go, cluster, tmp_path):
    fields = {"batches": [4, 8, 16], "budget": 16 * STEPS}
    preempted, folder = [], plan_trials(tmp_path / "jobs", **fields)

    def preempt() -> None:
        trial = wait_for_trial(folder)
        preempted.extend([trial, checkpointed(trial)])
        above = psutil.Process(read_owner(trial.lease_path)["pid"]).parents()
        (job,) = (job for job in cluster.jobs.values() if job.step in {p.pid for p in above})
        cluster.give_notice(job.id)
        go.touch()

    with ThreadPoolExecutor() as pool:
        pool.submit(preempt)
        jobs = run("jobs", ON_SLURM, **fields)
    assert jobs.exit_code == 0
    assert {status.attempts for status in jobs.states.values()} == {1}
    assert_resumed(*preempted, attempts=1)
    assert_same(folder, run("here", Services(), **fields).folder)
    wait_until(lambda: {job.state for job in cluster.jobs.values()} == {"COMPLETED"})
    assert sorted(job.starts for job in cluster.jobs.values()) == [1, 1, 2]


@pytest.mark.parametrize(
    ("workload", "end", "minutes"),
    [
        ("DiesAlways", (State.FAILED, Cause.LOST, 2), 30),
        ("OutOfMemoryAboveTwo", (State.COMPLETE, None, 3), 30),
        ("Hangs", (State.FAILED, Cause.LOST, 2), 0.1),
    ],
)
def test_failures_are_judged_as_on_one_machine(run, workload, end, minutes):
    services = LOCALLY.model_copy(update={"stall_minutes": minutes})
    summary = run("jobs", services, workload=f"faulty:{workload}", batches=[8])
    (status,) = summary.states.values()
    assert (status.state, status.cause, status.attempts) == end
    assert summary.exit_code == (1 if Cause.LOST in end else 0)


@pytest.mark.parametrize("is_over", [False, True])
def test_the_next_command_adopts_a_job_of_a_killed_command(command, tmp_path, go, is_over):
    folder = plan_trials(tmp_path / "jobs")
    first, second = command(folder, *OPTIONS), command(folder, *OPTIONS)
    trial = first.start_and_wait_for_trial()
    worker = read_owner(trial.lease_path)["pid"]
    first.kill()
    if is_over:
        go.touch()
        wait_until(trial.read_result)
    second.start()
    wait_until(lambda: read_owner(folder.lock_path).get("pid") == second.process.pid)
    go.touch()
    assert second.wait() == 0
    assert_resumed(trial, b"", attempts=1)
    assert read_owner(trial.lease_path)["pid"] == worker


def test_a_stopped_command_leaves_checkpoints_and_no_jobs(command, tmp_path, go):
    first = command(plan_trials(tmp_path / "jobs", "faulty:SlowUntilGo"), *OPTIONS)
    trial = first.start_and_wait_for_trial()
    lines = checkpointed(trial)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 130
    assert trial.read_status().state is State.WAITING and trial.checkpoints()[0].step < STEPS
    go.touch()
    assert first.run() == 0
    assert_resumed(trial, lines, attempts=2)


def test_a_preempted_job_that_slurm_does_not_requeue_is_submitted_again(submit, cluster, go):
    cluster.requeues = False
    _, folder, (future,) = submit()
    trial, (job,) = wait_for_trial(folder), cluster.jobs
    cluster.give_notice(job)
    go.touch()
    assert future.result(SECONDS).kind == "preempted" and trial.checkpoints()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_without_accounting_a_dead_worker_is_noticed_by_its_lease(
    submit, cluster, monkeypatch, is_elsewhere
):
    monkeypatch.setattr(lease, "DEAD_SECONDS", 1.0)
    cluster.accounts = False
    cluster.resize(0 if is_elsewhere else 4)
    _, folder, (future,) = submit()
    (trial,) = folder.trials()
    if is_elsewhere:  # its counter stands still
        owner = {"host": "elsewhere", "fencing": 1, "counter": 7, "folder": trial.id}
        trial.lease_path.write_text(canonical_json(seal(owner)))
    else:
        os.kill(read_owner(wait_for_trial(folder).lease_path)["pid"], signal.SIGKILL)
    outcome = future.result(SECONDS)
    assert outcome.kind == "lost" and str(trial.log_path) in outcome.message


def test_without_accounting_a_requeued_job_in_the_queue_is_not_lost(submit, cluster, go):
    cluster.accounts = False
    _, folder, (future,) = submit()
    trial, (job,) = wait_for_trial(folder), cluster.jobs
    lines = checkpointed(trial)
    cluster.resize(0)
    cluster.give_notice(job)
    go.touch()
    wait_until(lambda: cluster.jobs[job].state == "PENDING")
    time.sleep(20 * slurm.POLL_SECONDS)
    assert not future.done()
    cluster.resize(1)
    assert future.result(SECONDS).kind == "complete"
    assert trial.metrics_path.read_bytes().startswith(lines)


def test_a_suspended_job_ends_after_it_is_resumed(submit, cluster, go):
    _, folder, (future,) = submit()
    wait_for_trial(folder)
    (job,) = cluster.jobs
    subprocess.run(["scontrol", "suspend", job], check=True)
    go.touch()
    sacct_calls = cluster.sacct_calls
    wait_until(lambda: cluster.sacct_calls > sacct_calls + 1)
    assert not future.done()
    subprocess.run(["scontrol", "resume", job], check=True)
    assert future.result(SECONDS).kind == "complete"


def test_the_state_of_a_job_decides_the_outcome(submit, cluster):
    cluster.resize(0)
    kinds = {"CANCELLED by 1000": "error", "NODE_FAIL": "lost", "OUT_OF_MEMORY": "out_of_memory"}
    kinds |= {"PREEMPTED": "preempted", "TIMEOUT": "preempted"}
    kinds |= dict.fromkeys(("COMPLETING", "PENDING", "RESIZING", "SUSPENDED"))
    _, _, futures = submit(batches=[4 * 2**i for i in range(len(kinds))], budget=1024)
    wait_until(lambda: len(cluster.jobs) == len(futures))
    for name, state in zip(cluster.jobs, kinds, strict=True):
        cluster.end(name, state)
    ends = [kind for kind in kinds.values() if kind]
    wait_until(lambda: sum(future.done() for future in futures) == len(ends))
    sacct_calls = cluster.sacct_calls
    wait_until(lambda: cluster.sacct_calls > sacct_calls + 1)
    assert sorted(future.result().kind for future in futures if future.done()) == sorted(ends)


def test_stop_cancels_pending_jobs_and_lets_running_ones_checkpoint(submit, cluster):
    cluster.resize(1)
    fields = {"batches": [4, 8], "budget": 8 * STEPS}
    executor, folder, futures = submit(workload="faulty:SlowUntilGo", **fields)
    trial = wait_for_trial(folder)
    wait_until(lambda: len(cluster.jobs) == 2)
    running, pending = sorted(cluster.jobs, key=lambda name: cluster.jobs[name].step is None)
    executor.stop()
    wait_until(lambda: cluster.jobs[pending].state == f"CANCELLED by {os.getuid()}")
    assert [future.result(SECONDS).kind for future in futures] == ["stopped", "stopped"]
    assert trial.checkpoints()[0].step < STEPS
    wait_until(lambda: cluster.jobs[running].state == "COMPLETED")


def test_sbatch_receives_the_request(submit, cluster):
    cluster.resize(0)
    words = "partition=gpu, account=lab, qos=high, constraint=h100, time=2d, memory=32GiB"
    submit(words, {"device": "cuda", "devices": 2, "threads": 6})
    wait_until(lambda: cluster.jobs)
    (job,) = cluster.jobs.values()
    request = {"account": "lab", "constraint": "h100", "partition": "gpu", "qos": "high"}
    request |= {"cpus-per-task": "12", "gpus-per-node": "2", "mem": "32768M", "time": "2880"}
    request |= {"signal": "USR2@90"}
    assert {name: job.flags[name] for name in request} == request


def test_pairs_may_have_spaces_and_values_commas():
    request = parse_request("partition = gpu , time = 8h, export=ALL,NAME=1 ,memory=16GiB")
    assert (request.minutes, request.options["partition"]) == (480, "gpu")
    assert request.options["export"] == "ALL,NAME=1"
    assert request.options["mem"] == "16384M"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("memory=131072", "must have a unit"),
        ("memory=47.4", "must have a unit"),
        ("memory=500KB", "1 MiB or more"),
        ("mem=16G,memory=8GiB", "got both"),
        ("cores=4,cpus-per-task=8", "got both"),
    ],
)
def test_sizes_without_units_and_two_names_of_one_option_are_refused(text, problem):
    with pytest.raises(SweepError, match=problem):
        parse_request(text)


def test_sbatch_receives_any_option_and_lines_of_setup(submit, cluster):
    cluster.resize(0)
    words = "nodes=2,gres=gpu:a100:4,shard:1,container_image=lab/torch:2,exclusive=,mail-type=END"
    words += ",export=ALL,NAME=1"
    setup = "setup=module load cuda,setup=export NCCL_DEBUG=INFO"
    submit(f"{words},{setup}", {"device": "cuda", "devices": 8, "threads": 2})
    wait_until(lambda: cluster.jobs)
    (job,) = cluster.jobs.values()
    request = {"nodes": "2", "gres": "gpu:a100:4,shard:1", "container-image": "lab/torch:2"}
    request |= {"exclusive": "", "mail-type": "END", "cpus-per-task": "8", "ntasks-per-node": "1"}
    request["export"] = "ALL,NAME=1"
    assert {name: job.flags[name] for name in request} == request
    assert "gpus-per-node" not in job.flags
    script = (cluster.folder / f"{job.id}.sh").read_text()
    before, command = script.split("# command")
    assert "module load cuda\nexport NCCL_DEBUG=INFO\n" in before
    assert "--overlap --nodes=1 --ntasks=1" in command


def test_jobs_that_slurm_refuses_end_the_command_before_any_trial(submit, cluster, monkeypatch):
    (cluster.folder / "sbatch").write_text("#!/bin/sh\necho error: no such partition >&2; exit 1")
    with pytest.raises(SweepError, match="SLURM refuses such jobs: error: no such partition"):
        submit("partition=moon")
    (cluster.folder / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(cluster.folder))
    with pytest.raises(SweepError, match="executor slurm needs sbatch"):
        submit()


@pytest.mark.parametrize(
    ("program", "devices", "message"),
    [
        ({"experiment": "quick"}, 2, "must run on one node"),
        ({"command": COMMAND}, 3, "must be a multiple of the nodes"),
    ],
)
def test_several_nodes_need_a_command_and_devices_on_each(tmp_path, program, devices, message):
    settings = {"budget": 480, "batches": [6], "device": "cpu", "devices_per_trial": devices}
    on_two_nodes = {"executor": "slurm", "slurm": "cluster=local,nodes=2"}
    with pytest.raises(SweepError, match=message):
        run_sweep(out=tmp_path / "sweep", **program, **settings, **on_two_nodes)


@pytest.mark.parametrize(
    ("refusals", "end"),
    [(1, (State.COMPLETE, None, 1)), (4, (State.FAILED, Cause.LOST, 0))],  # twice for each trial
)
def test_a_job_that_sbatch_refuses_is_submitted_once_more(run, cluster, go, refusals, end):
    cluster.refusals = refusals
    go.touch()
    summary = run("jobs", ON_SLURM, batches=[4, 8])
    assert {(one.state, one.cause, one.attempts) for one in summary.states.values()} == {end}
    assert summary.exit_code == (1 if Cause.LOST in end else 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partition", "slurm must be KEY=VALUE"),
        ("nodes=2-4", "slurm's nodes must be"),
        ("ntasks=4", "must not have the key ntasks"),
        ("time=", "slurm's time must have a value"),
        ("qos=a,qos=b", "got qos twice"),
        ("time=4", "slurm's time must be"),
        ("time=4m", "slurm's time must be"),
        ("memory=big", "slurm's memory must be"),
        ("cluster=moon", "slurm or local"),
    ],
)
def test_an_invalid_request_is_refused(text, message):
    with pytest.raises(SweepError, match=message):
        refuse_unusable_services(services_table()(executor="slurm", slurm=text))


def test_without_slurm_the_command_refuses_to_run(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SweepError, match="srun"):
        run("jobs", ON_SLURM)
