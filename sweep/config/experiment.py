"""An experiment: the settings that ask one question, from TOML and command-line flags.

Reached through `load_experiment("quick", {"budget": "200k"})`. What is here changes numbers;
where and how fast trials run is decided on the command line (`sweep.config.trial.Execution`).
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from sweep.config.experiment_file import find_experiment, read_fields
from sweep.config.grpo import GrpoSettings
from sweep.config.models import (
    MODEL_PRESETS,
    ModelSettings,
    Positive,
    QuietSettings,
    Settings,
    model_preset,
)
from sweep.config.numbers import nearest_multiples, parse_batches, parse_count
from sweep.config.pretrained import find_model
from sweep.config.traits import WorkloadTraits, workload_traits
from sweep.errors import SweepError

AVERAGE = 0.1  # with a target
Fraction01 = Annotated[float, Field(ge=0, le=1, strict=True)]
TUNING_FLAGS = {"tune", "tune_budget"}
GRPO_FLAGS = {"init", "group_size"}
FOLLOW_FROM_INIT = ("model", "vocabulary", "context", "tokenizer")  # where it is pretrained
Points = Annotated[int, Field(gt=0, le=100_000, strict=True)]


class OptimizerSettings(Settings):
    """AdamW as torch has it, plain SGD, or none; weight decay applies to matrices only."""

    name: Literal["adamw", "sgd", "none"] = "adamw"  # none: forward and backward, no training
    beta1: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.999
    eps: Annotated[float, Field(gt=0, strict=True)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, strict=True)] = 0.1
    clip: Annotated[float, Field(ge=0, strict=True)] = 1.0  # global gradient norm; 0: never


class ScheduleSettings(QuietSettings):
    """Warmup as a fraction of the steps, then cosine decay (DESIGN.md §6)."""

    quiet = ("average",)

    name: Literal["cosine", "constant"] = "cosine"
    warmup_fraction: Fraction01 = 0.01
    warmup_min_steps: Annotated[int, Field(ge=0, strict=True)] = 0
    final_fraction: Fraction01 = 0.1  # of the peak rate, at the last step
    # of the weights, over the last tokens so far: its width as a share of them; 0: none
    average: Annotated[float, Field(ge=0, le=0.25, strict=True)] = 0.0


class EvaluationSettings(QuietSettings):
    """When and on how much the loss is measured; the same at every batch size."""

    quiet = ("window",)

    train_points: Points = 100  # log lines per trial
    points: Points = 20  # milestone evaluations per trial
    sequences: Positive | None = None  # per milestone; None: from the budget
    noise_points: Annotated[int, Field(ge=0, le=1000, strict=True)] = 10  # of gradient noise
    noise_share: Fraction01 = 0.005  # of the training sequences: those probed for it, in all
    # evaluations in a row whose mean is held against a target: more than 1 where they are noisy
    window: Annotated[int, Field(ge=1, le=1000, strict=True)] = 1


class TuningSettings(Settings):
    """How `lr = "tuned"` searches; no part of what a trial is."""

    dimensions: tuple[Literal["lr", "beta2", "weight_decay"], ...] = ("lr",)
    budget: int | None = None  # tokens of each tuning trial; None: as of the others
    trials: Annotated[int, Field(ge=5, le=1000, strict=True)] = 15  # of more than one dimension
    # rate at every batch size that the grid lies around; None: what suits the reference model
    centre: Annotated[float, Field(gt=0, le=1e6)] | None = None
    prune: bool = True  # the worse half at a quarter, and at half, of the tokens

    @field_validator("dimensions", mode="before")
    @classmethod
    def _read_dimensions(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("dimensions")
    @classmethod
    def _with_rate(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "lr" not in value or len(set(value)) < len(value):
            raise ValueError("must hold lr, and each of lr, beta2, weight_decay at most once")
        return value

    @field_validator("budget", mode="before")
    @classmethod
    def _read_budget(cls, value: Any) -> int | None:
        return None if value is None else parse_count(value, "tuning.budget")


class Experiment(QuietSettings):
    """One question: which batch size, for this model, data, budget and policy."""

    quiet = ("grpo",)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # names the folder
    question: str = ""
    workload: str = "pretrain"  # pretrain, grpo, quadratic, or module:object
    model: ModelSettings
    data: str | None = "tinystories"  # tinystories, synthetic, a path, or none
    tokenizer: Literal["bpe", "bytes", "pretrained"] = "bpe"
    budget: int  # training tokens of every trial
    batches: tuple[int, ...]  # sequences per optimizer step, ascending
    # None: 1 at a fixed rate, else 3
    seeds: Annotated[int, Field(gt=0, le=1000, strict=True)] | None = None
    lr: str = "3e-4"  # a number, sqrt[:rate@batch], linear:rate@batch, tuned
    precision: Literal["auto", "fp32", "bf16", "bf16-pure"] = "auto"
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    tuning: TuningSettings = TuningSettings()
    grpo: GrpoSettings | None = None  # of the workload grpo
    target: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # loss to train to

    @property
    def traits(self) -> WorkloadTraits:
        """Capabilities of the workload."""
        return workload_traits(self.workload, self.model, self.grpo)

    @model_validator(mode="before")
    @classmethod
    def _without_horizon(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """With a target: a constant rate and averaged weights, unless the schedule is named."""
        schedule = fields.get("schedule", {})
        if fields.get("target") is None or not isinstance(schedule, dict) or "name" in schedule:
            return fields
        return {**fields, "schedule": {"average": AVERAGE, **schedule, "name": "constant"}}

    @field_validator("budget", mode="before")
    @classmethod
    def _read_budget(cls, value: Any) -> int:
        return parse_count(value, "budget")

    @field_validator("batches", mode="before")
    @classmethod
    def _read_batches(cls, value: Any) -> tuple[int, ...]:
        return parse_batches(value)

    @field_validator("lr", mode="before")
    @classmethod
    def _read_lr(cls, value: Any) -> str:
        return str(value)

    @field_validator("workload")
    @classmethod
    def _known_workload(cls, value: str) -> str:
        if value not in ("pretrain", "grpo", "quadratic") and ":" not in value:
            raise ValueError("must be pretrain, grpo, quadratic, or a module:object of yours")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Experiment":
        is_quadratic = self.model.kind == "quadratic"
        if is_quadratic == (self.workload != "quadratic") and ":" not in self.workload:
            raise ValueError(
                f"workload {self.workload!r} cannot train the model {self.model.name!r}; "
                "the workload and the model named quadratic belong together"
            )
        if is_quadratic and self.precision not in ("auto", "fp32"):
            raise ValueError("the workload quadratic needs the precision fp32")
        self._check_grpo()
        if (self.tokenizer == "pretrained") != bool(getattr(self.model, "tokenizer_sha256", None)):
            raise ValueError(
                "the tokenizer pretrained belongs to a pretrained init, and to no other"
            )
        if self.tokenizer == "bytes" and getattr(self.model, "vocabulary", 256) < 256:
            raise ValueError("vocabulary must be at least 256 for the tokenizer bytes")
        if (self.tuning.budget or 0) > self.budget:
            raise ValueError("tuning.budget must be at most the budget")
        if self.target is not None and self.schedule.name != "constant":
            raise ValueError(
                "schedule.name must be constant with a target: a schedule that knows its end has "
                "reached nothing before it"
            )
        if self.target is not None and self.tuning.budget:
            raise ValueError("tuning.budget must be left out with a target, which ends trials")
        return self

    def _check_grpo(self) -> None:
        is_own = ":" in self.workload  # a user's workload may sample with these settings too
        if (self.workload == "grpo") != (self.grpo is not None) and not is_own:
            raise ValueError("the workload grpo and the table grpo belong together")
        if self.grpo is None:
            return
        size, context = self.grpo.group_size, self.model.context
        for batch in self.batches:
            if batch % size:
                raise ValueError(
                    f"batches must be whole groups of {size} completions; nearest to {batch}: "
                    f"{nearest_multiples(batch, size)}"
                )
        if self.grpo.tokens_per_sequence > context:
            raise ValueError(
                f"grpo.prompt_tokens and grpo.new_tokens must fit the context of {context}"
            )
        if self.data is None and self.grpo.task != "chess":
            raise ValueError(f"data must be a text for the task {self.grpo.task!r}")
        if self.grpo.task == "text" and self.grpo.reward is None:
            raise ValueError("grpo.reward must be a module:function of yours for the task 'text'")
        if self.target is not None:
            raise ValueError("target must be left out for the workload grpo: rewards are no loss")


def load_experiment(
    name: str = "tinystories", overrides: Mapping[str, Any] | None = None
) -> Experiment:
    """Read a shipped experiment or a TOML file, with command-line flags over its fields.

    Args:
        name: a shipped name, or the path of a TOML file.
        overrides: fields by name; `model`, `vocabulary` and `context` as the flags of that
            name; None leaves a field alone. A model named here brings its own vocabulary and
            context unless they are overridden too.

    Raises:
        SweepError: with the place and the remedy, for anything that cannot be an experiment.
    """
    path = find_experiment(name)
    fields = read_fields(path)
    flags = {key: value for key, value in (overrides or {}).items() if value is not None}
    left_out = batches_left_out(name, flags)
    tuning = {flag.removeprefix("tune_"): flags.pop(flag) for flag in TUNING_FLAGS & {*flags}}
    if tuning and isinstance(fields.setdefault("tuning", {}), dict):
        fields["tuning"] |= {{"tune": "dimensions"}.get(key, key): tuning[key] for key in tuning}
    grpo = {flag: flags.pop(flag) for flag in GRPO_FLAGS & {*flags}}
    named = {name for name in FOLLOW_FROM_INIT if name in flags}
    fields = _merge(fields, flags)
    if fields.get("workload") == "grpo" and isinstance(fields.setdefault("grpo", {}), dict):
        fields["grpo"] = fields["grpo"] | grpo
        fields |= _of_pretrained(fields["grpo"].get("init"), named)
        if left_out:
            fields["batches"] = [b for b in parse_batches(fields["batches"]) if b not in left_out]
    elif grpo:
        raise SweepError(f"{min(grpo)} means nothing but to the workload grpo. Leave it out.")
    fields.setdefault("name", path.stem)
    try:
        return Experiment.model_validate(fields)
    except ValidationError as error:
        raise SweepError(_one_sentence(error, name)) from error


def batches_left_out(name: str, overrides: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the batch sizes of an experiment of another workload that are no whole groups.

    Asked for GRPO without batch sizes, `load_experiment` leaves them out where any others remain.

    Args:
        name: as of `load_experiment`.
        overrides: likewise.
    """
    if overrides.get("workload") != "grpo" or overrides.get("batches") is not None:
        return ()
    fields = read_fields(find_experiment(name))
    if fields.get("workload", "pretrain") == "grpo" or "batches" not in fields:
        return ()
    tables = (overrides, overrides.get("grpo"), fields.get("grpo"))
    given = (one.get("group_size") for one in tables if isinstance(one, Mapping))
    size = next((one for one in given if isinstance(one, int)), GrpoSettings().group_size)
    batches = parse_batches(fields["batches"])
    parts = tuple(batch for batch in batches if batch % size)
    return parts if len(parts) < len(batches) else ()


