"""Where a trial starts: the identity of its initial weights."""

from pathlib import Path
from typing import Any

from sweep.config.hub import PREFIX
from sweep.config.models import ModelSettings
from sweep.errors import CorruptFile, SweepError
from sweep.resources import sha256_of_file
from sweep.trial.files import sha256_of
from sweep.trial.folder import TrialFolder


def weights_of(model: ModelSettings) -> dict[str, Any]:
    """Return the settings of a model that decide the shapes of its weights."""
    return model.model_dump(mode="json", exclude={"context", "lora"})


def identify_start(path: str) -> dict[str, Any]:
    """Return the identity of initial weights, and for a trial its model, tokenizer and data."""
    if path.startswith(PREFIX):
        return {"weights": path}  # with the commit, so planning need not download them
    folder = TrialFolder(Path(path).expanduser())
    files = sorted(folder.path.glob("*.safetensors*"))  # and the index of several files
    if not files or not folder.config_path.is_file():
        expected = "a complete trial or of a model, with config.json and weights in safetensors"
        raise SweepError(f"init must be the folder of {expected}, got {path!r}.")
    if folder.weights_path not in files:
        return {"weights": sha256_of({file.name: sha256_of_file(file) for file in files})}

    science = folder.read_config().science
    weights = sha256_of_file(folder.weights_path)
    result = folder.read_result()
    if result is None or result.weights_sha256 != weights:
        raise CorruptFile(f"{folder.weights_path} does not match the sha256 in result.json.")

    tokenizer = science.tokenizer
    start = {
        "weights": weights,
        "model": weights_of(science.model),
        "tokenizer": None if tokenizer is None else tokenizer.model_dump(mode="json"),
    }
    if tokenizer is None or not tokenizer.sha256:
        start["data"] = science.data  # a pretrained model's tokenizer does not depend on them
    return start
