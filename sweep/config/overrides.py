"""Types of the settings that Python functions such as `run_sweep` take, for editors and mypy.

A test compares them with the settings. Those of an executor lie in its file. For an executor of
another package, pass them as `**settings`, a dict.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

# `for` is a keyword of Python: pass it as **{"for": "time"}.
Keywords = TypedDict(
    "Keywords", {"for": Literal["auto", "tokens", "time", "steps"] | None}, total=False
)


class Overrides(Keywords, total=False):
    """Settings by the name of their flag, or of their key in an experiment file."""

    accumulation: int | str | None
    activation_checkpointing: bool | None
    answer: Literal["which", "order"] | Mapping[str, Any] | None
    at_once: int | str | None
    batches: str | Sequence[int | str] | None
    budget: int | str | Sequence[int | str] | None
    centre: Literal["fit", "rule"] | None
    chooses_batches: bool | None
    code_folder: str | None
    command: str | None
    context: int | str | None
    data: str | None
    device: str | None
    device_memory: int | str | None
    devices_per_trial: int | str | None
    direction: Literal["minimize", "maximize"] | None
    evaluation: Mapping[str, Any] | None
    examples_per_epoch: int | str | None
    executor: str | None
    generation_batch_size: int | str | None
    gpu: str | None
    group_size: int | str | None
    init: str | None
    keep: Literal["none", "weights", "checkpoints"] | None
    lora: int | str | None
    loss_chunk_rows: int | str | None
    lr: str | float | None
    max_hours: float | str | None
    max_seeds: int | str | None
    microbatch: int | str | None
    model: str | Callable[..., Any] | Mapping[str, Any] | None
    model_option: str | Mapping[str, Any] | None
    model_source: str | None
    no_user_code: bool | None
    noise: bool | None
    noise_scale: Mapping[str, Any] | None
    objective: str | None
    optimizer: Mapping[str, Any] | None
    optimizers: str | Sequence[str] | None
    precision: Literal["auto", "fp32", "bf16", "bf16-pure"] | None
    price: float | str | None
    question: str | None
    read: str | None
    replaced_sizes: str | Sequence[Mapping[str, Any]] | None
    schedule: Mapping[str, Any] | None
    seeds: int | str | None
    shard: str | None
    stall_minutes: float | str | None
    storage: str | None
    target: float | str | None
    text_column: str | None
    timing: str | None
    tokenizer: Literal["bpe", "bytes", "pretrained"] | None
    tolerance: float | str | None
    tracking_uri: str | None
    train: str | Callable[..., Any] | None
    tune: str | Sequence[Literal["lr", "beta2", "weight_decay"]] | None
    tune_budget: int | str | None
    tune_centre: float | str | None
    tuning: Mapping[str, Any] | None
    unit: str | None
    vocabulary: int | str | None
    workload: str | Callable[..., Any] | Mapping[str, Any] | None
    zero: Literal[0, 1, 2, 3] | None
