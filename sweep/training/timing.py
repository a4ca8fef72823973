"""Time the steps of several batch sizes side by side, in interleaved rounds on one model.

In each round every batch size takes its steps, so that a load that lasts slows all of them, and
cancels in their ratios.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from sweep.config.arms import Arm
from sweep.config.trial import TrialConfig
from sweep.data.tokens import find_prepared
from sweep.plan.course import Course
from sweep.plan.rounds import TimingRequest, choose_steps, order_of_round, rounds_within
from sweep.training import device as machine
from sweep.training.attempt import build_step, configure_torch
from sweep.training.step import TrainingStep
from sweep.trial.timing import LEAST_CPU_SHARE, TOO_SHORT, ArmTimes, Timing

LEARNING_RATE = 1e-9  # the weights stay as they are, so that no step diverges
TASKS = Path("/proc/self/task")


@dataclass
class CpuUsage:
    """Seconds in which the threads of this process ran, and in which they waited to run."""

    ran: float = 0.0
    waited: float = 0.0
    is_known: bool = True

    @property
    def share(self) -> float | None:
        """The share of the time in which threads wanted to run that they ran; None: not known."""
        if not self.is_known or self.ran == 0:
            return None
        return self.ran / (self.ran + self.waited)

    def add(
        self, before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]
    ) -> None:
        """Add what happened between two readings of `read_threads`."""
        if not before or not after:
            self.is_known = False
        for thread, (ran, waited) in after.items():
            ran_before, waited_before = before.get(thread, (0, 0))
            self.ran += (ran - ran_before) / 1e9
            self.waited += (waited - waited_before) / 1e9


def read_threads() -> dict[int, tuple[int, int]]:
    """Return the nanoseconds that each thread has run, and waited to run; empty if not known.

    Linux counts them. A thread that the kernel or a limit of its cgroup keeps from running waits;
    one that sleeps does not.
    """
    times: dict[int, tuple[int, int]] = {}
    for path in TASKS.glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # the thread has ended
            ran, waited, _ = path.read_text().split()
            times[int(path.parent.name)] = int(ran), int(waited)
    return times


@dataclass
class ArmTimer:
    """Takes and times the steps of one arm. Arms with the same optimizer share the `step`."""

    arm: Arm
    config: TrialConfig
    step: TrainingStep
    has_real_batches: bool
    seconds_compile: float | None = None
    rounds: list[float] = field(default_factory=list)  # seconds per step
    usage: CpuUsage = field(default_factory=CpuUsage)
    steps_taken: int = 0

    def compile(self, seconds_of_graphs: dict[tuple[int, int], float]) -> None:
        """Compile the microbatch, unless another arm has; enter the seconds by step and size."""
        if not self.config.execution.compile:
            return
        size = self.config.microbatch_size
        key = id(self.step), size
        if key not in seconds_of_graphs:
            self.step.microbatch_size = size
            start = time.perf_counter()
            self.step.warm_up()
            self._wait()
            seconds_of_graphs[key] = time.perf_counter() - start
        self.seconds_compile = seconds_of_graphs[key]

    def time_round(self, steps: int) -> None:
        before = read_threads()
        seconds = self.take(steps)
        self.usage.add(before, read_threads())
        self.rounds.append(seconds / steps)

    def take(self, steps: int) -> float:
        """Take the next steps of the arm's own stream; return the seconds of all of them."""
        course = Course.of_trial(self.config)
        workload = self.step.workload
        self.step.microbatch_size = self.config.microbatch_size
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.steps_taken += 1
            count = course.batch_at(self.steps_taken)
            if self.has_real_batches:
                batch = workload.build_batch(course.first_sequence(self.steps_taken), count)
            else:
                batch = workload.random_batch(count)
            self.step(batch, LEARNING_RATE)
        self._wait()
        seconds = time.perf_counter() - start
        workload.meter.clear()
        return seconds

    def _wait(self) -> None:
        """Wait until the device has done what it was asked to."""
        if self.step.device.type != "cpu":
            torch.accelerator.synchronize(self.step.device)

    def result(self, steps_per_round: int) -> ArmTimes:
        share = self.usage.share
        return ArmTimes(
            optimizer=self.arm.optimizer,
            batch_size=self.arm.batch_size,
            microbatch_size=self.config.microbatch_size,
            steps_per_round=steps_per_round,
            seconds_per_step=tuple(self.rounds),
            seconds_compile=self.seconds_compile,
            cpu_share=share,
            is_loaded=None if share is None else share < LEAST_CPU_SHARE,
        )


