"""Attempts on a Ray cluster, each in a fresh process on devices of its own.

Only the path of a trial's folder and a number go to a worker. Attempts belong to an actor on the
head node, not to the command, so that they outlive it: the next command finds them by their leases.
Ray retries nothing: there is one table of retries (sweep.plan.retry).
"""

import asyncio
import contextlib
import logging
import math
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from sweep.config.trial import Execution
from sweep.errors import SweepError
from sweep.plan.retry import Outcome
from sweep.training.memory_limit import oom_kills
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import DEAD_SECONDS, LeaseWatch

# A process per attempt; no retry by Ray.
FRESH = {"max_calls": 1, "max_retries": 0}
NAMESPACE = "sweep"
HEAD = "node:__internal_head__"  # what only the head node holds
# By default an actor does 1000 things at a time: with so many attempts it would hear no word more.
KEEPER = {"num_cpus": 0, "resources": {HEAD: 0.001}, "max_concurrency": 10**6}
ALONE = {"node:__internal_implicit_resource_sweep": 1}  # each node has one, whoever names it
NAMES = {"num_gpus": "GPU", "num_cpus": "CPU"}  # of what nodes hold
LOOK_SECONDS = 5.0  # between two looks at the cluster's nodes, and at the command's lock
CONNECT_SECONDS = 5.0  # Ray itself would try for minutes
NODE_SECONDS = 60.0  # at most, until Ray is sure that a node is gone, and why
TAKEN_AWAY = (1, 3, 4)  # reasons of a node's death: ended on purpose, preempted, scaled down
SETTINGS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # workers get the nodes' own environment
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what later versions of Ray do anyway
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what it would print to stdout, where results belong
}
LOG = logging.getLogger(__name__)


