"""The experiment: all settings that can change a result, and what must hold between them."""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from sweep.config.arms import Arm
from sweep.config.models import ModelSettings, Positive, ReplacedSize
from sweep.config.numbers import parse_batches, parse_budget, parse_count, seconds_of
from sweep.config.objective import TOKENS_TO_TARGET, Objective
from sweep.config.optimizers import OptimizerName, OptimizerSettings
from sweep.config.schedule import ScheduleSettings
from sweep.config.settings import Count, DataFlag, Flag, Group, RunFlag, Settings
from sweep.config.workloads import Pretrain, Surroundings, WorkloadSettings

LEAST_POINTS = 4  # evaluations that bound the slope of a curve; three are in its second half
TokenizerKind = Literal["bpe", "bytes", "pretrained"]
Precision = Literal["fp32", "bf16", "bf16-pure"]
Points = Annotated[int, Field(gt=0, le=100_000, strict=True)]
COMMAS = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)


class EvaluationSettings(Settings):
    """Times and sizes of the evaluations, the same at every batch size."""

    train_points: Points = 100  # log lines per trial, at most one per step
    points: Points = 20  # milestone evaluations per trial, at most one per step
    sequences: Positive | None = None  # per evaluation; by default derived from the budget
    # consecutive evaluations that are averaged before comparison with the target
    window: Annotated[int, Field(ge=1, le=1000, strict=True)] = 1


class NoiseSettings(Settings, use_attribute_docstrings=True):
    """Measurements of the gradient noise scale. Not part of a trial's id: losses do not change."""

    measure: Annotated[bool, RunFlag(Group.TUNING, "noise")] = False
    """Measure the gradient noise scale, for about 2 % of the time."""
    # most measurements per trial; fewer if the share does not suffice
    points: Annotated[int, Field(gt=0, le=1000, strict=True)] = 10
    # most of the budget's sequences that the measurements may take
    share: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.02


class OwnRate(Settings):
    """The rates that an experiment's file names, around which a search begins."""

    lr: str | None = None  # as the setting `lr`; None: those of the tuned policy
    optimizer: OptimizerName = "adamw"  # others begin as much higher as is usual for them


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
    """Centre of the first rates, by default the experiment's own lr or one for tinystories."""
    centred_by: Annotated[Literal["fit", "rule"], RunFlag(Group.TUNING, "centre")] = "fit"
    """fit: try rates near those predicted by the batch sizes before. rule: search each alone."""
    # the file's `lr` and optimizer, around which a search begins; {}: not at the file's rate
    own_rate: OwnRate = OwnRate()
    # centres of single optimizers, by name
    centres: dict[OptimizerName, Annotated[float, Field(gt=0, le=1e6)]] = Field(default={})
    prune: bool = True  # end the worse half at 1/4 and at 1/2 of the tokens

    @property
    def predicts_rates(self) -> bool:
        """Whether the best rates of some batch sizes predict those of others."""
        return self.centred_by == "fit" and self.dimensions == ("lr",)


class AnswerSettings(Settings, use_attribute_docstrings=True):
    """The side, the tolerance and the prices of the answer, and the limits of `--seeds auto`.

    Not part of a trial's id.
    """

    pursues: Annotated[Literal["auto", "tokens", "time", "steps"], RunFlag(name="for")] = "auto"
    """Recommend by tokens, time or steps; by default time with a target or a budget of time."""

    question: Annotated[Literal["which", "order"], RunFlag(name="answer")] = "which"
    """Question that ends --seeds auto. which: one batch size to use. order: a verdict on each."""
    tolerance: Annotated[float | None, Field(gt=0), RunFlag(Group.TUNING)] = None
    """Good enough: so far from the best loss, 0.01; with a target a share of the tokens, 0.05."""
    price: Annotated[float | None, Field(gt=0, le=1e9), RunFlag(Group.DEVICES)] = None
    """Price of a device for an hour, in any currency: what each batch size's training costs."""
    max_seeds: Annotated[Count, Field(ge=3, le=20), RunFlag(Group.TUNING)] = 20
    """Most seeds per batch size with --seeds auto, at most 20."""
    max_hours: Annotated[float | None, Field(gt=0), RunFlag(Group.TUNING)] = None
    """Start no further seeds after this many hours of a command, with --seeds auto."""
    # higher losses whose steps are read from the trials that reach the target
    other_targets: tuple[Annotated[float, Field(gt=0, strict=True)], ...] = ()


