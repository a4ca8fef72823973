"""Measure the largest microbatch that fits, and prove it: each point runs in a fresh process."""

import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sweep.config.numbers import format_bytes
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError, WorkerDied, cut, describe_error
from sweep.memory.search import (
    DOES_NOT_FIT,
    LINEAR,
    SHARES,
    UNKNOWN,
    Measurement,
    SearchResult,
    find_largest,
)
from sweep.plan.course import Course
from sweep.plan.retry import judge_death
from sweep.training.device import LimitedMemory, forget_peak_memory, is_out_of_memory, use_device
from sweep.training.process import FreshProcess, ShouldStop
from sweep.training.step import TrainingStep

STEPS = 3  # per point; the first creates optimizer states, the others are timed
NEAR_TOP = 0.95  # share of the top throughput that a microbatch of use reaches
SLOW = 0.6  # share of the best throughput of smaller points
POINT_SECONDS = 600  # limit for a point on a GPU, whose driver may hang; longer for more steps
WARM_UP_STEPS = 2  # first steps of a soak, not part of the slope
LEAST_SOAK = WARM_UP_STEPS + 3  # a slope needs three points for its interval

Measure = Callable[[int, int, int], Measurement]  # takes batch size, microbatch size, steps
OnPoint = Callable[[Measurement], object]


