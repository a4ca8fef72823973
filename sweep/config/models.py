"""Model settings: sizes, presets, and models of transformers."""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, TypeAdapter, model_validator

from sweep.config import read_toml, sha256_of_file
from sweep.config.hub import PREFIX, model_folder
from sweep.config.settings import Settings
from sweep.errors import SweepError

Positive = Annotated[int, Field(gt=0, le=10**9, strict=True)]
Layers = Annotated[int, Field(gt=0, le=10_000, strict=True)]


class ModelBase(Settings):
    """Capabilities that every model declares. Other code asks for these, never for the kind."""

    uses_all_parameters: ClassVar[bool] = True  # whether every step gives each one a gradient

    @property
    def supports_half_precision(self) -> bool:
        """Whether bf16 may be chosen; a workload's own model may use autocast by itself."""
        return getattr(self, "vocabulary", None) is not None


class TransformerSettings(ModelBase):
    """Pre-norm transformer: RMSNorm, rotary positions, SwiGLU, no biases, untied embeddings."""

    kind: Literal["transformer"] = "transformer"
    name: str
    vocabulary: Positive
    context: Positive  # tokens per sequence
    d_model: Positive
    layers: Layers
    heads: Positive
    d_ff: Positive

    @model_validator(mode="after")
    def _heads_divide(self) -> "TransformerSettings":
        if self.d_model % self.heads or (self.d_model // self.heads) % 2:
            raise ValueError(f"heads must split d_model ({self.d_model}) into equal even parts")
        return self


class ForeignModel(ModelBase):
    """A model that is defined elsewhere; its parameters are counted after it is built."""

    uses_all_parameters: ClassVar[bool] = False
    vocabulary: Positive = 10_000
    context: Positive = 256


class HuggingFaceSettings(ForeignModel):  # a causal language model
    kind: Literal["hugging_face"] = "hugging_face"
    name: str
    architecture: str  # model_type of transformers, such as gpt2
    sizes: dict[str, JsonValue] = Field(default={})  # entries of its config.json, no defaults
    end: int = 0  # id of the end-of-text token of a pretrained tokenizer
    tokenizer_sha256: str | None = None  # hash of a pretrained model's tokenizer.json
    lora: Positive | None = None  # rank of the adapters, which alone are trained; None: all weights


class ObjectSettings(ForeignModel):
    """A user's function of vocabulary, context and options: a module from ids (B, T) to logits.

    Or, without a vocabulary, whatever the workload of this name builds from its options.
    """

    kind: Literal["object"] = "object"
    name: str  # "module:object"
    vocabulary: Positive | None = 10_000  # type: ignore[assignment]  # size of the tokenizer and embeddings
    options: dict[str, JsonValue] = Field(default={})


ModelSettings = Annotated[
    TransformerSettings | HuggingFaceSettings | ObjectSettings, Field(discriminator="kind")
]

MODEL_PRESETS: dict[str, ModelSettings] = TypeAdapter(dict[str, ModelSettings]).validate_python(
    {name: {"name": name, **keys} for name, keys in read_toml(__file__, "models.toml").items()}
)
MAX_CONFIG_BYTES = 1 << 24
# Entries of a pretrained model's config.json that say nothing about its sizes.
NOT_SIZES = {
    *("architectures", "model_type", "vocab_size", "transformers_version", "dtype", "torch_dtype"),
    *("use_cache", "_name_or_path", "auto_map"),
}


def is_model_source(name: Any) -> bool:
    """Return True for a model of the hub, and for a folder with the config.json of a model."""
    if not isinstance(name, str) or name in MODEL_PRESETS:
        return False
    return name.startswith(PREFIX) or (Path(name).expanduser() / "config.json").is_file()


def model_preset(name: str) -> dict[str, Any]:
    if ":" in str(name) and not is_model_source(name):
        return {"kind": "object", "name": name}
    if str(name) not in MODEL_PRESETS:
        raise SweepError(
            f"model must be one of {', '.join(sorted(MODEL_PRESETS))}, your module:object, "
            f"hf:OWNER/NAME, a folder with the config.json of a model, or a table, got {name!r}."
        )
    return MODEL_PRESETS[name].model_dump()


def find_model(source: str, is_start: bool) -> dict[str, Any] | None:
    """Return the model fields of a folder or of the hub; None if transformers does not know it.

    A start needs a tokenizer, and may also be the folder of a trial that started from such a model.
    """
    folder = model_folder(source)
    try:
        path = folder / "config.json"
        if not path.is_file() or path.stat().st_size > MAX_CONFIG_BYTES:
            return None
        config = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):  # planning refuses this folder
        return None
    tokenizer = folder / "tokenizer.json"
    if "model_type" not in config:
        match config.get("science") if is_start else None:
            case {"model": {"lora": int()}}:
                remedy = "Start from the model that they were trained on"
                raise SweepError(f"init must hold all weights, got adapters: {source!r}. {remedy}.")
            case {"tokenizer": {"kind": "pretrained"}, "model": dict(model)}:
                if tokenizer.is_file():
                    return model
                raise SweepError(f"init must contain tokenizer.json, got {source!r}. Restore it.")
        return None
    vocabulary, end = config.get("vocab_size"), config.get("eos_token_id")
    end = next(iter(end), None) if isinstance(end, list) else end
    context = config.get("max_position_embeddings", config.get("n_positions"))
    has_tokenizer = tokenizer.is_file() and end is not None
    repository = source.removeprefix(PREFIX).partition("@")[0]
    if None in (vocabulary, context) or (is_start and not has_tokenizer):
        raise SweepError(
            "a model must have config.json with vocab_size and max_position_embeddings, and for "
            f"--init also eos_token_id and tokenizer.json, got {source!r}. Save the model and its "
            "tokenizer there."
        )
    fields = {
        "kind": "hugging_face",
        "name": repository if source.startswith(PREFIX) else config["model_type"],
        "architecture": config["model_type"],
        "vocabulary": vocabulary,
        "context": context,
        "sizes": {key: value for key, value in config.items() if key not in NOT_SIZES},
    }
    if has_tokenizer:
        fields |= {"end": end, "tokenizer_sha256": sha256_of_file(tokenizer)}
    return fields
