"""One attempt of one trial: everything between taking the lease and giving it back."""

import faulthandler
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from sweep.config.trial import TrialConfig
from sweep.data.tokens import pretrained_path
from sweep.errors import FolderInUse, Superseded, SweepError
from sweep.plan.retry import Outcome
from sweep.training.checkpoint import CheckpointStore, seed_everything
from sweep.training.compiler import has_compiler
from sweep.training.device import (
    EvaluationOutOfMemory,
    is_out_of_memory,
    keep_freed_memory,
)
from sweep.training.device_memory import limited_memory
from sweep.training.loop import train
from sweep.training.result import diverged_message, write_result
from sweep.training.step import TrainingStep
from sweep.trial.folder import State, TrialFolder, TrialStatus
from sweep.trial.lease import Lease
from sweep.workloads import ranks

LOG_KEPT_BYTES = 1 << 20
RANK_SEEDS = 1 << 32  # between the seeds of the processes of a trial


def run_attempt(
    path: Path, should_stop: Callable[[], str | None], number: int | None = None
) -> Outcome:
    """Run the newest attempt of a trial, as its state.json numbers it.

    Args:
        path: of the trial's folder.
        should_stop: asked after every step; its answer becomes the outcome's kind.
        number: of the attempt that was asked for, where a newer one may have been meanwhile.

    Returns:
        How it ended; never raises for what happens in the trial. Files are durable by then.
    """
    folder = TrialFolder(path)
    lease = None
    try:
        status = folder.read_status()
        if number is not None:
            folder.fence(number)()
        config = as_attempted(folder.read_config(), status)
        result = folder.read_result()
        if result is not None:  # written, but the runner died before it took note
            return Outcome("complete" if result["state"] == State.COMPLETE else result["cause"])
        lease = Lease(folder.lease_path, status.fencing)
        folder.remove_half_written()
        if config.execution.devices > 1:
            from sweep.training.launch import launch

            execution = config.execution
            return launch(path, execution.device, execution.devices, should_stop)
        return _limited(config, status, folder, should_stop)
    except Exception as error:
        if not isinstance(error, Superseded | FolderInUse):
            traceback.print_exc()
        return outcome_of(error)
    finally:
        if lease:
            lease.release()


def run_rank(path: Path, should_stop: Callable[[], str | None]) -> Outcome:
    """Run one process of an attempt whose lease another one holds; raises what happens in it."""
    folder = TrialFolder(path)
    status = folder.read_status()
    return _limited(as_attempted(folder.read_config(), status), status, folder, should_stop)


def outcome_of(error: Exception) -> Outcome:
    """Return how an attempt ended that raised."""
    if isinstance(error, Superseded | FolderInUse):
        return Outcome("superseded", str(error))
    if is_out_of_memory(error):
        in_evaluation = isinstance(error, EvaluationOutOfMemory)
        return Outcome("out_of_memory", _last_line(error), in_evaluation)
    return Outcome("error", _last_line(error))


def as_attempted(config: TrialConfig, status: TrialStatus) -> TrialConfig:
    """Return the config with the sizes that are left after memory ran out before."""
    size = status.evaluation_batch_size or config.execution.evaluation_batch_size
    return config.attempted(status.microbatch_size or config.microbatch_size, size)


def _limited(
    config: TrialConfig,
    status: TrialStatus,
    folder: TrialFolder,
    should_stop: Callable[[], str | None],
) -> Outcome:
    """Run it within the memory that a device may give, on this process's device."""
    device = torch.device(config.execution.device)
    if ranks.are_many() and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if config.execution.compile and not has_compiler(device.type):  # planned on another machine
        if not ranks.rank():
            print("eager: no compiler on this machine", flush=True)
        execution = config.execution.model_copy(update={"compile": False})
        config = config.model_copy(update={"execution": execution})
    with limited_memory(device, config.execution.device_memory_bytes):
        return _run(config, status, folder, should_stop, device)


def _run(
    config: TrialConfig,
    status: TrialStatus,
    folder: TrialFolder,
    should_stop: Callable[[], str | None],
    device: torch.device,
) -> Outcome:
    execution, science = config.execution, config.science
    microbatch = config.microbatch_size
    torch.set_num_threads(execution.threads)
    keep_freed_memory()
    seed_everything(science.seed)
    if not ranks.rank():
        print(
            f"attempt {status.attempts}: batch size {science.batch_size} = {microbatch} × "
            f"{execution.devices} devices × "
            f"{science.batch_size // execution.devices // microbatch}, seed {science.seed}, "
            f"rate {science.learning_rate:g}, {config.steps} steps on {execution.device}",
            flush=True,
        )
    started = time.perf_counter()
    store = CheckpointStore(folder, status.fencing, in_background=device.type != "cpu")
    store.check()
    step = TrainingStep(config, device, microbatch)
    if ranks.rank():  # the weights are the same in all processes; what they draw from now on is not
        seed_everything(science.seed + ranks.rank() * RANK_SEEDS)
    ending, progress, clock = train(
        config, step, store, device, should_stop, started, status.pause_step
    )
    if ending not in ("trained", "diverged"):
        return Outcome(ending, f"checkpoint at step {progress.step} of {config.steps}")
    final = None
    if ending == "trained":
        final = step.evaluated(step.workload.evaluate_finally)
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
        epochs = step.workload.epochs()
        write_result(config, status, store, device, progress, final, epochs)
        if keep != "checkpoints":
            store.remove_all()
    if final is None:
        return Outcome("diverged", diverged_message(progress))
    return Outcome("complete")


def _last_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, SweepError) else f"{type(error).__name__}: {text[:500]}"


def run_logged_attempt(
    path: Path, should_stop: Callable[[], str | None], number: int | None = None
) -> Outcome:
    """Run the newest attempt with its output in log.txt: the body of a worker process."""
    redirect_output(TrialFolder(path))
    faulthandler.enable()
    return run_attempt(path, should_stop, number)


def redirect_output(folder: TrialFolder) -> None:
    """Send stdout and stderr, native code's too, to log.txt.

    The log continues in a new file, so that an orphan of an older attempt reaches nothing.
    """
    old, new = folder.log_path, folder.path / f".log.{os.getpid()}.part"
    with new.open("wb") as out:
        if old.exists():
            with old.open("rb") as file:
                file.seek(max(0, old.stat().st_size - LOG_KEPT_BYTES))
                shutil.copyfileobj(file, out)
    new.replace(old)
    fd = os.open(old, os.O_WRONLY | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
