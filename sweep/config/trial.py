"""Settings of one trial: its identity (Science), and how it runs (Execution, Services)."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from sweep.config.experiment import (
    Experiment,
    NoiseSettings,
    Precision,
    TokenizerKind,
    TrainingSettings,
)
from sweep.config.settings import Count, CountOrZero, Flag, Group, RunFlag, Settings
from sweep.version import FORMAT_VERSION

STALL_MINUTES = 30.0
STORING = ("run", "plan", "report", "ui")  # commands that may use the store of a sweep
FORECASTING = ("run", "plan", "forecast")  # not probe, which measures one device


class TokenizerSettings(Settings):
    kind: TokenizerKind
    vocabulary: Count
    end: int = 0  # a pretrained tokenizer's end-of-text id
    sha256: str | None = None  # hash of its tokenizer.json


def tokenizer_of(experiment: Experiment) -> TokenizerSettings | None:
    """Return the tokenizer of an experiment; None if it has neither text nor a pretrained one."""
    model, kind = experiment.model, experiment.tokenizer
    if experiment.data is None and kind != "pretrained":
        return None
    end, sha256 = getattr(model, "end", 0), getattr(model, "tokenizer_sha256", None)
    assert model.vocabulary is not None
    return TokenizerSettings(kind=kind, vocabulary=model.vocabulary, end=end, sha256=sha256)


class Science(TrainingSettings):
    """Everything that can change a number. The trial id is the hash of this."""

    format_version: int = FORMAT_VERSION
    stage: Literal["final", "tune"] = "final"
    policy: str  # fixed, sqrt:rate@batch, linear:rate@batch, tuned
    data: dict[str, Any] | None  # identity: name, and hashes or version, seed and size
    tokenizer: TokenizerSettings | None
    precision: Precision
    tokens: int  # steps · batch_size · tokens_per_sequence; with a target, the cap
    batch_size: int  # sequences per optimizer step
    learning_rate: float  # peak
    seed: int
    start: dict[str, Any] | None = None  # identity of the initial weights; None: from the seed
    code: dict[str, Any] | None = None  # identity of user code; None: none is used


class Execution(Settings, use_attribute_docstrings=True):
    """How trials run. Decided when plan.json is first written, and then kept."""

    device: Annotated[str, Flag()] = "auto"
    """auto, cpu, cuda, cuda:i or mps."""
    microbatch: Annotated[Count | None, Flag(Group.MEMORY)] = None
    """Sequences per forward-backward; by default as many as fit."""
    accumulation: Annotated[Count | None, Flag(Group.MEMORY, metavar="N")] = None
    """Gradient accumulation steps; sets the microbatch."""
    device_memory_bytes: Annotated[Count | None, Flag(Group.MEMORY, "device-memory", "SIZE")] = None
    """Memory limit: 16GiB. On a CPU steps run eagerly."""
    activation_checkpointing: Annotated[bool, Flag(Group.MEMORY)] = False
    """Recompute activations: less memory, more time."""
    loss_chunk_rows: Annotated[CountOrZero | None, Flag(Group.MEMORY, metavar="N")] = None
    """Tokens whose logits exist at a time; 0: all. By default 1024, on CUDA 8192."""
    devices: Annotated[Count, Flag(Group.DEVICES, "devices-per-trial", "N", FORECASTING)] = 1
    """Devices per trial, one process each."""
    zero: Annotated[Literal[0, 1, 2, 3], Flag(Group.DEVICES, commands=FORECASTING)] = 0
    """Shard over a trial's devices: 1 optimizer, 2 + gradients, 3 + weights."""
    generation_batch_size: Annotated[Count | None, Flag(Group.GRPO, metavar="N")] = None
    """Completions sampled at once; by default four microbatches."""
    keep: Annotated[Literal["none", "weights", "checkpoints"], RunFlag(Group.OUTPUT)] = "weights"
    """Files that a finished trial keeps."""

    threads: int = 1  # CPU threads per process
    compile: bool = False  # torch.compile
    compile_reason: str = ""
    microbatch_bound: int | None = None  # largest that fits by forecast, as one of several
    microbatch_bound_alone: int | None = None  # the same, as the only one of a step
    evaluation_batch_size: int = 32  # sequences
    checkpoint_seconds: float = 60.0  # longest time between two checkpoints
    reason: str = ""  # why no forecast bounds the microbatch, or why steps may not fit

    @property
    def misfit(self) -> str:
        """Why steps do not fit by forecast, which then bounds the microbatch; "" if they do."""
        return "" if self.microbatch_bound is None else self.reason

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]


