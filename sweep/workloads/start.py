"""Weights to start from, loaded: those of a complete trial, or of a pretrained model."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from sweep.config.pretrained import find_pretrained
from sweep.errors import SweepError
from sweep.models.hugging_face import HuggingFace
from sweep.trial.folder import TrialFolder
from sweep.trial.start import check_start


def load_start(model: nn.Module, path: str, start: dict[str, Any] | None) -> None:
    """Load a trial's weights, or pretrained ones, into a model of the same sizes.

    Args:
        model: to fill.
        path: of the folder.
        start: what the weights must be, as `identify_start` says.

    Raises:
        SweepError: if they are others, or of another model.
    """
    check_start(path, start)
    try:
        if isinstance(model, HuggingFace) and find_pretrained(path) is not None:
            model.load(Path(path))
        else:
            load_model(model, TrialFolder(Path(path)).weights_path)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SweepError(
            f"init must hold weights of the experiment's model, but those in {path} do not load "
            f"({reason}). Use the model that they are of."
        ) from error
