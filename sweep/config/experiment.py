"""The experiment: all settings that can change a result, from a TOML file and from flags."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from sweep.config import settings
from sweep.config.models import (
    MODEL_PRESETS,
    SIZES,
    ModelSettings,
    Positive,
    ReplacedSize,
    model_preset,
)
from sweep.config.numbers import nearest_multiples, parse_batches, parse_count, parse_options
from sweep.config.objective import LOSS, TOKENS_TO_TARGET, Objective
from sweep.config.pretrained import with_transformers
from sweep.config.secrets import refuse_secrets
from sweep.config.settings import Count, DataFlag, Flag, Group, RunFlag, Settings, Share
from sweep.errors import SweepError, cut, did_you_mean, reason_of
from sweep.resources import EXPERIMENTS, read_toml, shipped_experiments
from sweep.usercode.commands import check_command, title_of_command

# Settings of a command's experiment; the others belong to trainings of this package. The optimizer
# and the schedule are for {beta2}, {weight_decay} and {warmup_steps}.
SETTINGS_OF_COMMANDS = (
    *("name", "question", "command", "code_folder", "context", "budget", "batches", "lr", "seeds"),
    *("tuning", "answer", "declared", "optimizer", "schedule"),
)
FINAL_PROMPTS = 256  # held-out prompts of the final evaluation
TokenizerKind = Literal["bpe", "bytes", "pretrained"]
MAX_EXPERIMENT_BYTES = 1 << 20
MetricName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
Command = Annotated[str, AfterValidator(check_command)]
Precision = Literal["fp32", "bf16", "bf16-pure"]
Points = Annotated[int, Field(gt=0, le=100_000, strict=True)]
COMMAS = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
Cell = tuple[str | None, int]  # optimizer, if a sweep has several, and batch size
OptimizerName = Annotated[str, settings.one_of("adamw", "sgd", "muon", "adafactor", "none")]
OPTIMIZERS: dict[str, dict[str, Any]] = read_toml(__file__, "optimizers.toml")


def optimizer_facts(name: str) -> dict[str, Any]:
    return OPTIMIZERS.get(name, OPTIMIZERS["own"])


class OptimizerSettings(Settings):
    """An optimizer of torch, or the user's; weight decay applies to matrices only."""

    # adamw, sgd, muon, adafactor, your module:object, or none: only forward and backward
    name: OptimizerName = "adamw"
    beta1: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.9  # decay of the first moment
    beta2: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.999  # decay of the second moment
    eps: Annotated[float, Field(gt=0, strict=True)] = 1e-8  # added to the denominator
    weight_decay: Annotated[float, Field(ge=0, strict=True)] = 0.1  # decoupled, times the rate
    clip: Annotated[float, Field(ge=0, strict=True)] = 1.0  # global gradient norm; 0: no clipping
    # further arguments, by the name of the optimizer
    options: dict[OptimizerName, dict[str, JsonValue]] = Field(default={})

    def of(self, name: str | None) -> Self:
        """Return the settings of one of a sweep's optimizers, by default this one."""
        name = name or self.name
        options = {name: self.options[name]} if self.options.get(name) else {}
        return self.model_copy(update={"name": name, "options": options})


class ScheduleSettings(Settings):
    """Linear warmup, then cosine decay or a constant rate; or the user's function of the step."""

    # after the warmup; or your module:function
    name: Annotated[str, settings.one_of("cosine", "constant")] = "cosine"
    # warmup as a share of the steps, of which it takes at most a tenth
    warmup_fraction: Annotated[float, Field(ge=0, le=0.1, strict=True)] = 0.01
    # least warmup at a fixed rate, up to a tenth of the steps
    warmup_min_steps: Annotated[int, Field(ge=0, strict=True)] = 0
    final_fraction: Share = 0.1  # last rate of the cosine as a share of the peak
    # width of the weights' average, as a share of the steps so far; 0: none. With a target: 0.1
    average: Annotated[float, Field(ge=0, le=0.25, strict=True)] = 0.0


