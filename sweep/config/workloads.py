"""Settings of workloads, the kinds of training, and what other code may ask of them."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from sweep.config.models import ModelSettings, Positive
from sweep.config.numbers import nearest_multiples, parse_count
from sweep.config.objective import LOSS, REWARD, Objective
from sweep.config.settings import Count, Flag, Group, RunFlag, Settings, one_of, parse_settings
from sweep.errors import SweepError, did_you_mean
from sweep.usercode.commands import placeholders_of, refuse_unreadable_command
from sweep.usercode.readers import refuse_unknown_reader

FINAL_PROMPTS = 256  # held-out prompts of the final evaluation
EXECUTION_OF_COMMANDS = {"device", "microbatch", "accumulation", "devices", "keep"}
LESS_MEMORY = (
    "Choose another --out and try --activation-checkpointing, --loss-chunk-rows 512 or --precision "
    "bf16 or, except for GRPO, --devices-per-trial 2 --zero 3. `sweep forecast --advise` has what "
    "each saves."
)
# Keys of a table without a kind, which tell it.
KIND_OF_KEY = {"command": "command", "train": "function"}
MetricName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]


def _count_if(value: Any) -> int | None:
    return None if value is None else parse_count(value, "examples_per_epoch")


def _function_name(value: str) -> str:
    if re.fullmatch(r"[\w.]+:\w+", value) is None:
        raise ValueError("must be MODULE:FUNCTION")
    return value


def _is_empty(value: Any) -> bool:
    return value is None or value == ()


@dataclass(frozen=True)
class Surroundings:
    """The other settings of an experiment that a workload depends on."""

    model: ModelSettings
    data: str | None
    batches: tuple[int, ...]
    target: float | None
    tuned: tuple[str, ...]  # dimensions of tuning


class WorkloadBase(Settings, use_attribute_docstrings=True):
    """Capabilities that every workload declares. Other code asks for these, never for the kind."""

    kind: str

    is_program: ClassVar[bool] = False
    """Whether a program of the user trains, which reads the values of a trial as words."""
    has_known_model: ClassVar[bool] = True
    """Whether its model can be built here, to count its parameters and to forecast its memory."""
    reads_text: ClassVar[bool] = False
    """Whether the experiment's language model is trained on the experiment's text."""
    has_fixed_kernels: ClassVar[bool] = False
    """Whether its loss launches the same kernels for all batches of a shape, and does no more."""
    context_is_bound: ClassVar[bool] = False
    """Whether its sequences only have to fit the model's context, which may be longer."""
    comparison_keys: ClassVar[frozenset[str]] = frozenset()
    """Fields that only tell how trials are compared, and are not part of a trial's id."""
    memory_remedy: ClassVar[str] = LESS_MEMORY
    """Remedy for a trial that runs out of memory at the smallest microbatch."""
    used_settings: ClassVar[frozenset[str] | None] = None
    """The keys of an experiment that apply to it; None: all."""

    @classmethod
    def settable_keys(cls) -> set[str]:
        """Return the keys that an experiment may set; the user's class declares the others."""
        return {*cls.model_fields}

    @property
    def name(self) -> str:
        """The kind, or the user's module:object."""
        return self.kind

    @property
    def code(self) -> tuple[str, ...]:
        """The user's code that it runs: objects named module:object, or a command."""
        return ()

    @property
    def samples(self) -> bool:
        """Whether each step first generates its batch with the model."""
        return False

    @property
    def can_measure_noise(self) -> bool:
        """Whether the gradient noise scale can be measured: on given batches, in this process."""
        return not (self.is_program or self.samples)

    @property
    def sequences_per_group(self) -> int:
        """Sequences that must stay together in a batch."""
        return 1

    @property
    def settings_of_grpo(self) -> "GrpoSettings | None":
        """The settings of GRPO, if it trains by that."""
        return None

    @property
    def splits_batches(self) -> bool:
        """Whether a step may consist of several microbatches."""
        return True

    @property
    def can_resume(self) -> bool:
        """Whether an attempt continues from the checkpoint of the one before."""
        return True

    def build_objective(self) -> Objective:
        """Return the metric that batch sizes are compared by if there is no target."""
        return LOSS

    @property
    def can_pause(self) -> bool:
        """Whether an attempt can end at a planned step and be continued later."""
        return True

    def receives(self, *names: str) -> bool:
        """Return True if trainings receive one of these values, such as weight_decay."""
        return True

    @property
    def unused(self) -> list[str]:
        """The values of the optimizer and the schedule that trainings do not receive."""
        names = ("beta2", "weight_decay", "warmup_steps", "optimizer")
        return [name for name in names if not self.receives(name)]

    def sequence_tokens(self, model: ModelSettings) -> int:
        """Return the training tokens that one sequence counts as."""
        return model.context

    def expected_initial_loss(self, model: ModelSettings) -> float | None:
        """Return the loss of an untrained model; None if it is not known."""
        return None

    def refuse_unsuited(self, context: Surroundings) -> None:
        """Raise ValueError if the experiment's other settings do not suit this workload."""
        model = context.model
        if self.reads_text != (model.vocabulary is not None):
            raise ValueError(f"workload {self.name!r} cannot train {model.name!r}. Change either")

    def refuse_execution(self, names: Iterable[str]) -> None:
        """Raise SweepError if one of these settings of the execution does not apply."""

    def with_declarations(self, values: Mapping[str, Any], context: Surroundings) -> Self:
        """Return the workload with what the first object of the user's code declares about it."""
        return self


