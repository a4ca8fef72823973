"""What weights a trial starts from, by their content: another trial's, or a pretrained model's."""

from pathlib import Path
from typing import Any

from sweep.config.pretrained import find_pretrained
from sweep.errors import SweepError
from sweep.trial.files import sha256_of, sha256_of_file
from sweep.trial.folder import TrialFolder


def identify_start(path: str) -> dict[str, Any]:
    """Return what weights are: their hash, and of a trial its model, tokenizer and data.

    Of a trial that began with a pretrained model, whose tokenizer is of no data, only the former.

    Raises:
        SweepError: if the folder is not that of a trial with weights, nor of a pretrained model.
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
            f"init must hold the model's tokenizer, got {path!r} without "
            f"{folder.tokenizer_path.name}. Copy it there from the pretrained model's folder."
        )
    return {
        "weights": sha256_of_file(folder.weights_path),
        "model": science.model.model_dump(mode="json"),
        "tokenizer": science.tokenizer and science.tokenizer.model_dump(mode="json"),
        **({} if is_pretrained else {"data": science.data}),  # its tokens are of no text
    }


def check_start(path: str, start: dict[str, Any] | None) -> None:
    """Refuse other weights than those that a trial was planned with.

    Raises:
        SweepError: if they are not there, or are others.
    """
    if start is None or identify_start(path)["weights"] != start["weights"]:
        raise SweepError(
            f"init must hold the weights that were planned with, and {path} holds others. Restore "
            "them, or start a new sweep in another folder."
        )


def _pretrained_sha256(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SweepError(
            f"init must hold weights in safetensors, got {str(folder)!r} without any. Save them "
            "there with save_pretrained."
        )
    return sha256_of({file.name: sha256_of_file(file) for file in files})