class Probe:
    """Measures points of one configuration, each once, and searches the largest that fits."""

    def __init__(
        self, measure: Measure, limit_bytes: int, on_point: OnPoint = lambda point: None
    ) -> None:
        self._measure = measure
        self._limit_bytes = limit_bytes
        self._on_point = on_point
        self._measured: dict[tuple[int, int, int], Measurement] = {}
        self.search = SearchResult()
        self.choices: list[dict[str, Any]] = []  # as `choose` returns them, the largest first
        self.accumulated: Measurement | None = None  # several microbatches of the balanced choice
        self.fast: Measurement | None = None  # the smallest microbatch near the top throughput

    @property
    def points(self) -> list[Measurement]:
        return [point for (*_, steps), point in self._measured.items() if steps == STEPS]

    def measure(self, batch_size: int, microbatch_size: int, steps: int = STEPS) -> Measurement:
        key = batch_size, microbatch_size, steps
        if key in self._measured:
            return self._measured[key]
        point = self._judge(self._measure(*key))
        if point.status == "COLLAPSED":  # another process may have used the device meanwhile
            point = self._judge(self._measure(*key))
        self._measured[key] = point
        if steps == STEPS:
            self._on_point(point)
        return point

    def _judge(self, point: Measurement) -> Measurement:
        """Judge whether a step that ran also fits; low speed alone is only noted."""
        if point.status != "OK":
            return point
        held = point.held_bytes or 0
        if held > self._limit_bytes:
            return replace(point, status="SPILLED", message=f"{format_bytes(held)} in use")
        if point.allocator_retries:
            message = f"the allocator had to retry {point.allocator_retries} times"
            return replace(point, status="COLLAPSED", message=message)

        size = point.microbatch_size
        rate = point.tokens_per_second or 0.0
        smaller = [p for p in self.points if p.status == "OK" and p.microbatch_size < size]
        best = max((p.tokens_per_second or 0.0 for p in smaller), default=0.0)
        if rate >= SLOW * best:
            return point
        speeds = f"{rate:,.0f} tokens/s, the best smaller point {best:,.0f}"
        if point.is_device_full:
            return replace(point, status="COLLAPSED", message=f"the device is full, {speeds}")
        return replace(point, message=f"slow: {speeds}")

    def find_largest(
        self, unit: int, cap: int | None, soak_steps: int, parts_to_peak: Callable[[int], int]
    ) -> None:
        """Search the largest microbatch, and choose a size for each share of the limit."""
        self.search = find_largest(self.peak_bytes, self._limit_bytes, unit, cap)
        largest = self.search.largest
        if not largest:
            return

        line = self.search.line
        for name, share in SHARES.items():
            bound = largest
            if line and share < 1:
                bound = line.largest(share * self._limit_bytes)
            size = min(largest, max(unit, bound // unit * unit))
            choice = self.choose(name, size, unit, soak_steps)
            if choice is None:
                continue
            self.choices.append(choice)
            if name == "balanced":
                self.accumulated = self.accumulate(choice["microbatch_size"], unit, parts_to_peak)

    def find_fast(self, unit: int) -> None:
        """Halve the largest microbatch until it is slow, to find the smallest that is fast."""
        size = self.search.largest
        while size > unit:
            size = max(unit, size // 2 // unit * unit)
            if self.measure(size, size) not in self._fast_points():
                break
        fast = self._fast_points()
        self.fast = min(fast, key=lambda point: point.microbatch_size, default=None)

    def _fast_points(self) -> list[Measurement]:
        """Return the steps of one microbatch that reach the top throughput, or almost."""
        fits = [
            point
            for point in self.points
            if point.status == "OK" and point.batch_size == point.microbatch_size
        ]
        top = max((point.tokens_per_second or 0.0 for point in fits), default=0.0)
        return [point for point in fits if (point.tokens_per_second or 0.0) >= NEAR_TOP * top]

    def verdict(self, unit: int) -> str:
        """Describe the result of the search by its points; refuse it if no step can run at all."""
        search = self.search
        points = {p.microbatch_size: p for p in self.points if p.batch_size == p.microbatch_size}
        if not search.peaks:
            return "measured as asked, without a search"
        if not search.largest:
            smallest = points[min(points)]
            if smallest.status in UNKNOWN:
                raise SweepError(
                    f"steps must run to be measured, got {smallest.status} with a microbatch of "
                    f"{smallest.microbatch_size} ({smallest.message}). Fix that first."
                )
            return f"a microbatch of {unit} does not fit"

        sentence = f"{search.largest} fits, and no larger size was asked for"
        larger = [points[size] for size in sorted(points) if size > search.largest]
        if larger and larger[0].status in DOES_NOT_FIT:
            following = f"{larger[0].microbatch_size} does not ({larger[0].status})"
            sentence = f"{search.largest} fits and {following}, both measured"
        elif larger:
            cause = f"{larger[0].status}: {larger[0].message}"
            unknown = f"whether {larger[0].microbatch_size} fits is not known ({cause})"
            sentence = f"{search.largest} fits; {unknown}"
        for point in points.values():
            if point.microbatch_size < search.largest and point.status != "OK":
                sentence += f"; {point.microbatch_size} failed ({point.status})"

        if not search.is_bisected:
            return sentence
        if search.line is not None and search.line.r_squared < LINEAR:
            return f"{sentence}; memory was not linear, so the search bisected"
        return f"{sentence}; the search bisected"

    def peak_bytes(self, size: int) -> int | None:
        point = self.measure(size, size)
        return point.held_bytes if point.status == "OK" else None

    def choose(self, name: str, largest: int, unit: int, soak_steps: int) -> dict[str, Any] | None:
        """Choose the largest size within its share of the limit that completes its `soak_steps`."""
        share = SHARES[name]
        for size in range(largest, 0, -unit):
            point = self.measure(size, size)
            if point.status != "OK" or (point.held_bytes or 0) > share * self._limit_bytes:
                continue

            soak = None
            if soak_steps:
                many = self.measure(size, size, soak_steps)
                if many.status != "OK":
                    continue
                soak = {"point": many.as_document(), "leak": find_leak(many.rests)}
            return {
                "name": name,
                "share": share,
                "microbatch_size": size,
                "headroom_bytes": point.headroom_bytes,
                "soak": soak,
            }
        return None

    def accumulate(self, size: int, unit: int, count: Callable[[int], int]) -> Measurement | None:
        """Measure `count(size)` microbatches of a size; if they do not fit, of smaller ones."""
        stride = unit
        while True:
            point = self.measure(count(size) * size, size)
            if point.status == "OK":
                return point
            if size <= unit:
                return None
            size = max(unit, size - stride)
            stride *= 2


def probe(
    config: TrialConfig,
    limit_bytes: int,
    unit: int = 1,
    cap: int | None = None,
    on_point: OnPoint = lambda point: None,
    soak_steps: int = 0,
    sizes: Sequence[tuple[int, int]] = (),
) -> Probe:
    """Find the largest microbatch and a size for each share; with `sizes` measure these pairs."""
    probe = Probe(partial(measure_in_process, config, limit_bytes), limit_bytes, on_point)
    for pair in sizes:
        probe.measure(*pair)
    if not sizes:
        probe.find_largest(unit, cap, soak_steps, config.parts_to_peak)
        probe.find_fast(unit)
    return probe


def find_leak(rests: tuple[int, ...]) -> dict[str, Any]:
    """Return the slope of bytes at rest over steps; a leak if its 95 % interval is above zero."""
    from scipy import stats  # it takes a second to import

    kept = rests[WARM_UP_STEPS:]
    fit: Any = stats.linregress(range(len(kept)), kept)
    error = fit.stderr if len({*kept}) > 1 else 0.0  # scipy returns NaN for constants
    slope = float(fit.slope)
    half_width = float(stats.t.ppf(0.975, len(kept) - 2) * error)
    return {
        "steps": len(rests),
        "bytes_per_step": slope,
        "interval": (slope - half_width, slope + half_width),
        "is_found": slope > half_width,
    }


def measure_in_process(
    config: TrialConfig, limit_bytes: int, batch_size: int, microbatch_size: int, steps: int
) -> Measurement:
    config = config.on_one_device(batch_size, microbatch_size)
    timeout = None  # on a CPU other programs decide how long a point takes
    if config.execution.device_type != "cpu":
        timeout = POINT_SECONDS * max(1, steps / STEPS)
    process = FreshProcess(measure, config, limit_bytes, steps)
    try:
        return process.result(timeout=timeout)  # type: ignore[no-any-return]
    except WorkerDied as error:
        if error.timed_out:
            return Measurement(batch_size, microbatch_size, "TIMEOUT", str(error))
        outcome = judge_death(error.exit_code, error.oom_killed, None)
        if outcome.kind == "out_of_memory":
            return Measurement(batch_size, microbatch_size, "OUT_OF_MEMORY", outcome.message)
        return Measurement(batch_size, microbatch_size, "ERROR", str(error))


def measure(
    config: TrialConfig, limit_bytes: int, steps: int, should_stop: ShouldStop
) -> Measurement:
    """Take at least two optimizer steps and evaluate one batch, within an enforced memory limit."""
    device = use_device(config.execution.device)
    torch.set_num_threads(config.execution.threads)
    sizes = config.science.batch_size, config.microbatch_size
    try:
        with LimitedMemory(device, limit_bytes) as memory:
            values = _take_steps(config, memory, steps)
    except Exception as error:
        if is_out_of_memory(error):
            return Measurement(*sizes, "OUT_OF_MEMORY", cut(str(error)), limit_bytes=limit_bytes)
        traceback.print_exc()
        return Measurement(*sizes, "ERROR", describe_error(error))

    point = Measurement(*sizes, "OK", limit_bytes=limit_bytes, **values)
    used_bytes = (point.device_bytes or 0) - memory.others_bytes
    if device.type == "cuda" and max(used_bytes, point.held_bytes or 0) > limit_bytes:
        return replace(point, status="SPILLED", message=f"{format_bytes(used_bytes)} in use")
    return point


def _take_steps(config: TrialConfig, memory: LimitedMemory, steps: int) -> dict[str, Any]:
    step = TrainingStep(config, torch.device(config.execution.device))
    if config.execution.compile:
        step.warm_up()
        forget_peak_memory(step.device)

    updates: list[None] = []
    if step.optimizer is not None:
        step.optimizer.register_step_post_hook(lambda *_: updates.append(None))
    rests = []
    loss = math.nan
    peaks: dict[str, int] = {}
    fastest: dict[str, float] = {}  # seconds by phase
    start = 0.0

    def end_phase(name: str) -> None:
        nonlocal start
        peaks[name] = max(peaks.get(name, 0), memory.take_peak())
        fastest[name] = min(fastest.get(name, math.inf), time.perf_counter() - start)
        start = time.perf_counter()

    step.workload.on_phase = end_phase
    for _ in range(steps):
        memory.take_peak()
        start = time.perf_counter()
        batch = step.workload.random_batch(config.science.batch_size)
        loss = step(batch, 1e-6).item()
        del batch
        end_phase("update")
        rests.append(memory.allocated_bytes())

    phase_seconds = dict(fastest)  # an evaluation that samples has the same phases
    seconds = sum(phase_seconds.values())
    step.evaluate(step.workload.random_batch(config.execution.evaluation_batch_size)).item()
    values: dict[str, Any] = {
        "rest_bytes": int(statistics.median(rests)),
        "peak_bytes": max(memory.take_peak(), *peaks.values()),
        **memory.statistics(),
        "seconds_per_step": seconds,
        "tokens_per_second": Course.of_trial(config).tokens_at(1) / seconds,
        "optimizer_steps": len(updates),
        "loss": loss if math.isfinite(loss) else None,
        "rests": tuple(rests),
    }
    if step.samples:
        values |= {"phases": peaks, "phase_seconds": phase_seconds}
    return values
