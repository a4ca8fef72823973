"""Train by a command: start it, check what it reports, and judge how it ended.

Its processes belong to the process group of the attempt, and end with it.
"""

import contextlib
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from sweep.config import sha256_of_file
from sweep.config.command import fill_placeholders
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.training import device as machine
from sweep.training.checkpoint import CheckpointStore, Progress
from sweep.training.process import ShouldStop, oom_kills
from sweep.trial import watchdog
from sweep.trial.files import load_json, replacing
from sweep.trial.folder import TrialFolder, TrialStatus

POLL_SECONDS = 0.2
SAVE_SECONDS = 5.0  # between two copies of the report
GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL
END_BYTES = 1 << 14  # of the output, searched for the reason of a failure
MOST_POINTS = 1000  # lines without a validation value that are kept
METRIC = re.compile(r"[A-Za-z]\w*(/[\w.-]+)+")
SECONDS, RATE = "perf/seconds", "perf/tokens_per_second"  # since the start of the training


class Report:
    """The lines that a command appends to its log, checked, and their copy in metrics.jsonl."""

    def __init__(self, config: TrialConfig, folder: TrialFolder) -> None:
        """Read the lines of earlier attempts, of which a resumed command repeats the last."""
        self.config, self.folder = config, folder
        self.lines: dict[int, dict[str, Any]] = {}  # by step, ascending
        self.is_diverged = False
        with folder.reported_path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # a killed command may leave half a line
        self._offset, self._start = 0, math.inf
        self._marked_at = time.perf_counter()  # when the newest line was read
        self.read()
        self._start = self._offset  # of the lines of this attempt
        for line in folder.find_metrics():
            if line["step"] in self.lines:
                self.lines[line["step"]] |= {key: line[key] for key in ("time", SECONDS, RATE)}

    @property
    def step(self) -> int:
        return next(reversed(self.lines), 0)

    @property
    def seconds(self) -> float:
        """The time of the training; of steps that were repeated, only that of the last time."""
        last = self.lines[self.step][SECONDS] if self.lines else 0.0
        return float(last) + time.perf_counter() - self._marked_at

    def read(self) -> bool:
        """Read the new complete lines; return True if there are any."""
        with self.folder.reported_path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        for text in complete.splitlines(keepends=True):
            if text.strip():
                self._add(*self._parse(text))
            self._offset += len(text)
        return bool(complete)

    def save(self, store: CheckpointStore) -> str:
        """Write metrics.jsonl; return its sha256."""
        text = "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in self.lines.values())
        with replacing(self.folder.metrics_path, store.check) as part:
            part.write_text(text)
        return sha256_of_file(self.folder.metrics_path)

    def final_metrics(self) -> dict[str, float]:
        """Return the validation metrics of the last step, by name."""
        steps, curve = self.config.steps, self.config.objective_curve
        last = self.lines.get(steps, {})
        if curve not in last:
            raise SweepError(
                f"the command must report {curve} at step {steps}, its last, got "
                f"{len(self.lines)} lines up to step {self.step}. Let it take all steps, and "
                "evaluate after the last one."
            )
        names = [name for name in last if name.startswith("valid/")]
        return {name.removeprefix("valid/"): last[name] for name in names}

    def _parse(self, text: bytes) -> tuple[int, dict[str, float | None]]:
        """Return the step and the metrics of a line; None replaces values that are not finite."""
        batch, sequence = self.config.science.batch_size, self.config.tokens_per_sequence
        wrong = f"each line of the log must {{}}, got {text.decode(errors='replace')[:200]!r}."
        try:
            line = load_json(text)
        except ValueError as error:
            raise SweepError(wrong.format("be a JSON object")) from error
        step = line.pop("step", None)
        if type(step) is not int or not 0 <= step <= self.config.steps:
            raise SweepError(wrong.format(f"have a step of at most {self.config.steps}"))
        for name, count in (("tokens", step * batch * sequence), ("examples", step * batch)):
            if line.pop(name, count) != count:
                factors = f"{step} × {batch}" + f" × {sequence}" * (name == "tokens")
                raise SweepError(wrong.format(f"count {count} {name} ({factors})"))
        line.pop("time", None)
        for name, value in line.items():
            is_number = type(value) in (int, float, type(None))
            if not is_number or not METRIC.fullmatch(name):
                raise SweepError(wrong.format("hold numbers, by names such as train/loss"))
            if value is None or not math.isfinite(value):
                losses = ("train/loss", "valid/loss", self.config.objective_curve)
                self.is_diverged |= name in losses
                line[name] = None
        return step, line

    def _add(self, step: int, metrics: dict[str, float | None]) -> None:
        if step < self.step:
            if self._offset > self._start:
                raise SweepError(f"the steps in the log must ascend, got {step} after {self.step}.")
            self.lines = {number: self.lines[number] for number in self.lines if number < step}
        if step not in self.lines:
            tokens = step * self.config.science.batch_size * self.config.tokens_per_sequence
            seconds, last = self.seconds, self.lines.get(self.step, {})
            self._marked_at = time.perf_counter()
            is_near = last and (step - 1) * MOST_POINTS // self.config.steps == (
                (self.step - 1) * MOST_POINTS // self.config.steps
            )
            if is_near and not any(name.startswith("valid/") for name in last):
                del self.lines[self.step]
            position = {"time": round(time.time(), 3), "step": step, "tokens": tokens}
            self.lines[step] = position | {SECONDS: seconds, RATE: tokens / max(seconds, 1e-9)}
        self.lines[step] |= metrics