class EvaluationSettings(Settings):
    """Times and sizes of the evaluations, the same at every batch size."""

    train_points: Points = 100  # log lines per trial, at most one per step
    points: Points = 20  # milestone evaluations per trial, at most one per step
    sequences: Positive | None = None  # per evaluation; by default derived from the budget
    # most gradient-noise measurements per trial; fewer if noise_share does not suffice
    noise_points: Annotated[int, Field(ge=0, le=1000, strict=True)] = 10
    noise_share: Share = 0.02  # most of the budget's sequences that these measurements may take
    # consecutive evaluations that are averaged before comparison with the target
    window: Annotated[int, Field(ge=1, le=1000, strict=True)] = 1


class TuningSettings(Settings, use_attribute_docstrings=True):
    """The search of `lr = "tuned"`. Not part of a trial's identity."""

    dimensions: Annotated[
        tuple[Literal["lr", "beta2", "weight_decay"], ...], COMMAS, RunFlag(Group.TUNING, "tune")
    ] = ("lr",)
    """Dimensions to tune: lr,beta2,weight_decay."""
    budget: Annotated[Count | None, RunFlag(Group.TUNING, "tune-budget")] = None
    """Tokens of each tuning trial; by default the budget."""
    trials: Annotated[int, Field(ge=5, le=1000, strict=True)] = 15  # if several dimensions
    centre: Annotated[
        float | None, Field(gt=0, le=1e6), RunFlag(Group.TUNING, "tune-centre", "RATE")
    ] = None
    """Centre of the grid of rates at every batch size; by default one that suits tinystories."""
    # centres of single optimizers, by name
    centres: dict[OptimizerName, Annotated[float, Field(gt=0, le=1e6)]] = Field(default={})
    prune: bool = True  # end the worse half at 1/4 and at 1/2 of the tokens


class AnswerSettings(Settings, use_attribute_docstrings=True):
    """The tolerance, and the limits of `--seeds auto`. Not part of a trial's id."""

    tolerance: Annotated[float | None, Field(gt=0), RunFlag(Group.TUNING)] = None
    """Good enough: so far from the best loss, 0.01; with a target a share of the tokens, 0.05."""
    max_seeds: Annotated[Count, Field(ge=3, le=20), RunFlag(Group.TUNING)] = 20
    """Most seeds per batch size with --seeds auto, at most 20."""
    max_hours: Annotated[float | None, Field(gt=0), RunFlag(Group.TUNING)] = None
    """Start no further seeds after this many hours of a command, with --seeds auto."""
    # higher losses whose steps are read from the trials that reach the target
    other_targets: tuple[Annotated[float, Field(gt=0, strict=True)], ...] = ()


