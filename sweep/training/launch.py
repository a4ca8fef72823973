"""An attempt in several processes of one machine, started by torch's elastic launcher.

The launcher's process and the others talk through files of a temporary folder: the request to stop,
and how a process failed. The end of one process ends all.
"""

import contextlib
import faulthandler
import json
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from multiprocessing import resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sweep.plan.retry import Outcome, judge_death
from sweep.training.memory_limit import oom_kills
from sweep.trial.files import replacing

POLL_SECONDS = 0.1
GRACE_SECONDS = 2  # a failed process waits so long, in case another's death was the cause
FAILED = ("error", "out_of_memory", "superseded")
DECIDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # by the launcher alone
RunRank = Callable[[Path, Callable[[], str | None]], Outcome]


def launch(
    run_rank: RunRank, path: Path, device: str, devices: int, should_stop: Callable[[], str | None]
) -> Outcome:
    """Run an attempt in `devices` processes on this machine.

    Args:
        run_rank: a module-level function that runs one process of the attempt, called with the
            trial's folder and `should_stop`.
        path: the trial's folder.
        device: `cpu` or `cuda`.
        devices: number of processes.
        should_stop: polled; its answer ends the attempt after a checkpoint.
    """
    killed_before = oom_kills()
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
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
            signals_to_handle="SIGHUP",  # `should_stop` answers for the others
            shutdown_timeout=GRACE_SECONDS,
        )
        try:
            with _passing_on(should_stop, Path(name) / "stop"), _signals_blocked():
                outcomes = elastic_launch(config, _rank)(run_rank, str(path), name, device)
        except ChildFailedError as error:
            said = {int(file.stem): json.loads(file.read_text()) for file in _ends(name)}
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return first_cause(exit_codes, said, oom_kills() > killed_before)
        outcome: Outcome = outcomes[0]
        return outcome


def first_cause(
    exit_codes: Mapping[int, int], said: Mapping[int, Mapping[str, object]], memory_ran_out: bool
) -> Outcome:
    """Return why an attempt failed.

    Args:
        exit_codes: of the processes whose end the launcher reports, by rank.
        said: for each rank that raised an exception: its outcome, and the `time` of it. Memory
            comes first; otherwise a process that ended without a word is the cause of exceptions
            in the others.
        memory_ran_out: whether the kernel has killed a process for memory.
    """
    silent = [rank for rank in exit_codes if rank not in said]
    out_of_memory = [end for end in said.values() if end["kind"] == "out_of_memory"]
    if silent and not out_of_memory:
        outcome = judge_death(exit_codes[silent[0]], memory_ran_out, None)
        return Outcome(outcome.kind, f"process {silent[0]} of the trial: {outcome.message}")
    first = min(out_of_memory or said.values(), key=lambda end: float(str(end["time"])))
    return Outcome(str(first["kind"]), str(first["message"]))


def _ends(name: str) -> Iterator[Path]:
    return Path(name).glob("*.end")


@contextlib.contextmanager
def _passing_on(should_stop: Callable[[], str | None], stop: Path) -> Iterator[None]:
    """Write the answer of `should_stop` to a file once there is one."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(POLL_SECONDS):
            if word := should_stop():
                with replacing(stop) as part:
                    part.write_text(word)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start processes with these signals blocked until they ignore them; a batch system may send
    them to all. This process receives them in the thread of `_passing_on`.
    """
    resource_tracker.ensure_running()  # starting it in here would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DECIDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rank(run_rank: RunRank, path: str, name: str, device: str) -> Outcome:
    """Run one process of the attempt."""
    for ignored in DECIDED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DECIDED)
    faulthandler.enable()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    rank, stop = int(os.environ["LOCAL_RANK"]), Path(name) / "stop"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    outcome = run_rank(Path(path), lambda: stop.read_text() if stop.exists() else None)
    if outcome.kind in FAILED:
        with replacing(Path(name) / f"{rank}.end") as part:
            part.write_text(json.dumps({"time": time.time(), **asdict(outcome)}))
        time.sleep(GRACE_SECONDS)
        os._exit(1)  # without exit handlers, which may wait for the other processes
    dist.barrier()
    dist.destroy_process_group()
    return outcome


def _end_with(parent: int) -> None:
    """End this process when the launcher's has ended."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)
