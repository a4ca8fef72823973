"""An attempt in several processes of one machine, started by torch's elastic launcher.

The launcher's process and the others exchange files in a temporary folder: the request to stop, and
how a process failed. The end of one process ends all.
"""

import faulthandler
import json
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sweep.plan.retry import Outcome, judge_death
from sweep.training.memory_limit import oom_kills
from sweep.training.progress import ShouldStop
from sweep.trial.files import replacing

POLL_SECONDS = 0.1
GRACE_SECONDS = 2  # a failed process waits so long, in case another's death was the cause
FAILED = ("error", "out_of_memory", "superseded")
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # the launcher decides
Run = Callable[[ShouldStop], Outcome]


def launch(run: Run, device: str, devices: int, should_stop: ShouldStop) -> Outcome:
    """Run an attempt in `devices` processes on this machine.

    Args:
        run: runs one process of the attempt; can be pickled.
        device: `cpu` or `cuda`.
        devices: number of processes.
        should_stop: polled; its answer ends the attempt after a checkpoint.
    """
    killed_before, ended = oom_kills(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:

        def pass_on() -> None:
            while not ended.wait(POLL_SECONDS):
                if word := should_stop():
                    with replacing(Path(name) / "stop") as part:
                        part.write_text(word)
                    return

        watcher = threading.Thread(target=pass_on, daemon=True)
        watcher.start()
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
            outcome: Outcome = elastic_launch(config, _run_rank)(run, name, device)[0]
            return outcome
        except ChildFailedError as error:
            files = Path(name).glob("*.end")
            reports = {int(file.stem): json.loads(file.read_text()) for file in files}
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return first_cause(exit_codes, reports, oom_kills() > killed_before)
        finally:
            ended.set()
            watcher.join()


def first_cause(
    exit_codes: Mapping[int, int],
    reports: Mapping[int, Mapping[str, object]],
    memory_ran_out: bool,
) -> Outcome:
    """Return why an attempt failed.

    Memory comes first. Otherwise a process that ended without a report is the cause of exceptions
    in the others.

    Args:
        exit_codes: of the processes whose end the launcher reports, by rank.
        reports: the outcome and the `time` of each rank that raised an exception.
        memory_ran_out: whether the kernel has killed a process for memory.
    """
    silent = [rank for rank in exit_codes if rank not in reports]
    out_of_memory = [end for end in reports.values() if end["kind"] == "out_of_memory"]
    if silent and not out_of_memory:
        outcome = judge_death(exit_codes[silent[0]], memory_ran_out, None)
        return Outcome(outcome.kind, f"process {silent[0]} of the trial: {outcome.message}")
    first = min(out_of_memory or reports.values(), key=lambda end: float(str(end["time"])))
    return Outcome(str(first["kind"]), str(first["message"]))


def _run_rank(run: Run, name: str, device: str) -> Outcome:
    """Run one process of the attempt; it ends when the launcher's process has ended."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    parent, rank, stop = os.getppid(), int(os.environ["LOCAL_RANK"]), Path(name) / "stop"

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch_parent, daemon=True).start()
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    outcome = run(lambda: stop.read_text() if stop.exists() else None)
    if outcome.kind in FAILED:
        with replacing(Path(name) / f"{rank}.end") as part:
            part.write_text(json.dumps({"time": time.time(), **asdict(outcome)}))
        time.sleep(GRACE_SECONDS)
        os._exit(1)  # without exit handlers, which may wait for the other processes
    dist.barrier()
    dist.destroy_process_group()
    return outcome