class GrpoSettings(Settings, use_attribute_docstrings=True):
    """Sampling, reward and loss. `batch_size` counts completions: prompts times `group_size`."""

    # source of prompts and rewards: words, text, chess, or your module:object
    task: Annotated[str, settings.one_of("words", "text", "chess")] = "words"
    reward: Annotated[str, Field(pattern=":")] | None = None  # your module:function
    group_size: Annotated[Count, Field(ge=2, le=1024), Flag(Group.GRPO, metavar="N")] = 8
    """Completions per prompt."""
    prompt_tokens: Positive = 32  # length of every prompt, padded on the left
    new_tokens: Positive = 64  # longest completion
    temperature: Annotated[float, Field(gt=0, le=10, strict=True)] = 1.0  # sampling temperature
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0  # nucleus sampling; 1: off
    # grpo: mean over completions of means over tokens; dapo: mean over all tokens of the batch;
    # dr_grpo: sum over tokens, divided by batch_size · new_tokens
    loss: Literal["grpo", "dr_grpo", "dapo"] = "grpo"
    # divisor of the advantages: standard deviation of the group or of the batch, or nothing
    scale_rewards: Literal["group", "batch", "none"] = "group"
    clip: Annotated[float, Field(gt=0, lt=1, strict=True)] = 0.2  # lower end of the ratio: 1 − clip
    clip_high: Annotated[float, Field(gt=0, strict=True)] | None = None  # upper end; default: clip
    kl: Annotated[float, Field(ge=0, strict=True)] = 0.02  # weight of KL; 0: no reference model
    num_iterations: Annotated[int, Field(ge=1, le=100, strict=True)] = 1  # updates per batch

    @property
    def tokens_per_sequence(self) -> int:
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class WorkloadTraits:
    """Properties of a workload that planning, memory search and reports read."""

    tokens_per_sequence: int  # training tokens that one sequence counts as
    group_size: int = 1  # sequences that must stay together in a batch
    samples: bool = False  # whether each step first generates its batch with the model
    objective: Objective = LOSS
    expected_initial_loss: float | None = None  # an untrained model's; None: not known

    @property
    def tokens(self) -> str:
        """The name of the data that are counted."""
        return "examples" if self.tokens_per_sequence == 1 else "tokens"

    @property
    def sequences(self) -> str:
        return "examples" if self.tokens_per_sequence == 1 else "sequences"

    @classmethod
    def of(cls, workload: str, model: ModelSettings, grpo: GrpoSettings | None) -> Self:
        if grpo is not None:
            objective = Objective(unit="of reward", label="minus mean reward")
            return cls(grpo.tokens_per_sequence, grpo.group_size, True, objective)
        if workload == "pretrain" and model.vocabulary:
            objective = Objective(unit="nats", label="nats per token")
            return cls(model.context, 1, False, objective, math.log(model.vocabulary))
        return cls(model.context)  # a user's `module:object`


class Declared(Settings, use_attribute_docstrings=True):
    """Class attributes of the user's workload; for a command they are set here."""

    tokens_per_sequence: Positive | None = None  # by default the context
    is_language: bool | None = None  # whether it reads the experiment's model and data
    objective: Annotated[MetricName, RunFlag(Group.MODEL, metavar="NAME")] = "loss"
    """Metric valid/NAME of a command, by which batch sizes are compared."""
    direction: Annotated[Literal["minimize", "maximize"], RunFlag(Group.MODEL)] = "minimize"
    """Whether a lower or a higher value of a command's objective is better."""
    unit: Annotated[str, RunFlag(Group.MODEL)] = ""
    """Unit of a command's objective in reports."""
    tolerance: Annotated[float, Field(gt=0)] = LOSS.tolerance  # --tolerance takes precedence


class TrainingSettings(Settings, use_attribute_docstrings=True):
    """Settings of the training that an experiment shares with each of its trials."""

    model: Annotated[ModelSettings, Flag()]
    """tinystories, small, quick, gpt2, hf:OWNER/NAME, a folder, or your module:object."""
    workload: Annotated[
        str, settings.one_of("pretrain", "grpo", "quadratic", "command"), Flag(Group.MODEL)
    ] = "pretrain"
    """pretrain, grpo, quadratic, or your module:object."""
    command: Annotated[Command | None, RunFlag(Group.MODEL)] = None
    """Your training script, with placeholders such as {batch_size}."""
    target: Annotated[float | None, Field(gt=0), RunFlag(Group.TUNING)] = None
    """Train to this validation loss, at a constant rate; the budget is a cap."""
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    grpo: GrpoSettings | None = None  # only with the workload grpo

    @property
    def traits(self) -> WorkloadTraits:
        return WorkloadTraits.of(self.workload, self.model, self.grpo)

    def passes(self, *names: str) -> bool:
        """Return True if trainings receive one of these values: a command by a placeholder."""
        return self.command is None or any(f"{{{name}}}" in self.command for name in names)

    @property
    def unused(self) -> list[str]:
        """The values of the optimizer and the schedule that a command does not receive."""
        names = ("beta2", "weight_decay", "warmup_steps", "optimizer")
        return [name for name in names if not self.passes(name)]

    @property
    def user_objects(self) -> list[str]:
        """The command, or the user's workload, optimizer and so on, each as module:object."""
        if self.command is not None:
            return [self.command]
        own_model = self.model.name if self.model.kind == "object" else ""
        of_grpo = (self.grpo.task, self.grpo.reward or "") if self.grpo else ()
        optimizers = (self.optimizer.name, *getattr(self, "optimizers", ()))
        names = (self.workload, own_model, *of_grpo, *optimizers, self.schedule.name)
        return [name for name in dict.fromkeys(names) if ":" in name]


