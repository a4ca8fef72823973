"""Trials on a real Ray cluster of several nodes, which loses workers, nodes, commands, its head."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from sweep.config.execution import Execution
from sweep.errors import SweepError
from sweep.orchestration.executors import ray as ray_executor
from sweep.orchestration.executors.ray import ENVIRONMENT, RayExecutor, RaySettings
from sweep.orchestration.runner import run_plan
from sweep.plan.retry import begin_attempt
from sweep.training.device import available_cores
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import is_locked, read_owner
from sweep.trial.status import Cause, State
from sweep.version import __version__
from tests.orchestration.clusters import (
    RAY_TOKEN,
    SECONDS,
    STEPS,
    assert_resumed,
    assert_same,
    checkpointed,
    plan_trials,
    planned,
    states,
    wait_until,
)

has_ray = importlib.util.find_spec("ray") is not None  # imported after ENVIRONMENT is set
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(not has_ray, reason="needs the extra ray"),
    pytest.mark.timeout(900),  # starts many processes, also on a busy machine
]
ON_RAY = ("--executor", "ray")
inspection = ray_executor._inspection


class RayCluster:
    """A head node without CPUs, and nodes that hold one trial each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 2}
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self.cluster.address
        self.options = (*ON_RAY, "--ray-address", self.address)

    def add(self, **resources: int):
        return self.cluster.add_node(**{"num_cpus": available_cores(), **resources})


@pytest.fixture
def ray_environment(go, monkeypatch) -> None:
    for name, value in {**RAY_TOKEN, **ENVIRONMENT}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def cluster(ray_environment):
    cluster = RayCluster()
    yield cluster
    cluster.cluster.shutdown()


@pytest.fixture
def uninterrupted(tmp_path, go) -> SweepFolder:
    folder = plan_trials(tmp_path / "local")
    go.touch()
    assert run_plan(planned(folder), folder).exit_code == 0
    go.unlink()
    return folder


def test_a_trial_survives_the_death_of_its_node_and_then_of_its_worker(
    cluster, command, tmp_path, uninterrupted, go
):
    first, run = cluster.add(), command(plan_trials(tmp_path / "ray"), *cluster.options)
    trial = run.start_and_wait_for_trial()
    cluster.cluster.remove_node(first, allow_graceful=False)
    lines = checkpointed(trial)
    cluster.add()
    wait_until(lambda: is_locked(trial.lease_path) and trial.read_status().attempts == 2, run)
    os.kill(read_owner(trial.lease_path)["pid"], signal.SIGKILL)
    go.touch()
    assert run.wait() == 0
    assert_resumed(trial, lines, attempts=3)
    assert_same(run.folder, uninterrupted)


def test_an_attempt_ends_with_its_killed_command_and_the_next_command_resumes_it(
    cluster, command, tmp_path, uninterrupted, go
):
    folder = plan_trials(tmp_path / "ray")
    first, second = (command(folder, *cluster.options) for _ in range(2))
    cluster.add()
    trial = first.start_and_wait_for_trial()
    assert second.run() == 2
    first.kill()
    wait_until(lambda: not is_locked(trial.lease_path))
    lines = checkpointed(trial)
    go.touch()
    assert second.run() == 0
    assert_resumed(trial, lines, attempts=2)
    assert_same(folder, uninterrupted)


@pytest.mark.usefixtures("interruptible")
def test_stop_lets_running_trials_checkpoint_and_drops_queued_ones(cluster, command, tmp_path, go):
    folder = plan_trials(tmp_path / "ray", "faulty:SlowUntilGo", seeds=2)
    run = command(folder, *cluster.options)
    cluster.add()
    trial = run.start_and_wait_for_trial()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert states(run.folder) == {State.WAITING}
    assert trial.checkpoints()[0].step < STEPS
    lines = checkpointed(trial)
    go.touch()
    assert run.run() == 0
    assert states(run.folder) == {State.COMPLETE}
    assert_resumed(trial, lines, attempts=2)


@pytest.mark.parametrize(
    ("workload", "end", "options"),
    [
        ("OutOfMemoryAboveTwo", (State.COMPLETE, None, 3), ()),
        ("BatchEightRaises", (State.FAILED, Cause.ERROR, 1), ()),
        ("DiesAlways", (State.FAILED, Cause.LOST, 2), ()),
        ("Hangs", (State.FAILED, Cause.LOST, 2), ("--stall-minutes", "0.1")),
    ],
)
def test_failures_are_judged_as_on_one_machine(cluster, command, tmp_path, workload, end, options):
    folder = plan_trials(tmp_path / "ray", f"faulty:{workload}", batches=[8])
    cluster.add()
    run = command(folder, *cluster.options, *options)
    assert run.run() == (1 if State.FAILED in end else 0)
    (status,) = (trial.read_status() for trial in folder.trials())
    assert (status.state, status.cause, status.attempts) == end


def test_a_worker_that_ray_kills_for_memory_shrinks_the_microbatch(
    ray_environment, command, tmp_path, monkeypatch
):
    memory = psutil.virtual_memory()
    if memory.available < 12 * 2**30:
        pytest.skip("needs 12 GiB of free memory")
    share = (memory.total - memory.available + 4 * 2**30) / memory.total
    monkeypatch.setenv("RAY_memory_usage_threshold", str(share))
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    folder = plan_trials(tmp_path, "faulty:TakesTheMachinesMemory", batches=[8])
    assert command(folder, *ON_RAY).run() == 0
    (trial,) = folder.trials()
    assert trial.read_result().microbatch_size == 2 and trial.read_status().attempts == 3


