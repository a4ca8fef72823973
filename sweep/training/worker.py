"""One attempt of one trial: everything between taking the lease and releasing it."""

import contextlib
import faulthandler
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sweep.config.trial import TrialConfig
from sweep.data.tokens import pretrained_path
from sweep.errors import FolderInUse, Superseded, SweepError
from sweep.plan.retry import Outcome
from sweep.training.checkpoint import CheckpointStore, seed_everything
from sweep.training.device import (
    EvaluationOutOfMemory,
    has_compiler,
    is_out_of_memory,
    limited_memory,
)
from sweep.training.loop import train
from sweep.training.process import ShouldStop
from sweep.training.result import write_result
from sweep.training.step import TrainingStep
from sweep.trial.files import replacing
from sweep.trial.folder import State, TrialFolder, TrialStatus
from sweep.trial.lease import Lease
from sweep.workloads import ranks

LOG_KEPT_BYTES = 1 << 20
SEED_STRIDE_PER_RANK = 1 << 32


def run_attempt(
    path: Path, should_stop: ShouldStop, number: int | None = None, is_logged: bool = False
) -> Outcome:
    """Run the newest attempt of a trial, as its state.json numbers it.

    Args:
        path: the trial's folder.
        should_stop: polled after every step; its answer becomes the outcome's kind.
        number: fencing number of the requested attempt, if a newer one may have started.
        is_logged: whether this process's output goes to log.txt.

    Returns:
        The outcome, with all files durable. Errors in the trial are outcomes, not exceptions.
    """
    folder, lease = TrialFolder(path), None
    try:
        fencing = folder.read_status().fencing if number is None else number
        folder.fence(fencing)()
        result = folder.read_result()
        if result is not None:  # the runner died before it recorded this
            return Outcome("complete" if result["state"] == State.COMPLETE else result["cause"])
        lease = Lease(folder.lease_path, fencing)
        if is_logged:
            _redirect_output(folder)
        folder.remove_half_written()
        execution, run = folder.read_config().execution, partial(run_process, path, fencing)
        if execution.devices == 1:
            return run(should_stop)
        from sweep.training.launch import launch  # takes half a second to import

        return launch(run, execution.device, execution.devices, should_stop)
    except Exception as error:
        return _outcome_of(error)
    finally:
        if lease:
            lease.release()


def run_process(path: Path, fencing: int, should_stop: ShouldStop) -> Outcome:
    """Run this process's part of an attempt, whose lease this process or the launcher's has."""
    try:
        folder = TrialFolder(path)
        store = CheckpointStore(folder, fencing)
        store.check()
        status = folder.read_status()
        config = as_attempted(folder.read_config(), status)
        execution, science = config.execution, config.science
        device = torch.device(execution.device)
        if ranks.are_many() and device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        if not ranks.rank():
            accumulation = science.batch_size // execution.devices // config.microbatch_size
            print(
                f"attempt {status.attempts}: batch size {science.batch_size} = "
                f"{config.microbatch_size} × {execution.devices} devices × {accumulation}, "
                f"seed {science.seed}, rate {science.learning_rate:g}, {config.steps} steps on "
                f"{execution.device}",
                flush=True,
            )
        if execution.compile and not has_compiler(device.type):  # planned on another machine
            if not ranks.rank():
                print("eager: no compiler on this machine", flush=True)
            execution = execution.model_copy(update={"compile": False})
            config = config.model_copy(update={"execution": execution})
        torch.set_num_threads(execution.threads)
        seed_everything(science.seed)
        with (
            deterministic(device, science.has_user_code),
            limited_memory(device, execution.device_memory_bytes),
        ):
            return _train_and_evaluate(config, status, store, should_stop, device)
    except Exception as error:
        return _outcome_of(error)


def _outcome_of(error: Exception) -> Outcome:
    if isinstance(error, Superseded | FolderInUse):
        return Outcome("superseded", str(error))
    traceback.print_exception(error)
    text = " ".join(str(error).split()) or type(error).__name__
    message = text if isinstance(error, SweepError) else f"{type(error).__name__}: {text[:500]}"
    if is_out_of_memory(error):
        return Outcome("out_of_memory", message, isinstance(error, EvaluationOutOfMemory))
    return Outcome("error", message)


def as_attempted(config: TrialConfig, status: TrialStatus) -> TrialConfig:
    """Return the config with the sizes of this attempt, which shrink when memory runs out."""
    size = status.evaluation_batch_size or config.execution.evaluation_batch_size
    return config.attempted(status.microbatch_size or config.microbatch_size, size)


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


def _train_and_evaluate(
    config: TrialConfig,
    status: TrialStatus,
    store: CheckpointStore,
    should_stop: ShouldStop,
    device: torch.device,
) -> Outcome:
    execution, science, folder = config.execution, config.science, store.folder
    started = time.perf_counter()
    step = TrainingStep(config, device, config.microbatch_size)
    if ranks.rank():  # equal weights in all processes, but different random numbers from now on
        seed_everything(science.seed + ranks.rank() * SEED_STRIDE_PER_RANK)
    ending, progress = train(config, step, store, should_stop, started, status.pause_step)
    if ending not in ("trained", "diverged"):
        return Outcome(ending, f"checkpoint at step {progress.step} of {config.steps}")
    final = step.evaluated(step.workload.evaluate_finally) if ending == "trained" else None
    if final and not math.isfinite(final.valid_loss):
        final = None
    progress.charge("evaluation")
    keep = execution.keep if final and science.stage == "report" else "none"
    if keep != "none":
        if science.tokenizer and science.tokenizer.kind == "pretrained" and not ranks.rank():
            with replacing(folder.tokenizer_path, store.check) as part:  # to start other trials
                shutil.copyfile(pretrained_path(config.init_path, science.tokenizer), part)
        store.save_weights(step)
        progress.charge("checkpoint")
    message = "" if final else f"loss not finite, or above its start, at step {progress.step}"
    if not ranks.rank():
        write_result(config, status, store, step, progress, final, message or None)
        if keep != "checkpoints":
            folder.remove_checkpoints()
    return Outcome("complete" if final else "diverged", message)


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
    faulthandler.enable()
