"""Run an attempt on several devices, with a process for each device."""

import faulthandler
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
import torch.distributed as dist

from sweep.config.execution import Execution
from sweep.config.trial import TrialConfig
from sweep.plan.retry import Outcome
from sweep.training.process import FreshProcess, ShouldStop, outcome_of
from sweep.trial.folder import TrialFolder
from sweep.trial.status import TrialStatus

POLL_SECONDS = 0.1
GRACE_SECONDS = 2  # after a failure, the other processes may report its cause
# The failures of a process. The exceptions of others are often consequences: earlier kinds count.
FAILURES = ("out_of_memory", "lost", "superseded", "storage", "error")
Attempt = Callable[[Path, ShouldStop, TrialStatus], Outcome]


def launch(
    attempt: Attempt, config: TrialConfig, path: Path, status: TrialStatus, should_stop: ShouldStop
) -> Outcome:
    """Run an attempt in several processes on this machine. The failure of one ends all.

    Args:
        attempt: a module-level function, which each process calls.
    """
    size = config.execution.devices
    word: str | None = None  # why the attempt stops
    deadline = math.inf
    running: dict[Future[Outcome], tuple[int, FreshProcess]] = {}  # with their ranks
    ends: list[Outcome] = []  # the earliest first
    with tempfile.TemporaryDirectory(prefix="sweep-") as name, ThreadPoolExecutor(size) as threads:
        try:
            for rank in range(size):
                arguments = (attempt, rank, path, status, config.execution, f"file://{name}/store")
                process = FreshProcess(_run_rank, *arguments)
                future = threads.submit(outcome_of, process, TrialFolder(path))
                running[future] = (rank, process)

            while running and time.monotonic() < deadline:
                if not word:
                    word = should_stop()
                    if word:
                        for _, process in running.values():
                            process.stop(word)
                for future in wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
                    rank, _ = running.pop(future)
                    end = future.result()
                    ends.append(end)
                    if end.kind in FAILURES:
                        print(f"process {rank}: {end.kind}: {end.message}", flush=True)
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            return first_cause(ends)
        finally:
            for _, process in running.values():
                process.kill()


def first_cause(ends: Sequence[Outcome]) -> Outcome:
    """Return the outcome of an attempt, given the ends of its processes, the earliest first."""
    return min(ends, key=lambda end: [*FAILURES, end.kind].index(end.kind))


def _run_rank(
    attempt: Attempt,
    rank: int,
    path: Path,
    status: TrialStatus,
    execution: Execution,
    store: str,
    should_stop: ShouldStop,
) -> Outcome:
    """Run the process of one rank, which meets the others at a store."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the launching process decides
    faulthandler.enable()
    is_cuda = execution.device == "cuda"
    size = execution.devices
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    if is_cuda:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, store, rank=rank, world_size=size)

    outcome = attempt(path, should_stop, status)
    if outcome.kind not in FAILURES:
        dist.barrier()
        dist.destroy_process_group()
    return outcome
