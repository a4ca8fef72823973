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
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sweep.config.trial import Execution
from sweep.errors import SweepError
from sweep.plan.retry import Outcome
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import LeaseWatch

# A process per attempt; no retry by Ray.
FRESH = {"max_calls": 1, "max_retries": 0}
NAMESPACE = "sweep"
HEAD = {"node:__internal_head__": 0.001}
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
        self._looked, self._capacity, self._is_killing = -math.inf, 0, False
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
        if not self._count_places():
            self.close()
            needs = " and ".join(f"{count:g} {NAMES[name]}" for name, count in self._needs.items())
            raise SweepError(
                f"the Ray cluster must have a node that holds a trial, which takes {needs}; none "
                "of its nodes does. Add one, or choose another --device."
            )

    @property
    def slots(self) -> list[dict[str, str]]:
        """As many as the nodes of this moment hold, and as many again, which Ray queues."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._capacity, self._looked = self._count_places(), time.monotonic()
        return [{} for _ in range(2 * max(1, self._capacity))]

    def _count_places(self) -> int:
        import ray

        return sum(
            min(int(node["Resources"].get(NAMES[k], 0) // v) for k, v in self._needs.items())
            for node in ray.nodes()
            if node["Alive"]
        )

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        """Queue the newest attempt of a trial."""
        import ray

        path, number = str(folder.path.absolute()), folder.read_status().fencing
        remote = ray.remote(num_cpus=0, resources=HEAD)(Keeper)
        keeper = remote.options(
            name=self._name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
        ).remote()
        keeper.live.remote(self._lock)
        asked = keeper.run.remote(path, number, self._needs).future()
        future: Future[Outcome] = Future()
        self._running.add(future)

        def end(_: object) -> None:
            error = asked.exception()
            outcome = Outcome("lost", _lines(error)[0]) if error else asked.result()
            if outcome.kind == "lost" and self._is_killing:
                outcome = Outcome("stopped", "killed while stopping")
            self._running.discard(future)
            future.set_result(outcome)

        asked.add_done_callback(end)
        return future

    def stop(self) -> None:
        """Ask all attempts of the sweep to checkpoint and end, an earlier command's too."""
        self._end_attempts(at_once=False)

    def kill(self) -> None:
        """End all attempts at once."""
        self._is_killing = True
        self._end_attempts(at_once=True)

    def _end_attempts(self, at_once: bool) -> None:
        import ray

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
        self._is_watched = False

    async def run(self, path: str, number: int, needs: dict[str, float]) -> Outcome:
        """Run one attempt and judge its end."""
        import ray

        task = ray.remote(**FRESH, **needs)(_attempt).remote(path, number)
        self._tasks[task] = path, number
        try:
            outcome: Outcome = await task
            return outcome
        except ray.exceptions.RayError as error:
            return await _judge(error, path)
        finally:
            del self._tasks[task]

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


def _attempt(path: str, number: int) -> Outcome:
    """The body of a worker process."""
    from sweep.training.remote import run_remote_attempt

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


def needs_of(execution: Execution) -> dict[str, float]:
    """Return what Ray sets aside for an attempt: its GPUs, or the CPUs of its threads."""
    if execution.device.startswith("cuda"):
        return {"num_gpus": execution.devices, "num_cpus": execution.devices}
    return {"num_cpus": execution.threads * execution.devices}


def _check_reachable(address: str | None) -> None:
    host, colon, port = (address or "").rpartition(":")
    if colon:
        socket.create_connection((host.rpartition("/")[2], int(port)), CONNECT_SECONDS).close()


def _lines(error: BaseException) -> list[str]:
    """Return the lines of an exception's text that are not empty; its name where none is."""
    lines = [line.strip() for line in str(error).splitlines()]
    return [line for line in lines if line] or [type(error).__name__]