class TrainingSettings(Settings, use_attribute_docstrings=True):
    """Settings of the training that an experiment shares with each of its trials."""

    model: Annotated[ModelSettings, Flag()]
    """tinystories, small, quick, gpt2, hf:OWNER/NAME, a folder, or your module:object."""
    workload: Annotated[WorkloadSettings, Flag(Group.MODEL)] = Pretrain()
    """pretrain, grpo, quadratic, or your module:object."""
    target: Annotated[float | None, Field(gt=0), RunFlag(Group.TUNING)] = None
    """Train to this validation loss, at a constant rate; the budget is a cap."""
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @property
    def tokens_per_sequence(self) -> int:
        """Training tokens that one sequence counts as; 1 for examples without tokens."""
        return self.workload.sequence_tokens(self.model)

    @property
    def counts_examples(self) -> bool:
        """Whether a sequence is an example without tokens."""
        return self.tokens_per_sequence == 1

    @property
    def token_unit(self) -> str:
        """The name of the data that are counted: tokens or examples."""
        return "examples" if self.counts_examples else "tokens"

    @property
    def sequence_unit(self) -> str:
        return "examples" if self.counts_examples else "sequences"

    @property
    def optimizer_names(self) -> tuple[str, ...]:
        return (self.optimizer.name,)

    @property
    def user_code(self) -> list[str]:
        """The command, or the user's workload, optimizer and so on, each as module:object."""
        if self.workload.is_program:
            return [*self.workload.code]
        names = [*self.workload.code, *self.model.code]
        for name in (*self.optimizer_names, self.schedule.name):
            if ":" in name:
                names.append(name)
        return list(dict.fromkeys(names))


def _read_seeds(value: Any) -> Any:
    if value is None or value == "auto":
        return value
    count = parse_count(value, "seeds")
    if count > 1000:
        raise ValueError("must be at most 1000, or auto")
    return count


