"""The result of a trial: the keys of result.json and the columns of trials.csv, declared once."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from sweep.config.execution import was_alone
from sweep.config.metrics import FINAL_VALID, final_column
from sweep.trial.status import Cause, State


@dataclass(frozen=True)
class Column:
    """How trials.csv, the report and docs/results.md show a field."""

    unit: str = ""
    is_mean: bool = False  # the report shows the mean over the complete trials of an arm
    is_in_file: bool = True  # False: the whole sweep has one value, which result.json lacks
    is_in_table: bool = True  # False: only result.json has the field
    kind: str = "object"  # dtype, from the field's type; integers with gaps become floats
    meaning: str = ""  # from the field's docstring


def _without_infinities(value: Any) -> Any:
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    return None if is_infinite else value


# A number that may be missing; one that is not finite, which JSON lacks, counts as missing.
Measured = Annotated[float | None, BeforeValidator(_without_infinities)]
Digest = Annotated[str | None, Column(is_in_table=False)]


class Result(BaseModel):
    """The result of a trial that completed or diverged.

    Fields have no defaults, so that no writer forgets one. A field that is added later needs a
    default, because earlier results lack it.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    id: str
    """First 12 hex digits of the sha256 over all settings that can change a result."""
    stage: Literal["final", "tune"]
    """`final`: compared; `tune`: used only to choose a learning rate."""
    policy: str
    """Learning-rate policy, such as `fixed`, `sqrt:RATE@BATCH` or `tuned`."""
    batch_size: Annotated[int, Field(ge=1), Column("sequences")]
    """Sequences per optimizer step, over all devices."""
    seed: int
    """Seed of the initial weights and the order of the data; tuning seeds start at 1000."""
    learning_rate: float
    """Peak learning rate of the schedule."""
    beta2: float | None
    """AdamW's β2, as set by the policy."""
    weight_decay: float | None
    """Weight decay, as set by the policy."""
    tokens: Annotated[int, Column("tokens")]
    """Tokens trained on, fewer than planned if the trial diverged, reached its target, was pruned
    or did not end. Without result.json those of the last line of metrics.jsonl; empty without a
    line."""
    budget: Annotated[int | None, Column("tokens", is_in_file=False)] = None
    """Token budget of the trial; a sweep may have several. Empty with a budget of time."""
    planned_tokens: Annotated[int | None, Column("tokens", is_in_file=False)] = None
    """Tokens of the plan; with `--target` the most."""
    epochs: Measured
    """Passes over the training data; empty if data never repeat."""
    tokens_per_sequence: Annotated[int | None, Column("tokens", is_in_file=False)] = None
    """Context length; for GRPO prompt and longest completion; 1 for examples without tokens."""
    steps: Annotated[int, Field(ge=1), Column("optimizer steps")]
    """With GRPO's `num_iterations` = k each step samples once and updates k times; `steps ×
    batch_size × tokens_per_sequence = tokens`."""
    warmup_steps: Annotated[int | None, Column("optimizer steps")]
    """Steps of rising learning rate."""
    devices: int
    """Devices of one trial."""
    microbatch_size: Annotated[int, Column("sequences")]
    """Sequences per device and forward-backward."""
    gradient_accumulation_steps: int
    """`batch_size = microbatch_size × gradient_accumulation_steps × devices`."""
    state: Annotated[State, Field(strict=False)]
    """WAITING, RUNNING, COMPLETE, PRUNED, FAILED."""
    cause: Annotated[Cause | None, Field(strict=False)]
    """For FAILED: `out_of_memory`, `diverged`, `preempted`, `lost`, `error`."""
    message: str | None
    """Why a trial failed, and the remedy."""
    attempts: int
    """Executions of the trial, resumes and retries included."""
    parameters: int | None
    """Parameters of the model, with those that are not trained."""
    optimizer: str | None
    """adamw, sgd, muon, adafactor, or your module:object."""
    target: Annotated[Measured, Column("loss", is_in_file=False)] = None
    """With `--target`: the validation loss that ends a trial."""
    time_budget_seconds: Annotated[Measured, Column("s", is_in_file=False)] = None
    """With a budget of time: the seconds for which the tokens of each batch size were fixed."""
    valid_slope: Annotated[Measured, Column("loss", is_in_file=False)] = None
    """If batch sizes trained on different tokens: the most that the evaluated value improved per
    unit of ln tokens between two milestones of the second half."""
    expected_initial_loss: Annotated[Measured, Column("nats", is_in_file=False)] = None
    """ln V, the loss of an untrained language model over V tokens; empty for other workloads."""
    initial_train_loss: Annotated[Measured, Column("loss")]
    """Loss of the first batch, before the first step."""
    initial_valid_loss: Annotated[Measured, Column("loss")]
    """Loss before the first step, on the milestone set."""
    initial_valid_reward: Annotated[Measured, Column("reward")] = None
    """With GRPO: mean reward of the milestone prompts before the first step."""
    final_train_loss: Annotated[Measured, Column("loss", is_mean=True)]
    """Loss after the last step, on a fixed set of training windows that every batch size has
    trained on."""
    final_train_reward: Annotated[Measured, Column("reward", is_mean=True)] = None
    """With GRPO: mean reward after the last step, on a fixed set of training prompts."""
    final_valid_loss: Annotated[Measured, Column("loss", is_mean=True)]
    """Loss after the last step, on the whole validation split: batch sizes are compared by it, if
    no other objective is declared."""
    final_valid: Annotated[dict[str, Measured], Field(exclude=True)]
    """Other metrics of the same evaluation, by the names that the workload or the command chose.
    Each has a key of its own in result.json, and a column: `final_valid_NAME`."""
    best_valid_loss: Annotated[Measured, Column("loss", is_mean=True)]
    """Least loss of the milestone evaluations, on the milestone set; biased downwards, never
    compared with `final_valid_loss`."""
    loss_unit: Annotated[str | None, Column(is_in_file=False)] = None
    """Unit of differences between losses."""
    has_looks: Annotated[bool | None, Column(is_in_file=False)] = None
    """Whether seeds were added after results were seen: `--seeds auto`, or a larger `--seeds`."""
    tokens_to_target: Annotated[Measured, Column("tokens")]
    """With `--target`: the confirmed crossing, interpolated; null if the target was not reached."""
    bits_per_byte: Annotated[Measured, Column("bits per byte", is_mean=True)]
    """`final_valid_loss` per byte of validation text; empty without text."""
    bytes_per_token: Annotated[Measured, Column("bytes")]
    """Mean bytes of a token of the validation text."""
    clipped_step_fraction: Annotated[Measured, Column(is_mean=True)]
    """Fraction of steps whose gradient norm exceeded the clip; for GRPO's steps of several updates
    the last one counts."""
    seconds_total: Annotated[float, Column("s", is_mean=True)]
    """Time over all attempts: the parts below, start-up and data; repeated work after a kill is
    counted once. Without result.json that of the last line of metrics.jsonl, without its parts;
    empty if an earlier version wrote the line."""
    seconds_compile: Annotated[Measured, Column("s", is_mean=True)]
    """Compilation."""
    seconds_training: Annotated[float, Column("s", is_mean=True)]
    """Forward, backward and optimizer, without compilation; for a command the whole time of its
    process."""
    seconds_evaluation: Annotated[Measured, Column("s", is_mean=True)]
    """Evaluations at milestones and at the end."""
    seconds_checkpoint: Annotated[Measured, Column("s", is_mean=True)]
    """Writing checkpoints."""
    seconds_noise: Annotated[Measured, Column("s", is_mean=True)]
    """Probing the gradient noise; 0 without `--noise`."""
    tokens_per_second: Annotated[Measured, Column("tokens/s", is_mean=True)]
    """`tokens / seconds_training`."""
    mfu: Annotated[Measured, Column(is_mean=True)]
    """Model FLOPs per second over the device's peak; only on CUDA in bf16, for devices and models
    whose FLOPs are known."""
    peak_memory_bytes: Annotated[int | None, Column("bytes")]
    """Largest over all attempts, in training steps: allocated memory on CUDA; resident memory of
    the process on a CPU, with torch, and with compiled code and caches of earlier trials."""
    device: str
    """Name of the device."""
    torch_version: str | None
    """Version of torch."""
    git_commit: str | None
    """Commit of sweep's code, `-dirty` with local changes; empty outside a checkout."""
    data_sha256: str | None
    """Hash of the data's identity."""
    execution: Annotated[dict[str, Any], Column("JSON")]
    """Device, threads, compilation, instruction sets of the CPU and more; rounding and time can
    depend on it."""

    metrics_sha256: Annotated[str, Column(is_in_table=False)]
    """Hash of metrics.jsonl."""
    valid_losses_sha256: Digest
    """Hash of valid_losses.npy."""
    weights_sha256: Digest
    """Hash of weights.safetensors; null if they were not kept."""

    @model_validator(mode="before")
    @classmethod
    def _gather_metrics(cls, fields: dict[str, Any]) -> dict[str, Any]:
        metrics = {
            name.removeprefix(FINAL_VALID): value
            for name, value in fields.items()
            if is_metric(name)
        }
        return {"final_valid": metrics, **fields}

    @model_validator(mode="after")
    def _is_evaluated(self) -> Self:
        values = [self.final_valid_loss, *self.final_valid.values()]
        is_evaluated = any(value is not None for value in values)
        if self.state is State.COMPLETE and not is_evaluated:
            raise ValueError("a complete trial has been evaluated")
        return self

    @property
    def was_alone(self) -> bool:
        """Whether the trial did not share its device, so that its times are its own."""
        return was_alone(self.execution)

    def as_document(self) -> dict[str, Any]:
        """Return the content of result.json."""
        of_sweep = {name for name, column in FIELDS.items() if not column.is_in_file}
        return self.model_dump(mode="json", exclude=of_sweep) | self._metric_columns()

    def as_row(self) -> dict[str, Any]:
        """Return the values by the columns of trials.csv."""
        return self.model_dump(mode="json", include={*COLUMNS}) | self._metric_columns()

    def _metric_columns(self) -> dict[str, float | None]:
        return {final_column(name): value for name, value in self.final_valid.items()}


def is_metric(name: str) -> bool:
    """Return True for the key or the column of a metric that a workload or a command named."""
    return name.startswith(FINAL_VALID) and name not in Result.model_fields


def _describe(field: FieldInfo) -> Column:
    """Complete the column of a field by its type and its docstring."""
    declared = [item for item in field.metadata if isinstance(item, Column)]
    column = declared[0] if declared else Column()
    types = (field.annotation, *get_args(field.annotation))
    kind = "object"
    if int in types:
        kind = "int64"
    elif float in types:
        kind = "float64"
    meaning = " ".join(str(field.description).split()).rstrip(".")
    return replace(column, kind=kind, meaning=meaning)


FIELDS = {
    name: _describe(field) for name, field in Result.model_fields.items() if not field.exclude
}
COLUMNS = {name: column for name, column in FIELDS.items() if column.is_in_table}  # in order