class Pretrain(WorkloadBase):
    """Next-token prediction on a text."""

    kind: Literal["pretrain"] = "pretrain"

    reads_text: ClassVar[bool] = True
    has_fixed_kernels: ClassVar[bool] = True

    def build_objective(self) -> Objective:
        return Objective(unit="nats", label="nats per token")

    def expected_initial_loss(self, model: ModelSettings) -> float | None:
        return math.log(model.vocabulary) if model.vocabulary else None


class Quadratic(WorkloadBase):
    """The noisy quadratic model, whose optimum is known."""

    kind: Literal["quadratic"] = "quadratic"


class GrpoSettings(Settings, use_attribute_docstrings=True):
    """Sampling, reward and loss. `batch_size` counts completions: prompts times `group_size`."""

    # source of prompts and rewards: words, text, chess, or your module:object
    task: Annotated[str, one_of("words", "text", "chess")] = "words"
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

    @property
    def user_objects(self) -> tuple[str, ...]:
        names = (self.task,) if self.reward is None else (self.task, self.reward)
        return tuple(name for name in names if ":" in name)

    def refuse_batches(self, context: Surroundings) -> None:
        """Raise ValueError if batches are not whole groups, or sequences exceed the context."""
        for batch in context.batches:
            if batch % self.group_size:
                near = f"got {batch}. Use {nearest_multiples(batch, self.group_size)}"
                must = f"batches must be multiples of group_size ({self.group_size})"
                raise ValueError(f"{must}, {near}")
        most = context.model.context
        if self.tokens_per_sequence > most:
            raise ValueError(f"prompt_tokens + new_tokens must fit context {most}. Lower them")
        if self.task == "text" and self.reward is None:
            raise ValueError("the task 'text' needs your module:function. Set workload.reward")


class Grpo(GrpoSettings, WorkloadBase):
    """GRPO on a language model: a sequence is a prompt and its completion."""

    kind: Literal["grpo"] = "grpo"

    reads_text: ClassVar[bool] = True
    context_is_bound: ClassVar[bool] = True

    @property
    def code(self) -> tuple[str, ...]:
        return self.user_objects

    @property
    def samples(self) -> bool:
        return True

    @property
    def sequences_per_group(self) -> int:
        return self.group_size

    @property
    def settings_of_grpo(self) -> GrpoSettings:
        return self

    def build_objective(self) -> Objective:
        return REWARD

    def sequence_tokens(self, model: ModelSettings) -> int:
        return self.tokens_per_sequence

    def refuse_unsuited(self, context: Surroundings) -> None:
        super().refuse_unsuited(context)
        if context.target is not None:
            raise ValueError("target does not apply to grpo. Leave it out")
        self.refuse_batches(context)


class MetricWorkload(WorkloadBase, use_attribute_docstrings=True):
    """A workload of the user, which names the metric that batch sizes are compared by."""

    objective: Annotated[MetricName, RunFlag(Group.MODEL, metavar="NAME")] = "loss"
    """Metric valid/NAME of a command, by which batch sizes are compared."""
    direction: Annotated[Literal["minimize", "maximize"], RunFlag(Group.MODEL)] = "minimize"
    """Whether a lower or a higher value of a command's objective is better."""
    unit: Annotated[str, RunFlag(Group.MODEL)] = ""
    """Unit of a command's objective in reports."""
    tolerance: Annotated[float, Field(gt=0)] = LOSS.tolerance  # --tolerance takes precedence

    comparison_keys: ClassVar[frozenset[str]] = frozenset(
        {"objective", "direction", "unit", "tolerance"}
    )

    def build_objective(self) -> Objective:
        name = f"final_valid_{self.objective}"
        return Objective(name, self.direction, self.unit, self.tolerance, self.unit)

    @property
    def compares_loss(self) -> bool:
        return (self.objective, self.direction) == ("loss", "minimize")


