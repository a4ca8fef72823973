"""Where and how fast trials run: settings that never change a result beyond rounding."""

from typing import Annotated, Literal

from sweep.config.settings import (
    DEVICES,
    EVERYDAY,
    GRPO,
    MEMORY,
    OUTPUT,
    Bytes,
    Count,
    CountOrZero,
    Flag,
    RunFlag,
    Settings,
)


class Execution(Settings):
    """How trials of a sweep run; decided when plan.json is first written, and then kept.

    `model_fields_set` of the settings from the command line says which of them the user chose;
    planning decides the others.
    """

    device: Annotated[str, Flag("auto, cpu, cuda, cuda:i or mps.", EVERYDAY)] = "auto"
    microbatch: Annotated[
        Count | None, Flag("Sequences per forward-backward; by default as many as fit.", MEMORY)
    ] = None
    accumulation: Annotated[
        Count | None, Flag("Gradient accumulation steps; sets the microbatch.", MEMORY, None, "N")
    ] = None
    device_memory_bytes: Annotated[
        Bytes | None,
        Flag("Memory limit: 16GiB. On a CPU steps run eagerly.", MEMORY, "device-memory", "SIZE"),
    ] = None
    activation_checkpointing: Annotated[
        bool, Flag("Recompute activations: less memory, more time.", MEMORY)
    ] = False
    loss_chunk_rows: Annotated[
        CountOrZero, Flag("Tokens whose logits exist at a time; 0: all.", MEMORY, metavar="N")
    ] = 0
    preset: Annotated[
        Literal["speed", "balanced", "memory"] | None,
        RunFlag("Choose microbatch, checkpointing, ZeRO and precision by forecast.", MEMORY),
    ] = None
    devices: Annotated[
        Count, Flag("Devices per trial, one process each.", DEVICES, "devices-per-trial", "N")
    ] = 1
    zero: Annotated[
        Literal[0, 1, 2, 3],
        Flag("Shard over a trial's devices: 1 optimizer, 2 + gradients, 3 + weights.", DEVICES),
    ] = 0
    strategy: Annotated[Literal["torch", "deepspeed"], RunFlag("Library that shards.", DEVICES)] = (
        "torch"
    )
    generation_batch_size: Annotated[
        Count | None,
        Flag("Completions sampled at once; by default four microbatches.", GRPO, metavar="N"),
    ] = None
    keep: Annotated[
        Literal["none", "weights", "checkpoints"],
        RunFlag("Files that a finished trial keeps.", OUTPUT),
    ] = "weights"

    threads: int = 1  # CPU threads per process
    compile: bool = False  # torch.compile
    compile_reason: str = ""
    microbatch_bound: int | None = None  # largest microbatch that fits by forecast
    evaluation_batch_size: int = 32  # sequences
    checkpoint_seconds: float = 60.0  # longest time between two checkpoints
    reason: str = ""  # of a preset's choices, or why no forecast bounds the microbatch

    @property
    def device_type(self) -> str:
        """The device without its number: cpu, cuda or mps."""
        return self.device.partition(":")[0]


class Services(Settings):
    """Which executor and stores a command uses; may differ from command to command."""

    executor: Annotated[
        Literal["local", "ray", "slurm"],
        RunFlag("Where trials run: docs/ray.md, docs/slurm.md.", DEVICES),
    ] = "local"
    ray_address: Annotated[
        str | None, RunFlag("A running Ray cluster.", DEVICES, metavar="HOST:PORT")
    ] = None
    slurm: Annotated[
        str | None,
        RunFlag("Options of SLURM jobs: partition=gpu,time=4h.", DEVICES, metavar="KEY=VALUE,…"),
    ] = None
    tracking_uri: Annotated[
        str | None,
        RunFlag("MLflow store: http://HOST:5000; by default a file in the folder.", OUTPUT),
    ] = None
    storage: Annotated[
        str | None,
        RunFlag("Optuna storage: postgresql://…; by default a file in the folder.", OUTPUT),
    ] = None
