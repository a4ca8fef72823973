"""Times of steps, measured side by side: the keys of timing.json, its reader and its writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.errors import CorruptFile
from sweep.trial.files import find_json, write_json
from sweep.trial.folder import SweepFolder

LEAST_CPU_SHARE = 0.9  # below it, other programs have slowed the steps
REMEDY = "Restore it from a copy, or remove it and call `sweep time`."
TOO_SHORT = "a tenth of the training time is too short for one round"
# Keys of an execution on which the time of a step depends, apart from the device's number.
TIMED_BY = (
    *("devices", "zero", "threads", "at_once", "compile", "activation_checkpointing"),
    *("loss_chunk_rows", "device_memory_bytes", "generation_batch_size", "graph_bound"),
)

Seconds = Annotated[float, Field(gt=0)]


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True, allow_inf_nan=False, extra="forbid", use_attribute_docstrings=True
    )


class ArmTimes(_Record):
    """Times of one optimizer and batch size."""

    optimizer: str | None
    """Its name; null if the sweep has only one."""
    batch_size: Annotated[int, Field(ge=1)]
    """Sequences per optimizer step."""
    microbatch_size: Annotated[int, Field(ge=1)]
    """Sequences per forward-backward."""
    steps_per_round: Annotated[int, Field(ge=0)]
    """Steps that each round takes."""
    seconds_per_step: tuple[Seconds, ...]
    """Mean of each round, in order; without compilation and evaluation."""
    seconds_compile: Annotated[float, Field(ge=0)] | None
    """Compilation of its microbatch; null if steps are not compiled."""
    cpu_share: Annotated[float, Field(ge=0, le=1)] | None
    """Share of the time in which its threads wanted to run that they ran; null if not known."""
    is_loaded: bool | None
    """Whether that share is below 0.9: other programs slowed its steps; null if not known."""

    @property
    def arm(self) -> Arm:
        return Arm(self.optimizer, self.batch_size)

    @property
    def seconds_per_sequence(self) -> tuple[float, ...]:
        """Mean of each round; its ratios are those of trainings on equal tokens."""
        return tuple(seconds / self.batch_size for seconds in self.seconds_per_step)


class Timing(_Record):
    """timing.json: the times of the steps of a sweep on one device."""

    sweep_uid: str
    """The sweep that was timed, as in plan.json."""
    measured_at: str
    """When, in UTC."""
    device: str
    """Name of the device, as in result.json."""
    execution: dict[str, Any]
    """Device, threads, compilation and more, as in result.json."""
    precision: str
    """fp32, bf16 or bf16-pure."""
    model: str | None = None
    """Name of the model; null in older files."""
    parameters: int | None = None
    """Parameters of the model; null in older files."""
    tokens_per_sequence: int | None = None
    """Tokens of a sequence, 1 for examples without tokens; null in older files."""
    workload: str | None = None
    """Name of the workload, such as pretrain; null in older files."""
    optimizers: tuple[str, ...] | None = None
    """Names of the optimizers; null in older files."""
    torch_version: str
    """Version of torch."""
    has_real_batches: bool
    """Whether steps trained on the sweep's data; otherwise on random tokens."""
    rounds: Annotated[int, Field(ge=0)]
    """Rounds, in each of which every batch size takes its steps."""
    rounds_needed: Annotated[int, Field(ge=0)]
    """The least number of rounds that gives an interval of each ratio."""
    reason: str
    """Why there are no rounds; "" if there are some."""
    seconds_evaluation: Annotated[float, Field(ge=0)] | None
    """One evaluation at a milestone; null if it was not measured."""
    arms: tuple[ArmTimes, ...]
    """The times of each optimizer and batch size."""

    @model_validator(mode="after")
    def _has_all_rounds(self) -> Self:
        if any(len(times.seconds_per_step) != self.rounds for times in self.arms):
            raise ValueError("every round has a time of each arm")
        return self

    def times_of(self, arm: Arm) -> ArmTimes | None:
        """Return the times of an arm; None if it was not timed."""
        return next((times for times in self.arms if times.arm == arm), None)

    def seconds_of_trainings(self, steps: Mapping[Arm, float]) -> list[list[float]] | None:
        """Return for each arm the seconds of its steps by each round; None if one was not timed."""
        seconds = []
        for arm, count in steps.items():
            times = self.times_of(arm)
            if times is None or not times.seconds_per_step:
                return None
            seconds.append([count * step for step in times.seconds_per_step])
        return seconds

    def covers(self, microbatch_sizes: Mapping[Arm, int]) -> bool:
        """Return True if it is about all of these arms, with these microbatches."""
        timed = {times.arm: times.microbatch_size for times in self.arms}
        return microbatch_sizes.items() <= timed.items()

    def is_of(self, execution: Mapping[str, Any]) -> bool:
        """Return True if steps were timed as this execution, of a plan or of a result, runs them.

        The machine may be another one: `device` names it.
        """
        return timed_settings(self.execution) == timed_settings(execution)


def timed_settings(execution: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an execution on which the time of a step depends."""
    device_type = str(execution.get("device")).partition(":")[0]
    # An older version, which did not have a setting, took steps as its default does.
    defaults = {name: Execution.model_fields[name].default for name in TIMED_BY}
    settings = {name: execution.get(name, default) for name, default in defaults.items()}
    return {"device": device_type, **settings}


def read_timing_file(path: Path) -> Timing | None:
    """Read a timing.json; None without one.

    Raises:
        CorruptFile: it is damaged.
    """
    document = find_json(path)
    if document is None:
        return None
    del document["format_version"]
    try:
        return Timing.model_validate(document)
    except ValidationError as error:
        raise CorruptFile(f"{path} lacks what measured times have. {REMEDY}") from error


def read_timing(folder: SweepFolder, sweep_uid: str) -> Timing | None:
    """Read the timing.json of a sweep; None without one.

    Raises:
        CorruptFile: it is damaged, or of another sweep than the one with this uid.
    """
    timing = read_timing_file(folder.timing_path)
    if timing is not None and timing.sweep_uid != sweep_uid:
        raise CorruptFile(f"{folder.timing_path} belongs to another sweep. {REMEDY}")
    return timing


def write_timing(folder: SweepFolder, timing: Timing) -> None:
    write_json(folder.timing_path, timing.model_dump(mode="json"))
