"""Trials on a real Ray cluster of several nodes, which lose nodes, drivers and patience."""

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.orchestration.execution import Logistics
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.ray_executor import ALONE, LOOK_SECONDS, SETTINGS, RayExecutor, needs_of
from sweep.orchestration.runner import holding, run_plan
from sweep.plan.retry import begin_attempt
from sweep.training.device import available_cores
from sweep.training.memory_limit import ROOT as CGROUPS
from sweep.training.memory_limit import _groups
from sweep.training.worker import POLL_SECONDS
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder
from sweep.trial.lease import is_locked, read_owner
from sweep.trial.metrics import read_metrics

has_ray = importlib.util.find_spec("ray") is not None  # imported once its settings are made
pytestmark = [pytest.mark.ray, pytest.mark.skipif(not has_ray, reason="needs the extra ray")]

HERE, ROOT = str(Path(__file__).parent), str(Path(__file__).parents[2])
STEPS, SECONDS = 100, 90.0


class RayCluster:
    """A head node without CPUs, and nodes that hold one trial each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 2}
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self.nodes = []

    def add(self, **holds: int):
        node = self._cluster.add_node(**{"num_cpus": available_cores(), **holds})
        self.nodes.append(node)
        return node

    def kill(self, node) -> None:
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_head(self, is_stopped: bool) -> None:
        """End the head's processes, as `ray stop` does or at once."""
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=is_stopped)

    def preempt(self, node) -> None:
        """Take a node away as a cloud takes back a spot machine: with notice."""
        reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test")
        drain = ("drain-node", "--address", self.address, "--node-id", node.node_id, *reason)
        command = [sys.executable, "-m", "ray.scripts.scripts", *drain]
        done = subprocess.run([*command, "--deadline-remaining-seconds", "1"], capture_output=True)
        assert done.returncode == 0, done.stderr
        time.sleep(1)
        self.kill(node)

    def shut_down(self) -> None:
        self._cluster.shutdown()


class Driver:
    """`sweep run --executor ray` in a process of its own, on a plan that lies there already."""

    def __init__(self, folder: SweepFolder, address: str | None) -> None:
        self.folder = folder
        self.arguments = [
            *(sys.executable, "-m", "sweep", "run", str(folder.path.parent / "question.toml")),
            *("--executor", "ray", "--out", str(folder.path), "--quiet", "--yes"),
            *(("--ray-address", address) if address else ()),
        ]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def wait(self) -> int:
        output, _ = self.process.communicate(timeout=SECONDS)
        print(output)
        return self.process.returncode

    def until(self, reached) -> TrialFolder:
        """Wait until this holds of some trial; return it."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for trial in self.folder.trials():
                if reached(trial):
                    return trial
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)
        raise AssertionError("the sweep did not get there")


@pytest.fixture(scope="module")
def importable() -> Iterator[None]:
    """Let nodes and commands import this project, and the workloads of faulty.py; before Ray."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((HERE, ROOT)))
        patch.syspath_prepend(HERE)
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex())  # else one is left in the home folder
        yield


@pytest.fixture(scope="module")
def running_cluster(importable, tmp_path_factory) -> Iterator[RayCluster]:
    os.environ["FAULTY_FOLDER"] = str(tmp_path_factory.mktemp("faulty"))
    cluster = RayCluster()
    yield cluster
    cluster.shut_down()


@pytest.fixture
def two_clusters(importable) -> Iterator[list[RayCluster]]:
    """Clusters of which a test may lose the head."""
    clusters = [RayCluster(), RayCluster()]
    yield clusters
    for cluster in clusters:
        cluster.shut_down()


@pytest.fixture
def cluster(running_cluster) -> Iterator[RayCluster]:
    """The cluster, without nodes that could hold a trial."""
    yield running_cluster
    for node in list(running_cluster.nodes):
        running_cluster.kill(node)


