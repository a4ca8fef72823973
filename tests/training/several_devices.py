"""A small trial on one device or several: real processes, which exchange by gloo."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sweep.config.execution import Execution
from sweep.plan.retry import Outcome, begin_attempt
from sweep.training import attempt_trial
from sweep.training.process import FreshProcess
from sweep.trial.files import read_metrics
from sweep.trial.folder import TrialFolder
from tests.exactness.attempts import plan_trial

STEPS, MIDDLE = 30, 17
# The norm of a gradient is above 0.6 in some steps and below in others.
SETTINGS = {
    "batches": "8",
    "budget": 8 * 64 * STEPS,
    "lr": "3e-3",
    "optimizer": {"clip": 0.65},
    "noise_scale": {"measure": True, "share": 0.2},
}


def planned(
    path: Path,
    devices: int = 1,
    zero: int = 0,
    execution: dict[str, Any] | None = None,
    **settings: object,
) -> TrialFolder:
    asked = Execution(device="cpu", microbatch=2, devices=devices, zero=zero)
    return plan_trial(path, "quick", SETTINGS | settings, asked, threads=1, **execution or {})


def start(trial: TrialFolder, pause_step: int | None = None) -> FreshProcess:
    status = begin_attempt(trial.read_status())
    trial.write_status(status.changed(pause_step=pause_step))
    return FreshProcess(attempt_trial, trial.path, None, ends_itself=True)


def attempt(trial: TrialFolder, pause_step: int | None = None) -> Outcome:
    return start(trial, pause_step).result()


def complete(trial: TrialFolder) -> TrialFolder:
    assert attempt(trial).kind == "complete", trial.log_path.read_text()
    return trial


def pause(trial: TrialFolder, step: int = MIDDLE) -> None:
    message = f"checkpoint at step {step} of {trial.read_config().steps}"
    assert attempt(trial, step) == Outcome("paused", message)
    assert trial.checkpoints()[0].step == step


def on(trial: TrialFolder, devices: int) -> TrialFolder:
    config = trial.read_config()
    execution = config.execution.model_copy(update={"devices": devices})
    trial.write_config(config.model_copy(update={"execution": execution}))
    return trial


def curves(trial: TrialFolder) -> dict[str, torch.Tensor]:
    lines = read_metrics(trial.metrics_path)
    names = ("train/loss", "train/grad_norm", "train/clipped", "valid/loss")
    return {n: torch.tensor([line[n] for line in lines if n in line]) for n in names}


def assert_same_trial(trial: TrialFolder, other: TrialFolder) -> None:
    for name, curve in curves(trial).items():
        torch.testing.assert_close(curve, curves(other)[name], rtol=1e-5, atol=1e-6)
    ours, theirs = trial.read_result(), other.read_result()
    for name in ("final_valid_loss", "final_train_loss", "initial_valid_loss"):
        assert math.isclose(getattr(ours, name), getattr(theirs, name), rel_tol=1e-5), name
    tokens = theirs.tokens_to_target  # None without a target
    assert ours.tokens_to_target == (tokens and pytest.approx(tokens, rel=1e-5))
    weights, others = load_file(trial.weights_path), load_file(other.weights_path)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        # root mean square: AdamW amplifies the rounding of single gradients close to zero
        assert (weight - others[name]).square().mean().sqrt() <= 1e-5, name