def measure_times(request: TimingRequest) -> Timing:
    """Time the steps of these arms on one model, in this process.

    The memory needed is that of the largest trial, with the states of each further optimizer.
    """
    configs = request.configs
    config = next(iter(configs.values()))
    device = machine.use_device(config.execution.device)
    compiles = config.execution.compile and machine.has_compiler(device.type)
    runnable = {arm: _without_start(each, compiles) for arm, each in configs.items()}
    configure_torch(config, device)
    if compiles:  # a graph of each microbatch, each with as many recompilations as in training
        torch.compiler.config.recompile_limit *= len(configs)

    with machine.LimitedMemory(device, config.execution.device_memory_bytes):
        timers = list(_build_timers(runnable, device))
        steps, timed = _measure(timers, request)
        return Timing(
            sweep_uid=request.sweep_uid,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            device=machine.device_name(device),
            execution=timers[0].config.execution.model_dump(mode="json"),
            precision=config.science.precision,
            model=config.science.model.name,
            parameters=timers[0].step.parameter_count,
            tokens_per_sequence=config.tokens_per_sequence,
            workload=config.science.workload.name,
            optimizers=tuple(
                dict.fromkeys(each.science.optimizer.name for each in configs.values())
            ),
            torch_version=torch.__version__,
            has_real_batches=timers[0].has_real_batches,
            rounds=timed,
            rounds_needed=request.rounds_needed,
            reason="" if timed else TOO_SHORT,
            seconds_evaluation=_time_evaluation(timers[0]) if request.evaluates else None,
            arms=tuple(timer.result(count) for timer, count in zip(timers, steps, strict=True)),
        )


def _without_start(config: TrialConfig, compiles: bool) -> TrialConfig:
    """Return a config that needs no weights, unless what it samples depends on them."""
    science = config.science
    if not science.workload.samples:
        science = science.model_copy(update={"start": None})
    config = config.with_microbatch(config.microbatch_size, compile=compiles)
    return config.model_copy(update={"science": science})


def _build_timers(configs: Mapping[Arm, TrialConfig], device: torch.device) -> Iterator[ArmTimer]:
    """Build one model, a step function for each optimizer, and a timer for each arm."""
    steps: dict[str, TrainingStep] = {}
    for arm, config in configs.items():
        science = config.science
        name = science.optimizer.name
        if name not in steps:
            model = next((step.model for step in steps.values()), None)
            steps[name] = build_step(config, device, model)
        tokenizer = science.tokenizer
        has_real_batches = True
        if science.data is not None and tokenizer is not None:
            has_real_batches = find_prepared(science.data, tokenizer) is not None
        yield ArmTimer(arm, config, steps[name], has_real_batches)


def _measure(timers: Sequence[ArmTimer], request: TimingRequest) -> tuple[list[int], int]:
    """Time the rounds; return the steps of each arm in a round, and the number of rounds."""
    deadline = request.deadline
    seconds = _warm_up(timers, deadline)
    left = deadline - time.monotonic()
    wanted = rounds_within(seconds, request.rounds, request.seconds_per_arm * len(timers))
    rounds = rounds_within(seconds, max(request.rounds_needed, wanted), left)
    if not rounds:
        return [0] * len(timers), 0
    steps = choose_steps(seconds, rounds, request.seconds_per_arm, left)

    longest = 0.0
    for number in range(rounds):
        start = time.monotonic()
        if start + longest > deadline:
            return steps, number
        for index in order_of_round(len(timers), number):
            timers[index].time_round(steps[index])
        longest = max(longest, time.monotonic() - start)
    return steps, rounds


def _warm_up(timers: Sequence[ArmTimer], deadline: float) -> list[float]:
    """Return the seconds of a step of each arm; infinite for one that the deadline left out."""
    graphs: dict[tuple[int, int], float] = {}  # seconds of compilation by step and microbatch
    seconds = []
    for timer in timers:
        if time.monotonic() > deadline:
            seconds.append(math.inf)
            continue
        timer.compile(graphs)
        timer.take(timer.step.warm_up_steps)  # allocate, also the states of the optimizer
        seconds.append(timer.take(1))
    return seconds


def _time_evaluation(timer: ArmTimer) -> float | None:
    """Return the seconds of an evaluation at a milestone; None without the sweep's data."""
    if not timer.has_real_batches:
        return None
    start = time.perf_counter()
    timer.step.run_evaluation(timer.step.workload.evaluate_metrics)
    return time.perf_counter() - start
