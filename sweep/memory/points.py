"""Memory of one configuration, as predicted and as measured."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Forecast:
    """Predicted bytes of one configuration on one device."""

    batch_size: int  # sequences of a step on this device
    microbatch_size: int
    peak_bytes: int  # of a training step
    by_category: dict[str, int]  # at that peak
    rest_bytes: int  # between steps
    evaluation_bytes: int  # peak of an evaluation batch
    phases: dict[str, int] = field(default_factory=dict)  # peak of each, if the workload samples

    @property
    def needed_bytes(self) -> int:
        """The larger peak of training and evaluation."""
        return max(self.peak_bytes, self.evaluation_bytes)

    def as_document(self) -> dict[str, Any]:
        """Return the fields as `sweep forecast --json` prints them."""
        return {**asdict(self), "status": "FORECAST"}


@dataclass(frozen=True)
class Measurement:
    """Measured memory and time of one configuration; None if unavailable."""

    batch_size: int
    microbatch_size: int
    status: str  # OK, OUT_OF_MEMORY, SPILLED, COLLAPSED, ERROR, TIMEOUT
    message: str = ""
    rest_bytes: int | None = None  # between steps
    peak_bytes: int | None = None  # allocated by steps and evaluation
    reserved_bytes: int | None = None  # peak of the caching allocator
    context_bytes: int = 0  # of this process on the device before it made a tensor
    device_bytes: int | None = None  # in use on the device by all processes; resident set on a CPU
    total_bytes: int | None = None  # the limit
    allocator_retries: int | None = None
    seconds_per_step: float | None = None  # of the fastest step
    tokens_per_second: float | None = None
    optimizer_steps: int | None = None  # as counted by a hook of the optimizer
    loss: float | None = None
    phases: dict[str, int] = field(default_factory=dict)  # peak of each, if the workload samples
    phase_seconds: dict[str, float] = field(default_factory=dict)  # of the fastest
    rests: tuple[int, ...] = ()  # bytes between steps, one per step

    @property
    def held_bytes(self) -> int | None:
        """Peak bytes that count against the limit: tensors or allocator, plus the context."""
        if self.peak_bytes is None:
            return None
        return max(self.peak_bytes, self.reserved_bytes or 0) + self.context_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """Bytes between the peak and the limit."""
        held = self.held_bytes
        return None if held is None or self.total_bytes is None else self.total_bytes - held

    def as_document(self) -> dict[str, Any]:
        """Return the fields as `sweep probe --json` prints them."""
        derived = {"held_bytes": self.held_bytes, "headroom_bytes": self.headroom_bytes}
        document = {**asdict(self), "by_category": {}, **derived}
        del document["rests"]
        return document
