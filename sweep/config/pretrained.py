"""Pretrained models of the library transformers, as `save_pretrained` leaves them, as settings.

A folder holds config.json, weights in safetensors, and tokenizer.json, whose id that ends a text
takes the place of id 0 (`end`), which separates documents everywhere here.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from sweep.errors import SweepError

NOT_SIZES = (  # of config.json
    *("architectures", "model_type", "vocab_size", "transformers_version", "dtype", "torch_dtype"),
    *("use_cache", "_name_or_path"),
)


def find_pretrained(source: str) -> Path | None:
    """Return the folder of a pretrained model; None where a path is not one's."""
    folder = Path(source).expanduser()
    return folder if "model_type" in _config_of(folder) else None


def find_model(source: str) -> dict[str, Any] | None:
    """Return the model that follows from a start, as fields; None where none does.

    It does from a pretrained model, and from a trial that began with one.

    Raises:
        SweepError: as `model_of`.
    """
    if (folder := find_pretrained(source)) is not None:
        return model_of(folder)
    science = _config_of(Path(source).expanduser()).get("science") or {}
    is_of_one = (science.get("tokenizer") or {}).get("kind") == "pretrained"
    return dict(science["model"]) if is_of_one else None


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def model_of(folder: Path) -> dict[str, Any]:
    """Return what a folder holds as fields of `HuggingFaceSettings`.

    Raises:
        SweepError: if the folder lacks a tokenizer, or its config what is needed.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise SweepError(
            f"init must hold the model's tokenizer, got {str(folder)!r} without tokenizer.json. "
            "Save it there with AutoTokenizer.from_pretrained(…).save_pretrained(…)."
        )
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    context = config.get("max_position_embeddings", config.get("n_positions"))
    known = {
        "vocab_size": config.get("vocab_size"),
        "eos_token_id": end,
        "max_position_embeddings": context,
    }
    if lacking := [name for name, value in known.items() if not isinstance(value, int)]:
        raise SweepError(
            f"{folder / 'config.json'} must name {', '.join(lacking)}, and does not. Add it."
        )
    return {
        "kind": "hugging_face",
        "name": str(config["model_type"]),  # not the folder's, which may be renamed
        "architecture": str(config["model_type"]),
        "vocabulary": config["vocab_size"],
        "context": context,
        "sizes": {key: value for key, value in config.items() if key not in NOT_SIZES},
        "end": end,
        "tokenizer_sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
    }
