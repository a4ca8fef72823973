"""The memory of one configuration, and the search for the largest size that fits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

# Share of the memory limit that a choice may use, from the largest microbatch to the smallest.
SHARES = {"maximum": 1.0, "balanced": 0.9, "conservative": 0.7}
LINEAR_POINTS = 5  # enough to prove the largest size if memory is linear
FULL = 0.02  # share of a device below which its free memory is too little for a step
LINEAR = 0.999  # least R² of memory that is called linear
DOES_NOT_FIT = ("OUT_OF_MEMORY", "SPILLED", "COLLAPSED")
UNKNOWN = ("ERROR", "TIMEOUT")  # the step did not run, for a reason other than memory


@dataclass(frozen=True)
class Forecast:
    microbatch_size: int
    peak_bytes: int  # peak of a training step
    by_category: dict[str, int]  # at that peak
    rest_bytes: int  # between steps
    evaluation_bytes: int  # peak of an evaluation batch
    phases: dict[str, int] = field(default_factory=dict)  # peak of each, if the workload samples

    @property
    def needed_bytes(self) -> int:
        return max(self.peak_bytes, self.evaluation_bytes)


@dataclass(frozen=True)
class Measurement:
    """Measured memory and time of one configuration; None if it was not measured."""

    batch_size: int
    microbatch_size: int
    status: str  # OK, one of DOES_NOT_FIT, or one of UNKNOWN
    message: str = ""
    rest_bytes: int | None = None  # between steps
    peak_bytes: int | None = None  # allocated by steps and evaluation
    reserved_bytes: int | None = None  # caching allocator, after the last step
    context_bytes: int = 0  # device memory of this process before its first tensor
    device_bytes: int | None = None  # in use on the device by all processes; resident set on a CPU
    free_bytes: int | None = None  # not in use on the device; None on a CPU
    limit_bytes: int | None = None
    allocator_retries: int | None = None
    seconds_per_step: float | None = None  # the fastest repetition of each phase
    tokens_per_second: float | None = None
    optimizer_steps: int | None = None  # as counted by a hook of the optimizer
    loss: float | None = None
    phases: dict[str, int] = field(default_factory=dict)  # peak of each, if the workload samples
    phase_seconds: dict[str, float] = field(default_factory=dict)  # fastest repetition
    rests: tuple[int, ...] = ()  # bytes between steps, one per step

    @property
    def held_bytes(self) -> int | None:
        """Peak bytes that count against the limit: tensors or allocator, plus the context."""
        if self.peak_bytes is None:
            return None
        return max(self.peak_bytes, self.reserved_bytes or 0) + self.context_bytes

    @property
    def is_device_full(self) -> bool:
        """Return True if the device has no memory left, so that a driver may use the host's."""
        if self.free_bytes is None or self.device_bytes is None:
            return False
        return self.free_bytes < FULL * (self.free_bytes + self.device_bytes)

    @property
    def headroom_bytes(self) -> int | None:
        used = self.held_bytes
        return None if used is None or self.limit_bytes is None else self.limit_bytes - used

    def as_document(self) -> dict[str, Any]:
        derived = {"held_bytes": self.held_bytes, "headroom_bytes": self.headroom_bytes}
        document = {**asdict(self), "by_category": {}, **derived}
        document["total_bytes"] = document.pop("limit_bytes")  # the documented key
        del document["rests"]
        return document


@dataclass(frozen=True)
class Line:
    """A least-squares line through peaks: fixed + per_sequence · microbatch size."""

    fixed_bytes: float
    bytes_per_sequence: float
    r_squared: float  # 1 through two points
    largest_residual_bytes: float

    def largest(self, limit_bytes: float) -> int:
        """Return the largest size whose peak is within the limit; 0 if none is."""
        if self.bytes_per_sequence <= 0:
            return 0 if self.fixed_bytes > limit_bytes else 2**40
        size = (limit_bytes - self.fixed_bytes) / self.bytes_per_sequence
        return max(0, math.floor(size + 1e-6))  # a tolerance for the arithmetic of the fit


def fit_line(peaks: Mapping[int, float]) -> Line | None:
    """Fit a line to peaks in bytes by size; None with fewer than two sizes."""
    if len(peaks) < 2:
        return None

    sizes = np.array(list(peaks), float)
    values = np.array(list(peaks.values()), float)
    slope, fixed = np.polyfit(sizes, values, 1)

    residuals = values - (fixed + slope * sizes)
    spread = float(((values - values.mean()) ** 2).sum())
    r_squared = 1.0
    if spread:
        r_squared = 1 - float((residuals**2).sum()) / spread
    return Line(
        fixed_bytes=float(fixed),
        bytes_per_sequence=float(slope),
        r_squared=r_squared,
        largest_residual_bytes=float(np.abs(residuals).max()),
    )


@dataclass(frozen=True)
class SearchResult:
    peaks: dict[int, int | None] = field(default_factory=dict)  # by size, in order; None: unknown
    largest: int = 0  # 0 if not even one unit fits
    is_bisected: bool = False  # lines through the points did not lead to the result
    is_capped: bool = False  # the largest allowed size fits

    @property
    def line(self) -> Line | None:
        peaks = sorted((size, peak) for size, peak in self.peaks.items() if peak is not None)
        return fit_line({size: peak for size, peak in peaks if size <= self.largest})


def find_largest(
    measure: Callable[[int], int | None], limit_bytes: float, unit: int = 1, cap: int | None = None
) -> SearchResult:
    """Find the largest multiple of `unit` up to `cap` whose peak is at most the limit.

    `measure` returns the peak bytes of a size, or None if it and all larger ones do not fit. The
    result was measured, and the next size too, unless that exceeds the cap.
    """
    # All sizes below are in units.
    top = cap // unit if cap else 2**40
    low = 0  # the largest size that fits
    high = top + 1  # the smallest that does not
    peaks: dict[int, int | None] = {}

    def try_size(size: int) -> None:
        nonlocal low, high
        peak = measure(size * unit)
        peaks[size * unit] = peak
        if peak is None or peak > limit_bytes:
            high = size
        else:
            low = size

    # At smaller sizes the optimizer can set the peak, not the batch.
    first_sizes = (4, 8) if top >= 8 else (1, top)
    for size in first_sizes:
        if low < size < high:
            try_size(size)

    used: tuple[Line, int] | None = None  # the line, and `low`, that led to a size
    is_bisected = False
    while high - low > 1:
        if len(peaks) > LINEAR_POINTS:
            is_bisected = True
        size = 2 * low if high > top else math.isqrt(low * high)

        # Chords of a convex curve approach from one side only, so then every other size halves.
        halves = is_bisected and len(peaks) % 2 == 1
        line = _last_chord(peaks)
        if line is not None and (line, low) != used and not halves:
            used = line, low
            size = min(line.largest(limit_bytes) // unit, 64 * max(low, 1))
        try_size(min(max(size, low + 1), high - 1))
    return SearchResult(peaks, low * unit, is_bisected, is_capped=low == top)


def _last_chord(peaks: Mapping[int, int | None]) -> Line | None:
    """Return the line through the peaks of the two largest sizes that have one."""
    pairs = sorted((size, peak) for size, peak in peaks.items() if peak is not None)
    return fit_line(dict(pairs[-2:]))
