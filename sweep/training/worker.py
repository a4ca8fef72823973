"""One attempt of one trial: everything between taking the lease and releasing it."""

import contextlib
import faulthandler
import math
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sweep.config.trial import TrialConfig
from sweep.data.tokenizer import pretrained_path
from sweep.errors import FolderInUse, Superseded, SweepError
from sweep.plan.retry import Outcome
from sweep.training.checkpoint import CheckpointStore, seed_everything
from sweep.training.device import (
    has_compiler,
    is_out_of_memory,
    limited_memory,
)
from sweep.training.loop import train
from sweep.training.result import diverged_message, write_result
from sweep.training.step import TrainingStep
from sweep.trial.folder import State, TrialFolder, TrialStatus
from sweep.trial.lease import Lease
from sweep.workloads import ranks

LOG_KEPT_BYTES = 1 << 20
SEED_STRIDE_PER_RANK = 1 << 32
POLL_SECONDS = 1.0  # between two checks for the file that asks an attempt to stop
ShouldStop = Callable[[], str | None]


def run_attempt(path: Path, should_stop: ShouldStop, number: int | None = None) -> Outcome:
    """Run the newest attempt of a trial, as its state.json numbers it.

    Args:
        path: the trial's folder.
        should_stop: polled after every step; its answer becomes the outcome's kind.
        number: fencing number of the requested attempt, if a newer one may have started.

    Returns:
        The outcome, with all files durable. Errors in the trial are outcomes, not exceptions.
    """
    folder = TrialFolder(path)
    lease = None
    try:
        status = folder.read_status()
        if number is not None:
            folder.fence(number)()
        config = as_attempted(folder.read_config(), status)
        result = folder.read_result()
        if result is not None:  # the runner died before it recorded this
            return Outcome("complete" if result["state"] == State.COMPLETE else result["cause"])
        lease = Lease(folder.lease_path, status.fencing)
        folder.remove_half_written()
        execution = config.execution
        if execution.devices > 1:
            from sweep.training.launch import launch  # takes half a second to import

            return launch(run_rank, path, execution.device, execution.devices, should_stop)
        return _run(config, status, folder, should_stop)
    except Exception as error:
        return _outcome_of(error)
    finally:
        if lease:
            lease.release()


def run_rank(path: Path, should_stop: ShouldStop) -> Outcome:
    """Run one process of an attempt on several devices; the launcher's process has the lease."""
    folder = TrialFolder(path)
    try:
        status = folder.read_status()
        return _run(as_attempted(folder.read_config(), status), status, folder, should_stop)
    except Exception as error:
        return _outcome_of(error)


def _outcome_of(error: Exception) -> Outcome:
    if isinstance(error, Superseded | FolderInUse):
        return Outcome("superseded", str(error))
    traceback.print_exception(error)
    text = " ".join(str(error).split()) or type(error).__name__
    message = text if isinstance(error, SweepError) else f"{type(error).__name__}: {text[:500]}"
    if is_out_of_memory(error):
        return Outcome("out_of_memory", message)
    return Outcome("error", message)


def as_attempted(config: TrialConfig, status: TrialStatus) -> TrialConfig:
    """Return the config with the sizes of this attempt, which shrink when memory runs out."""
    return config.attempted(status.microbatch_size) if status.microbatch_size else config


def _run(
    config: TrialConfig, status: TrialStatus, folder: TrialFolder, should_stop: ShouldStop
) -> Outcome:
    """Run the attempt on this process's device, within its memory limit."""
    device = torch.device(config.execution.device)
    if ranks.are_many() and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if config.execution.compile and not has_compiler(device.type):  # planned on another machine
        if not ranks.rank():
            print("eager: no compiler on this machine", flush=True)
        execution = config.execution.model_copy(update={"compile": False})
        config = config.model_copy(update={"execution": execution})
    torch.set_num_threads(config.execution.threads)
    seed_everything(config.science.seed)
    if not ranks.rank():
        _print_start(config, status)
    with (
        deterministic(device, config.science.has_user_code),
        limited_memory(device, config.execution.device_memory_bytes),
    ):
        return _train_and_evaluate(config, status, folder, should_stop, device)