@pytest.fixture
def plan_trials(tmp_path):
    """Plan trials that checkpoint all the time, as question.toml asks for them."""

    def plan(name: str = "sweep", workload: str = "faulty:WaitsForGo", **fields) -> SweepFolder:
        folder = SweepFolder(tmp_path / name / "sweep")
        fields = {"batches": [4], "budget": 4 * STEPS, "workload": workload, **fields}
        folder.path.parent.mkdir()
        lines = ['question = "Does it end well?"', 'model = "quadratic"', 'lr = "0.05"']
        lines += [f"{key} = {value!r}" for key, value in fields.items()]
        question = folder.path.parent / "question.toml"
        question.write_text("\n".join(lines).replace("'", '"'))
        planned = make_plan(load_experiment(str(question)), Logistics(device="cpu"), folder)
        execution = planned.plan.execution.model_copy(update={"checkpoint_seconds": 0.01})
        save_plan(planned.plan.model_copy(update={"execution": execution}), folder)
        return folder

    return plan


@pytest.fixture
def drive(importable) -> Iterator:
    """Make drivers, of which none outlives the test."""
    drivers = []

    def make(folder: SweepFolder, address: str | None) -> Driver:
        drivers.append(Driver(folder, address))
        return drivers[-1]

    yield make
    for driver in drivers:
        if driver.process and driver.process.poll() is None:
            driver.kill()


@pytest.fixture
def go(running_cluster) -> Iterator[Path]:
    """The file that lets trials go on behind step 50."""
    path = Path(os.environ["FAULTY_FOLDER"]) / "go"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def uninterrupted(plan_trials, go) -> SweepFolder:
    """The same trials, run on this machine without a disturbance."""
    folder = plan_trials("local")
    question = load_experiment(str(folder.path.parent / "question.toml"))
    planned = make_plan(question, Logistics(device="cpu"), folder)
    go.touch()
    assert run_plan(planned, folder).exit_code == 0
    go.unlink()
    return folder


def assert_same(folder: SweepFolder, other: SweepFolder) -> None:
    for trial in folder.trials():
        assert trial.read_status().state is State.COMPLETE
        weights = load_file(trial.weights_path)
        others = load_file(other.trial(trial.id).weights_path)
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert trial.losses_path.read_bytes() == other.trial(trial.id).losses_path.read_bytes()


def checkpointed(trial: TrialFolder) -> bytes:
    """Return the lines that the newest checkpoint knows: who begins anew writes other times."""
    lines = trial.metrics_path.read_bytes()[: trial.checkpoints()[0].metrics_length]
    assert lines
    return lines


