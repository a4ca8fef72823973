"""Weights to start from: those of a complete trial."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from sweep.errors import SweepError
from sweep.trial.files import sha256_of_file
from sweep.trial.folder import TrialFolder


def identify_start(path: str) -> dict[str, Any]:
    """Return what weights are: their hash, and the model and tokenizer that they belong to.

    Raises:
        SweepError: if the folder is not that of a trial with weights.
    """
    folder = TrialFolder(Path(path).expanduser())
    if not folder.config_path.is_file() or not folder.weights_path.is_file():
        raise SweepError(
            f"init must be the folder of a complete trial, with config.json and "
            f"{folder.weights_path.name}, got {path!r}. Name one of a sweep's trials/."
        )
    science = folder.read_config().science
    return {
        "weights": sha256_of_file(folder.weights_path),
        "model": science.model.model_dump(mode="json"),
        "tokenizer": science.tokenizer and science.tokenizer.model_dump(mode="json"),
        "data": science.data,
    }


def load_start(model: nn.Module, path: str) -> None:
    """Load a trial's weights into a model of the same sizes."""
    weights = TrialFolder(Path(path)).weights_path
    try:
        model.load_state_dict(load_file(weights))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SweepError(
            f"init must hold weights of the experiment's model, but {weights} does not load "
            f"({reason}). Use that trial's model."
        ) from error