def processes_of(run) -> list[psutil.Process]:
    children = psutil.Process(run.process.pid).children(recursive=True)
    return [child for child in children if "Agent" not in child.name()]  # these take a minute


def test_a_local_cluster_ends_with_its_command(ray_environment, command, tmp_path, go):
    run = command(plan_trials(tmp_path), *ON_RAY)
    trial = run.start_and_wait_for_trial()
    processes = processes_of(run)
    assert {"gcs_server", "raylet"} < {process.name() for process in processes}
    assert read_owner(trial.lease_path)["pid"] in {process.pid for process in processes}
    run.kill()
    assert not psutil.wait_procs(processes, timeout=SECONDS)[1]
    lines = checkpointed(trial)
    run.start()
    wait_until(lambda: is_locked(trial.lease_path), run)
    processes = processes_of(run)
    go.touch()
    assert run.wait() == 0
    assert not psutil.wait_procs(processes, timeout=SECONDS)[1]
    assert_resumed(trial, lines, attempts=2)


def test_a_command_without_its_head_node_ends_and_resumes_on_another_cluster(
    cluster, command, tmp_path, go, monkeypatch, request
):
    folder = plan_trials(tmp_path, batches=[4, 8], budget=8 * STEPS)  # one of them is queued
    first = RayCluster()
    request.addfinalizer(first.cluster.shutdown)
    with monkeypatch.context() as patch:  # how long a node lives without a head
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "30")
        first.add()
    run = command(folder, *first.options)
    trial = run.start_and_wait_for_trial()
    first.cluster.remove_node(first.cluster.head_node, allow_graceful=False)
    assert run.wait() == 130
    assert states(folder) == {State.WAITING}
    assert (folder.path / "report.md").exists()
    lines = checkpointed(trial)
    go.touch()
    cluster.add()
    assert command(folder, *cluster.options).run() == 0
    assert states(folder) == {State.COMPLETE}
    assert trial.metrics_path.read_bytes().startswith(lines)


@pytest.mark.parametrize(("device", "devices", "parallel"), [("cuda", 2, 2), ("cpu", 1, 1)])
def test_attempts_share_neither_device_nor_process(
    cluster, tmp_path, go, device, devices, parallel
):
    """Ray does not check that the GPUs exist; the trials run on the CPU."""
    fields = {"batches": [4, 8, 16], "budget": 16 * STEPS}  # all of them wait for go
    folder = plan_trials(tmp_path, "faulty:NotesItsDevices", **fields)
    notes = [tmp_path / f"devices-{trial.id}" for trial in folder.trials()]
    for note in notes:  # the forecast of memory takes steps too
        note.unlink(missing_ok=True)
    cluster.add(**({"num_cpus": 4, "num_gpus": 4} if device == "cuda" else {}))
    execution = Execution(device=device, devices=devices, threads=available_cores())
    executor = RayExecutor(RaySettings(ray_address=cluster.address), execution, folder)
    for trial in folder.trials():
        trial.write_status(begin_attempt(trial.read_status()))
    futures = [executor.submit(trial, {}) for trial in folder.trials()]
    wait_until(lambda: sum(note.exists() for note in notes) >= parallel)
    time.sleep(5)  # the others have time to begin
    gpus = [note.read_text().partition(" ")[2].split(",") for note in notes if note.exists()]
    go.touch()
    executor.close()
    assert {future.result().kind for future in futures} == {"complete"}
    assert len(gpus) == parallel
    assert len({note.read_text().partition(" ")[0] for note in notes}) == len(notes)
    if device == "cuda":
        assert [len(names) for names in gpus] == [devices, devices]
        assert not set(gpus[0]) & set(gpus[1])


def test_a_trial_on_two_devices_ends_with_the_same_weights(cluster, tmp_path):
    cluster.add()
    weights = []
    for options in ((), cluster.options):
        out = tmp_path / f"sweep-{len(options)}"
        settings = ("--batches", "8", "--budget", "4096", "--devices-per-trial", "2", "--quiet")
        words = [sys.executable, "-m", "sweep", "run", "quick", *settings, *options]
        subprocess.run([*words, "--device", "cpu", "--out", str(out)], check=True)
        (trial,) = SweepFolder(out).trials()
        assert trial.read_result().devices == 2
        weights.append(trial.weights_path.read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("flag", "value"), [("--ray-address", "127.0.0.1:1"), ("--device", "cuda")]
)
def test_a_cluster_that_cannot_run_the_trials_is_refused(ray_environment, tmp_path, flag, value):
    out = tmp_path / "deep" / "sweep"
    words = [sys.executable, "-m", "sweep", "run", "quadratic", *ON_RAY, flag, value]
    done = subprocess.run([*words, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in done.stderr and not out.parent.exists()


@pytest.mark.parametrize(
    ("attribute", "value", "problem"),
    [
        ("__version__", "9.9", f"has sweep {__version__}"),
        ("_inspection", lambda path: inspection(f"{path}-elsewhere"), "does not see the folder"),
    ],
)
def test_nodes_that_cannot_run_trials_of_the_folder_are_named(
    cluster, tmp_path, monkeypatch, attribute, value, problem
):
    cluster.add()
    folder = plan_trials(tmp_path / "sweep")
    before = set(folder.path.iterdir())
    execution = Execution(device="cpu", threads=available_cores())
    monkeypatch.setattr(ray_executor, attribute, value)
    with pytest.raises(SweepError, match=f"but {socket.gethostname()} {problem}"):
        RayExecutor(RaySettings(ray_address=cluster.address), execution, folder)
    assert set(folder.path.iterdir()) == before