class Program(MetricWorkload, use_attribute_docstrings=True):
    """A training of the user in a process of its own, which reads the values of a trial."""

    examples_per_epoch: Annotated[
        int | None,
        BeforeValidator(_count_if),
        Field(exclude_if=_is_empty),
        RunFlag(Group.MODEL, metavar="N"),
    ] = None
    """Examples of a pass over the data, for {epochs}."""
    # values of a trial that the user's file reads by itself, as its text tells
    read_by_script: tuple[str, ...] = Field(default=(), exclude_if=_is_empty)

    comparison_keys: ClassVar[frozenset[str]] = MetricWorkload.comparison_keys | {"read_by_script"}

    is_program: ClassVar[bool] = True
    has_known_model: ClassVar[bool] = False
    memory_remedy: ClassVar[str] = (
        "Let the program use {microbatch_size} or {accumulation}, or less memory."
    )
    # The optimizer and the schedule are for {beta2}, {weight_decay} and {warmup_steps}.
    used_settings: ClassVar[frozenset[str]] = frozenset(
        {
            "name",
            "question",
            "workload",
            "code_folder",
            "context",
            "budget",
            "batches",
            "lr",
            "seeds",
            "tuning",
            "answer",
            "optimizer",
            "schedule",
        }
    )

    @property
    def function(self) -> str | None:
        """The function that is called, as module:function; None: a command is started."""
        return None

    @property
    def reader(self) -> str | None:
        """Reader of the program's own output, as --read names it; None: a log has JSON lines."""
        return None

    @classmethod
    def settable_keys(cls) -> set[str]:
        return {*cls.model_fields} - {"read_by_script"}

    @property
    def splits_batches(self) -> bool:
        return self.receives("microbatch_size", "accumulation")

    @property
    def can_resume(self) -> bool:
        return self.receives("resume")

    def receives(self, *names: str) -> bool:
        return not {*self.read_by_script}.isdisjoint(names)

    @property
    def can_pause(self) -> bool:
        return False

    def refuse_unsuited(self, context: Surroundings) -> None:
        if context.target is not None and not self.compares_loss:
            raise ValueError("target needs the objective loss, less is better. Leave it out")
        for name in context.tuned:
            if name != "lr" and not self.receives(name):
                raise ValueError(f"tuning {name} needs {{{name}}} in the {self.kind}. Add it")
        self._check_epochs(context.batches)

    def _check_epochs(self, batches: Iterable[int]) -> None:
        """Raise ValueError if a program that counts epochs would take other steps than planned."""
        count = self.examples_per_epoch
        if count is not None:
            wrong = [size for size in batches if count % size]
            if wrong:
                raise ValueError(
                    f"batches must divide the {count} examples of an epoch, got {wrong[0]}. Change "
                    "it, or let the program train for {steps}"
                )

    def refuse_execution(self, names: Iterable[str]) -> None:
        others = sorted({*names} - EXECUTION_OF_COMMANDS)
        if others:
            raise SweepError(f"{others[0]} does not apply to a command. Leave it out.")
        if not self.splits_batches and not {"microbatch", "accumulation"}.isdisjoint(names):
            needed = "need {microbatch_size} or {accumulation} in the command"
            raise SweepError(f"microbatch and accumulation {needed}. Add one, or leave them out.")


class Command(Program):
    """A program of the user, started with the values of a trial in place of its placeholders."""

    kind: Literal["command"] = "command"
    command: Annotated[str, AfterValidator(refuse_unreadable_command), RunFlag(Group.MODEL)]
    """Your training script, with placeholders such as {batch_size}."""
    read: Annotated[
        str | None,
        AfterValidator(refuse_unknown_reader),
        Field(exclude_if=_is_empty),
        RunFlag(Group.MODEL, metavar="WHAT"),
    ] = None
    """Output of the script: trainer_state.json, metrics.csv, tensorboard:DIR or 'regex:…'."""

    @property
    def code(self) -> tuple[str, ...]:
        return (self.command,)

    @property
    def reader(self) -> str | None:
        return self.read

    def receives(self, *names: str) -> bool:
        received = placeholders_of(self.command) | {*self.read_by_script}
        return not received.isdisjoint(names)

    def refuse_unsuited(self, context: Surroundings) -> None:
        super().refuse_unsuited(context)
        if self.examples_per_epoch is None and "epochs" in placeholders_of(self.command):
            raise ValueError("{epochs} needs --examples-per-epoch. Add it")


