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
from sweep.errors import WorkerDied, describe_error
from sweep.memory.search import SHARES, Measurement, SearchResult, find_largest
from sweep.plan.retry import judge_death
from sweep.training.device import LimitedMemory, forget_peak_memory, is_out_of_memory
from sweep.training.process import FreshProcess, ShouldStop
from sweep.training.step import TrainingStep

STEPS = 3  # per point; the first creates optimizer states, the others are timed
COLLAPSE = 0.6  # share of the best throughput of smaller points
WARM_UP_STEPS = 2  # first steps of a soak, not part of the slope

Measure = Callable[[int, int, int], Measurement]  # takes batch size, microbatch size, steps
OnPoint = Callable[[Measurement], object]


class Probe:
    """Measures points of one configuration, each once, and searches the largest that fits."""

    def __init__(self, measure: Measure, limit_bytes: int, on_point: OnPoint) -> None:
        self._measure, self._limit_bytes, self._on_point = measure, limit_bytes, on_point
        self._measured: dict[tuple[int, int, int], Measurement] = {}
        self.search = SearchResult()
        self.choices: list[dict[str, Any]] = []  # as `choose` returns them, the largest first
        self.accumulated: Measurement | None = None  # several microbatches of the balanced choice

    @property
    def points(self) -> list[Measurement]:
        return [point for (*_, steps), point in self._measured.items() if steps == STEPS]

    def measure(self, batch_size: int, microbatch_size: int, steps: int = STEPS) -> Measurement:
        key = batch_size, microbatch_size, steps
        if key in self._measured:
            return self._measured[key]
        smaller = [point for point in self.points if point.microbatch_size < microbatch_size]
        rates = [point.tokens_per_second or 0.0 for point in smaller if point.status == "OK"]
        best = max(rates, default=0.0)
        for _ in range(2):  # another process may have slowed down the first measurement
            point = self._measure(*key)
            rate, retries = point.tokens_per_second or 0.0, point.allocator_retries
            if point.status != "OK" or (not retries and rate >= COLLAPSE * best):
                break
            message = f"{rate:,.0f} tokens/s, the best smaller point {best:,.0f}"
            if retries:
                message = f"the allocator had to retry {retries} times"
            point = replace(point, status="COLLAPSED", message=message)
        self._measured[key] = point
        if steps == STEPS:
            self._on_point(point)
        return point

    def peak_bytes(self, size: int) -> int | None:
        point = self.measure(size, size)
        return point.held_bytes if point.status == "OK" else None

    def choose(self, name: str, largest: int, unit: int, soak_steps: int) -> dict[str, Any] | None:
        """Choose the largest size within its share of the limit that completes its `soak_steps`."""
        for size in range(largest, 0, -unit):
            point, soak = self.measure(size, size), None
            if point.status != "OK" or (point.held_bytes or 0) > SHARES[name] * self._limit_bytes:
                continue
            if soak_steps:
                many = self.measure(size, size, max(soak_steps, WARM_UP_STEPS + 3))
                if many.status != "OK":
                    continue
                soak = {"point": many.as_document(), "leak": find_leak(many.rests)}
            sizes = {"microbatch_size": size, "headroom_bytes": point.headroom_bytes}
            return {"name": name, "share": SHARES[name], **sizes, "soak": soak}
        return None

    def accumulate(self, size: int, unit: int, count: Callable[[int], int]) -> Measurement | None:
        """Measure `count(size)` microbatches of a size; if they do not fit, of smaller ones."""
        stride = unit
        while (point := self.measure(count(size) * size, size)).status != "OK":
            if size <= unit:
                return None
            size, stride = max(unit, size - stride), 2 * stride
        return point


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
        probe.search = find_largest(probe.peak_bytes, limit_bytes, unit, cap)
    largest, line = probe.search.largest, probe.search.line
    for name, share in SHARES.items() if largest else ():
        bound = line.largest(share * limit_bytes) if line and share < 1 else largest
        size = min(largest, max(unit, bound // unit * unit))
        if (choice := probe.choose(name, size, unit, soak_steps)) is not None:
            probe.choices.append(choice)
            if name == "balanced":
                size = choice["microbatch_size"]
                probe.accumulated = probe.accumulate(size, unit, config.parts_to_peak)
    return probe


def find_leak(rests: tuple[int, ...]) -> dict[str, Any]:
    """Return the slope of bytes at rest over steps; a leak if its 95 % interval is above zero."""
    from scipy import stats  # it takes a second to import

    kept = rests[WARM_UP_STEPS:]
    fit: Any = stats.linregress(range(len(kept)), kept)
    error = fit.stderr if len({*kept}) > 1 else 0.0  # scipy returns NaN for constants
    slope, half = float(fit.slope), float(stats.t.ppf(0.975, len(kept) - 2) * error)
    interval, is_found = (slope - half, slope + half), slope > half
    return dict(steps=len(rests), bytes_per_step=slope, interval=interval, is_found=is_found)


def measure_in_process(
    config: TrialConfig, limit_bytes: int, batch_size: int, microbatch_size: int, steps: int
) -> Measurement:
    config = config.on_one_device(batch_size, microbatch_size)
    process = FreshProcess(measure, config, limit_bytes, steps)
    try:
        return process.result(timeout=600 * max(1, steps / STEPS))  # type: ignore[no-any-return]
    except WorkerDied as error:
        status, message = "TIMEOUT" if error.timed_out else "ERROR", str(error)
        outcome = judge_death(error.exit_code, error.oom_killed, None)
        if not error.timed_out and outcome.kind == "out_of_memory":
            status, message = "OUT_OF_MEMORY", outcome.message
        return Measurement(batch_size, microbatch_size, status, message)


def measure(config: TrialConfig, limit: int, steps: int, should_stop: ShouldStop) -> Measurement:
    """Take at least two optimizer steps and evaluate one batch, within an enforced memory limit."""
    device = torch.device(config.execution.device)
    torch.set_num_threads(config.execution.threads)
    sizes = config.science.batch_size, config.microbatch_size
    try:
        with LimitedMemory(device, limit) as memory:
            values = _take_steps(config, memory, steps)
    except Exception as error:
        if is_out_of_memory(error):
            return Measurement(*sizes, "OUT_OF_MEMORY", str(error)[:300], total_bytes=limit)
        traceback.print_exc()
        return Measurement(*sizes, "ERROR", describe_error(error)[:300])
    point = Measurement(*sizes, "OK", total_bytes=limit, **values)
    own = (point.device_bytes or 0) - memory.others_bytes
    if device.type == "cuda" and max(own, point.held_bytes or 0) > limit:
        return replace(point, status="SPILLED", message=f"{format_bytes(own)} in use")
    return point


def _take_steps(config: TrialConfig, memory: LimitedMemory, steps: int) -> dict[str, Any]:
    step = TrainingStep(config, torch.device(config.execution.device))
    if config.execution.compile:
        step.warm_up()
        forget_peak_memory(step.device)
    updates: list[None] = []
    if step.optimizer is not None:
        step.optimizer.register_step_post_hook(lambda *_: updates.append(None))
    rests, loss = [], math.nan
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
    return {
        "rest_bytes": int(statistics.median(rests)),
        "peak_bytes": max(memory.take_peak(), *peaks.values()),
        **memory.statistics(),
        "seconds_per_step": seconds,
        "tokens_per_second": config.science.batch_size * config.tokens_per_sequence / seconds,
        "optimizer_steps": len(updates),
        "loss": loss if math.isfinite(loss) else None,
        "rests": tuple(rests),
        **({"phases": peaks, "phase_seconds": phase_seconds} if step.samples else {}),
    }