def _read_seeds(value: Any) -> Any:
    if value is None or value == "auto":
        return value
    if (count := parse_count(value, "seeds")) > 1000:
        raise ValueError("must be at most 1000, or auto")
    return count


class Experiment(TrainingSettings):
    """One question: which batch size, for this model, data, budget and policy."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # by default the file's
    question: str = ""  # shown to people
    budget: Annotated[Count, RunFlag()]
    """Training tokens of every trial: 327M, 3.2768e8."""
    batches: Annotated[tuple[int, ...], BeforeValidator(parse_batches), Flag()]
    """Batch sizes in sequences: 1,8,32 or 1..512 (powers of two)."""
    data: Annotated[str | None, Flag()] = "tinystories"
    """tinystories, synthetic, hf:OWNER/NAME, or the path of a file or folder."""
    text_column: Annotated[str, DataFlag(Group.MODEL, metavar="NAME")] = "text"
    """Column of a table or of a data set of the hub that holds the texts."""
    lr: Annotated[str, BeforeValidator(str), RunFlag()] = "3e-4"
    """A learning rate, sqrt[:RATE@BATCH], linear:RATE@BATCH, or tuned."""
    seeds: Annotated[int | str | None, BeforeValidator(_read_seeds), RunFlag(metavar="N|auto")] = (
        None
    )
    """Seeds per batch size, by default 1 at a fixed rate, else 3. auto: until all is clear."""
    optimizers: Annotated[
        tuple[OptimizerName, ...], COMMAS, RunFlag(Group.TUNING, metavar="NAME,…")
    ] = ()
    """Optimizers: adamw,sgd,muon,adafactor, or your module:object; several are compared."""
    precision: Annotated[Literal["auto", Precision], Flag(Group.MODEL)] = "auto"
    """auto: bf16 (autocast) on CUDA, else fp32. bf16-pure: weights in bf16 too."""
    tokenizer: Annotated[TokenizerKind, DataFlag(Group.MODEL)] = "bpe"
    """Byte-level BPE, plain bytes, or the pretrained model's."""
    # Sizes of the model. They complete `model` before validation and are None afterwards.
    vocabulary: Annotated[Count | None, Field(exclude=True), DataFlag(Group.MODEL)] = None
    """Size of the tokenizer and embeddings."""
    context: Annotated[Count | None, Field(exclude=True), Flag(Group.MODEL)] = None
    """Tokens per sequence."""
    model_option: Annotated[
        str | dict[str, JsonValue] | None, Field(exclude=True), Flag(Group.MODEL, None, "KEY=VALUE")
    ] = None
    """An argument of your own model. Repeat it for more."""
    lora: Annotated[Count | None, Field(exclude=True), Flag(Group.MODEL, metavar="RANK")] = None
    """Train only LoRA adapters of this rank; needs --init."""
    init: Annotated[str | None, Flag(Group.MODEL, metavar="DIR")] = None
    """Weights to start from: hf:OWNER/NAME, or the folder of a model or of a trial."""
    model_source: Annotated[str | None, Field(exclude=True)] = None  # what `model` names
    # folder of the experiment's file, in which modules of user code are found
    code_folder: Annotated[str | None, Field(exclude=True)] = None
    # sizes of a model of transformers, or of the experiment, that are not used
    replaced_sizes: Annotated[tuple[ReplacedSize, ...], Field(exclude=True)] = ()
    tuning: TuningSettings = TuningSettings()
    answer: AnswerSettings = AnswerSettings()
    declared: Declared | None = None  # by the user's workload, when it is planned

    @property
    def traits(self) -> WorkloadTraits:
        traits, own = super().traits, self.declared
        if self.init is not None:
            traits = replace(traits, expected_initial_loss=None)
        if own is None:
            return traits
        name = f"final_valid_{own.objective}"
        objective = Objective(name, own.direction, own.unit, own.tolerance, own.unit)
        tokens = own.tokens_per_sequence or traits.tokens_per_sequence
        return replace(traits, tokens_per_sequence=tokens, objective=objective)

    def with_declared(self, own: Declared) -> Self:
        """Return the experiment with what the user's workload declares."""
        reads_model = self.model.vocabulary is not None
        if own.is_language and not (reads_model and self.data):
            needed = "a model and a text. Name them with --model and --data"
            raise SweepError(f"workload {self.workload!r} reads {needed}, or an experiment.")
        if own.is_language is False and (reads_model or self.data):
            problem = "builds its own model and batches, but the experiment names a model or a text"
            raise SweepError(f"workload {self.workload!r} {problem}. Leave EXPERIMENT out.")
        has_loss = (own.objective, own.direction) == ("loss", "minimize")
        if self.target is not None and not has_loss:
            raise SweepError("target needs the objective loss, less is better. Leave it out.")
        return self.model_copy(update={"declared": own})

    @property
    def objective(self) -> Objective:
        own = self.traits.objective if self.target is None else TOKENS_TO_TARGET
        return replace(own, tolerance=self.answer.tolerance or own.tolerance)

    @property
    def optimizer_names(self) -> tuple[str, ...]:
        return self.optimizers or (self.optimizer.name,)

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(product(self.optimizers or (None,), self.batches))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        model, tuning, grpo, workload = self.model, self.tuning, self.grpo, self.workload
        is_user_code = ":" in workload
        reads_model = workload in ("pretrain", "grpo")
        if (workload == "command") != (self.command is not None):
            raise ValueError("workload 'command' needs a command. Use --command instead")
        if not is_user_code and reads_model != (model.vocabulary is not None):
            raise ValueError(f"workload {workload!r} cannot train {model.name!r}. Change either")
        if not model.supports_half_precision and self.precision not in ("auto", "fp32"):
            raise ValueError(f"the model {model.name} needs the precision fp32. Leave it out")
        if (self.tokenizer == "pretrained") != bool(getattr(model, "tokenizer_sha256", None)):
            needed = "a model with eos_token_id and tokenizer.json, as --init or --model"
            raise ValueError(f"tokenizer 'pretrained' needs {needed}. Name one")
        if getattr(model, "lora", None) and self.init is None:
            raise ValueError("lora needs pretrained weights. Name them with --init")
        if "lr" not in tuning.dimensions or len({*tuning.dimensions}) < len(tuning.dimensions):
            raise ValueError("tuning.dimensions must contain lr, each at most once. Write lr,beta2")
        if absent := [name for name in tuning.dimensions if name != "lr" and not self.passes(name)]:
            raise ValueError(f"tuning {absent[0]} needs {{{absent[0]}}} in the command. Add it")
        if len({*self.optimizers, "none"}) <= len(self.optimizers):
            raise ValueError("optimizers must differ, and none is not one of them. Correct them")
        if (tuning.budget or 0) > self.budget:
            raise ValueError("tuning.budget must be at most the budget. Lower it")
        if not is_user_code and (workload == "grpo") != (grpo is not None):
            raise ValueError("group_size and [grpo] need the workload grpo. Leave them out")
        if self.target is None and self.answer.other_targets:
            raise ValueError("answer.other_targets need a target. Add one, or leave them out")
        if self.target is not None:
            if self.traits.samples:
                raise ValueError(f"target does not apply to {workload}. Leave it out")
            if self.schedule.name != "constant":
                raise ValueError("schedule.name must be constant with a target. Leave it out")
            if any(other <= self.target for other in self.answer.other_targets):
                raise ValueError("answer.other_targets must be above the target. Raise them")
            if tuning.budget is not None:
                raise ValueError("tuning.budget does not apply with a target. Leave it out")
        if model.vocabulary is None and (self.init, self.data) != (None, None):
            raise ValueError("init and data apply only to language models. Leave them out")
        if grpo is None:
            return self
        for batch in self.batches:
            if batch % (size := grpo.group_size):
                near = f"got {batch}. Use {nearest_multiples(batch, size)}"
                raise ValueError(f"batches must be multiples of group_size ({size}), {near}")
        if grpo.tokens_per_sequence > (context := model.context):
            raise ValueError(f"prompt_tokens + new_tokens must fit context {context}. Lower them")
        if grpo.task == "text" and grpo.reward is None:
            raise ValueError("the task 'text' needs your module:function. Set grpo.reward")
        return self