class Function(Program):
    """A Python function of the user, called with a trial in a process of its own."""

    kind: Literal["function"] = "function"
    train: Annotated[
        str, AfterValidator(_function_name), RunFlag(Group.MODEL, metavar="MODULE:FUNCTION")
    ]
    """Your training function, which is called with the values of a trial."""

    @property
    def name(self) -> str:
        return self.train

    @property
    def code(self) -> tuple[str, ...]:
        return (self.train,)

    @property
    def function(self) -> str:
        return self.train


class UserWorkload(MetricWorkload):
    """A class of the user, derived from `sweep.Workload`; it declares most settings itself."""

    kind: Literal["user"] = "user"
    object: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]  # the class, as module:object
    grpo_settings: GrpoSettings | None = None  # None: the class is not derived from Grpo
    tokens_per_sequence: Positive | None = None  # as the class declares it; None: the context
    is_language: bool | None = None  # whether it reads the experiment's model and data

    @classmethod
    def settable_keys(cls) -> set[str]:
        return {"kind", "object", "grpo_settings"}

    @property
    def name(self) -> str:
        return self.object

    @property
    def code(self) -> tuple[str, ...]:
        of_grpo = self.grpo_settings.user_objects if self.grpo_settings else ()
        return (self.object, *of_grpo)

    @property
    def samples(self) -> bool:
        return self.grpo_settings is not None

    @property
    def sequences_per_group(self) -> int:
        return self.grpo_settings.group_size if self.grpo_settings else 1

    @property
    def settings_of_grpo(self) -> GrpoSettings | None:
        return self.grpo_settings

    def sequence_tokens(self, model: ModelSettings) -> int:
        if self.tokens_per_sequence is not None:
            return self.tokens_per_sequence
        return self.grpo_settings.tokens_per_sequence if self.grpo_settings else model.context

    def refuse_unsuited(self, context: Surroundings) -> None:
        if self.grpo_settings is None:
            return
        if context.target is not None:
            raise ValueError(f"target does not apply to {self.name}. Leave it out")
        self.grpo_settings.refuse_batches(context)

    def with_declarations(self, values: Mapping[str, Any], context: Surroundings) -> Self:
        """Return the workload with attributes of its class, which must suit the experiment."""
        declared = parse_settings(
            type(self), {**self.model_dump(), **values}, f"workload {self.name!r}"
        )
        reads_model = context.model.vocabulary is not None
        if declared.is_language and not (reads_model and context.data):
            needed = "a model and a text. Name them with --model and --data"
            raise SweepError(f"workload {self.name!r} reads {needed}, or an experiment.")
        if declared.is_language is False and (reads_model or context.data):
            problem = "builds its own model and batches, but the experiment names a model or a text"
            raise SweepError(f"workload {self.name!r} {problem}. Leave EXPERIMENT out.")
        if context.target is not None and not declared.compares_loss:
            raise SweepError("target needs the objective loss, less is better. Leave it out.")
        return declared


AnyWorkload = Pretrain | Grpo | Quadratic | Command | Function | UserWorkload
SETTINGS_OF_KIND: dict[str, type[WorkloadBase]] = {
    workload.model_fields["kind"].default: workload for workload in get_args(AnyWorkload)
}
KINDS = tuple(kind for kind in SETTINGS_OF_KIND if kind != "user")  # as people write them
# Attributes of the class of a user's workload.
DECLARATIONS = tuple(
    name for name in UserWorkload.model_fields if name not in UserWorkload.settable_keys()
)


def workload_table(workload: Any, default_kind: str = "pretrain") -> dict[str, Any]:
    """Return the table of a workload, which may be named by its kind or by module:object alone.

    A table without a kind is a command's if it has one, else of the default kind.

    Raises:
        SweepError: if it is neither text nor a table, or of an unknown kind.
    """
    table = {"kind": workload} if isinstance(workload, str) else workload
    kind = None
    if isinstance(table, Mapping):
        told = (kind for key, kind in KIND_OF_KEY.items() if key in table)
        kind = table.get("kind", next(told, default_kind))
    if isinstance(kind, str) and kind in SETTINGS_OF_KIND:
        return {**table, "kind": kind}
    if isinstance(kind, str) and ":" in kind:
        return {**table, "kind": "user", "object": kind}

    name = workload if kind is None else kind
    hint = did_you_mean(str(name), KINDS) or "Correct it."
    known = f"{', '.join(KINDS)} or your module:object"
    raise SweepError(f"workload must be {known}, got {name!r}. {hint}")


def _read_workload(value: Any) -> Any:
    return value if isinstance(value, WorkloadBase) else workload_table(value)


WorkloadSettings = Annotated[
    AnyWorkload, Field(discriminator="kind"), BeforeValidator(_read_workload)
]
