"""Weights to start from: those of a complete trial, or of a pretrained model of transformers."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from sweep.config.pretrained import find_pretrained
from sweep.errors import SweepError
from sweep.models.hugging_face import HuggingFace
from sweep.trial.files import sha256_of, sha256_of_file
from sweep.trial.folder import TrialFolder


def identify_start(path: str) -> dict[str, Any]:
    """Return what weights are: their hash, and of a trial its model, tokenizer and data.

    Raises:
        SweepError: if the folder is not that of a trial with weights, nor of a pretrained model.
    """
    if (pretrained := find_pretrained(path)) is not None:
        files = sorted(pretrained.glob("*.safetensors"))
        if not files:
            raise SweepError(
                f"init must hold weights in safetensors, got {path!r} without any. Save them there "
                "with save_pretrained."
            )
        return {"weights": sha256_of({file.name: sha256_of_file(file) for file in files})}
    folder = TrialFolder(Path(path).expanduser())
    if not folder.config_path.is_file() or not folder.weights_path.is_file():
        raise SweepError(
            f"init must be the folder of a complete trial, with config.json and "
            f"{folder.weights_path.name}, or of a pretrained model of transformers, got {path!r}. "
            "Name one of a sweep's trials/."
        )
    science = folder.read_config().science
    return {
        "weights": sha256_of_file(folder.weights_path),
        "model": science.model.model_dump(mode="json"),
        "tokenizer": science.tokenizer and science.tokenizer.model_dump(mode="json"),
        "data": science.data,
    }


def load_start(model: nn.Module, path: str) -> None:
    """Load a trial's weights, or pretrained ones, into a model of the same sizes."""
    weights = TrialFolder(Path(path)).weights_path
    try:
        if isinstance(model, HuggingFace) and find_pretrained(path) is not None:
            model.load(Path(path))
        else:
            load_model(model, weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SweepError(
            f"init must hold weights of the experiment's model, but {weights} does not load "
            f"({reason}). Use that trial's model."
        ) from error