def load_experiment(
    name: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    keeps_model_sizes: bool = False,
) -> Experiment:
    """Load a shipped experiment or a TOML file; apply overrides by the name of flag or field.

    By default it is `tinystories`; for the user's workload or command it has no model or text.
    With `keeps_model_sizes` a model of transformers keeps its vocabulary and context.
    """
    flags = {key: value for key, value in (overrides or {}).items() if value is not None}
    workload = str(flags.get("workload", ""))
    fields: dict[str, Any] = {"lr": "1e-3"}
    if name or not (":" in workload or "command" in flags):
        default = "quadratic" if workload == "quadratic" else "tinystories"
        fields = _read_experiment(name or default)
    model: Any = fields.get("model", "tinystories")
    usual = dict(model if isinstance(model, dict) else MODEL_PRESETS.get(str(model), {}))
    usual = {key: usual[key] for key in SIZES if key in usual} | fields
    is_other_model = flags.get("model") not in (None, fields.get("model"))
    left_out: dict[str, Any] = {}
    if is_other_model and ":" in str(flags["model"]):
        fields = usual
    elif is_other_model:  # these belong to the file's model
        left_out = {key: fields[key] for key in SIZES if key in fields}
        fields = {key: value for key, value in fields.items() if key not in SIZES}
    merged = settings.merge_settings(Experiment, fields, flags)
    fields = with_transformers(merged, usual, flags, keeps_model_sizes)
    is_of_transformers = fields is not merged
    is_other_model |= is_of_transformers and "init" in flags
    if is_other_model and "schedule" not in flags and not _is_path(name or ""):
        schedule = fields.get("schedule")
        if isinstance(schedule, dict):
            schedule.pop("warmup_min_steps", None)  # the shipped model needs it
    if fields.get("workload") == "grpo":
        fields.setdefault("grpo", {})
    fields |= _own_model(fields, flags)
    model = fields.get("model", "tinystories")
    changes = dict(model) if isinstance(model, dict) else {"preset": model}
    preset = {} if "kind" in changes else model_preset(changes.pop("preset", "tinystories"))
    sizes = {key: parse_count(fields.pop(key), key) for key in (*SIZES, "lora") if key in fields}
    fields["model"] = {**preset, **changes, **sizes}
    if options := fields.pop("model_option", None):
        refuse_secrets(str(options), "model_option")
        own = parse_options(options, "model_option")
        fields["model"]["options"] = {**fields["model"].get("options", {}), **own}
    schedule = fields.get("schedule", {})
    if fields.get("target") is not None and isinstance(schedule, dict) and "name" not in schedule:
        fields["schedule"] = {"average": 0.1, **schedule, "name": "constant"}
    if not is_of_transformers:
        fields["replaced_sizes"] = _replaced_sizes(left_out, flags, fields["model"])
    subject = f"experiment {name or fields.get('name')!r}"
    experiment = settings.parse_settings(Experiment, fields, subject)
    _refuse_without_effect(experiment, flags)
    optimizer = experiment.optimizer.model_copy(update={"name": experiment.optimizer_names[0]})
    several = experiment.optimizers if len(experiment.optimizers) > 1 else ()
    return experiment.model_copy(update={"optimizer": optimizer, "optimizers": several})


