"""An attempt of a trial on several devices: a process for each, by torch's elastic launcher.

What the launcher's process is told, a word to stop, and what the others say of their end go through
files of a temporary folder: they outlive whoever wrote them. Each process holds a lock there while
it lives. Whatever ends one process ends all.
"""

import contextlib
import faulthandler
import json
import os
import signal
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sweep.config.objects import load_object
from sweep.plan.retry import Outcome, judge_death
from sweep.training.memory_limit import oom_kills
from sweep.trial.lease import FileLock, is_locked

POLL_SECONDS = 0.1
GRACE_SECONDS = 3  # between asking the others of a dead process to end, and ending them
STOP = "stop"
DECIDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # by the launcher alone
BODY = "sweep.training.worker:run_rank"  # called with the trial's folder and should_stop


def launch(path: Path, device: str, devices: int, should_stop: Callable[[], str | None]) -> Outcome:
    """Run an attempt in `devices` processes on this machine.

    Args:
        path: of the trial's folder.
        device: of the trial, `cpu` or `cuda`.
        devices: that it takes, a process for each.
        should_stop: asked now and then; its answer ends the attempt behind a checkpoint.

    Returns:
        How it ended. A process that dies without a word is seen within a second.
    """
    killed_before = oom_kills()
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
        words = Path(name)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=name),
            monitor_interval=POLL_SECONDS,
            signals_to_handle="SIGHUP",  # the others say `preempted` and `stopped` here
            shutdown_timeout=GRACE_SECONDS,
        )
        try:
            with _watching(should_stop, words, devices) as deaths, _held_back():
                found: dict[int, Outcome] = elastic_launch(config, _rank)(str(path), name, device)
        except ChildFailedError as error:
            return judged(error, deaths, words, oom_kills() > killed_before)
        return found[0]


@contextlib.contextmanager
def _watching(
    should_stop: Callable[[], str | None], words: Path, devices: int
) -> Iterator[dict[int, float]]:
    """Write down what `should_stop` answers, once it does; note when each process is gone."""
    is_over, deaths = threading.Event(), dict[int, float]()

    def look() -> None:
        for number in range(devices):
            alive = words / f"alive-{number}"
            if number not in deaths and alive.exists() and not is_locked(alive):
                deaths[number] = time.time()

    def watch() -> None:
        while not is_over.wait(POLL_SECONDS):
            if not (words / STOP).exists() and (word := should_stop()):
                _write(words / STOP, word)
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield deaths
    finally:
        is_over.set()
        thread.join()
        look()


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Let processes begin with these signals blocked: they ignore them once they have imported.

    This process gets them by another thread, that of `_watching`.
    """
    resource_tracker.ensure_running()  # which would unblock them, were it started within
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DECIDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rank(path: str, name: str, device: str) -> Outcome:
    """One process of the attempt."""
    for ignored in DECIDED:  # though they may reach all
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DECIDED)
    faulthandler.enable()
    parent, words = os.getppid(), Path(name)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    number = int(os.environ["LOCAL_RANK"])
    alive = FileLock(words / f"alive-{number}")

    def should_stop() -> str | None:
        place = words / STOP
        return place.read_text() if place.exists() else None

    try:
        backend = "gloo"
        if device == "cuda":
            torch.cuda.set_device(number)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend)
        outcome: Outcome = load_object(BODY)(Path(path), should_stop)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        from sweep.training.worker import outcome_of

        said = {"time": time.time(), **asdict(outcome_of(error))}
        _write(words / f"end-{number}", json.dumps(said))
        os._exit(1)  # at once: the others may be waiting for this one
    alive.release()
    return outcome


def judged(
    error: ChildFailedError, deaths: dict[int, float], words: Path, memory_ran_out: bool
) -> Outcome:
    """Return why the attempt ended: memory before all, then a death without a word.

    What the others say of the process they lost is none of it, nor that they were ended for it.
    """
    said = [json.loads(place.read_text()) for place in words.glob("end-*[0-9]")]
    said = sorted(said, key=lambda one: (one["kind"] != "out_of_memory", one["time"]))
    first = min([*deaths.values(), *(one["time"] for one in said)], default=0.0)
    silent = [
        number
        for number, when in deaths.items()
        if when < first + GRACE_SECONDS / 2 and not (words / f"end-{number}").exists()
    ]
    if said and (said[0]["kind"] == "out_of_memory" or not silent):
        return Outcome(said[0]["kind"], said[0]["message"], said[0]["in_evaluation"])
    known = {number: failure.exitcode for number, failure in error.failures.items()}
    number = silent[0] if silent else min(known, default=0)
    outcome = judge_death(known.get(number, -signal.SIGKILL), memory_ran_out, None)
    return Outcome(outcome.kind, f"process {number} of the trial: {outcome.message}")


def _end_with(parent: int) -> None:
    """End this process once the launcher's is gone: no other will tell it to."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