@contextlib.contextmanager
def deterministic(device: torch.device, has_user_code: bool) -> Iterator[None]:
    """Use deterministic algorithms on a CPU within this context.

    An operation that has none is an error in our code, and a warning in a user's.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=has_user_code)
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        memory.fill_uninitialized_memory = filled


def _print_start(config: TrialConfig, status: TrialStatus) -> None:
    execution, science = config.execution, config.science
    accumulation = science.batch_size // execution.devices // config.microbatch_size
    print(
        f"attempt {status.attempts}: batch size {science.batch_size} = {config.microbatch_size} × "
        f"{execution.devices} devices × {accumulation}, seed {science.seed}, "
        f"rate {science.learning_rate:g}, {config.steps} steps on {execution.device}",
        flush=True,
    )


def _train_and_evaluate(
    config: TrialConfig,
    status: TrialStatus,
    folder: TrialFolder,
    should_stop: ShouldStop,
    device: torch.device,
) -> Outcome:
    execution, science = config.execution, config.science
    started = time.perf_counter()
    store = CheckpointStore(folder, status.fencing)
    store.check()
    step = TrainingStep(config, device, config.microbatch_size)
    if ranks.rank():  # equal weights in all processes, but different random numbers from now on
        seed_everything(science.seed + ranks.rank() * SEED_STRIDE_PER_RANK)
    ending, progress, clock = train(
        config, step, store, device, should_stop, started, status.pause_step
    )
    if ending not in ("trained", "diverged"):
        return Outcome(ending, f"checkpoint at step {progress.step} of {config.steps}")
    final = step.evaluated(step.workload.evaluate_finally) if ending == "trained" else None
    if final and not math.isfinite(final.valid_loss):
        final = None
    clock.charge("evaluation")
    keep = execution.keep if final and science.stage == "report" else "none"
    if keep != "none":
        if science.tokenizer and science.tokenizer.kind == "pretrained" and not ranks.rank():
            store.save_tokenizer(pretrained_path(config.init_path, science.tokenizer))
        store.save_weights(step)
        clock.charge("checkpoint")
    if not ranks.rank():
        write_result(config, status, store, device, progress, final, step.workload.epochs())
        if keep != "checkpoints":
            store.remove_all()
    return Outcome("complete") if final else Outcome("diverged", diverged_message(progress))


def run_logged_attempt(path: Path, should_stop: ShouldStop, number: int | None = None) -> Outcome:
    """Run the newest attempt with its output in log.txt: the main function of a worker."""
    _redirect_output(TrialFolder(path))
    faulthandler.enable()
    return run_attempt(path, should_stop, number)


def _redirect_output(folder: TrialFolder) -> None:
    """Send stdout and stderr, including native code's, to log.txt.

    The log continues in a new file, which an orphaned older attempt cannot write to.
    """
    old, new = folder.log_path, folder.path / f".log.{os.getpid()}.part"
    with new.open("wb") as out:
        if old.exists():
            with old.open("rb") as file:
                file.seek(max(0, old.stat().st_size - LOG_KEPT_BYTES))
                shutil.copyfileobj(file, out)
    new.replace(old)
    sys.stdout.flush()
    sys.stderr.flush()
    with old.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def run_numbered_attempt(path: Path, number: int, stops: list[str]) -> Outcome:
    """Run one attempt that a cluster started, in this process.

    Args:
        path: the trial's folder, at the same path on every machine.
        number: the attempt's fencing number; if there is a newer one, nothing runs.
        stops: reasons to end after a checkpoint, appended to by signal handlers. A file in the
            folder (`TrialFolder.ask_to_stop`) appends `stopped`.
    """
    folder = TrialFolder(path)
    if not folder.config_path.exists():
        return Outcome(
            "error",
            f"{path} must be a folder that all machines share, but {socket.gethostname()} does "
            "not see it. Choose an --out on a shared file system.",
        )
    try:
        folder.fence(number)()
    except Superseded as error:
        return Outcome("superseded", str(error))
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            if folder.is_asked_to_stop(number):
                stops.append("stopped")
                return

    threading.Thread(target=watch, name="stop", daemon=True).start()
    try:
        return run_logged_attempt(path, lambda: stops[0] if stops else None, number)
    finally:
        ended.set()