def _of_pretrained(init: Any, named: set[str]) -> dict[str, Any]:
    """Return the fields that follow from weights of a pretrained model, trained on or not."""
    model = find_model(init) if isinstance(init, str) else None
    if model is None:
        return {}
    if named:
        raise SweepError(
            f"{min(named)} must be left out with the pretrained model {init!r}, from which it "
            "follows."
        )
    return {"model": model, "tokenizer": "pretrained"}


def _merge(fields: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Put flags over a file's fields and fill the model's sizes in."""
    fields = dict(fields)
    if flags.get("workload") == "quadratic":
        flags.setdefault("model", "quadratic")
    own_model = fields.get("model", "tinystories")
    sizes = {key: fields.pop(key) for key in ("vocabulary", "context") if key in fields}
    chosen = flags.pop("model", own_model)
    if chosen != own_model:
        sizes = {key: sizes[key] for key in sizes if ":" in str(chosen)}
        # A minimum of warmup steps is part of the experiment's own setting.
        if isinstance(schedule := fields.get("schedule", {}), dict):
            fields["schedule"] = {**schedule, "warmup_min_steps": 0}
    model = dict(chosen) if isinstance(chosen, dict) else model_preset(chosen)
    if "kind" not in model:
        model = {**model_preset(model.pop("preset", "tinystories")), **model}
    if model["kind"] != "quadratic":
        model |= sizes
        model |= {key: flags.pop(key) for key in ("vocabulary", "context") if key in flags}
        for key, size in (("vocabulary", 10_000), ("context", 256)):
            model.setdefault(key, size)
    else:
        for name in ("vocabulary", "context", "data"):
            if name in flags:
                raise SweepError(f"{name} means nothing to the model quadratic. Leave it out.")
        fields |= {"data": None, "workload": fields.get("workload", "quadratic")}
    return {**fields, **flags, "model": model}


def _one_sentence(error: ValidationError, name: str) -> str:
    """Say the first thing that is wrong, where, and what would be right."""
    found = error.errors()
    first = next((e for e in found if e["type"] == "extra_forbidden"), found[0])
    place = ".".join(str(part) for part in first["loc"] if part not in MODEL_KINDS)
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"])
        close = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(known)}."
        return f"experiment {name!r}: {place!r} is not a known key. {hint}"
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    given = first.get("input")
    shown = f", got {given!r}" if isinstance(given, str | int | float) else ""
    return f"experiment {name!r}: {place + ': ' if place else ''}{message}{shown}. Correct it."


MODEL_KINDS = {preset["kind"] for preset in MODEL_PRESETS.values()} | {"object"}


def _known_keys(place: tuple[int | str, ...]) -> list[str]:
    tables: dict[str, type[Settings]] = {
        "optimizer": OptimizerSettings,
        "schedule": ScheduleSettings,
        "evaluation": EvaluationSettings,
        "tuning": TuningSettings,
        "grpo": GrpoSettings,
    }
    table = tables.get(str(place[0])) if len(place) > 1 else Experiment
    keys = list(table.model_fields) if table else ["kind", "name", *MODEL_PRESETS["small"]]
    return sorted([*keys, "vocabulary", "context"] if table is Experiment else keys)
