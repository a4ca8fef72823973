"""result.json: the final record of a trial (docs/results.md names every key)."""

import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sweep.config.trial import TrialConfig
from sweep.models import count_parameters
from sweep.plan.tuning import crossing_tokens
from sweep.training.checkpoint import CheckpointStore
from sweep.training.device import device_name, flop_utilisation
from sweep.training.progress import Progress
from sweep.trial.files import read_metrics, replacing, sha256_of, sha256_of_file, write_json
from sweep.trial.folder import Cause, State, TrialFolder, TrialStatus
from sweep.workloads.protocol import FinalEvaluation


def write_result(
    config: TrialConfig,
    status: TrialStatus,
    store: CheckpointStore,
    device: torch.device,
    progress: Progress,
    final: FinalEvaluation | None,
    epochs: float | None,
) -> None:
    """Write valid_losses.npy and result.json; `final` is None for a diverged trial."""
    folder = store.folder
    if final is not None:
        with replacing(folder.losses_path, store.check) as part, part.open("wb") as file:
            np.save(file, final.valid_losses)
    record = {
        **_settings(config, progress.step, epochs),
        "state": State.COMPLETE if final else State.FAILED,
        "cause": None if final else Cause.DIVERGED,
        "message": None if final else diverged_message(progress),
        "attempts": status.attempts,
        "initial_train_loss": progress.first_loss,
        "initial_valid_loss": progress.start_loss,
        "final_train_loss": final.train_loss if final else None,
        "final_valid_loss": final.valid_loss if final else None,
        "best_valid_loss": progress.best_valid_loss,
        "tokens_to_target": tokens_to_target(config, folder) if final else None,
        **_per_byte(final),
        "clipped_step_fraction": progress.clipped_steps / max(1, progress.log_step),
        **_speed(config, device, progress),
        "peak_memory_bytes": progress.peak_memory_bytes,
        "device": device_name(device),
        "torch_version": torch.__version__,
        "git_commit": git_commit(),
        "data_sha256": sha256_of(config.science.data) if config.science.data else None,
        "execution": config.execution.model_dump(mode="json"),
        "metrics_sha256": sha256_of_file(folder.metrics_path),
        "valid_losses_sha256": sha256_of_file(folder.losses_path) if final else None,
    }
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    write_json(folder.result_path, finite, store.check)


def tokens_to_target(config: TrialConfig, folder: TrialFolder) -> float | None:
    """Return the tokens at which a trial's evaluations reached its target; None if never."""
    science = config.science
    if science.target is None:
        return None
    lines = [line for line in read_metrics(folder.metrics_path) if "valid/loss" in line]
    losses = [math.nan if line["valid/loss"] is None else line["valid/loss"] for line in lines]
    tokens = [line["tokens"] for line in lines]
    return crossing_tokens(tokens, losses, science.target, science.evaluation.window)


def diverged_message(progress: Progress) -> str:
    """Return one line that says why a trial diverged."""
    return f"loss not finite, or above its start, at step {progress.step}"


def _settings(config: TrialConfig, steps: int, epochs: float | None) -> dict[str, Any]:
    science, devices = config.science, config.execution.devices
    return {
        "id": config.id,
        "stage": science.stage,
        "policy": science.policy,
        "batch_size": science.batch_size,
        "seed": science.seed,
        "learning_rate": science.learning_rate,
        "beta2": science.optimizer.beta2,
        "weight_decay": science.optimizer.weight_decay,
        "parameters": count_parameters(science.model),
        "tokens": steps * science.batch_size * config.tokens_per_sequence,
        "epochs": epochs and epochs * steps / config.steps,
        "steps": steps,
        "warmup_steps": config.warmup_steps,
        "devices": devices,
        "microbatch_size": config.microbatch_size,
        "gradient_accumulation_steps": science.batch_size // devices // config.microbatch_size,
    }


def _speed(config: TrialConfig, device: torch.device, progress: Progress) -> dict[str, Any]:
    tokens = progress.step * config.science.batch_size * config.tokens_per_sequence
    rate = tokens / max(progress.seconds_training, 1e-9)
    accounts = ("total", "compile", "training", "evaluation", "checkpoint", "noise")
    return {
        **{f"seconds_{name}": getattr(progress, f"seconds_{name}") for name in accounts},
        "tokens_per_second": rate,
        "mfu": flop_utilisation(config, device, rate),
    }


def _per_byte(final: FinalEvaluation | None) -> dict[str, float | None]:
    if final is None or not final.valid_bytes:
        return {"bits_per_byte": None, "bytes_per_token": None}
    nats, tokens = final.valid_losses.sum(axis=0)
    return {
        "bits_per_byte": float(nats / math.log(2) / final.valid_bytes),
        "bytes_per_token": float(final.valid_bytes / tokens),
    }


def git_commit() -> str | None:
    """Return the commit of this code, `-dirty` with local changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "sweep")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
