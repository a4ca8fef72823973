"""Run attempts as tasks of a Ray cluster, in fresh processes that end with the command."""

import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, TypedDict

from sweep.config.execution import Execution
from sweep.config.settings import Group, RunFlag, Settings
from sweep.errors import SweepError
from sweep.orchestration.executors.base import Executor
from sweep.plan.retry import Outcome
from sweep.training import run_cluster_attempt
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import DEAD_SECONDS
from sweep.version import __version__

POLL_SECONDS = 1.0  # between two checks of the cluster's nodes
NODE_SECONDS = 120.0  # for a node to tell its version
ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # workers use the environment of their node
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the default of later versions, which 2.60 suggests
    "RAY_USAGE_STATS_ENABLED": "0",
}
LOG = logging.getLogger(__name__)


class RaySettings(Settings, use_attribute_docstrings=True):
    ray_address: Annotated[str | None, RunFlag(Group.DEVICES, metavar="HOST:PORT")] = None
    """A running Ray cluster."""


class RayOverrides(TypedDict, total=False):
    ray_address: str | None


class RayExecutor(Executor):
    """Executor on the Ray cluster at an address, or on a local one that ends with this process."""

    name = "ray"
    extra = "ray"
    library = "ray"
    settings = RaySettings

    def __init__(self, settings: RaySettings, execution: Execution, folder: SweepFolder) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # Ray reads some of them when it is imported
        import ray

        self._ray = ray
        self._resource = "CPU"
        self._needed = execution.threads * execution.devices
        if execution.device == "cuda":
            self._resource = "GPU"
            self._needed = execution.devices

        self._lock = threading.RLock()  # held while Ray is called and could be left
        self._attempts: dict[Any, tuple[Future[Outcome], Path]] = {}  # future and log, by task
        self._is_stopping = False
        self._is_closing = False

        self._connect(settings.ray_address, execution.threads * execution.devices)
        self._address = str(ray.get_runtime_context().gcs_address)
        capacity = self._capacity()
        if not capacity:
            ray.shutdown()
            needs = f"{self._needed} {self._resource}"
            raise SweepError(
                f"the Ray cluster must have a node with {needs} for each trial. Add one, or choose "
                "another --device."
            )

        if settings.ray_address:
            self._refuse_unready_nodes(folder.path)
        self.slots = _slots(capacity)
        self._watcher = threading.Thread(target=self._watch, name="ray", daemon=True)
        self._watcher.start()

    def _connect(self, address: str | None, cores: int) -> None:
        """Connect to a cluster, or start one on this machine with so many CPUs."""
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not address:
            options |= {"include_dashboard": False, "num_cpus": cores}
        try:
            _check_reachable(address)
            self._ray.init(address or "local", **options)
        except (OSError, RuntimeError, ValueError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise SweepError(
                f"ray-address must be the address of a Ray cluster, got {address!r} ({reason}). "
                "Start one with `ray start --head`, or leave the flag out to use this machine."
            ) from error

    def _refuse_unready_nodes(self, folder: Path) -> None:
        """Raise SweepError if nodes cannot see the sweep's folder, or have another version."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        probe = folder.absolute() / f".{uuid.uuid4().hex}"  # new, so no file system has cached it
        probe.touch()
        inspect = self._ray.remote(num_cpus=0, max_retries=0)(_inspection(str(probe)))
        nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in self._nodes()}
        try:
            tasks = {}
            for node in nodes:
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                tasks[node] = inspect.options(scheduling_strategy=strategy).remote()
            problems = [
                f"{nodes[node]} {problem}"
                for node, task in tasks.items()
                if (problem := self._problem_of_node(task, folder))
            ]
        finally:
            probe.unlink()
        if problems:
            self._ray.shutdown()
            raise SweepError(
                f"all nodes of the Ray cluster must see {folder.absolute()} and have sweep "
                f"{__version__}, but {'; '.join(problems)}. Mend these nodes, or take them out of "
                "the cluster."
            )

    def _problem_of_node(self, task: Any, folder: Path) -> str:
        try:
            version, sees_folder = self._ray.get(task, timeout=NODE_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            return f"has not answered for {NODE_SECONDS:g} s"
        except self._ray.exceptions.RayError as error:
            return f"cannot run a task ({str(error).strip().splitlines()[-1]})"
        if version is None:
            return "has no sweep in its Python"
        if version != __version__:
            return f"has sweep {version}"
        return "" if sees_folder else "does not see the folder"

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        path = folder.path.absolute()
        number = folder.read_status().fencing
        with self._lock:
            if self._is_stopping or not self.slots:
                future.set_result(Outcome("stopped", "not submitted", has_begun=False))
                return future

            options = {
                "max_calls": 1,  # one call per process
                "max_retries": 0,  # by Ray
                f"num_{self._resource.lower()}s": self._needed,
            }
            words = {
                signal.SIGINT: "stopped",  # sent by ray.cancel()
                signal.SIGTERM: "preempted",
            }
            task = self._ray.remote(**options)(run_cluster_attempt).remote(path, number, words)
            self._attempts[task] = (future, folder.log_path)
        return future

    def stop(self, force: bool = False) -> None:
        self._is_stopping = True
        with self._lock:
            for task in list(self._attempts):
                self._ray.cancel(task, force=force)

    def close(self) -> None:
        self._is_closing = True
        self._watcher.join()
        self._ray.shutdown()

    def _watch(self) -> None:
        answered = time.monotonic()
        while self._attempts or not self._is_closing:
            try:
                self.slots = _slots(max(1, self._capacity()))
                answered = time.monotonic()
                tasks = list(self._attempts)
                if tasks:
                    for task in self._ray.wait(tasks, timeout=POLL_SECONDS)[0]:
                        outcome = self._outcome(task)
                        future, _ = self._attempts.pop(task)
                        future.set_result(outcome)
                    continue
            except (OSError, self._ray.exceptions.RayError):
                if time.monotonic() - answered > DEAD_SECONDS:
                    self._leave()
                    return
            time.sleep(POLL_SECONDS)

    def _leave(self) -> None:
        """End all attempts before Ray, whose head is gone, ends this process."""
        LOG.warning("The head of the Ray cluster at %s does not answer.", self._address)
        with self._lock:
            self.slots = []
            for future, _ in self._attempts.values():
                future.set_result(Outcome("stopped", "its Ray cluster is gone"))
            self._attempts.clear()
            self._ray.shutdown()

    def _outcome(self, task: Any) -> Outcome:
        errors = self._ray.exceptions
        _, log = self._attempts[task]
        try:
            return self._ray.get(task)  # type: ignore[no-any-return]
        except errors.RayError as error:
            if self._is_stopping or isinstance(error, errors.TaskCancelledError):
                return Outcome("stopped", "cancelled")
            if isinstance(error, errors.OutOfMemoryError):
                return Outcome("out_of_memory", "killed by Ray: the node's memory ran out")
            if isinstance(error, errors.NodeDiedError):
                return Outcome("preempted", "its Ray node died or was taken away")
            if isinstance(error, errors.RayTaskError):
                return Outcome("error", f"the worker failed: {str(error).splitlines()[-1]}")
            return Outcome("lost", f"the worker died: {type(error).__name__}; see {log}")

    def _capacity(self) -> int:
        """Return how many attempts fit the cluster's nodes; OSError if its head does not answer."""
        _check_reachable(self._address)  # else Ray would block, and end this process
        return sum(int(node["Resources"][self._resource] // self._needed) for node in self._nodes())

    def _nodes(self) -> list[dict[str, Any]]:
        """Return the living nodes that can hold a trial."""
        return [
            node
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get(self._resource, 0) >= self._needed
        ]


def _inspection(path: str) -> Callable[[], tuple[str | None, bool]]:
    """Return a function of a node's version of sweep, and whether a file exists there.

    Ray sends a local function as code, so it also runs on a node without this package.
    """

    def inspect() -> tuple[str | None, bool]:
        import os

        is_visible = os.path.exists(path)
        try:
            from sweep.version import __version__ as version
        except ImportError:
            return None, is_visible
        return version, is_visible

    return inspect


def _slots(capacity: int) -> list[dict[str, str]]:
    """Return twice as many slots as attempts can run, so that Ray has a queue."""
    return [{}] * (2 * capacity)


def _check_reachable(address: str | None) -> None:
    """Raise OSError if nothing answers; Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon:
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=5).close()
