"""Identify the weights that a trial starts from, by their content."""

from pathlib import Path
from typing import Any

from sweep.config.pretrained import find_pretrained
from sweep.errors import SweepError
from sweep.trial.files import sha256_of, sha256_of_file
from sweep.trial.folder import TrialFolder


def identify_start(path: str) -> dict[str, Any]:
    """Return the hash of initial weights, and for a trial its model, tokenizer and data.

    The data are left out if the trial started from a pretrained model, whose tokenizer does not
    depend on them.

    Raises:
        SweepError: if the folder is neither a trial with weights nor a pretrained model.
    """
    if (pretrained := find_pretrained(path)) is not None:
        return {"weights": _pretrained_sha256(pretrained)}
    folder = TrialFolder(Path(path).expanduser())
    if not folder.config_path.is_file() or not folder.weights_path.is_file():
        raise SweepError(
            f"init must be the folder of a complete trial, with config.json and "
            f"{folder.weights_path.name}, or of a pretrained model of transformers, got {path!r}. "
            "Name one of a sweep's trials/."
        )
    science = folder.read_config().science
    is_pretrained = science.tokenizer is not None and science.tokenizer.kind == "pretrained"
    if is_pretrained and not folder.tokenizer_path.is_file():
        raise SweepError(
            f"init must contain the model's tokenizer, got {path!r} without "
            f"{folder.tokenizer_path.name}. Copy it there from the pretrained model's folder."
        )
    return {
        "weights": sha256_of_file(folder.weights_path),
        "model": science.model.model_dump(mode="json"),
        "tokenizer": science.tokenizer and science.tokenizer.model_dump(mode="json"),
        **({} if is_pretrained else {"data": science.data}),  # the tokenizer is not trained on data
    }


def check_start(path: str, start: dict[str, Any] | None) -> None:
    """Check that the weights are those that a trial was planned with.

    Raises:
        SweepError: if they are missing or different.
    """
    if start is None or identify_start(path)["weights"] != start["weights"]:
        raise SweepError(
            f"init must contain the weights that the plan names, but {path} contains others. "
            "Restore them, or start a new sweep in another folder."
        )


def _pretrained_sha256(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SweepError(
            f"init must contain weights in safetensors, got {str(folder)!r} without any. Save them "
            "there with save_pretrained."
        )
    return sha256_of({file.name: sha256_of_file(file) for file in files})
