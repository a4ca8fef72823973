"""Where and how fast trials run: settings that never change a result beyond rounding."""

from typing import Annotated, Literal

from sweep.config.settings import Count, CountOrZero, Flag, Group, RunFlag, Settings


class Execution(Settings, use_attribute_docstrings=True):
    """How trials run: chosen by the user (in `model_fields_set`) or by the first plan.json."""

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
    loss_chunk_rows: Annotated[CountOrZero, Flag(Group.MEMORY, metavar="N")] = 0
    """Tokens whose logits exist at a time; 0: all."""
    preset: Annotated[Literal["speed", "balanced", "memory"] | None, RunFlag(Group.MEMORY)] = None
    """Choose microbatch, checkpointing, ZeRO and precision by forecast."""
    devices: Annotated[Count, Flag(Group.DEVICES, "devices-per-trial", "N")] = 1
    """Devices per trial, one process each."""
    zero: Annotated[Literal[0, 1, 2, 3], Flag(Group.DEVICES)] = 0
    """Shard over a trial's devices: 1 optimizer, 2 + gradients, 3 + weights."""
    strategy: Annotated[Literal["torch", "deepspeed"], RunFlag(Group.DEVICES)] = "torch"
    """Library that shards."""
    generation_batch_size: Annotated[Count | None, Flag(Group.GRPO, metavar="N")] = None
    """Completions sampled at once; by default four microbatches."""
    keep: Annotated[Literal["none", "weights", "checkpoints"], RunFlag(Group.OUTPUT)] = "weights"
    """Files that a finished trial keeps."""

    threads: int = 1  # CPU threads per process
    compile: bool = False  # torch.compile
    compile_reason: str = ""
    microbatch_bound: int | None = None  # largest microbatch that fits by forecast
    evaluation_batch_size: int = 32  # sequences
    checkpoint_seconds: float = 60.0  # longest time between two checkpoints
    reason: str = ""  # why a preset chose these, or why no forecast bounds the microbatch

    @property
    def device_type(self) -> str:
        """The device without its number: cpu, cuda or mps."""
        return self.device.partition(":")[0]


class Services(Settings, use_attribute_docstrings=True):
    """Which executor and stores a command uses; may differ from command to command."""

    executor: Annotated[Literal["local", "ray", "slurm"], RunFlag(Group.DEVICES)] = "local"
    """Where trials run: docs/ray.md, docs/slurm.md."""
    ray_address: Annotated[str | None, RunFlag(Group.DEVICES, metavar="HOST:PORT")] = None
    """A running Ray cluster."""
    slurm: Annotated[str | None, RunFlag(Group.DEVICES, metavar="KEY=VALUE,…")] = None
    """Options of SLURM jobs: partition=gpu,time=4h."""
    tracking_uri: Annotated[str | None, RunFlag(Group.OUTPUT)] = None
    """MLflow store: http://HOST:5000; by default a file in the folder."""
    storage: Annotated[str | None, RunFlag(Group.OUTPUT)] = None
    """Optuna storage: postgresql://…; by default a file in the folder."""