def has_keeper() -> bool:
    """Tell whether an actor lives that owns attempts."""
    lines = (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
    return any("ray::Keeper" in " ".join(line) for line in lines)


def has_logged(step: int):
    def reached(trial: TrialFolder) -> bool:
        lines = read_metrics(trial.metrics_path)
        is_there = bool(lines) and lines[-1]["step"] >= step and not trial.result_path.exists()
        return is_there and trial.read_status().state is State.RUNNING

    return reached


def test_a_killed_node_loses_nothing_but_time(cluster, drive, plan_trials, uninterrupted, go):
    folder = plan_trials()
    first = cluster.add()
    driver = drive(folder, cluster.address)
    driver.start()
    trial = driver.until(has_logged(40))
    cluster.kill(first)
    lines = checkpointed(trial)
    go.touch()
    cluster.add()
    assert driver.wait() == 0
    assert trial.read_status().attempts == 2
    assert trial.metrics_path.read_bytes().startswith(lines)
    steps = [line["step"] for line in read_metrics(trial.metrics_path)]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    assert_same(folder, uninterrupted)


def test_a_killed_driver_is_started_again_and_starts_nothing_twice(
    cluster, drive, plan_trials, uninterrupted, go
):
    folder = plan_trials()
    cluster.add()
    first, refused, second = (drive(folder, cluster.address) for _ in range(3))
    first.start()
    trial = first.until(has_logged(40))
    worker = read_owner(trial.lease_path)["pid"]
    refused.start()
    assert refused.wait() == 2
    first.kill()
    second.start()
    second.until(lambda _: read_owner(folder.lock_path)["pid"] == second.process.pid)
    time.sleep(LOOK_SECONDS)  # the second has every chance to start what still runs
    assert is_locked(trial.lease_path) and read_owner(trial.lease_path)["pid"] == worker
    go.touch()
    assert second.wait() == 0
    assert (trial.read_status().attempts, trial.read_result()["attempts"]) == (1, 1)
    assert read_owner(trial.lease_path)["pid"] == worker
    assert_same(folder, uninterrupted)


def test_what_outlives_its_driver_is_found_finished(cluster, drive, plan_trials, uninterrupted, go):
    folder = plan_trials()
    cluster.add()
    first, second = drive(folder, cluster.address), drive(folder, cluster.address)
    first.start()
    trial = first.until(has_logged(40))
    assert has_keeper()
    first.kill()
    go.touch()
    deadline = time.monotonic() + SECONDS
    while trial.read_result() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert trial.read_status().state is State.RUNNING  # nobody was there to note its end
    while has_keeper() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not has_keeper()  # nothing of a dead command stays on the cluster
    second.start()
    assert second.wait() == 0
    assert (trial.read_status().state, trial.read_status().attempts) == (State.COMPLETE, 1)
    assert_same(folder, uninterrupted)


def test_stop_checkpoints_what_runs_and_drops_what_waits(cluster, drive, plan_trials, go):
    folder = plan_trials(seeds=2)
    cluster.add()
    driver = drive(folder, cluster.address)
    driver.start()
    trial = driver.until(has_logged(40))
    os.kill(driver.process.pid, signal.SIGINT)
    driver.until(lambda _: trial.stop_path.exists())
    time.sleep(2 * POLL_SECONDS)
    go.touch()
    assert driver.wait() == 130
    assert {one.read_status().state for one in folder.trials()} == {State.WAITING}
    assert trial.checkpoints()[0].step < STEPS
    driver.start()
    assert driver.wait() == 0
    assert {one.read_status().state for one in folder.trials()} == {State.COMPLETE}


def test_a_preempted_node_is_not_counted_as_a_lost_worker(cluster, drive, plan_trials, go):
    folder = plan_trials()
    first = cluster.add()
    driver = drive(folder, cluster.address)
    driver.start()
    trial = driver.until(has_logged(40))
    cluster.preempt(first)
    cluster.add()
    driver.until(lambda one: is_locked(one.lease_path) and one.read_status().attempts == 2)
    os.kill(read_owner(trial.lease_path)["pid"], signal.SIGKILL)  # lost: retried once
    go.touch()
    assert driver.wait() == 0
    assert (trial.read_status().state, trial.read_status().attempts) == (State.COMPLETE, 3)


def test_a_worker_that_dies_twice_is_lost_and_named(cluster, drive, plan_trials):
    folder = plan_trials(workload="faulty:DiesAlways")
    cluster.add()
    driver = drive(folder, cluster.address)
    driver.start()
    assert driver.wait() == 1
    (trial,) = folder.trials()
    status = trial.read_status()
    assert (status.state, status.cause, status.attempts) == (State.FAILED, Cause.LOST, 2)
    assert str(trial.log_path) in status.message


def test_a_node_whose_memory_runs_out_shrinks_the_microbatch(drive, plan_trials, monkeypatch):
    memory = psutil.virtual_memory()
    if memory.available < 12 * 2**30:
        pytest.skip("needs 12 GiB of free memory")
    share = (memory.total - memory.available + 4 * 2**30) / memory.total
    monkeypatch.setenv("RAY_memory_usage_threshold", str(share))
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    folder = plan_trials(workload="faulty:TakesTheMachinesMemory", batches=[8])
    driver = drive(folder, None)
    driver.start()
    assert driver.wait() == 0
    (trial,) = folder.trials()
    assert trial.read_result()["microbatch_size"] == 2 and trial.read_status().attempts == 3


@pytest.fixture
def tight_group() -> Iterator[Path]:
    """A cgroup of 2 GiB inside this process's own."""
    parent, names = next(_groups(CGROUPS, Path("/proc/self/cgroup")))
    group = parent / f"sweep-{os.getpid()}"
    try:
        group.mkdir()
        (group / names.limit).write_text(str(2 * 2**30))
    except OSError as error:
        pytest.skip(f"needs leave to limit memory: {error}")
    yield group
    deadline = time.monotonic() + SECONDS
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    group.rmdir()


def test_an_attempt_that_the_kernel_ends_for_memory_shrinks_the_microbatch(
    tight_group, cluster, drive, plan_trials, monkeypatch
):
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # else Ray might be the first
    (tight_group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        cluster.add()  # its processes are in this one's group
    finally:
        (tight_group.parent / "cgroup.procs").write_text(str(os.getpid()))
    folder = plan_trials(workload="faulty:TakesTheMachinesMemory", batches=[8])
    driver = drive(folder, cluster.address)
    driver.start()
    assert driver.wait() == 0
    (trial,) = folder.trials()
    assert trial.read_result()["microbatch_size"] == 2 and trial.read_status().attempts == 3


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_cluster_of_its_own_ends_with_the_command(drive, plan_trials, go, is_killed):
    folder = plan_trials()
    driver = drive(folder, None)
    driver.start()
    trial = driver.until(has_logged(40))
    own = psutil.Process(driver.process.pid).children(recursive=True)
    own = [process for process in own if "Agent" not in process.name()]  # they take a minute
    assert {"gcs_server", "raylet"} < {process.name() for process in own}
    assert read_owner(trial.lease_path)["pid"] in {process.pid for process in own}
    if is_killed:
        driver.kill()
    else:
        go.touch()
        assert driver.wait() == 0
    _, left = psutil.wait_procs(own, timeout=SECONDS)
    assert not left
    if is_killed:
        lines = checkpointed(trial)
        go.touch()
        driver.start()
        assert driver.wait() == 0
        assert trial.metrics_path.read_bytes().startswith(lines)
    assert trial.read_status().state is State.COMPLETE
    assert trial.read_status().attempts == 1 + is_killed


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_command_whose_cluster_is_gone_ends_and_goes_on_in_another(
    two_clusters, drive, plan_trials, go, monkeypatch, is_stopped
):
    folder = plan_trials(batches=[4, 8], budget=8 * STEPS)  # one of them is queued
    cluster, other = two_clusters
    with monkeypatch.context() as patch:  # how long a node lives without a head: 60 s
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "30")
        cluster.add()
    driver = drive(folder, cluster.address)
    driver.start()
    trial = driver.until(has_logged(40))
    cluster.lose_head(is_stopped)
    assert driver.wait() == 130
    assert {one.read_status().state for one in folder.trials()} == {State.WAITING}
    assert (folder.path / "report.md").exists()
    lines = checkpointed(trial)
    go.touch()
    other.add()
    driver = drive(folder, other.address)
    driver.start()
    assert driver.wait() == 0
    assert {one.read_status().state for one in folder.trials()} == {State.COMPLETE}
    assert trial.metrics_path.read_bytes().startswith(lines)


def test_an_attempt_takes_its_gpus_or_a_node(importable):
    from ray._raylet import IMPLICIT_RESOURCE_PREFIX

    assert all(name.startswith(IMPLICIT_RESOURCE_PREFIX) for name in ALONE)
    on = Execution(device="cuda", devices=4, threads=8)
    assert needs_of(on) == {"num_gpus": 4, "num_cpus": 4}
    assert needs_of(on.model_copy(update={"device": "cpu"})) == {"num_cpus": 32, "resources": ALONE}


@pytest.mark.parametrize(("device", "devices", "at_once"), [("cuda", 2, 2), ("cpu", 1, 1)])
def test_attempts_at_the_same_time_share_no_device(
    cluster, plan_trials, go, device, devices, at_once
):
    """That there are no such GPUs Ray does not look; the trials themselves are on the CPU."""
    fields = {"batches": [4, 8, 16], "budget": 16 * STEPS}  # so that all wait for go
    folder = plan_trials(workload="faulty:NotesItsDevices", **fields)
    places = [go.parent / f"devices-{trial.id}" for trial in folder.trials()]
    for place in places:  # the other case's
        place.unlink(missing_ok=True)
    cluster.add(num_cpus=4 * available_cores(), num_gpus=4)
    execution = Execution(device=device, devices=devices, threads=available_cores())
    futures = []
    with holding(folder):
        executor = RayExecutor(execution, folder, cluster.address)
        for trial in folder.trials():
            trial.write_status(begin_attempt(trial.read_status()))
            futures.append(executor.submit(trial, {}))
        deadline = time.monotonic() + SECONDS
        while sum(place.exists() for place in places) < at_once and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(LOOK_SECONDS)  # the others have every chance to begin
        noted = [place.read_text().partition(" ")[2] for place in places if place.exists()]
        noted = [gpus.split(",") for gpus in noted]
        go.touch()
        executor.close()
    assert {future.result().kind for future in futures} == {"complete"}
    assert len(noted) == at_once
    processes = {place.read_text().partition(" ")[0] for place in places}
    assert len(processes) == len(places)  # each attempt in one of its own
    if device == "cuda":
        assert [len(one) for one in noted] == [devices, devices]
        assert not set(noted[0]) & set(noted[1])


@pytest.mark.parametrize(
    ("workload", "state", "cause", "attempts"),
    [
        ("OutOfMemoryAboveTwo", State.COMPLETE, None, 2),
        ("BatchEightRaises", State.FAILED, Cause.ERROR, 1),
    ],
)
def test_what_happens_within_a_trial_is_judged_as_on_one_machine(
    cluster, drive, plan_trials, workload, state, cause, attempts
):
    batch = {"batches": [4 if attempts == 2 else 8], "budget": 80}
    folder = plan_trials(workload=f"faulty:{workload}", **batch)
    cluster.add()
    driver = drive(folder, cluster.address)
    driver.start()
    assert driver.wait() == (0 if state is State.COMPLETE else 1)
    (status,) = (trial.read_status() for trial in folder.trials())
    assert (status.state, status.cause, status.attempts) == (state, cause, attempts)


def test_a_trial_on_two_devices_ends_with_the_same_weights_there(cluster, tmp_path):
    cluster.add()
    weights = []
    for place in ((), ("--executor", "ray", "--ray-address", cluster.address)):
        out = tmp_path / f"sweep-{len(place)}"
        settings = ("--batches", "8", "--budget", "4096", "--devices-per-trial", "2", "--quiet")
        command = [sys.executable, "-m", "sweep", "run", "quick", *settings, *place]
        done = subprocess.run(
            [*command, "--device", "cpu", "--out", str(out)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (trial,) = SweepFolder(out).trials()
        assert "2 devices" in trial.log_path.read_text()
        weights.append(trial.weights_path.read_bytes())
    assert weights[0] == weights[1]


def test_the_file_for_rays_launcher_is_what_ray_takes():
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = (Path(ROOT) / "deploy" / "ray-cluster.yaml").read_text()
    config = prepare_config(yaml.safe_load(text))
    validate_config(config)
    assert len(config["provider"]["worker_ips"]) == config["max_workers"]


@pytest.mark.parametrize(
    ("flag", "value"), [("--ray-address", "127.0.0.1:1"), ("--device", "cuda")]
)
def test_what_no_cluster_can_do_is_refused_and_writes_nothing(importable, tmp_path, flag, value):
    command = [sys.executable, "-m", "sweep", "run", "quadratic", "--executor", "ray"]
    out = tmp_path / "deep" / "sweep"
    done = subprocess.run(
        [*command, "--out", str(out), flag, value, "--json"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{flag[2:] if flag != '--device' else 'the Ray cluster'} must" in done.stderr
    assert not out.parent.exists() and done.stdout == ""
