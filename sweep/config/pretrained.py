"""Folders of pretrained models, as `save_pretrained` of the transformers library writes them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from sweep.errors import SweepError

NOT_SIZES = {  # entries of config.json that say nothing about the architecture's sizes
    "architectures",
    "model_type",
    "vocab_size",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "_name_or_path",
}


def find_pretrained(source: str) -> Path | None:
    """Return the folder of a pretrained model, or None if the path is not such a folder."""
    folder = Path(source).expanduser()
    return folder if "model_type" in _load_config(folder) else None


def find_initial_model(source: str) -> dict[str, Any] | None:
    """Return the model fields that `--init` implies, or None if it implies none.

    A pretrained model implies them, and so does a trial that started from one.

    Raises:
        SweepError: as `model_of`.
    """
    if (folder := find_pretrained(source)) is not None:
        return model_of(folder)
    science = _load_config(Path(source).expanduser()).get("science") or {}
    is_pretrained = (science.get("tokenizer") or {}).get("kind") == "pretrained"
    return dict(science["model"]) if is_pretrained else None


def _load_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def model_of(folder: Path) -> dict[str, Any]:
    """Return the fields of `HuggingFaceSettings` for a pretrained model.

    Raises:
        SweepError: if the folder lacks tokenizer.json, or its config.json lacks an entry.
    """
    config, tokenizer = _load_config(folder), folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise SweepError(
            f"init must contain the model's tokenizer.json, got {str(folder)!r} without it. "
            "Save it there with AutoTokenizer.from_pretrained(…).save_pretrained(…)."
        )
    end = config.get("eos_token_id")
    required = {
        "vocab_size": config.get("vocab_size"),
        "eos_token_id": end[0] if isinstance(end, list) and end else end,
        "max_position_embeddings": config.get("max_position_embeddings", config.get("n_positions")),
    }
    missing = [name for name, value in required.items() if not isinstance(value, int)]
    if missing:
        raise SweepError(
            f"{folder / 'config.json'} must contain {', '.join(missing)}. Add the missing entries."
        )
    return {
        "kind": "hugging_face",
        "name": str(config["model_type"]),
        "architecture": str(config["model_type"]),
        "vocabulary": required["vocab_size"],
        "context": required["max_position_embeddings"],
        "sizes": {key: value for key, value in config.items() if key not in NOT_SIZES},
        "end": required["eos_token_id"],
        "tokenizer_sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
    }
