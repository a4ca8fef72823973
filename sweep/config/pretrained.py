"""Experiments with a model that transformers saved, read without transformers or torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweep.config.hub import PREFIX, model_folder
from sweep.config.models import SIZES, is_model_source
from sweep.config.numbers import parse_count
from sweep.config.workloads import SETTINGS_OF_KIND
from sweep.errors import SweepError, reason_of
from sweep.resources import sha256_of_file

MAX_CONFIG_BYTES = 1 << 24
# Entries of a pretrained model's config.json that say nothing about its sizes.
NOT_SIZES = {
    "architectures",
    "model_type",
    "vocab_size",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "_name_or_path",
    "auto_map",
}


def pin(source: str) -> str:
    """Return a model's name with the commit of its revision; a folder's name as it is."""
    if not source.startswith(PREFIX):
        return source
    commit = model_folder(source).name
    return f"{source.partition('@')[0]}@{commit}"


def fields_of_model(
    source: str, is_start: bool, needs_tokenizer: bool = False
) -> dict[str, Any] | None:
    """Return the model fields of a folder or of the hub; None if transformers does not know it.

    A start may also be the folder of a trial that started from such a model.
    """
    folder = model_folder(source)
    tokenizer = folder / "tokenizer.json"
    config = _read_config(folder / "config.json")
    if config is None:
        return None
    if "model_type" not in config:
        return _fields_of_trial(config, source, tokenizer.is_file()) if is_start else None

    vocabulary = config.get("vocab_size")
    context = config.get("max_position_embeddings", config.get("n_positions"))
    end = config.get("eos_token_id")
    if isinstance(end, list):
        end = end[0] if end else None
    has_tokenizer = tokenizer.is_file() and end is not None
    if None in (vocabulary, context) or (needs_tokenizer and not has_tokenizer):
        raise SweepError(
            "a model must have config.json with vocab_size and max_position_embeddings, and for "
            f"--init also eos_token_id and tokenizer.json, got {source!r}. Save the model and its "
            "tokenizer there."
        )

    name = config["model_type"]
    if source.startswith(PREFIX):
        name = source.removeprefix(PREFIX).partition("@")[0]
    fields = {
        "kind": "hugging_face",
        "name": name,
        "architecture": config["model_type"],
        "vocabulary": vocabulary,
        "context": context,
        "sizes": {key: value for key, value in config.items() if key not in NOT_SIZES},
    }
    if has_tokenizer:
        fields |= {"end": end, "tokenizer_sha256": sha256_of_file(tokenizer)}
    return fields


def _read_config(path: Path) -> dict[str, Any] | None:
    """Read the config.json of a model; None if there is none, which planning refuses."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_CONFIG_BYTES:
            return None
        config = json.loads(path.read_bytes())
    except OSError:
        return None
    except (ValueError, RecursionError) as error:
        problem = f"must be JSON, but {reason_of(error)}"
        raise SweepError(f"{path} {problem}. Correct it.") from error
    if not isinstance(config, dict):
        problem = f"must be an object of JSON, got {type(config).__name__}"
        raise SweepError(f"{path} {problem}. Correct it.")
    return config


def _fields_of_trial(
    config: Mapping[str, Any], source: str, has_tokenizer: bool
) -> dict[str, Any] | None:
    """Return the model fields of a trial of a pretrained model; None for any other trial."""
    match config.get("science"):
        case {"model": {"lora": int()}}:
            remedy = "Start from the model that they were trained on"
            raise SweepError(f"init must hold all weights, got adapters: {source!r}. {remedy}.")
        case {"tokenizer": {"kind": "pretrained"}, "model": dict(model)}:
            if not has_tokenizer:
                raise SweepError(f"init must contain tokenizer.json, got {source!r}. Restore it.")
            return model
    return None


def with_transformers(
    fields: dict[str, Any],
    file: Mapping[str, Any],
    flags: Mapping[str, Any],
    keeps_sizes: bool = False,
) -> dict[str, Any]:
    """Replace the name of a model of transformers, or the model of the init, by its fields.

    The vocabulary is that of the experiment's tokenizer, and the context is the experiment's, at
    most the model's; for grpo, where it is a bound, the model's. With `keeps_sizes` both are the
    model's, unless they were set for this model, and an init needs no more than its config.json.
    `replaced_sizes` lists what is not used.

    Args:
        fields: those of the experiment, with the flags.
        file: the fields of the experiment's file, with the sizes of its model.
    """
    init = fields.get("init")
    source = fields.get("model")
    model_fields = None
    changes: dict[str, Any] = {}
    if isinstance(init, str):
        model_fields = fields_of_model(init, is_start=True, needs_tokenizer=not keeps_sizes)
    if model_fields is not None and "tokenizer_sha256" not in model_fields:
        changes = {"init": None, "model_source": pin(str(init))}  # memory needs no weights
    elif model_fields is not None:
        set_by_init = sorted({"model", "tokenizer", "vocabulary"} & {*flags})
        if set_by_init:
            raise SweepError(f"{set_by_init[0]} must be left out: the init {init!r} sets it.")
        changes = {"init": pin(str(init)), "tokenizer": "pretrained"}
    elif is_model_source(source):
        model_fields = fields_of_model(str(source), is_start=False)
        changes = {"model_source": pin(str(source))}
    if model_fields is None:
        return fields

    is_pretrained = changes.get("tokenizer", fields.get("tokenizer")) == "pretrained"
    if is_pretrained and "vocabulary" in flags:
        raise SweepError("vocabulary must be left out: the pretrained tokenizer sets it.")

    # Sizes in the file belong to the file's model, not to an init that a flag names.
    stated = flags if "init" in flags else fields
    used = stated if keeps_sizes else {**file, **flags}
    sizes = {key: parse_count(used[key], key) for key in SIZES if used.get(key) is not None}
    context_of_experiment = sizes.get("context")

    context_of_model = model_fields["context"]
    if stated.get("context") is not None:
        if sizes["context"] > context_of_model:
            problem = f"must be at most the model's {context_of_model}, got {sizes['context']}"
            raise SweepError(f"context {problem}. Lower it.")
    elif SETTINGS_OF_KIND[fields["workload"]["kind"]].context_is_bound:
        sizes["context"] = context_of_model
    else:
        sizes["context"] = min(sizes.get("context", context_of_model), context_of_model)

    if is_pretrained:
        sizes.pop("vocabulary", None)  # the model's
    else:
        model_fields.pop("end", None)
        model_fields.pop("tokenizer_sha256", None)
    model = {**model_fields, **sizes}

    replaced = [_replaced_size("model", key, model_fields[key], model[key]) for key in SIZES]
    if not keeps_sizes and context_of_experiment and model["context"] == context_of_model:
        size = _replaced_size("experiment", "context", context_of_experiment, model["context"])
        replaced.append(size)
    changes["replaced_sizes"] = [size for size in replaced if size["size"] != size["used"]]

    others = {key: value for key, value in fields.items() if key not in SIZES}
    return {**others, **changes, "model": model}


def _replaced_size(owner: str, name: str, size: int, used: int) -> dict[str, Any]:
    return {"owner": owner, "name": name, "size": size, "used": used}
