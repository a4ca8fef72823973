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
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

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

_compiled_shapes: set[str] = set()  # shapes whose steps this process has compiled
_recompile_limit = torch.compiler.config.recompile_limit  # for one shape


def run_attempt(
    path: Path, should_stop: ShouldStop, status: TrialStatus | None = None, is_logged: bool = False
) -> Outcome:
    """Run an attempt, by default the newest, or one of its processes; errors become outcomes."""
    folder = TrialFolder(path)
    with contextlib.ExitStack() as stack:
        try:
            return _begin(folder, should_stop, status, is_logged, stack)
        except BaseException as error:  # the user's code may raise anything
            return _outcome_of(error, folder)


def _begin(
    folder: TrialFolder,
    should_stop: ShouldStop,
    status: TrialStatus | None,
    is_logged: bool,
    stack: contextlib.ExitStack,
) -> Outcome:
    """Take the lease, which the stack holds, and run the kind of attempt that the config needs."""
    if status is None:
        status = folder.read_status()
    store = CheckpointStore(folder, status.fencing)
    store.fence()
    result = folder.find_result()
    if result is not None:  # the runner died before it recorded this
        return Outcome(result.cause or "complete")

    if not ranks.is_distributed():  # otherwise the launching process has done this
        files.refuse_links(folder.path)
        stack.enter_context(Lease(folder.lease_path, status.fencing))
        if is_logged:
            stack.enter_context(_output_to(folder.log_path))
        folder.remove_half_written()
    stack.enter_context(watchdog.Watchdog(status.stall_minutes))

    config = folder.read_config()
    if status.microbatch_size:
        config = config.for_attempt(status.microbatch_size)
    if config.science.workload.is_program:
        return _run_command(config, status, store, should_stop)

    def poll() -> str | None:  # after every step
        watchdog.progress()
        return should_stop()

    if config.execution.devices > 1 and not ranks.is_distributed():
        return launch(run_attempt, config, folder.path, status, poll)
    return _run(config, status, store, poll)


@contextlib.contextmanager
def _output_to(log_path: Path) -> Iterator[None]:
    """Append the output of this process to a log, also that of native code."""
    streams = {1: sys.stdout, 2: sys.stderr}
    before = {number: os.dup(number) for number in streams}

    def lead_to(descriptors: Mapping[int, int]) -> None:
        for number, stream in streams.items():
            stream.flush()
            os.dup2(descriptors[number], number)

    with log_path.open("ab") as file:
        lead_to(dict.fromkeys(streams, file.fileno()))
    faulthandler.enable()
    try:
        yield
    finally:
        lead_to(before)
        for descriptor in before.values():
            os.close(descriptor)


def _outcome_of(error: BaseException, folder: TrialFolder) -> Outcome:
    """Judge an attempt that raised an error, and print the traceback if it may be the code's."""
    if isinstance(error, errors.Superseded | errors.FolderInUse):
        return Outcome("superseded", str(error))
    problem = files.storage_problem(error, folder.path)
    if problem:
        return Outcome("storage", problem)

    trace = "".join(traceback.format_exception(error))
    print(errors.without_secrets(trace), file=sys.stderr, flush=True)
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
    """Train in this process, alone or as one of several ranks."""
    execution = config.execution
    science = config.science
    is_first = ranks.rank() == 0
    device = machine.use_device(execution.device)
    if ranks.is_distributed() and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if is_first:
        print(
            f"attempt {status.attempts}: batch size {science.batch_size} in microbatches of "
            f"{config.microbatch_size} on {execution.devices} × {device}, seed {science.seed}, "
            f"lr {science.learning_rate:g}, {config.steps} steps",
            flush=True,
        )
    if execution.compile and not machine.has_compiler(device.type):  # planned on another machine
        config = config.with_microbatch(config.microbatch_size, compile=False)
        if is_first:
            print("eager: no compiler on this machine", flush=True)

    configure_torch(config, device)
    limit_bytes = None
    shares_gpu = execution.trials_at_once > 1 and device.type == "cuda"
    if execution.device_memory_bytes is not None or shares_gpu:
        limit_bytes = machine.memory_limit(execution)
    with machine.LimitedMemory(device, limit_bytes), _compiling(config):
        machine.start_peak_memory(device)
        started = time.perf_counter()
        step = build_step(config, device)
        ending, progress, metrics_sha256 = train(
            config, step, store, should_stop, started, status.pause_step
        )
        if ending not in ("trained", "diverged"):
            return Outcome(ending, f"checkpoint at step {progress.step} of {config.steps}")

        final = None
        if ending == "trained":
            final = _evaluate_finally(step)
        progress.charge("evaluation")
        keep = execution.kept_of(science.stage) if final else "none"
        if keep != "none":
            if is_first:
                _copy_tokenizer(config, store)
            store.save_weights(step)
            progress.charge("checkpoint")

        message = "" if final else f"loss not finite, or above its start, at step {progress.step}"
        if is_first:
            write_result(config, status, store, step, progress, final, message, metrics_sha256)
            if keep != "checkpoints":
                store.folder.remove_checkpoints()
        return Outcome("complete" if final else "diverged", message)