class Ended(NamedTuple):
    ending: str  # trained, diverged, paused, or what `should_stop` answered
    progress: Progress
    metrics: dict[str, float]  # of the validation after the last step
    metrics_sha256: str
    peak_memory_bytes: int | None  # of the largest process, on a CPU; None: not known


def run_command(
    config: TrialConfig, status: TrialStatus, store: CheckpointStore, should_stop: ShouldStop
) -> Ended:
    """Run a trial's command to its end, or kill it at `status.pause_step`, for `sweep check`.

    Raises:
        SweepError: if the command fails, by a MemoryError if memory ran out, or misreports.
    """
    assert os.getpgrp() == os.getpid(), "an attempt leads its process group"
    folder, pause_step = store.folder, status.pause_step
    if not config.science.passes("resume"):
        folder.clear()
    folder.work_path.mkdir(exist_ok=True)
    report, killed_before, saved_at = Report(config, folder), oom_kills(), time.monotonic()
    process, log_start = _start(config, folder, status.attempts)
    ending = None
    try:
        while ending is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS if pause_step is None else POLL_SECONDS / 20)
            has_ended = process.returncode is not None  # before its last lines are read
            if report.read():
                watchdog.progress()
            if report.is_diverged:
                ending = "diverged"
            elif has_ended:
                ending = "trained"
            elif pause_step is not None and report.step >= pause_step:
                process.kill()
                ending = "paused"
            else:
                ending = should_stop()
            if time.monotonic() - saved_at > SAVE_SECONDS:
                report.save(store)
                saved_at = time.monotonic()
    finally:
        _stop(process)
    metrics_sha256, seconds = report.save(store), report.seconds
    if ending == "trained" and process.returncode:
        oom_killed = oom_kills() > killed_before
        raise _failure(process.returncode, oom_killed, folder.log_path, log_start)
    metrics = report.final_metrics() if ending == "trained" else {}
    progress = Progress(report.step, seconds_training=seconds, seconds_total=seconds)
    peak = machine.peak_resident_bytes(resource.RUSAGE_CHILDREN)
    # A child counts the memory of the process that started it.
    is_known = config.execution.device == "cpu" and peak > machine.peak_resident_bytes()
    return Ended(ending, progress, metrics, metrics_sha256, peak if is_known else None)


def _start(
    config: TrialConfig, folder: TrialFolder, attempt: int
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the command; return it, and where its output starts in the log."""
    science, execution, size = config.science, config.execution, config.microbatch_size
    values: dict[str, object] = {
        **science.model_dump(include={"batch_size", "learning_rate", "seed", "tokens"}),
        **science.optimizer.model_dump(include={"beta2", "weight_decay"}),
        **config.model_dump(include={"steps", "warmup_steps", "microbatch_size"}),
        "examples": config.steps * science.batch_size,
        "accumulation": science.batch_size // (size * execution.devices),
        "device": execution.device,
        "log": folder.reported_path.absolute(),
        "folder": folder.work_path.absolute(),
        "resume": folder.resume_path.absolute(),
    }
    environment = os.environ | {
        "OMP_NUM_THREADS": str(execution.threads),
        "PYTHONUNBUFFERED": "1",  # so that an error is the last line of the log
        "SWEEP_LOG": str(values["log"]),
    }
    if execution.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    words = fill_placeholders(str(science.command), values)
    print(f"attempt {attempt}: {shlex.join(words)}", flush=True)
    with folder.log_path.open("ab") as log:
        start, stdin = log.tell(), subprocess.DEVNULL
        return subprocess.Popen(words, stdin=stdin, stdout=log, stderr=log, env=environment), start


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs: SIGTERM to its group, later SIGKILL."""
    if process.poll() is None:
        os.killpg(0, signal.SIGTERM)  # this process only takes note
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(code: int, oom_killed: bool, log: Path, log_start: int) -> SweepError:
    """Describe a command that failed by its exit code and the end of its output in the log."""
    with log.open("rb") as file:
        file.seek(max(log_start, log.stat().st_size - END_BYTES))
        end = file.read().decode(errors="replace").strip()
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last_line = end.rpartition("\n")[2]
    error = SweepError(f"the command ended with {how} (log: {log}): {last_line}")
    is_killed = oom_killed and code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if is_killed or re.search(machine.NO_MEMORY, end):
        error.__cause__ = MemoryError()
    return error
