"""result.json: the final record of a trial (docs/results.md names every key)."""

import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import torch

from sweep.config.trial import TrialConfig
from sweep.models import count_parameters
from sweep.plan.rates import crossing_tokens
from sweep.training.checkpoint import CheckpointStore
from sweep.training.device import device_name, flop_utilisation
from sweep.training.progress import Progress
from sweep.training.step import TrainingStep
from sweep.trial.files import (
    read_metrics,
    replacing,
    sha256_of,
    sha256_of_file,
    with_nulls,
    write_json,
)
from sweep.trial.folder import Cause, State, TrialStatus
from sweep.workloads.protocol import FinalEvaluation


def write_result(
    config: TrialConfig,
    status: TrialStatus,
    store: CheckpointStore,
    step: TrainingStep,
    progress: Progress,
    final: FinalEvaluation | None,
    message: str | None,
) -> None:
    """Write valid_losses.npy and result.json; a diverged trial has a message and no `final`."""
    folder, science, execution = store.folder, config.science, config.execution
    if final is not None:
        with replacing(folder.losses_path, store.check) as part, part.open("wb") as file:
            np.save(file, final.valid_losses)
    nats, valid_tokens = final.valid_losses.sum(axis=0).tolist() if final else (math.nan, 1)
    valid_bytes = (final and final.valid_bytes) or math.nan  # null in the file
    steps, epochs = progress.step, step.workload.epochs()
    tokens = steps * science.batch_size * config.tokens_per_sequence
    tokens_per_second = tokens / max(progress.seconds_training, 1e-9)
    record = {
        "id": config.id,
        **science.model_dump(include={"stage", "policy", "batch_size", "seed", "learning_rate"}),
        **science.optimizer.model_dump(include={"beta2", "weight_decay"}),
        "parameters": count_parameters(science.model),
        "tokens": tokens,
        "epochs": epochs and epochs * steps / config.steps,
        "steps": steps,
        "warmup_steps": config.warmup_steps,
        "devices": execution.devices,
        "microbatch_size": config.microbatch_size,
        "gradient_accumulation_steps": science.batch_size
        // (execution.devices * config.microbatch_size),
        "state": State.COMPLETE if final else State.FAILED,
        "cause": None if final else Cause.DIVERGED,
        "message": message,
        "attempts": status.attempts,
        "initial_train_loss": progress.first_loss,
        "initial_valid_loss": progress.start_loss,
        "final_train_loss": final and final.train_loss,
        "final_valid_loss": final and final.valid_loss,
        "bits_per_byte": nats / math.log(2) / valid_bytes,
        "bytes_per_token": valid_bytes / valid_tokens,
        "best_valid_loss": progress.best_valid_loss,
        "tokens_to_target": tokens_to_target(config, folder.metrics_path) if final else None,
        "clipped_step_fraction": progress.clipped_steps / max(1, progress.log_step),
        **{key: value for key, value in vars(progress).items() if key.startswith("seconds_")},
        "tokens_per_second": tokens_per_second,
        "mfu": flop_utilisation(config, step.device, tokens_per_second),
        "peak_memory_bytes": progress.peak_memory_bytes,
        "device": device_name(step.device),
        "torch_version": torch.__version__,
        "git_commit": git_commit(),
        "data_sha256": sha256_of(science.data) if science.data else None,
        "execution": execution.model_dump(mode="json"),
        "metrics_sha256": sha256_of_file(folder.metrics_path),
        "valid_losses_sha256": sha256_of_file(folder.losses_path) if final else None,
    }
    write_json(folder.result_path, with_nulls(record), store.check)


def tokens_to_target(config: TrialConfig, metrics: Path) -> float | None:
    """Return the tokens at which a complete trial's evaluations reached its target, if they did."""
    target, window = config.science.target, config.science.evaluation.window
    lines = [line for line in read_metrics(metrics) if "valid/loss" in line]
    tokens, losses = ([line[name] for line in lines] for name in ("tokens", "valid/loss"))
    return None if target is None else crossing_tokens(tokens, losses, target, window)


def git_commit() -> str | None:
    """Return the commit of this code, `-dirty` with local changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
