"""The experiment: all settings that can change a result, from a TOML file and from flags."""

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from sweep.config.models import ModelSettings, Positive, find_initial_model, model_preset
from sweep.config.numbers import nearest_multiples, parse_batches, parse_count
from sweep.config.settings import (
    GRPO,
    MODEL,
    TUNING,
    Count,
    Flag,
    Settings,
    Share,
    describe_error,
    settings_of,
)
from sweep.config.workload import GrpoSettings, WorkloadTraits, workload_traits
from sweep.errors import SweepError

LOG = logging.getLogger(__name__)
AVERAGE_WITH_TARGET = 0.1
DEFAULT_SIZES = {"vocabulary": 10_000, "context": 256}
Points = Annotated[int, Field(gt=0, le=100_000, strict=True)]


class OptimizerSettings(Settings):
    """AdamW as in torch, SGD, or none; weight decay applies to matrices only."""

    name: Literal["adamw", "sgd", "none"] = "adamw"  # none: forward and backward only
    beta1: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.999
    eps: Annotated[float, Field(gt=0, strict=True)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, strict=True)] = 0.1
    clip: Annotated[float, Field(ge=0, strict=True)] = 1.0  # global gradient norm; 0: no clipping


class ScheduleSettings(Settings):
    """Linear warmup, then cosine decay or a constant rate (DESIGN.md §6)."""

    name: Literal["cosine", "constant"] = "cosine"
    warmup_fraction: Share = 0.01  # of the steps
    warmup_min_steps: Annotated[int, Field(ge=0, strict=True)] = 0
    final_fraction: Share = 0.1  # of the peak rate, at the last step
    # width of the weights' exponential average, as a share of the tokens so far; 0: no average
    average: Annotated[float, Field(ge=0, le=0.25, strict=True)] = 0.0


class EvaluationSettings(Settings):
    """When the loss is measured and on how much data; the same at every batch size."""

    train_points: Points = 100  # log lines per trial
    points: Points = 20  # milestone evaluations per trial
    sequences: Positive | None = None  # per milestone; None: derived from the budget
    noise_points: Annotated[int, Field(ge=0, le=1000, strict=True)] = (
        10  # measurements of the noise scale
    )
    noise_share: Share = 0.005  # of the training sequences, used by all noise measurements
    # consecutive evaluations whose mean is compared with a target; > 1 if they are noisy
    window: Annotated[int, Field(ge=1, le=1000, strict=True)] = 1


