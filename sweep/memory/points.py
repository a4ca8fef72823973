"""What is known of one configuration's memory: forecast, or measured."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Forecast:
    """Predicted bytes of one configuration."""

    batch_size: int  # sequences of a step on one device
    microbatch_size: int
    peak_bytes: int  # of a training step
    by_category: dict[str, int]  # at that peak
    rest_bytes: int  # between steps
    evaluation_bytes: int  # peak of an evaluation batch
    phases: dict[str, int] = field(default_factory=dict)  # peaks, where a step has several

    @property
    def needed_bytes(self) -> int:
        """What must fit: the larger peak of training and evaluation."""
        return max(self.peak_bytes, self.evaluation_bytes)

    def as_document(self) -> dict[str, Any]:
        """Return it as `forecast` prints it."""
        return {**asdict(self), "status": "FORECAST"}


@dataclass(frozen=True)
class Measurement:
    """What one configuration took; null where it ended early or the device does not tell."""

    batch_size: int
    microbatch_size: int
    status: str  # OK, OUT_OF_MEMORY, SPILLED, COLLAPSED, ERROR, TIMEOUT
    message: str = ""
    rest_bytes: int | None = None  # between steps
    peak_bytes: int | None = None  # allocated, the largest of steps and evaluation
    reserved_bytes: int | None = None  # by the allocator, at its peak
    context_bytes: int = 0  # of the process on the device, before any tensor
    device_bytes: int | None = None  # in use on the device, others' too; resident set on a CPU
    total_bytes: int | None = None  # of the device, or the limit
    allocator_retries: int | None = None
    seconds_per_step: float | None = None  # the fastest
    tokens_per_second: float | None = None
    optimizer_steps: int | None = None  # as the optimizer's own hook counted them
    loss: float | None = None
    phases: dict[str, int] = field(default_factory=dict)  # peaks, where a step has several
    phase_seconds: dict[str, float] = field(default_factory=dict)  # the least
    rests: tuple[int, ...] = ()  # bytes between steps, one a step

    @property
    def held_bytes(self) -> int | None:
        """What must fit: the most that tensors or the allocator held, and the context."""
        if self.peak_bytes is None:
            return None
        return max(self.peak_bytes, self.reserved_bytes or 0) + self.context_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """What the limit leaves above the most that was held."""
        held = self.held_bytes
        return None if held is None or self.total_bytes is None else self.total_bytes - held

    def as_document(self) -> dict[str, Any]:
        """Return it as `probe` prints it."""
        headroom = {"held_bytes": self.held_bytes, "headroom_bytes": self.headroom_bytes}
        document = {**asdict(self), "by_category": {}, **headroom}
        return {key: document[key] for key in document if key != "rests"}
