"""One attempt of one trial, from taking the lease to its result."""

import contextlib
import faulthandler
import math
import os
import random
import shutil
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from sweep import errors
from sweep.config.trial import TrialConfig
from sweep.data.tokens import pretrained_path
from sweep.plan.retry import Outcome
from sweep.training import device as machine
from sweep.training.checkpoint import CheckpointStore
from sweep.training.command import run_command
from sweep.training.launch import launch
from sweep.training.loop import train
from sweep.training.process import ShouldStop
from sweep.training.record import write_result
from sweep.training.step import TrainingStep
from sweep.trial import files, watchdog
from sweep.trial.folder import TrialFolder
from sweep.trial.lease import Lease
from sweep.trial.status import MESSAGE_CHARACTERS, TrialStatus
from sweep.usercode.identity import check_code
from sweep.usercode.objects import use_code_folder
from sweep.workloads import ranks
from sweep.workloads.workload import FinalEvaluation

SEED_STRIDE_PER_RANK = 1 << 32


def run_attempt(
    path: Path, should_stop: ShouldStop, status: TrialStatus | None = None, is_logged: bool = False
) -> Outcome:
    """Run an attempt, by default the newest, or one of its processes; errors become outcomes."""
    folder = TrialFolder(path)
    with contextlib.ExitStack() as stack:
        try:
            if status is None:
                status = folder.read_status()
            store = CheckpointStore(folder, status.fencing)
            store.fence()
            result = folder.find_result()
            if result is not None:  # the runner died before it recorded this
                return Outcome(result.cause or "complete")
            if not ranks.is_distributed():  # otherwise the launching process has done this
                files.refuse_links(path)
                stack.enter_context(Lease(folder.lease_path, status.fencing))
                if is_logged:  # by native code too
                    with folder.log_path.open("ab") as file:
                        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
                            stream.flush()
                            os.dup2(file.fileno(), number)
                    faulthandler.enable()
                folder.remove_half_written()
            stack.enter_context(watchdog.Watchdog(status.stall_minutes))

            def poll() -> str | None:  # after every step
                watchdog.progress()
                return should_stop()

            config = folder.read_config()
            if status.microbatch_size:
                config = config.for_attempt(status.microbatch_size)
            if config.science.workload.is_program:
                return _run_command(config, status, store, should_stop)
            if config.execution.devices > 1 and not ranks.is_distributed():
                return launch(run_attempt, config, path, status, poll)
            return _run(config, status, store, poll)
        except (errors.Superseded, errors.FolderInUse) as error:
            return Outcome("superseded", str(error))
        except BaseException as error:  # the user's code may raise anything
            problem = files.storage_problem(error, folder.path)
            if problem:
                return Outcome("storage", problem)

            print(errors.without_secrets(traceback.format_exc()), file=sys.stderr, flush=True)
            if isinstance(error, errors.UnusableCheckpoint):
                return Outcome("preempted", str(error))
            text = errors.without_secrets(errors.describe_error(error))
            line = errors.printable(" ".join(text.split()))
            message = errors.cut(line, MESSAGE_CHARACTERS)
            kind = "out_of_memory" if machine.is_out_of_memory(error) else "error"
            return Outcome(kind, message)


def _run(
    config: TrialConfig, status: TrialStatus, store: CheckpointStore, should_stop: ShouldStop
) -> Outcome:
    execution = config.execution
    science = config.science
    rank = ranks.rank()
    device = machine.use_device(execution.device)
    if ranks.is_distributed() and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if not rank:
        print(
            f"attempt {status.attempts}: batch size {science.batch_size} in microbatches of "
            f"{config.microbatch_size} on {execution.devices} × {device}, seed {science.seed}, "
            f"lr {science.learning_rate:g}, {config.steps} steps",
            flush=True,
        )
    if execution.compile and not machine.has_compiler(device.type):  # planned on another machine
        config = config.with_microbatch(config.microbatch_size, compile=False)
        if not rank:
            print("eager: no compiler on this machine", flush=True)

    torch.set_num_threads(execution.threads)
    if device.type == "cpu":  # an operation without a deterministic form: a warning in user code
        torch.use_deterministic_algorithms(True, warn_only=science.code is not None)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    with machine.LimitedMemory(device, execution.device_memory_bytes):
        started = time.perf_counter()
        _seed_everything(science.seed)
        if science.code is not None:
            use_code_folder(config.code_path)
            check_code(science.user_code, science.code)

        step = TrainingStep(config, device)
        if rank:  # equal weights in all processes, but different random numbers from now on
            _seed_everything(science.seed + rank * SEED_STRIDE_PER_RANK)
        ending, progress, metrics_sha256 = train(
            config, step, store, should_stop, started, status.pause_step
        )
        if ending not in ("trained", "diverged"):
            return Outcome(ending, f"checkpoint at step {progress.step} of {config.steps}")

        final = None
        if ending == "trained":
            final = step.run_evaluation(step.workload.evaluate_finally)
        if final and not all(map(math.isfinite, final.metrics.values())):
            final = None
        progress.charge("evaluation")
        keep = execution.kept_of(science.stage) if final else "none"
        if keep != "none":
            if science.tokenizer and science.tokenizer.sha256 and not rank:
                source = pretrained_path(config.init_path, science.tokenizer)
                with files.replacing(store.folder.tokenizer_path, store.fence) as part:
                    shutil.copyfile(source, part)  # so that other trials can start from this one
            store.save_weights(step)
            progress.charge("checkpoint")

        message = "" if final else f"loss not finite, or above its start, at step {progress.step}"
        if not rank:
            write_result(config, status, store, step, progress, final, message, metrics_sha256)
            if keep != "checkpoints":
                store.folder.remove_checkpoints()
        return Outcome("complete" if final else "diverged", message)


def _run_command(
    config: TrialConfig, status: TrialStatus, store: CheckpointStore, should_stop: ShouldStop
) -> Outcome:
    print(f"attempt {status.attempts}: {config.steps} steps by a command", flush=True)
    ending, progress, metrics, digest = run_command(config, store, should_stop)
    if ending not in ("trained", "diverged"):
        return Outcome(ending, f"step {progress.step} of {config.steps}")
    final = FinalEvaluation(metrics) if metrics else None
    message = "" if final else f"a loss that is not finite at step {progress.step}"
    write_result(config, status, store, None, progress, final, message, digest)
    keep = config.execution.kept_of(config.science.stage) if final else "none"
    if keep != "checkpoints":
        files.remove(store.folder.resume_path)
    if keep == "none":
        files.remove(store.folder.work_path)
    return Outcome("complete" if final else "diverged", message)


def _seed_everything(seed: int) -> None:
    random.seed(seed)  # for user code that draws from the global generators
    np.random.seed(list(divmod(seed, SEED_STRIDE_PER_RANK)))  # takes words of 32 bits
    torch.manual_seed(seed)