class RayExecutor:
    """Attempts on a running cluster, or on a local one that ends with this process.

    Args:
        execution: how many devices, or threads, an attempt takes.
        folder: of the sweep; every node sees it at the same place.
        address: of the cluster; None: start a local one.

    Raises:
        SweepError: if there is no such cluster, or no node of it could hold an attempt.
    """

    queues = True

    def __init__(self, execution: Execution, folder: SweepFolder, address: str | None) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        import ray

        self._needs, self._lock = needs_of(execution), str(folder.lock_path.absolute())
        self._name = str(folder.path.absolute())
        self._running: set[Future[Outcome]] = set()
        self._looked, self._capacity = -math.inf, 0
        self._is_killing = self._is_gone = self._is_unheard = False
        cpus = None if "num_gpus" in self._needs else self._needs["num_cpus"]
        own: dict[str, Any] = {"include_dashboard": False, "num_cpus": cpus}
        try:
            _check_reachable(address)
            ray.init(
                address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if address else own),
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise SweepError(
                f"ray-address must be that of a running Ray cluster, got {address!r} "
                f"({_lines(error)[0]}). Start one with `ray start --head`, or leave the flag "
                "out for one of this machine."
            ) from error
        self._address = str(ray.get_runtime_context().gcs_address)
        if not self._places(self._nodes()):
            self.close()
            counts = {NAMES[k]: v for k, v in self._needs.items() if k in NAMES}
            needs = " and ".join(f"{count:g} {name}" for name, count in counts.items())
            raise SweepError(
                f"the Ray cluster must have a node that holds a trial, which takes {needs}; none "
                "of its nodes does. Add one, or choose another --device."
            )

    @property
    def slots(self) -> list[dict[str, str]]:
        """As many as the nodes of this moment hold, and as many again, which Ray queues.

        Empty once the cluster is gone.
        """
        if not self._is_gone and time.monotonic() - self._looked > LOOK_SECONDS:
            deadline = time.monotonic() + DEAD_SECONDS
            while not (nodes := self._nodes()) and time.monotonic() < deadline:
                time.sleep(1)
            self._capacity, self._looked = self._places(nodes), time.monotonic()
            if not nodes:
                self._give_up()
            elif self._is_unheard:
                self._end_attempts(self._is_killing)
        return [] if self._is_gone else [{} for _ in range(2 * max(1, self._capacity))]

    def _nodes(self) -> list[dict[str, float]]:
        """Return what each node holds; nothing while the head does not answer."""
        import ray

        if self._is_gone:
            return []
        try:
            _check_reachable(self._address)
        except OSError:
            return []
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return nodes if any(HEAD in node for node in nodes) else []

    def _places(self, nodes: list[dict[str, float]]) -> int:
        needs = {NAMES[name]: count for name, count in self._needs.items() if name in NAMES}
        most = 1 if "resources" in self._needs else sys.maxsize
        fits = ([int(node.get(k, 0) // needs[k]) for k in needs] for node in nodes)
        return sum(min(most, *counts) for counts in fits)

    def _give_up(self) -> None:
        """Leave a cluster that is gone: after a minute Ray would end this process for it."""
        import ray

        LOG.warning("The Ray cluster at %s is gone: its head does not answer.", self._address)
        self._is_gone = True
        for future in list(self._running):
            self._end(future, Outcome("stopped", "its Ray cluster is gone"))
        ray.shutdown()

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        """Queue the newest attempt of a trial."""
        import ray

        path, number = str(folder.path.absolute()), folder.read_status().fencing
        remote = ray.remote(**KEEPER)(Keeper)
        keeper = remote.options(
            name=self._name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
        ).remote()
        keeper.live.remote(self._lock)
        asked = keeper.run.remote(path, number, self._needs).future()
        future: Future[Outcome] = Future()
        self._running.add(future)

        def end(_: object) -> None:
            if error := asked.exception():
                name = type(error).__name__
                outcome = Outcome("lost", f"its owner on Ray's head is gone: {name}")
                self._looked = -math.inf  # to ask a head that is gone for another one would block
            else:
                outcome = asked.result()
            if outcome.kind == "lost" and self._is_killing:
                outcome = Outcome("stopped", "killed while stopping")
            self._end(future, outcome)

        asked.add_done_callback(end)
        return future

    def _end(self, future: Future[Outcome], outcome: Outcome) -> None:
        self._running.discard(future)
        with contextlib.suppress(InvalidStateError):  # it ended as the cluster went
            future.set_result(outcome)

    def stop(self) -> None:
        """Ask all attempts of the sweep to checkpoint and end, an earlier command's too."""
        self._end_attempts(at_once=False)

    def kill(self) -> None:
        """End all attempts at once."""
        self._is_killing = True
        self._end_attempts(at_once=True)

    def _end_attempts(self, at_once: bool) -> None:
        import ray

        self._is_unheard = not self._nodes()
        if self._is_unheard:  # there is nobody to ask just now, and asking takes Ray a minute
            return
        with contextlib.suppress(ValueError):  # nothing was submitted yet
            ray.get_actor(self._name, NAMESPACE).stop.remote(at_once)

    def close(self) -> None:
        """Wait for what is left; end the cluster if it was started for this."""
        import ray

        for future in list(self._running):
            future.exception()
        ray.shutdown()


class Keeper:
    """Owns the attempts of one sweep: an actor that lives as long as they or the command do."""

    def __init__(self) -> None:
        self._tasks: dict[Any, tuple[str, int]] = {}
        self._begun: dict[tuple[str, int], tuple[str, int]] = {}  # by trial and attempt
        self._is_watched = False

    async def run(self, path: str, number: int, needs: dict[str, Any]) -> Outcome:
        """Run one attempt and judge its end."""
        import ray

        own = ray.get_runtime_context().current_actor
        task = ray.remote(**FRESH, **needs)(_attempt).remote(own, path, number)
        self._tasks[task] = path, number
        try:
            outcome: Outcome = await task
            return outcome
        except ray.exceptions.WorkerCrashedError as error:
            begun = self._begun.get((path, number))
            if begun and await _memory_ran_out(*begun):
                return Outcome("out_of_memory", "ended by the kernel: the node's memory ran out")
            return await _judge(error, path)
        except ray.exceptions.RayError as error:
            return await _judge(error, path)
        finally:
            del self._tasks[task]
            self._begun.pop((path, number), None)

    def note_begun(self, path: str, number: int, node: str, kills: int) -> None:
        """Note where an attempt begins, and how often memory has run out there before."""
        self._begun[path, number] = node, kills

    async def stop(self, at_once: bool) -> None:
        """Cancel what has not begun; ask the others to end, or end them."""
        import ray

        for task, (path, number) in list(self._tasks.items()):
            TrialFolder(Path(path)).ask_to_stop(number)
            ray.cancel(task, force=at_once)  # one that trains ignores it unless forced

    async def live(self, lock: str) -> None:
        """End this actor once no attempt is left and the command has ended, or died."""
        import ray

        if self._is_watched:
            return
        self._is_watched, watch = True, LeaseWatch(Path(lock))
        while self._tasks or watch.is_alive():
            await asyncio.sleep(LOOK_SECONDS)
        ray.actor.exit_actor()


def _attempt(keeper: Any, path: str, number: int) -> Outcome:
    """The body of a worker process."""
    import ray

    from sweep.training.worker import run_remote_attempt

    node = ray.get_runtime_context().get_node_id()
    ray.get(keeper.note_begun.remote(path, number, node, oom_kills()))
    return run_remote_attempt(Path(path), number)


async def _judge(error: Exception, path: str) -> Outcome:
    """Tell by Ray's exception why an attempt ended without a word."""
    from ray import exceptions

    see = f"; see {TrialFolder(Path(path)).log_path}"
    if isinstance(error, exceptions.TaskCancelledError):
        return Outcome("stopped", "cancelled")
    if isinstance(error, exceptions.OutOfMemoryError):
        return Outcome("out_of_memory", "ended by Ray: the node's memory ran out")
    if isinstance(error, exceptions.NodeDiedError):
        is_taken = await _was_taken_away(error)
        return Outcome("preempted" if is_taken else "lost", "its Ray node is gone")
    if isinstance(error, exceptions.RayTaskError):
        return Outcome("error", f"the worker failed: {_lines(error)[-1]}{see}")
    return Outcome("lost", f"the worker ended without a word: {type(error).__name__}{see}")


async def _memory_ran_out(node: str, kills: int) -> bool:
    """Tell whether the kernel has killed a process of a node's for memory since so many kills."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    try:
        now = ray.remote(num_cpus=0, scheduling_strategy=there, **FRESH)(oom_kills).remote()
        return bool(await now > kills)
    except ray.exceptions.RayError:  # the node is gone too
        return False


async def _was_taken_away(error: Exception) -> bool:
    """Tell whether the node that an error names was ended on purpose, as Ray knows a bit later."""
    import ray

    found = re.search(r"node ID: ([0-9a-f]+)", str(error))
    deadline = time.monotonic() + NODE_SECONDS
    while found and time.monotonic() < deadline:
        for node in ray.nodes():
            if node["NodeID"] == found[1] and not node["Alive"]:
                return node["DeathReason"] in TAKEN_AWAY
        await asyncio.sleep(0.2)
    return False


def needs_of(execution: Execution) -> dict[str, Any]:
    """Return what Ray sets aside for an attempt: its GPUs, or a node with CPUs for its threads.

    A node is one device, however many CPUs it has: attempts beside each other would be slower.
    """
    if execution.device.startswith("cuda"):
        return {"num_gpus": execution.devices, "num_cpus": execution.devices}
    return {"num_cpus": execution.threads * execution.devices, "resources": ALONE}


def _check_reachable(address: str | None) -> None:
    host, colon, port = (address or "").rpartition(":")
    if colon:
        socket.create_connection((host.rpartition("/")[2], int(port)), CONNECT_SECONDS).close()


def _lines(error: BaseException) -> list[str]:
    """Return the lines of an exception's text that are not empty; its name where none is."""
    lines = [line.strip() for line in str(error).splitlines()]
    return [line for line in lines if line] or [type(error).__name__]