@contextlib.contextmanager
def _compiling(config: TrialConfig) -> Iterator[None]:
    """Make a trial compile as in a fresh process; the next one of its shape must not compile.

    In torch 2.13 `fail_on_recompile` also refuses code that was never compiled. So `warm_up` must
    compile all code of a shape, because the first trial may end after it. torch limits how often
    the code of a function is compiled, and then runs it eagerly without an error; the limit grows
    with the number of shapes.
    """
    if not config.execution.compile:
        yield
        return
    stance = "default"
    if config.shape in _compiled_shapes:
        stance = "fail_on_recompile"
    _compiled_shapes.add(config.shape)
    torch.compiler.config.recompile_limit = _recompile_limit * len(_compiled_shapes)
    with torch.compiler.set_stance(stance):
        yield


def configure_torch(config: TrialConfig, device: torch.device) -> None:
    """Set the threads of this process, and on a CPU deterministic algorithms."""
    torch.set_num_threads(config.execution.threads)
    if device.type == "cpu":  # an operation without a deterministic form: a warning in user code
        torch.use_deterministic_algorithms(True, warn_only=config.science.code is not None)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def build_step(
    config: TrialConfig, device: torch.device, model: nn.Module | None = None
) -> TrainingStep:
    """Seed the global generators, check the user's code, and build a step.

    Without a `model`, as in `TrainingStep`, its weights are those of the seed or of the start.
    """
    science = config.science
    _seed_everything(science.seed)
    if science.code is not None:
        use_code_folder(config.code_path)
        check_code(science.user_code, science.code)
    step = TrainingStep(config, device, model)

    rank = ranks.rank()
    if rank:  # from now on, each process draws different random numbers
        _seed_everything(science.seed + rank * SEED_STRIDE_PER_RANK)
    return step


def _evaluate_finally(step: TrainingStep) -> FinalEvaluation | None:
    """Return the final evaluation; None if a metric is not finite."""
    final = step.run_evaluation(step.workload.evaluate_finally)
    if not isinstance(final, FinalEvaluation):
        kind = type(final).__name__
        raise errors.SweepError(
            f"evaluate_finally must return a FinalEvaluation, got {kind}. Return one."
        )
    return final if all(map(math.isfinite, final.metrics.values())) else None


def _copy_tokenizer(config: TrialConfig, store: CheckpointStore) -> None:
    """Keep a pretrained tokenizer with the weights, so that other trials can start from them."""
    tokenizer = config.science.tokenizer
    if tokenizer is not None and tokenizer.sha256:
        source = pretrained_path(config.init_path, tokenizer)
        with files.replacing(store.folder.tokenizer_path, store.fence) as part:
            shutil.copyfile(source, part)


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
