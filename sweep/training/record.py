"""The record of a trial that trained to its end or diverged: result.json and valid_losses.npy."""

import math
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import torch

from sweep.config.trial import TrialConfig
from sweep.errors import CorruptFile
from sweep.plan.course import Course
from sweep.plan.target import crossing_tokens
from sweep.training import device as machine
from sweep.training.checkpoint import CheckpointStore, Progress
from sweep.training.step import TrainingStep
from sweep.trial import files
from sweep.trial.result import Result
from sweep.trial.status import Cause, State, TrialStatus
from sweep.workloads.workload import FinalEvaluation, Floats


def write_result(
    config: TrialConfig,
    status: TrialStatus,
    store: CheckpointStore,
    step: TrainingStep | None,  # None: a command trained
    progress: Progress,
    final: FinalEvaluation | None,  # None: the trial diverged
    message: str,
    metrics_sha256: str,
) -> None:
    """Write the losses of the validation documents, if there are any, and then result.json."""
    folder = store.folder
    if files.find_sha256(folder.metrics_path) != metrics_sha256:
        problem = f"{folder.metrics_path} was changed during training"
        raise CorruptFile(f"{problem}. Run it again.")

    document_losses = None if final is None else final.valid_losses
    if document_losses is not None:
        with files.replacing(folder.losses_path, store.fence) as part, part.open("wb") as file:
            np.save(file, document_losses)

    science = config.science
    devices = config.execution.devices
    device = torch.device(config.execution.device) if step is None else step.device
    tokens = Course.of_trial(config).tokens_at(progress.step)
    tokens_per_second = tokens / max(progress.seconds_training, 1e-9)

    metrics: dict[str, float | None] = {} if final is None else dict(final.metrics)
    valid_bytes = None if final is None else final.valid_bytes
    bits_per_byte, bytes_per_token = _per_byte(document_losses, valid_bytes)

    result = Result(
        id=config.id,
        stage=science.stage,
        policy=science.policy,
        batch_size=science.batch_size,
        seed=science.seed,
        learning_rate=science.learning_rate,
        beta2=science.optimizer.beta2,
        weight_decay=science.optimizer.weight_decay,
        tokens=tokens,
        epochs=_epochs(config, step, progress),
        steps=progress.step,
        warmup_steps=config.warmup_steps,
        devices=devices,
        microbatch_size=config.microbatch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        state=State.FAILED if final is None else State.COMPLETE,
        cause=Cause.DIVERGED if final is None else None,
        message=message or None,
        attempts=status.attempts,
        parameters=None if step is None else step.parameter_count,
        optimizer=science.optimizer.name,
        initial_train_loss=progress.first_loss,
        initial_valid_loss=progress.start_loss,
        initial_valid_reward=progress.start_reward,
        final_train_loss=None if final is None else final.train_loss,
        final_train_reward=None if final is None else final.train_reward,
        final_valid_loss=metrics.pop("loss", None),
        final_valid=metrics,
        best_valid_loss=progress.best_valid_loss,
        tokens_to_target=_tokens_to_target(config, folder.metrics_path, document_losses),
        bits_per_byte=bits_per_byte,
        bytes_per_token=bytes_per_token,
        clipped_step_fraction=progress.clipped_steps / max(1, progress.log_step),
        seconds_total=progress.seconds_total,
        seconds_compile=progress.seconds_compile,
        seconds_training=progress.seconds_training,
        seconds_evaluation=progress.seconds_evaluation,
        seconds_checkpoint=progress.seconds_checkpoint,
        seconds_noise=progress.seconds_noise,
        tokens_per_second=tokens_per_second,
        mfu=machine.flop_utilization(config, device, tokens_per_second),
        peak_memory_bytes=progress.peak_memory_bytes or None,
        device=machine.device_name(device),
        torch_version=None if step is None else torch.__version__,
        git_commit=git_commit(),
        data_sha256=files.sha256_of(science.data) if science.data else None,
        execution={
            **config.execution.model_dump(mode="json"),
            "instruction_sets": progress.instruction_sets,
        },
        metrics_sha256=metrics_sha256,
        valid_losses_sha256=None if final is None else files.find_sha256(folder.losses_path),
        weights_sha256=files.find_sha256(folder.weights_path),
    )
    result = result.model_copy(update=dict.fromkeys(science.workload.unused))
    files.write_json(folder.result_path, result.as_document(), store.fence)


def _epochs(config: TrialConfig, step: TrainingStep | None, progress: Progress) -> float | None:
    """Return how many times the steps that were taken saw the training data."""
    planned = None if step is None else step.workload.epochs()
    if planned is None:
        return None
    return planned * progress.step / config.steps


def _per_byte(
    document_losses: Floats | None, valid_bytes: int | None
) -> tuple[float | None, float | None]:
    """Return the bits per byte and the bytes per token of the validation text, if there is one."""
    if document_losses is None or not valid_bytes:
        return None, None
    nats, tokens = document_losses.sum(axis=0).tolist()
    return nats / math.log(2) / valid_bytes, valid_bytes / tokens


def _tokens_to_target(
    config: TrialConfig, metrics_path: Path, document_losses: Floats | None
) -> float | None:
    """Return the tokens at which the validation loss crossed the target; None without a loss."""
    target = config.science.target
    if target is None or document_losses is None:
        return None
    points = [line for line in files.read_metrics(metrics_path) if "valid/loss" in line]
    return crossing_tokens(
        [point["tokens"] for point in points],
        [point["valid/loss"] for point in points],
        target,
        config.science.evaluation.window,
    )


@cache
def git_commit() -> str | None:
    """Return the commit of this code, `-dirty` with local changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
