"""Model settings: sizes, presets, and models of transformers."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, TypeAdapter, model_validator

from sweep.config.hub import PREFIX, model_folder
from sweep.config.settings import Settings
from sweep.errors import SweepError, did_you_mean
from sweep.resources import read_toml

SIZES = ("vocabulary", "context")  # settings of an experiment that belong to its model

Positive = Annotated[int, Field(gt=0, le=10**9, strict=True)]
Layers = Annotated[int, Field(gt=0, le=10_000, strict=True)]


class ModelBase(Settings):
    """Capabilities that every model declares. Other code asks for these, never for the kind."""

    uses_all_parameters: ClassVar[bool] = True  # whether every step gives each one a gradient
    has_fixed_kernels: ClassVar[bool] = False  # whether all batches of a shape launch the same ones

    @property
    def supports_half_precision(self) -> bool:
        """Whether bf16 may be chosen; a workload's own model may use autocast by itself."""
        return True

    @property
    def code(self) -> tuple[str, ...]:
        """The user's code that builds it, as module:object."""
        return ()

    @property
    def tokenizer_hash(self) -> str | None:
        """The sha256 of the tokenizer.json that it was pretrained with; None if there is none."""
        return None

    @property
    def end_token(self) -> int:
        """The id of the end of a text, of a pretrained tokenizer."""
        return 0

    @property
    def adapter_rank(self) -> int | None:
        """The rank of the adapters, which alone are trained; None: all weights are."""
        return None

    @property
    def parameters_of_layers(self) -> int | None:
        """Parameters without embeddings and norms; None: not known before it is built."""
        return None


class TransformerSettings(ModelBase):
    """Pre-norm transformer: RMSNorm, rotary positions, SwiGLU, no biases, untied embeddings."""

    has_fixed_kernels: ClassVar[bool] = True
    kind: Literal["transformer"] = "transformer"
    name: str
    vocabulary: Positive
    context: Positive  # tokens per sequence
    d_model: Positive
    layers: Layers
    heads: Positive
    d_ff: Positive

    @property
    def parameters_of_layers(self) -> int:
        return self.layers * (4 * self.d_model**2 + 3 * self.d_model * self.d_ff)

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

    @property
    def tokenizer_hash(self) -> str | None:
        return self.tokenizer_sha256

    @property
    def end_token(self) -> int:
        return self.end

    @property
    def adapter_rank(self) -> int | None:
        return self.lora


class ObjectSettings(ForeignModel):
    """A user's function of vocabulary, context and options: a module from ids (B, T) to logits.

    Or, without a vocabulary, whatever the workload of this name builds from its options.
    """

    kind: Literal["object"] = "object"
    name: str  # "module:object"
    vocabulary: Positive | None = 10_000  # type: ignore[assignment]  # size of the tokenizer and embeddings
    options: dict[str, JsonValue] = Field(default={})

    @property
    def supports_half_precision(self) -> bool:
        return self.vocabulary is not None

    @property
    def code(self) -> tuple[str, ...]:
        return (self.name,) if ":" in self.name else ()


class ReplacedSize(Settings):
    """A size that the model is not trained with, because another one took precedence."""

    owner: Literal["model", "experiment"]
    name: str  # vocabulary or context
    size: int
    used: int


ModelSettings = Annotated[
    TransformerSettings | HuggingFaceSettings | ObjectSettings, Field(discriminator="kind")
]

MODEL_PRESETS: dict[str, ModelSettings] = TypeAdapter(dict[str, ModelSettings]).validate_python(
    {name: {"name": name, **keys} for name, keys in read_toml(__file__, "models.toml").items()}
)


def is_model_source(name: Any) -> bool:
    """Return True for a model of the hub, for a config.json, and for a folder that has one."""
    if not isinstance(name, str) or name in MODEL_PRESETS:
        return False
    return name.startswith(PREFIX) or (model_folder(name) / "config.json").is_file()


def model_preset(name: str) -> dict[str, Any]:
    if ":" in str(name) and not is_model_source(name):
        return {"kind": "object", "name": name}
    if str(name) not in MODEL_PRESETS:
        raise SweepError(
            f"model must be one of {', '.join(sorted(MODEL_PRESETS))}, your module:object, "
            f"hf:OWNER/NAME, a folder with the config.json of a model, or a table, got {name!r}. "
            + (did_you_mean(str(name), MODEL_PRESETS) or "Correct it.")
        )
    return MODEL_PRESETS[name].model_dump()