class Services(Settings, use_attribute_docstrings=True):
    """The executor and the stores of a command; they may differ from command to command.

    The table of a command is derived from this one by `services_table` in
    sweep/orchestration/executors/build.py, which adds the settings of the executors.
    """

    tracking_uri: Annotated[str | None, Flag(Group.OUTPUT, commands=STORING)] = None
    """MLflow store: http://HOST:5000; by default a file in the folder."""
    storage: Annotated[str | None, RunFlag(Group.OUTPUT)] = None
    """Optuna storage: postgresql://…; by default a file in the folder."""
    stall_minutes: Annotated[float, Field(gt=0, le=1e5), RunFlag(Group.DEVICES)] = STALL_MINUTES
    """Minutes without a step after which an attempt ends; at least 10 times its longest step."""
    no_user_code: Annotated[bool, Flag(Group.MODEL)] = False
    """Refuse experiments that name code, as module:object."""
    executor: Annotated[str, RunFlag(Group.DEVICES)] = "local"
    """The machines that run trials."""


class TrialConfig(Settings):
    """config.json: everything a worker needs to run one trial.

    Once written, only `noise_scale` may change, before another attempt.
    """

    id: str
    sweep: str  # name of the sweep
    science: Science
    execution: Execution
    noise_scale: NoiseSettings = NoiseSettings()
    tokens_per_sequence: int
    flops_per_token: float | None = None
    steps: int
    warmup_steps: int
    token_budget: int | None = None  # before rounding to whole steps; None: unknown
    objective_curve: str = "valid/loss"  # metric of the objective, which a command must report
    microbatch_size: int  # as planned; state.json records a smaller one after out-of-memory
    data_path: str | None = None  # if data is a path; relative to the sweep folder
    init_path: str | None = None  # folder of the initial weights; relative to the sweep folder
    code_path: str | None = None  # folder of modules of user code; relative to the sweep folder

    @property
    def group_size(self) -> int:
        return self.science.workload.sequences_per_group

    @property
    def sequences_per_device(self) -> int:
        """Sequences of a step on each device."""
        return self.science.batch_size // self.execution.devices

    def completions_at_once(self, microbatch_size: int) -> int:
        # Four microbatches, because sampling keeps no activations (docs/grpo.md).
        return self.execution.generation_batch_size or 4 * microbatch_size

    def with_microbatch(self, microbatch_size: int, **execution: Any) -> "TrialConfig":
        changed = self.execution.model_copy(update=execution)
        return self.model_copy(update={"execution": changed, "microbatch_size": microbatch_size})

    def for_attempt(self, microbatch_size: int) -> "TrialConfig":
        """Return the config of an attempt after memory ran out: other batches shrink too."""
        evaluated = min(microbatch_size, self.execution.evaluation_batch_size)
        config = self.with_microbatch(microbatch_size, evaluation_batch_size=evaluated)
        if at_once := self.execution.generation_batch_size:
            at_once = max(1, at_once * microbatch_size // self.microbatch_size)
            config = config.with_microbatch(microbatch_size, generation_batch_size=at_once)
        return config

    def on_one_device(self, batch_size: int, microbatch_size: int) -> "TrialConfig":
        """Return the config of a step with these sizes on one device, to forecast or measure it."""
        at_once = min(microbatch_size, self.execution.evaluation_batch_size)
        execution = {"evaluation_batch_size": at_once, "devices": 1, "zero": 0}
        config = self.with_microbatch(microbatch_size, **execution)
        science = self.science.model_copy(update={"batch_size": batch_size})
        return config.model_copy(update={"science": science})

    def parts_to_peak(self, microbatch_size: int) -> int:
        """Return how many microbatches of a step reach the peak memory of any larger number."""
        if self.science.workload.samples:
            return max(2, math.ceil(self.completions_at_once(microbatch_size) / microbatch_size))
        return 2  # the first one's gradients exist while the second one runs
