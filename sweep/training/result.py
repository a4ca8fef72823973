"""result.json: the final record of a trial (docs/results.md names every key)."""

import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sweep.config.trial import TrialConfig
from sweep.models import count_parameters
from sweep.training.checkpoint import CheckpointStore
from sweep.training.device import device_name, peak_flops, peak_memory_bytes
from sweep.training.progress import Progress
from sweep.trial.files import replacing, sha256_of, sha256_of_file, write_json
from sweep.trial.folder import Cause, State, TrialStatus
from sweep.workloads.protocol import FinalEvaluation


def write_result(
    config: TrialConfig,
    status: TrialStatus,
    store: CheckpointStore,
    device: torch.device,
    progress: Progress,
    final: FinalEvaluation | None,
    epochs: float | None,
    microbatch_size: int,
) -> None:
    """Write valid_losses.npy and result.json; `final` is None for a diverged trial."""
    folder, science = store.folder, config.science
    if final is not None:
        with replacing(folder.losses_path, store.check) as part, part.open("wb") as file:
            np.save(file, final.valid_losses)
    flops = science.model.flops_per_token
    peak = peak_flops(device, science.precision)
    tokens = progress.step * science.batch_size * config.tokens_per_sequence
    rate = tokens / progress.seconds_training if progress.seconds_training else None
    steps = progress.step
    record = {
        "id": config.id,
        "stage": science.stage,
        "policy": science.policy,
        "batch_size": science.batch_size,
        "seed": science.seed,
        "learning_rate": science.learning_rate,
        "beta2": science.optimizer.beta2,
        "weight_decay": science.optimizer.weight_decay,
        "tokens": tokens,
        "epochs": epochs,
        "steps": steps,
        "warmup_steps": config.warmup_steps,
        "devices": config.execution.devices,
        "microbatch_size": microbatch_size,
        "gradient_accumulation_steps": science.batch_size
        // config.execution.devices
        // microbatch_size,
        "state": State.COMPLETE if final else State.FAILED,
        "cause": None if final else Cause.DIVERGED,
        "attempts": status.attempts,
        "parameters": count_parameters(science.model),
        "initial_train_loss": progress.first_loss,
        "final_train_loss": final.train_loss if final else None,
        "final_valid_loss": final.valid_loss if final else None,
        "best_valid_loss": progress.best_valid_loss,
        **_per_byte(final),
        "clipped_step_fraction": progress.clipped_steps / max(1, progress.log_step),
        "seconds_total": progress.seconds_total,
        "seconds_compile": progress.seconds_compile,
        "seconds_training": progress.seconds_training,
        "seconds_evaluation": progress.seconds_evaluation,
        "seconds_checkpoint": progress.seconds_checkpoint,
        "tokens_per_second": rate,
        "mfu": rate * flops / peak if rate and flops and peak else None,
        "peak_memory_bytes": peak_memory_bytes(device),
        "device": device_name(device),
        "torch_version": torch.__version__,
        "git_commit": git_commit(),
        "data_sha256": sha256_of(science.data) if science.data else None,
        "execution": config.execution.model_dump(mode="json"),
        "metrics_sha256": sha256_of_file(folder.metrics_path),
        "valid_losses_sha256": sha256_of_file(folder.losses_path) if final else None,
    }
    write_json(folder.result_path, _finite(record), store.check)


def _per_byte(final: FinalEvaluation | None) -> dict[str, float | None]:
    if final is None or not final.valid_bytes:
        return {"bits_per_byte": None, "bytes_per_token": None}
    nats, tokens = final.valid_losses.sum(axis=0)
    return {
        "bits_per_byte": float(nats / math.log(2) / final.valid_bytes),
        "bytes_per_token": float(final.valid_bytes / tokens),
    }


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace what JSON cannot hold by null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
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