@dataclass(frozen=True)
class UnmetNeed:
    """A setting of a table, and what it needs to have an effect but does not have."""

    key: str  # such as tuning.budget
    needs: str  # such as lr tuned
    got: str
    decided_by: str = ""  # flag that decides whether the need is met; "": none does
    remedy: str = ""  # an alternative to leaving the setting out

    def is_changed(self, experiment: Experiment) -> bool:
        """Return True if the setting has another value than its default."""
        table, name = self.key.split(".")
        values = getattr(experiment, table)
        return bool(getattr(values, name) != type(values).model_fields[name].default)

    def __str__(self) -> str:
        return f"{self.key} needs {self.needs}, got {self.got}"


def unmet_needs(experiment: Experiment) -> list[UnmetNeed]:
    """Return the settings that other settings leave without effect, whatever their values."""
    needs = []
    if experiment.lr != "tuned":
        of_tuned = ("lr tuned", experiment.lr, "lr", "Add --lr tuned")
        needs += [UnmetNeed(f"tuning.{name}", *of_tuned) for name in TuningSettings.model_fields]
    elif len(experiment.tuning.dimensions) == 1:
        of_several = ("several dimensions", "lr", "tune", "Add --tune lr,beta2")
        needs.append(UnmetNeed("tuning.trials", *of_several))
    if experiment.seeds != "auto":
        of_auto = ("seeds auto", str(experiment.seeds or "the default"), "seeds")
        for name in ("max_seeds", "max_hours"):
            needs.append(UnmetNeed(f"answer.{name}", *of_auto, "Add --seeds auto"))
    if experiment.target is None:
        needs.append(UnmetNeed("evaluation.window", "a target", "none", "", "Add --target"))
    if experiment.command is not None:
        return needs + _unmet_needs_of_command(experiment)

    if experiment.schedule.name != "cosine":
        of_cosine = ("the schedule cosine", experiment.schedule.name, "target")
        needs.append(UnmetNeed("schedule.final_fraction", *of_cosine))
    names = experiment.optimizer_names
    used = {setting for name in names for setting in optimizer_facts(name)["settings"]}
    for name in ("beta1", "beta2", "eps"):
        if name in used:
            continue
        users = [user for user, facts in OPTIMIZERS.items() if name in facts["settings"]]
        of_users = (f"the optimizer {' or '.join(users)}", ", ".join(names), "optimizers")
        needs.append(UnmetNeed(f"optimizer.{name}", *of_users))
        if name in experiment.tuning.dimensions and experiment.lr == "tuned":
            needs.append(UnmetNeed("tuning.dimensions", *of_users))
    return needs


