"""The largest microbatch that fits, measured: each point in a fresh process, the answer proved.

A point fits if whole optimizer steps and an evaluation ended without an error, the device held it
without spilling and without asking the allocator twice, and throughput did not collapse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from sweep.config.trial import TrialConfig
from sweep.errors import WorkerDied
from sweep.memory.points import Measurement
from sweep.memory.search import Found, Look, find_largest
from sweep.plan.retry import judge_death
from sweep.training.memory_limit import oom_kills
from sweep.training.process import FreshProcess

STEPS = 3  # of a point: the first makes the optimizer's states, the others are timed
POINT_SECONDS = 600.0  # after which a point is given up
COLLAPSE = 0.6  # of the best throughput of smaller points
SHARES = {"maximum": 1.0, "balanced": 0.9, "conservative": 0.7}  # of the limit, for a choice
WARM_UP_STEPS = 2  # of a soak, left out of the slope

OnPoint = Callable[[Measurement], None]


@dataclass(frozen=True)
class Leak:
    """Bytes at rest against steps: a line, and what 95 % of such lines would span."""

    steps: int
    bytes_per_step: float
    interval: tuple[float, float]
    halves: tuple[float, float]  # bytes per step in each half of the steps

    @property
    def is_found(self) -> bool:
        """Whether memory grows beyond doubt, and in both halves of the steps: no single jump."""
        return self.interval[0] > 0 and min(self.halves) > 0


@dataclass(frozen=True)
class Soak:
    """Many steps of one size."""

    point: Measurement
    leak: Leak | None  # None where they did not end OK


@dataclass(frozen=True)
class Choice:
    """A size to recommend."""

    name: str  # maximum, balanced, conservative
    share: float  # of the limit that it holds at most
    point: Measurement
    soak: Soak | None = None  # None: not asked for


@dataclass(frozen=True)
class Probed:
    """What was measured, and what follows from it."""

    found: Found
    points: tuple[Measurement, ...]  # in the order in which they were measured
    choices: tuple[Choice, ...]  # the largest first
    accumulated: Measurement | None  # several microbatches of the safe size

    @property
    def safe(self) -> int:
        """The balanced size; 0: none."""
        sizes = [one.point.microbatch_size for one in self.choices if one.name == "balanced"]
        return sizes[0] if sizes else 0


class Probe:
    """Measures points of one configuration within a limit, each once.

    Args:
        config: of a trial; its batch size and microbatch size are replaced.
        limit_bytes: of the device; enforced.
        on_point: called after each point.
        environment: variables of the measuring processes.
    """

    def __init__(
        self,
        config: TrialConfig,
        limit_bytes: int,
        on_point: OnPoint | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.limit_bytes, self._environment = config, limit_bytes, environment
        self._on_point = on_point or (lambda point: None)
        self.points: dict[tuple[int, int], Measurement] = {}
        self._soaks: dict[int, Soak] = {}

    def look(self, size: int) -> Look:
        """Measure one microbatch size, as the search asks for it."""
        point = self.measure(size, size)
        fits = point.status == "OK"
        return Look(fits, point.held_bytes if fits else None)

    def measure(self, batch_size: int, microbatch_size: int) -> Measurement:
        """Measure one point and judge it; a collapse is believed when it is seen twice."""
        key = (batch_size, microbatch_size)
        if key not in self.points:
            point = self._measure(batch_size, microbatch_size, STEPS)
            fastest = self._fastest_below(point)
            if fastest is not None and _judged(point, fastest).status == "COLLAPSED":
                sizes = (fastest.batch_size, fastest.microbatch_size)
                fastest = self._measure(*sizes, STEPS)  # under the same load as what follows
                point = self._measure(batch_size, microbatch_size, STEPS)
            point = self.points[key] = _judged(point, fastest)
            self._on_point(point)
        return self.points[key]

    def soak(self, size: int, steps: int) -> Soak:
        """Run many steps of one size, once; judge them, and tell whether memory at rest grows."""
        if size not in self._soaks:
            point = self._measure(size, size, max(steps, WARM_UP_STEPS + 3))
            point = _judged(point, self.points.get((size, size)))
            leak = find_leak(point.rests) if point.status == "OK" else None
            self._soaks[size] = Soak(point, leak)
        return self._soaks[size]

    def _measure(self, batch_size: int, microbatch_size: int, steps: int) -> Measurement:
        config = self.config.sized(batch_size, microbatch_size)
        killed_before = oom_kills()
        process = FreshProcess(
            "sweep.memory.measure:measure",
            config,
            self.limit_bytes,
            steps,
            environment=self._environment,
        )
        try:
            point: Measurement = process.result(timeout=POINT_SECONDS * max(1, steps / STEPS))
        except WorkerDied as error:
            status, message = self._death(error, killed_before)
            point = Measurement(batch_size, microbatch_size, status, message)
        return point

    def _death(self, error: WorkerDied, killed_before: int) -> tuple[str, str]:
        if error.timed_out:
            return "TIMEOUT", str(error)
        outcome = judge_death(error.exit_code, oom_kills() > killed_before, None)
        is_memory = outcome.kind == "out_of_memory"
        return ("OUT_OF_MEMORY", outcome.message) if is_memory else ("ERROR", str(error))

    def _fastest_below(self, point: Measurement) -> Measurement | None:
        """Return the fastest smaller point; None where a larger one has not collapsed."""
        fine = [other for other in self.points.values() if other.status == "OK"]
        if any(other.microbatch_size > point.microbatch_size for other in fine):
            return None
        smaller = [other for other in fine if other.microbatch_size < point.microbatch_size]
        return max(smaller, key=lambda other: other.tokens_per_second or 0.0, default=None)

    def step_back(self, size: int, unit: int, is_accumulated: bool = False) -> Measurement | None:
        """Measure steps of a microbatch size, or several of it, else of smaller ones that fit."""
        step = unit
        while True:
            parts = self.config.telling_parts(size) if is_accumulated else 1
            if (point := self.measure(parts * size, size)).status == "OK":
                return point
            if size <= unit:
                return None
            size, step = max(unit, size - step), 2 * step

    def choose(self, name: str, share: float, size: int, unit: int, steps: int) -> Choice | None:
        """Choose a size, or a smaller one, that holds at most a share of the limit.

        Args:
            name: of the choice.
            share: of the limit.
            size: to begin with.
            unit: sizes are multiples of it.
            steps: that it must get through without a fault; 0: only those of a point.
        """
        point = self.step_back(size, unit)
        while point is not None:
            if (point.held_bytes or 0) <= share * self.limit_bytes:
                soak = self.soak(point.microbatch_size, steps) if steps else None
                if soak is None or soak.point.status == "OK":
                    return Choice(name, share, point, soak)
            smaller = point.microbatch_size - unit
            point = self.step_back(smaller, unit) if smaller >= unit else None
        return None


def _judged(point: Measurement, fastest: Measurement | None) -> Measurement:
    """Say where a point that ran does not fit all the same.

    Args:
        point: as measured.
        fastest: the best smaller point, to compare throughput with.
    """
    if point.status != "OK":
        return point
    if point.allocator_retries:
        why = f"the allocator had to ask again {point.allocator_retries} times"
        return replace(point, status="COLLAPSED", message=why)
    rate, best = (one.tokens_per_second or 0.0 if one else 0.0 for one in (point, fastest))
    if rate < COLLAPSE * best:
        why = f"{rate:,.0f} tokens/s, below {COLLAPSE} of {best:,.0f}"
        return replace(point, status="COLLAPSED", message=why)
    return point


def probe(
    config: TrialConfig,
    limit_bytes: int,
    unit: int = 1,
    cap: int | None = None,
    on_point: OnPoint | None = None,
    soak_steps: int = 0,
) -> Probed:
    """Find the largest microbatch that fits, two safer ones, and measure accumulation.

    Args:
        config: of a trial.
        limit_bytes: of the device; enforced.
        unit: sizes are multiples of it.
        cap: the largest size of interest.
        on_point: called after each measured point.
        soak_steps: that each choice must get through, or a smaller one is chosen; 0: none.
    """
    measured = Probe(config, limit_bytes, on_point)
    found = find_largest(measured.look, limit_bytes, unit, cap)
    largest, line, choices, accumulated = found.largest, found.line, [], None
    if largest:
        for name, share in SHARES.items():
            bound = line.largest(share * limit_bytes) if line and share < 1 else largest
            size = min(largest, max(unit, bound // unit * unit))
            choice = measured.choose(name, share, size, unit, soak_steps)
            if choice is not None:
                choices.append(choice)
            if choice is not None and name == "balanced":
                # beside the gradients of the microbatches before it
                size = choice.point.microbatch_size
                accumulated = measured.step_back(size, unit, is_accumulated=True)
    return Probed(found, tuple(measured.points.values()), tuple(choices), accumulated)


def find_leak(rests: tuple[int, ...]) -> Leak:
    """Fit bytes at rest against steps, with the slope's 95 % interval."""
    kept = np.array(rests[WARM_UP_STEPS:], dtype=float)
    if np.ptp(kept) == 0:
        return Leak(len(rests), 0.0, (0.0, 0.0), (0.0, 0.0))
    fit: Any = stats.linregress(np.arange(len(kept)), kept)
    half = float(stats.t.ppf(0.975, len(kept) - 2)) * float(fit.stderr)
    slope = float(fit.slope)
    first, second = (_slope(part) for part in np.array_split(kept, 2))
    return Leak(len(rests), slope, (slope - half, slope + half), (first, second))


def _slope(values: NDArray[np.float64]) -> float:
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) if np.ptp(values) else 0.0
