"""Model settings: sizes, parameter counts and FLOPs in closed form, and pretrained models."""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, TypeAdapter, model_validator

from sweep.config import read_toml, sha256_of_file
from sweep.config.settings import Settings
from sweep.errors import SweepError

Positive = Annotated[int, Field(gt=0, le=10**9, strict=True)]
Layers = Annotated[int, Field(gt=0, le=10_000, strict=True)]


class ModelBase(Settings):
    """Capabilities that every model declares. Other code asks for these, never for the kind."""

    uses_all_parameters: ClassVar[bool] = True  # whether every step gives each one a gradient
    is_worth_compiling: ClassVar[bool] = True  # whether torch.compile can pay for its time
    supports_half_precision: ClassVar[bool] = True  # whether bf16 may be chosen


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

    @property
    def embedding_parameters(self) -> int:  # input embeddings and output projection
        return 2 * self.vocabulary * self.d_model

    @property
    def parameters(self) -> int:
        d = self.d_model
        block = 4 * d * d + 3 * d * self.d_ff + 2 * d
        return self.embedding_parameters + self.layers * block + d

    @property
    def flops_per_token(self) -> int:  # in training: 6 per matrix weight, plus causal attention
        matrices = self.parameters - self.vocabulary * self.d_model
        return 6 * matrices + 6 * self.layers * self.context * self.d_model


class ForeignModel(ModelBase):
    """A model that is defined elsewhere; its parameters are counted after it is built."""

    uses_all_parameters: ClassVar[bool] = False
    vocabulary: Positive = 10_000
    context: Positive = 256
    parameters: None = None
    embedding_parameters: None = None
    flops_per_token: None = None


class HuggingFaceSettings(ForeignModel):  # a causal language model
    kind: Literal["hugging_face"] = "hugging_face"
    name: str
    architecture: str  # model_type of transformers, such as gpt2
    sizes: dict[str, JsonValue] = Field(default={})  # entries of its config.json, no defaults
    end: int = 0  # id of the end-of-text token, which swaps places with id 0
    tokenizer_sha256: str | None = None  # hash of a pretrained model's tokenizer.json


class ObjectSettings(ForeignModel):
    """A user's function of vocabulary, context and options: a module from ids (B, T) to logits."""

    kind: Literal["object"] = "object"
    name: str  # "module:object"
    options: dict[str, JsonValue] = Field(default={})


class OwnModel(ModelBase):
    """What the user's workload builds."""

    uses_all_parameters: ClassVar[bool] = False
    supports_half_precision: ClassVar[bool] = False  # its code may still use autocast
    vocabulary: ClassVar[None] = None
    kind: Literal["own"] = "own"
    name: str  # the workload's
    context: Positive = 1  # tokens per sequence
    parameters: None = None
    embedding_parameters: None = None
    flops_per_token: None = None


class QuadraticSettings(ModelBase):
    """The noisy quadratic model (Zhang et al. 2019): curvature and noise fall as powers of i."""

    is_worth_compiling: ClassVar[bool] = False
    supports_half_precision: ClassVar[bool] = False
    vocabulary: ClassVar[None] = None
    kind: Literal["quadratic"] = "quadratic"
    name: str = "quadratic"
    dimensions: Positive = 1000
    curvature_power: Annotated[float, Field(ge=0, le=10, strict=True)] = 1.0  # h_i = 1/i^power
    noise_power: Annotated[float, Field(ge=0, le=10, strict=True)] = 1.0  # c_i = noise/i^power
    noise: Annotated[float, Field(ge=0, le=1e6, strict=True)] = 1.0  # variance of w_1's gradient
    context: Literal[1] = 1
    embedding_parameters: Literal[0] = 0

    @property
    def parameters(self) -> int:
        return self.dimensions

    @property
    def flops_per_token(self) -> int:  # about three multiply-adds per dimension
        return 6 * self.dimensions


ModelSettings = Annotated[
    TransformerSettings | HuggingFaceSettings | ObjectSettings | OwnModel | QuadraticSettings,
    Field(discriminator="kind"),
]

MODEL_PRESETS: dict[str, ModelSettings] = TypeAdapter(dict[str, ModelSettings]).validate_python(
    {name: {"name": name, **keys} for name, keys in read_toml(__file__, "models.toml").items()}
)
MAX_CONFIG_BYTES = 1 << 24
# Entries of a pretrained model's config.json that say nothing about its sizes.
NOT_SIZES = {
    *("architectures", "model_type", "vocab_size", "transformers_version", "dtype", "torch_dtype"),
    *("use_cache", "_name_or_path"),
}


def model_preset(name: str) -> dict[str, Any]:
    if ":" in str(name):
        return {"kind": "object", "name": name}
    if str(name) not in MODEL_PRESETS:
        raise SweepError(
            f"model must be one of {', '.join(sorted(MODEL_PRESETS))}, your module:object, or a "
            f"table of sizes, got {name!r}."
        )
    return MODEL_PRESETS[name].model_dump()


def find_initial_model(source: str) -> dict[str, Any] | None:
    """Return the model fields of a pretrained model, or of a trial that started from one."""
    folder = Path(source).expanduser()
    tokenizer = folder / "tokenizer.json"
    try:
        path = folder / "config.json"
        if not path.is_file() or path.stat().st_size > MAX_CONFIG_BYTES:
            return None
        config = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):  # planning refuses this folder
        return None
    if "model_type" not in config:
        match config.get("science"):
            case {"tokenizer": {"kind": "pretrained"}, "model": dict(model)}:
                if tokenizer.is_file():
                    return model
                raise SweepError(f"init must contain tokenizer.json, got {source!r}. Restore it.")
        return None
    vocabulary, end = config.get("vocab_size"), config.get("eos_token_id")
    end = next(iter(end), None) if isinstance(end, list) else end
    context = config.get("max_position_embeddings", config.get("n_positions"))
    if None in (vocabulary, end, context) or not tokenizer.is_file():
        raise SweepError(
            "init must contain tokenizer.json, and config.json with vocab_size, eos_token_id and "
            f"max_position_embeddings, got {source!r}. Save the model and its tokenizer there."
        )
    return {
        "kind": "hugging_face",
        "name": config["model_type"],
        "architecture": config["model_type"],
        "vocabulary": vocabulary,
        "context": context,
        "sizes": {key: value for key, value in config.items() if key not in NOT_SIZES},
        "end": end,
        "tokenizer_sha256": sha256_of_file(tokenizer),
    }