class Experiment(TrainingSettings):
    """One question: which batch size, for this model, data, budget and policy."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # by default the file's
    question: str = ""  # shown to people
    budget: Annotated[int | str | tuple[int, ...], BeforeValidator(parse_budget), RunFlag()]
    """Training tokens of every trial: 327M; several: 1M,4M,16M; or the time of its steps: 10min."""
    batches: Annotated[tuple[int, ...], BeforeValidator(parse_batches), Flag()]
    """Batch sizes: 1,8,32 or 1..512 (powers of two) sequences; 64ktok tokens; auto: by budget."""
    # batch sizes of further budgets are chosen around the best of the smaller ones
    chooses_batches: Annotated[bool, Field(exclude=True)] = False
    data: Annotated[str | None, Flag()] = "tinystories"
    """tinystories, synthetic, hf:OWNER/NAME, or the path of a file or folder."""
    text_column: Annotated[str, DataFlag(Group.MODEL, metavar="NAME")] = "text"
    """Column of a table or of a data set of the hub that holds the texts."""
    lr: Annotated[str, BeforeValidator(str), RunFlag()] = "3e-4"
    """A learning rate, or a policy: tuned, sqrt[:RATE@BATCH], linear:RATE@BATCH, …"""
    seeds: Annotated[int | str | None, BeforeValidator(_read_seeds), RunFlag(metavar="N|auto")] = (
        None
    )
    """Seeds per batch size, by default 1 at a fixed rate, else 3. auto: until it is answered."""
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
    noise_scale: NoiseSettings = NoiseSettings()

    @property
    def token_budget(self) -> int | None:
        """Training tokens of every trial; None with a budget of time, or several budgets."""
        return self.budget if isinstance(self.budget, int) else None

    @property
    def by_budget(self) -> "tuple[Experiment, ...]":
        """An experiment for each budget, ascending; `self` with a single one."""
        if not isinstance(self.budget, tuple):
            return (self,)
        return tuple(self.model_copy(update={"budget": tokens}) for tokens in self.budget)

    @property
    def time_budget_seconds(self) -> float | None:
        """Seconds of the training steps of every trial; None with a budget of tokens."""
        return seconds_of(self.budget)

    @property
    def expected_initial_loss(self) -> float | None:
        """The loss of the untrained model; None if it is not known, or trained already."""
        return None if self.init else self.workload.expected_initial_loss(self.model)

    @property
    def evaluated(self) -> Objective:
        """The result of a trial's evaluations that its workload names."""
        return self.workload.build_objective()

    @property
    def objective(self) -> Objective:
        """The value that batch sizes are compared by: a result, or the tokens to the target."""
        objective = self.evaluated if self.target is None else TOKENS_TO_TARGET
        if self.answer.tolerance is None:
            return objective
        return replace(objective, tolerance=self.answer.tolerance)

    @property
    def surroundings(self) -> Surroundings:
        """The settings outside its table on which the workload depends."""
        return Surroundings(
            model=self.model,
            data=self.data,
            batches=self.batches,
            target=self.target,
            tuned=self.tuning.dimensions,
        )

    @property
    def optimizer_names(self) -> tuple[str, ...]:
        return self.optimizers if self.optimizers else (self.optimizer.name,)

    @property
    def arms(self) -> tuple[Arm, ...]:
        names = self.optimizers if self.optimizers else (None,)
        arms = []
        for name in names:
            arms += [Arm(name, batch_size) for batch_size in self.batches]
        return tuple(arms)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_model()
        self._check_tuning()
        self._check_target()
        self._check_time_budget()
        self.workload.refuse_unsuited(self.surroundings)
        return self

    def _check_model(self) -> None:
        model = self.model
        if not model.supports_half_precision and self.precision not in ("auto", "fp32"):
            raise ValueError(f"the model {model.name} needs the precision fp32. Leave it out")

        if (self.tokenizer == "pretrained") != (model.tokenizer_hash is not None):
            needed = "a model with eos_token_id and tokenizer.json, as --init or --model"
            raise ValueError(f"tokenizer 'pretrained' needs {needed}. Name one")

        if model.vocabulary is None and (self.init, self.data) != (None, None):
            raise ValueError("init and data apply only to language models. Leave them out")

    def _check_tuning(self) -> None:
        tuning = self.tuning
        is_repeated = len({*tuning.dimensions}) < len(tuning.dimensions)
        if "lr" not in tuning.dimensions or is_repeated:
            raise ValueError("tuning.dimensions must contain lr, each at most once. Write lr,beta2")
        if len({*self.optimizers, "none"}) <= len(self.optimizers):
            raise ValueError("optimizers must differ, and none is not one of them. Correct them")
        if tuning.budget is not None and isinstance(self.budget, tuple):
            raise ValueError("tuning.budget must be left out with several budgets")
        budget = self.token_budget
        if tuning.budget is not None and budget is not None and tuning.budget > budget:
            raise ValueError("tuning.budget must be at most the budget. Lower it")

    def _check_target(self) -> None:
        others = self.answer.other_targets
        if self.target is None:
            if others:
                raise ValueError("answer.other_targets need a target. Add one, or leave them out")
            return
        if isinstance(self.budget, tuple):
            raise ValueError("budget must be one number with a target, whose cap it is. Write 4M")
        if self.schedule.name != "constant":
            raise ValueError("schedule.name must be constant with a target. Leave it out")
        if any(other <= self.target for other in others):
            raise ValueError("answer.other_targets must be above the target. Raise them")
        if self.tuning.budget is not None:
            raise ValueError("tuning.budget does not apply with a target. Leave it out")

    def _check_time_budget(self) -> None:
        """Refuse what needs a number of tokens that is the same at every batch size."""
        if self.time_budget_seconds is None:
            return
        if self.target is not None:
            raise ValueError("budget must be tokens with a target, whose cap it is. Write 4M")
        if self.tuning.budget is not None:
            raise ValueError("tuning.budget does not apply with a budget of time. Leave it out")
        if self.evaluation.points < LEAST_POINTS:
            problem = f"evaluation.points must be at least {LEAST_POINTS} with a budget of time"
            raise ValueError(f"{problem}, which needs the slopes of curves. Raise it")
        if self.workload.is_program:
            problem = "budget must be tokens with a command, whose steps are not timed in advance"
            raise ValueError(f"{problem}. Write 64k")