class TuningSettings(Settings):
    """How `lr = "tuned"` searches. Not part of a trial's identity."""

    dimensions: Annotated[
        tuple[Literal["lr", "beta2", "weight_decay"], ...],
        Flag("Dimensions to tune: lr,beta2,weight_decay.", TUNING, "tune", concerns_memory=False),
    ] = ("lr",)
    budget: Annotated[
        Count | None,
        Flag(
            "Tokens of each tuning trial; by default the budget.",
            TUNING,
            "tune-budget",
            concerns_memory=False,
        ),
    ] = None
    trials: Annotated[int, Field(ge=5, le=1000, strict=True)] = 15  # with more than one dimension
    # centre of the rate grid at every batch size; None: the reference model's
    centre: Annotated[float, Field(gt=0, le=1e6, strict=True)] | None = None
    prune: bool = True  # end the worse half at 1/4 and at 1/2 of the tokens

    @field_validator("dimensions", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("dimensions")
    @classmethod
    def _contains_the_rate(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "lr" not in value or len(set(value)) < len(value):
            raise ValueError("must contain lr, and each of lr, beta2, weight_decay at most once")
        return value


class Experiment(Settings):
    """One question: which batch size, for this model, data, budget and policy."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # of the sweep's folder
    question: str = ""
    budget: Annotated[
        Count, Flag("Training tokens of every trial: 327M, 3.2768e8.", concerns_memory=False)
    ]
    batches: Annotated[
        tuple[int, ...], Flag("Batch sizes in sequences: 1,8,32 or 1..512 (powers of two).")
    ]
    model: Annotated[
        ModelSettings, Flag("tinystories, small, quick, gpt2, elman, or your module:object.")
    ]
    data: Annotated[
        str | None,
        Flag("tinystories, synthetic, hf:OWNER/NAME, or the path of a file or folder."),
    ] = "tinystories"
    lr: Annotated[
        str,
        Flag(
            "A rate, sqrt[:RATE@BATCH], linear:RATE@BATCH, or tuned.",
            metavar="POLICY",
            concerns_memory=False,
        ),
    ] = "3e-4"
    seeds: Annotated[
        Count | None,
        Field(le=1000),
        Flag("Seeds per batch size; by default 1 at a fixed rate, else 3.", concerns_memory=False),
    ] = None
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "bf16-pure"],
        Flag("auto: bf16 on CUDA, else fp32.", MODEL),
    ] = "auto"
    target: Annotated[
        float | None,
        Field(gt=0),
        Flag(
            "Train each trial to this validation loss, at a constant rate; the budget is a cap.",
            TUNING,
            metavar="LOSS",
            concerns_memory=False,
        ),
    ] = None
    workload: Annotated[str, Flag("pretrain, grpo, quadratic, or your module:object.", MODEL)] = (
        "pretrain"
    )
    tokenizer: Annotated[
        Literal["bpe", "bytes", "pretrained"], Flag("How text becomes tokens.", MODEL)
    ] = "bpe"
    # Sizes of the model. They complete `model` before validation and are None afterwards.
    vocabulary: Annotated[
        Count | None, Flag("Size of the tokenizer and the embeddings.", MODEL)
    ] = Field(default=None, exclude=True)
    context: Annotated[Count | None, Flag("Tokens per sequence.", MODEL)] = Field(
        default=None, exclude=True
    )
    init: Annotated[
        str | None,
        Flag(
            "Folder of a complete trial, or of a pretrained transformers model, to start from.",
            GRPO,
            metavar="DIR",
        ),
    ] = None
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    tuning: TuningSettings = TuningSettings()
    grpo: GrpoSettings | None = None  # only with the workload grpo

    @property
    def traits(self) -> WorkloadTraits:
        """Capabilities of the workload."""
        return workload_traits(self.workload, self.model, self.grpo)

    @model_validator(mode="before")
    @classmethod
    def _use_a_constant_rate_with_a_target(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Use a constant rate and averaged weights with a target, unless a schedule is named."""
        schedule = fields.get("schedule", {})
        if fields.get("target") is None or not isinstance(schedule, dict) or "name" in schedule:
            return fields
        schedule = {"average": AVERAGE_WITH_TARGET, **schedule, "name": "constant"}
        return {**fields, "schedule": schedule}

    @model_validator(mode="before")
    @classmethod
    def _complete_the_model(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Replace a model's name by its fields, and put vocabulary and context into them."""
        fields = dict(fields)
        model = fields.get("model", "tinystories")
        model = dict(model) if isinstance(model, dict) else model_preset(model)
        if "kind" not in model:
            model = {**model_preset(model.pop("preset", "tinystories")), **model}
        sizes = {key: fields.pop(key, None) for key in DEFAULT_SIZES}
        if model["kind"] == "quadratic":
            for key, size in sizes.items():
                if size is not None:
                    raise ValueError(f"{key} does not apply to the model quadratic; leave it out")
            fields = {"workload": "quadratic", **fields, "data": None}
        else:
            for key, size in sizes.items():
                default = model.get(key, DEFAULT_SIZES[key])
                model[key] = default if size is None else parse_count(size, key)
        return {**fields, "model": model}

    @field_validator("batches", mode="before")
    @classmethod
    def _parse_batches(cls, value: Any) -> tuple[int, ...]:
        return parse_batches(value)

    @field_validator("lr", mode="before")
    @classmethod
    def _write_the_rate(cls, value: Any) -> str:
        return str(value)

    @field_validator("workload")
    @classmethod
    def _is_a_workload(cls, value: str) -> str:
        if value not in ("pretrain", "grpo", "quadratic") and ":" not in value:
            raise ValueError("must be pretrain, grpo, quadratic, or your module:object")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "Experiment":
        is_builtin = ":" not in self.workload  # a user's workload may use any of these
        is_mixed = (self.model.kind == "quadratic") != (self.workload == "quadratic")
        if is_builtin and is_mixed:
            raise ValueError(
                f"workload {self.workload!r} cannot train the model {self.model.name!r}; "
                "the workload quadratic needs the model quadratic, and vice versa"
            )
        if not self.model.supports_half_precision and self.precision not in ("auto", "fp32"):
            raise ValueError(f"the model {self.model.name} needs the precision fp32")
        if (self.tokenizer == "pretrained") != bool(getattr(self.model, "tokenizer_sha256", None)):
            raise ValueError("the tokenizer pretrained needs an init that is a pretrained model")
        if self.tokenizer == "bytes" and (self.model.vocabulary or 256) < 256:
            raise ValueError("vocabulary must be at least 256 for the tokenizer bytes")
        if (self.tuning.budget or 0) > self.budget:
            raise ValueError("tuning.budget must be at most the budget")
        if self.target is not None:
            self._check_target()
        if is_builtin and (self.workload == "grpo") != (self.grpo is not None):
            raise ValueError("the workload grpo and the table grpo belong together")
        if self.grpo is not None:
            self._check_grpo(self.grpo)
        elif self.init is not None:
            raise ValueError("init applies only to the workload grpo; leave it out")
        return self

    def _check_target(self) -> None:
        if not self.traits.supports_target:
            raise ValueError(f"target does not apply to the workload {self.workload}")
        if self.schedule.name != "constant":
            raise ValueError(
                "schedule.name must be constant with a target, because a decaying schedule "
                "reaches its loss only at its end"
            )
        if self.tuning.budget:
            raise ValueError("tuning.budget must be left out with a target, which ends trials")

    def _check_grpo(self, grpo: GrpoSettings) -> None:
        for batch in self.batches:
            if batch % grpo.group_size:
                nearest = nearest_multiples(batch, grpo.group_size)
                raise ValueError(
                    f"batches must be multiples of group_size ({grpo.group_size}) completions; "
                    f"nearest to {batch}: {nearest}"
                )
        if grpo.tokens_per_sequence > self.model.context:
            raise ValueError(
                "grpo.prompt_tokens + grpo.new_tokens must be at most the context "
                f"({self.model.context})"
            )
        if self.data is None and grpo.task != "chess":
            raise ValueError(f"data must be a text for the task {grpo.task!r}")
        if grpo.task == "text" and grpo.reward is None:
            raise ValueError("grpo.reward must be your module:function for the task 'text'")


def load_experiment(
    name: str = "tinystories", overrides: Mapping[str, Any] | None = None
) -> Experiment:
    """Load a shipped experiment or a TOML file, and apply overrides.

    Args:
        name: a shipped name, or the path of a TOML file.
        overrides: values by the name of a flag (`tune_budget`) or of a top-level field; None
            leaves the field alone. A model named here brings its own vocabulary and context
            unless they are overridden too.

    Raises:
        SweepError: naming the key, the value and the remedy, if this is not an experiment.
    """
    path = find_experiment(name)
    fields = read_toml(path)
    flags = {key: value for key, value in (overrides or {}).items() if value is not None}
    if flags.get("workload") == "quadratic":
        flags.setdefault("model", "quadratic")
    if "model" in flags and flags["model"] != fields.get("model"):
        _forget_the_model(fields, str(flags["model"]))
    paths = {setting.name: setting.path for setting in settings_of(Experiment)}
    is_other_workload = flags.get("workload", fields.get("workload")) != fields.get("workload")
    for key, value in flags.items():
        *tables, field = paths.get(key, (key,))
        table = fields
        for part in tables:
            table[part] = dict(table.get(part) or {})
            table = table[part]
        table[field] = value
    if fields.get("workload") == "grpo":
        fields["grpo"] = dict(fields.get("grpo") or {})
        _use_the_initial_model(fields, flags)
        if is_other_workload and "batches" not in flags:
            _keep_whole_groups(fields, name)
    elif "group_size" in flags:
        raise SweepError("group_size applies only to the workload grpo. Leave it out.")
    fields.setdefault("name", path.stem)
    try:
        return Experiment.model_validate(fields)
    except ValidationError as error:
        raise describe_error(error, f"experiment {name!r}", Experiment) from error


def find_experiment(name: str) -> Path:
    """Return the file of a shipped experiment, or of a path.

    Raises:
        SweepError: if there is no such file.
    """
    shipped = experiments_dir()
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise SweepError(f"experiment file must exist, got {name!r}. Check the path.")
        return path
    if not (shipped / f"{name}.toml").is_file():
        names = ", ".join(sorted(file.stem for file in shipped.glob("*.toml")))
        raise SweepError(
            f"experiment must be a TOML file or one of {names}, got {name!r}. Choose one of them."
        )
    return shipped / f"{name}.toml"


def experiments_dir() -> Path:
    """Return the folder of shipped experiments, in the wheel or in the repository."""
    package = Path(__file__).parent.parent
    shipped = package / "_experiments"
    return shipped if shipped.is_dir() else package.parent / "experiments"


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file, unchecked.

    Raises:
        SweepError: if the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SweepError(f"experiment {path} must be TOML, but {error}. Correct it.") from error
    except OSError as error:
        raise SweepError(f"experiment {path} cannot be read: {error.strerror}.") from error


def _forget_the_model(fields: dict[str, Any], model: str) -> None:
    """Remove what the file says about its own model, because another one was chosen."""
    if ":" not in model:
        for key in DEFAULT_SIZES:
            fields.pop(key, None)
    if isinstance(schedule := fields.get("schedule", {}), dict):
        fields["schedule"] = {**schedule, "warmup_min_steps": 0}  # the reference model's only


def _use_the_initial_model(fields: dict[str, Any], flags: Mapping[str, Any]) -> None:
    init = fields.get("init")
    model = find_initial_model(init) if isinstance(init, str) else None
    if model is None:
        return
    if named := sorted({"model", "tokenizer", *DEFAULT_SIZES} & {*flags}):
        raise SweepError(
            f"{named[0]} must be left out with the pretrained model {init!r}, which determines it."
        )
    for key in DEFAULT_SIZES:
        fields.pop(key, None)
    fields |= {"model": model, "tokenizer": "pretrained"}


def _keep_whole_groups(fields: dict[str, Any], name: str) -> None:
    """Leave out batch sizes of another workload's experiment that are not whole groups."""
    size = parse_count(fields["grpo"].get("group_size", GrpoSettings().group_size), "group_size")
    batches = parse_batches(fields.get("batches", ()))
    whole = [batch for batch in batches if batch % size == 0]
    if whole and len(whole) < len(batches):
        dropped = ", ".join(str(batch) for batch in batches if batch not in whole)
        LOG.warning(
            "Batch sizes %s of %s are not multiples of group_size (%s) and are left out. "
            "Choose others with --batches.",
            *(dropped, name, size),
        )
        fields["batches"] = whole