def _unmet_needs_of_command(experiment: Experiment) -> list[UnmetNeed]:
    """Return the settings that a command does not receive."""
    needs = []
    placeholders = {
        "optimizer.beta2": "beta2",
        "optimizer.weight_decay": "weight_decay",
        "schedule.warmup_fraction": "warmup_steps",
        "schedule.warmup_min_steps": "warmup_steps",
    }
    for key, name in placeholders.items():
        if not experiment.passes(name):
            needs.append(UnmetNeed(key, f"{{{name}}} in the command", "none", "", "Add it"))
    of_trainings = [f"optimizer.{name}" for name in ("beta1", "eps", "clip", "options")]
    of_trainings += [f"schedule.{name}" for name in ("name", "final_fraction", "average")]
    needs += [UnmetNeed(key, "a training of this package", "a command") for key in of_trainings]
    return needs


def settings_without_effect(experiment: Experiment) -> list[UnmetNeed]:
    """Return those that differ from their defaults: a file's that flags leave without effect."""
    return [need for need in unmet_needs(experiment) if need.is_changed(experiment)]


def _refuse_without_effect(experiment: Experiment, flags: Mapping[str, Any]) -> None:
    """Refuse a setting that another one leaves without effect.

    A file's setting that a flag leaves without effect is kept, and the plan says so: its user
    chose so for one command, and should not have to edit the file.
    """
    names = {".".join(setting.path): setting.name for setting in settings.settings_of(Experiment)}
    for need in unmet_needs(experiment):
        flag, table = names.get(need.key), need.key.partition(".")[0]
        is_flag = flag in flags
        if not (is_flag or need.is_changed(experiment)):
            continue
        is_of_file = not is_flag and table not in flags
        if is_of_file and need.decided_by in flags:
            continue
        subject = str(flag) if is_flag else need.key
        remedy = f"{need.remedy}, or leave it out" if need.remedy else "Leave it out"
        raise SweepError(f"{subject} needs {need.needs}, got {need.got}. {remedy}.")


def _replaced_sizes(
    left_out: Mapping[str, Any], flags: Mapping[str, Any], model: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """List the sizes of a file that are left out, because a flag names another model."""
    replaced = []
    for name, value in left_out.items():
        size, used = parse_count(value, name), model.get(name)
        if name not in flags and used not in (None, size):
            replaced.append({"owner": "experiment", "name": name, "size": size, "used": used})
    return replaced


def _own_model(fields: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an experiment whose workload or command has its own model."""
    workload, command = str(fields.get("workload", "")), fields.get("command")
    if command is not None:
        refuse_secrets(str(command))
        if others := sorted(fields.keys() - {*SETTINGS_OF_COMMANDS}):
            is_in_file = "command" in flags and others[0] not in flags
            subject = f"experiment {fields['name']!r}" if is_in_file else cut(others[0])
            problem = "does not apply to a command, which has its own model, data and training"
            raise SweepError(f"{subject} {problem}. Leave it out.")
        title, name = title_of_command(check_command(str(command))), f"command: {command}"
        workload = "command"
    elif "declared" in fields:
        raise SweepError("objective, direction and unit need a command. Leave them out.")
    elif (":" not in workload and workload != "quadratic") or "model" in fields:
        return {}
    else:
        title, name = workload.partition(":")[0].rpartition(".")[2], workload
    own = {"kind": "object", "name": name, "vocabulary": None, "context": 1}
    return {"name": title, "data": None, **fields, "workload": workload, "model": own}


def _is_path(name: str) -> bool:
    """Return True for the path of an experiment, and False for the name of a shipped one."""
    return name.endswith(".toml") or "/" in name


def _read_experiment(name: str) -> dict[str, Any]:
    path = Path(name) if _is_path(name) else EXPERIMENTS / f"{name}.toml"
    if not path.is_file():
        names = shipped_experiments()
        problem = f"experiment must be a TOML file or one of {', '.join(names)}, got {name!r}."
        raise SweepError(f"{problem} {did_you_mean(name, names) or 'Check the path.'}")
    try:
        if path.stat().st_size > MAX_EXPERIMENT_BYTES:
            raise ValueError(f"it has more than {MAX_EXPERIMENT_BYTES} bytes")
        fields = {"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))}
        fields["code_folder"] = str(path.parent)
        repr(fields)  # raises for integers that are too long to print
        return fields
    except (ValueError, RecursionError) as error:  # also of the encoding
        problem = f"must be TOML, but {reason_of(error)}"
        raise SweepError(f"experiment {path} {problem}. Correct it.") from error
