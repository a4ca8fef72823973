"""One attempt of one trial: everything between taking the lease and releasing it."""

import contextlib
import faulthandler
import math
import os
import random
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
from sweep.training.checkpoint import CheckpointStore
from sweep.training.device import (
    has_compiler,
    is_out_of_memory,
    limited_memory,
)
from sweep.training.loop import train
from sweep.training.progress import ShouldStop
from sweep.training.result import write_result
from sweep.training.step import TrainingStep
from sweep.trial.files import replacing
from sweep.trial.folder import State, TrialFolder, TrialStatus
from sweep.trial.lease import Lease
from sweep.workloads import ranks

SEED_STRIDE_PER_RANK = 1 << 32


def run_attempt(
    path: Path, should_stop: ShouldStop, number: int | None = None, is_logged: bool = False
) -> Outcome:
    """Run the newest attempt of a trial, as its state.json numbers it, or one of its processes.

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
        status = folder.read_status()
        fencing = status.fencing if number is None else number
        store = CheckpointStore(folder, fencing)
        store.check()
        result = folder.read_result()
        if result is not None:  # the runner died before it recorded this
            return Outcome("complete" if result["state"] == State.COMPLETE else result["cause"])
        if not ranks.are_many():  # otherwise the launcher's process has done this
            lease = Lease(folder.lease_path, fencing)
            if is_logged:
                _append_output_to(folder.log_path)
            folder.remove_half_written()
        config = folder.read_config()
        if status.microbatch_size:
            config = config.attempted(status.microbatch_size)
        if config.execution.devices > 1 and not ranks.are_many():
            from sweep.training.launch import launch  # takes half a second to import

            run = partial(run_attempt, path, number=fencing)
            return launch(run, config.execution.device, config.execution.devices, should_stop)
        return _run(config, status, store, should_stop)
    except (Superseded, FolderInUse) as error:
        return Outcome("superseded", str(error))
    except Exception as error:
        traceback.print_exc()
        message = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, SweepError):
            message = f"{type(error).__name__}: {message[:500]}"
        if is_out_of_memory(error):
            return Outcome("out_of_memory", message)
        return Outcome("error", message)
    finally:
        if lease:
            lease.release()


def _append_output_to(log: Path) -> None:
    """Send stdout and stderr, including native code's, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()


def _run(
    config: TrialConfig, status: TrialStatus, store: CheckpointStore, should_stop: ShouldStop
) -> Outcome:
    """Train and evaluate on this process's device, within its memory limit."""
    execution, science = config.execution, config.science
    rank, device = ranks.rank(), torch.device(execution.device)
    if ranks.are_many() and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if not rank:
        accumulation = science.batch_size // execution.devices // config.microbatch_size
        print(
            f"attempt {status.attempts}: batch size {science.batch_size} = "
            f"{config.microbatch_size} × {execution.devices} devices × {accumulation}, seed "
            f"{science.seed}, rate {science.learning_rate:g}, {config.steps} steps on {device}",
            flush=True,
        )
    if execution.compile and not has_compiler(device.type):  # planned on another machine
        execution = execution.model_copy(update={"compile": False})
        config = config.model_copy(update={"execution": execution})
        if not rank:
            print("eager: no compiler on this machine", flush=True)
    torch.set_num_threads(execution.threads)
    with (
        deterministic(device, science.code is not None),
        limited_memory(device, execution.device_memory_bytes),
    ):
        started = time.perf_counter()
        _seed_everything(science.seed)
        step = TrainingStep(config, device, config.microbatch_size)
        if rank:  # equal weights in all processes, but different random numbers from now on
            _seed_everything(science.seed + rank * SEED_STRIDE_PER_RANK)
        ending, progress = train(config, step, store, should_stop, started, status.pause_step)
        if ending not in ("trained", "diverged"):
            return Outcome(ending, f"checkpoint at step {progress.step} of {config.steps}")
        final = step.evaluated(step.workload.evaluate_finally) if ending == "trained" else None
        if final and not math.isfinite(final.valid_loss):
            final = None
        progress.charge("evaluation")
        keep = execution.keep if final and science.stage == "report" else "none"
        if keep != "none":
            if science.tokenizer and science.tokenizer.kind == "pretrained" and not rank:
                source = pretrained_path(config.init_path, science.tokenizer)
                with replacing(store.folder.tokenizer_path, store.check) as part:
                    shutil.copyfile(source, part)  # so that other trials can start from this one
            store.save_weights(step)
            progress.charge("checkpoint")
        message = "" if final else f"loss not finite, or above its start, at step {progress.step}"
        if not rank:
            write_result(config, status, store, step, progress, final, message or None)
            if keep != "checkpoints":
                store.folder.remove_checkpoints()
        return Outcome("complete" if final else "diverged", message)


def _seed_everything(seed: int) -> None:
    random.seed(seed)  # for user code that draws from the global generators
    torch.manual_seed(seed)


@contextlib.contextmanager
def deterministic(device: torch.device, has_user_code: bool) -> Iterator[None]:
    """Use deterministic algorithms on a CPU within this context.

    An operation that has none is an error in our code, and a warning in a user's.
    """
    memory: Any = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=has_user_code)
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills
