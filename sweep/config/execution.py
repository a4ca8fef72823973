"""Settings of the execution, which change results by rounding at most, and of the services."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from sweep.config.gpus import find_gpu
from sweep.config.numbers import parse_count
from sweep.config.settings import Bytes, Count, CountOrZero, Flag, Group, RunFlag, Settings

STALL_MINUTES = 30.0
STORING = ("run", "plan", "report", "ui")  # commands that may use the store of a sweep
FORECASTING = ("run", "plan", "forecast")  # not probe, which measures one device
GpuFlag = Flag(Group.MEMORY, metavar="NAME", commands=("plan", "forecast", "probe"))
MEASURING = (*Flag.commands, "time")


def _read_at_once(value: Any) -> Any:
    return value if value == "auto" else parse_count(value, "at_once")


def _read_gpu(value: str | None) -> str | None:
    return None if value is None else find_gpu(value).name


class Execution(Settings, use_attribute_docstrings=True):
    """How trials run. Decided when plan.json is first written, and then kept."""

    device: Annotated[str, Flag(commands=MEASURING)] = "auto"
    """auto, cpu, cuda, cuda:i or mps."""
    microbatch: Annotated[Count | None, Flag(Group.MEMORY)] = None
    """Sequences per forward-backward; by default as many as fit."""
    accumulation: Annotated[Count | None, Flag(Group.MEMORY, metavar="N")] = None
    """Gradient accumulation steps; sets the microbatch."""
    device_memory_bytes: Annotated[Bytes | None, Flag(Group.MEMORY, "device-memory", "SIZE")] = None
    """Memory limit: 24GB, 47.4GiB. On a CPU steps run eagerly."""
    gpu: Annotated[str | None, AfterValidator(_read_gpu), GpuFlag] = None
    """Plan for a GPU that is not here: h100, a100-80, 4090, l4, …; for probe its memory."""
    activation_checkpointing: Annotated[bool, Flag(Group.MEMORY)] = False
    """Recompute activations: less memory, more time."""
    loss_chunk_rows: Annotated[CountOrZero | None, Flag(Group.MEMORY, metavar="N")] = None
    """Tokens whose logits exist at a time; 0: all. By default 1024, on CUDA 8192."""
    devices: Annotated[Count, Flag(Group.DEVICES, "devices-per-trial", "N", FORECASTING)] = 1
    """Devices per trial, one process each."""
    zero: Annotated[Literal[0, 1, 2, 3], Flag(Group.DEVICES, commands=FORECASTING)] = 0
    """Shard over a trial's devices: 1 optimizer, 2 + gradients, 3 + weights."""
    at_once: Annotated[
        int | str,
        BeforeValidator(_read_at_once),
        RunFlag(Group.DEVICES, metavar="N|auto"),
    ] = 1
    """Trials that share a device and its cores. auto: as many as fit; 1 if CPU steps are large."""
    generation_batch_size: Annotated[Count | None, Flag(Group.GRPO, metavar="N")] = None
    """Completions sampled at once; by default four microbatches."""
    keep: Annotated[Literal["none", "weights", "checkpoints"], RunFlag(Group.OUTPUT)] = "weights"
    """Files that a finished trial keeps."""

    threads: int = 1  # CPU threads per process
    threads_alone: int | None = None  # the same, of a trial that shares no device; None: `threads`
    at_once_reason: str = ""  # "" if it was not chosen
    compile: bool = False  # torch.compile
    compile_reason: str = ""
    graph_bound: int = 0  # largest batch size whose updates are CUDA graphs, as one microbatch
    graph_reason: str = ""
    microbatch_bound: int | None = None  # largest that fits by forecast, as one of several
    microbatch_bound_alone: int | None = None  # the same, as the only one of a step
    evaluation_batch_size: int = 32  # sequences
    checkpoint_seconds: float = 60.0  # longest time between two checkpoints
    reason: str = ""  # why no forecast bounds the microbatch, or why steps may not fit

    @property
    def known_memory_bytes(self) -> int | None:
        """The memory limit, or that of the GPU that is named, the less of both; None: neither."""
        limits = [] if self.device_memory_bytes is None else [self.device_memory_bytes]
        if self.gpu is not None:
            limits.append(find_gpu(self.gpu).memory_bytes)
        return min(limits, default=None)

    @property
    def misfit(self) -> str:
        """Why steps do not fit by forecast, which then bounds the microbatch; "" if they do."""
        return "" if self.microbatch_bound is None else self.reason

    @property
    def trials_at_once(self) -> int:
        """Trials that share a device; 1 until `auto` is decided."""
        return self.at_once if isinstance(self.at_once, int) else 1

    def alone(self) -> "Execution":
        """Return the execution of one trial at a time, with all cores."""
        return self.model_copy(update=run_alone(dict(self)))

    def kept_of(self, stage: str) -> str:
        """Return what remains of a trial that has a result; nothing of a tuning trial."""
        return self.keep if stage == "final" else "none"

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]


def run_alone(execution: Mapping[str, Any]) -> dict[str, Any]:
    """Return an execution, by its keys, with one trial at a time, which has all cores."""
    threads = execution.get("threads_alone")
    if threads is None:
        threads = execution["threads"]
    return {**execution, "at_once": 1, "threads": threads, "threads_alone": None}


def was_alone(execution: Mapping[str, Any]) -> bool:
    """Return True if a trial with this execution did not share its device with another one."""
    return execution.get("at_once") in (None, 1)  # older trials have no such key


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
    no_user_code: Annotated[bool, Flag(Group.MODEL, commands=MEASURING)] = False
    """Refuse experiments that name code, as module:object."""
    timing: Annotated[str | None, RunFlag(Group.DEVICES, metavar="FILE")] = None
    """timing.json that fixes the tokens of a --budget of time; by default steps are timed here."""
    shard: Annotated[str | None, RunFlag(Group.DEVICES, metavar="I/N")] = None
    """Run only the I-th of N parts, in a folder of its own; `sweep merge` joins the folders."""
    executor: Annotated[str, RunFlag(Group.DEVICES)] = "local"
    """The machines that run trials."""
