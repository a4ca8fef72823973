"""Train by a command: start it, check what it reports, and judge how it ended."""

import contextlib
import itertools
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sweep.config.metrics import SECONDS, MetricNames, check_reported_name
from sweep.config.trial import TrialConfig
from sweep.config.workloads import Program
from sweep.errors import SweepError, reason_of
from sweep.plan.course import Course
from sweep.resources import sha256_of_file
from sweep.training import device as machine
from sweep.training.checkpoint import CheckpointStore, Progress
from sweep.training.process import ShouldStop, oom_kills
from sweep.trial import watchdog
from sweep.trial.files import check_curve_bytes, load_json, replacing
from sweep.trial.folder import TrialFolder
from sweep.usercode.commands import fill_placeholders
from sweep.usercode.identity import check_code
from sweep.usercode.objects import use_code_folder
from sweep.usercode.readers import Places, build_reader

POLL_SECONDS = 0.02
READ_SECONDS = 0.5  # between two looks of a reader
SAVE_SECONDS = 5.0  # between two copies of the report
GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL
END_BYTES = 1 << 14  # size of the end of the output, which may name the reason of a failure
MAX_LINE_BYTES = 1 << 20  # longest line of the log
# Parts of the steps; each keeps its last line with a validation value, and its last one without.
MOST_POINTS = 1000
METRIC = re.compile(r"[A-Za-z]\w*(/[\w.-]+)+")
RATE = "perf/tokens_per_second"  # since the start of the training
PARTS = ("compile", "evaluation", "checkpoint", "noise")  # whose time is not measured


class Report:
    """The lines that a command appends to its log, and their copy in metrics.jsonl.

    A command that resumes from its checkpoint reports some steps again, which replaces their lines.
    """

    def __init__(self, config: TrialConfig, store: CheckpointStore) -> None:
        """Read the lines of earlier attempts; cut the log at the first wrong or incomplete line."""
        self.config = config
        self.store = store
        self._course = Course.of_trial(config)
        path = store.folder.reported_path
        self.lines: dict[int, dict[str, Any]] = {}  # by step, ascending
        self.left_out = 0  # steps whose lines are not kept
        self._names = MetricNames()
        self.is_diverged = False
        self._read_bytes = self._read_lines = 0
        self._file = path.open("a+b")  # creates the file
        self._read_at = self._saved_at = time.monotonic()
        self._earlier = {line["step"]: line for line in store.folder.find_metrics()}
        with contextlib.suppress(SweepError):  # a wrong line, which failed an earlier attempt
            self.read()
        os.truncate(path, self._read_bytes)
        self._earlier.clear()

    @property
    def step(self) -> int:
        return next(reversed(self.lines), 0)

    @property
    def seconds(self) -> float:
        """The time of the training, without that of steps that were repeated."""
        before = self.lines[self.step][SECONDS] if self.lines else 0.0
        return float(before) + time.monotonic() - self._read_at

    def _take_seconds(self) -> float:
        """Return `seconds`, and let the time until the next line begin now."""
        seconds = self.seconds
        self._read_at = time.monotonic()
        return seconds

    def read(self) -> bool:
        """Read the new lines; return True if there are any."""
        start = self._read_bytes
        self._file.seek(start)
        for text in iter(partial(self._file.readline, MAX_LINE_BYTES), b""):
            if not text.endswith(b"\n"):
                if len(text) == MAX_LINE_BYTES:
                    raise _wrong_line(
                        f"have less than {MAX_LINE_BYTES >> 20} MiB",
                        text=text,
                        number=self._read_lines + 1,
                    )
                break
            self._add(*self._parse(text))
            self._read_bytes += len(text)
            self._read_lines += 1
        if time.monotonic() - self._saved_at > SAVE_SECONDS:
            self.save()
        return self._read_bytes > start

    def save(self) -> str:
        """Write metrics.jsonl, with the time until now in its newest line; return its sha256."""
        if self.lines:
            self.lines[self.step][SECONDS] = self._take_seconds()
        self._saved_at = time.monotonic()

        text = "".join(f"{json.dumps(line)}\n" for line in self.lines.values())
        check_curve_bytes(len(text))  # the text is ASCII
        path = self.store.folder.metrics_path
        with replacing(path, self.store.fence) as part:
            part.write_text(text)
        return sha256_of_file(path)

    def final_metrics(self) -> dict[str, float]:
        """Return the validation metrics of the last step, by name."""
        steps = self.config.steps
        curve = self.config.objective_curve
        last = self.lines.get(steps, {})
        if curve not in last:
            names = {*self.lines.get(self.step, ())} - {"time", "step", "tokens", SECONDS, RATE}
            reported = ", ".join(sorted(names)) if names else "nothing"
            raise SweepError(
                f"the command must report {curve} at its last step, {steps}, but ended after step "
                f"{self.step} with {reported} in its log. Let it take "
                "all steps, evaluate at the end, and report: append to {log}, or call sweep.log."
            )

        metrics = {}
        for name, value in last.items():
            if name.startswith("valid/"):
                metrics[name.removeprefix("valid/")] = value
        return metrics

    def _parse(self, text: bytes) -> tuple[int, dict[str, float | None]]:
        """Return the step and the metrics of a line; None replaces values that are not finite."""
        wrong = partial(_wrong_line, text=text, number=self._read_lines + 1)
        try:
            line = load_json(text)
        except ValueError as error:
            reason = reason_of(error).replace("line 1 column", "column")
            raise wrong("be a JSON object", f" ({reason})") from error

        step = line.pop("step", None)
        if type(step) is not int or not 0 <= step <= self.config.steps:
            raise wrong(f'have a "step", a number of optimizer steps up to {self.config.steps}')

        tokens = self._course.tokens_at(step)
        if line.pop("tokens", tokens) != tokens:
            factors = f"{step} × {self._course.batch_size} × {self._course.tokens_per_sequence}"
            raise wrong(f"count {tokens} tokens ({factors})")
        examples = self._course.sequences_at(step)
        if line.pop("examples", examples) != examples:
            raise wrong(f"count {examples} examples ({step} × {self._course.batch_size})")

        line.pop("time", None)
        for name, value in line.items():
            if type(value) not in (int, float, type(None)) or not METRIC.fullmatch(name):
                raise wrong("hold numbers, by names such as train/loss")
            check_reported_name(name)
            self._names.add(name)
            if value is None or not math.isfinite(value):
                losses = ("train/loss", "valid/loss", self.config.objective_curve)
                self.is_diverged |= name in losses
                line[name] = None
        return step, line

    def _add(self, step: int, metrics: dict[str, float | None]) -> None:
        if step < self.step:
            self.lines = {number: line for number, line in self.lines.items() if number < step}
        if step not in self.lines:
            seconds = self._take_seconds()
            self._thin(step)
            self.lines[step] = self._begin_line(step, seconds)
        self.lines[step] |= metrics

    def _begin_line(self, step: int, seconds: float) -> dict[str, Any]:
        """Return a line without metrics: as an earlier attempt wrote it, or of now."""
        tokens = self._course.tokens_at(step)
        line = {
            "time": round(time.time(), 3),
            "step": step,
            "tokens": tokens,
            SECONDS: seconds,
            RATE: tokens / max(seconds, 1e-9),
        }
        earlier = self._earlier.get(step, {})
        for key in line:
            if key in earlier:
                line[key] = earlier[key]
        return line

    def _thin(self, next_step: int) -> None:
        """Drop the line that the newest one replaces, now that all of its metrics are there.

        The steps are divided into parts. Each keeps its last line of each kind.
        """
        if not self.lines:
            return
        newest = self.step
        if not self._is_validation(newest):
            if self._part(newest) == self._part(next_step):
                self._leave_out(newest)
            return
        for step in itertools.islice(reversed(self.lines), 1, None):
            if self._part(step) != self._part(newest):
                break
            if self._is_validation(step):
                self._leave_out(step)
                break

    def _leave_out(self, step: int) -> None:
        self.lines.pop(step)
        self.left_out += 1

    def _part(self, step: int) -> int:
        return -(-step * MOST_POINTS // self.config.steps)

    def _is_validation(self, step: int) -> bool:
        return any(name.startswith("valid/") for name in self.lines[step])


def _wrong_line(requirement: str, reason: str = "", *, text: bytes, number: int) -> SweepError:
    line = text.decode(errors="replace").strip()
    problem = f"must {requirement}, got {line!r} in line {number}{reason}"
    return SweepError(f"each line of the log {problem}.")


def run_command(
    config: TrialConfig, store: CheckpointStore, should_stop: ShouldStop
) -> tuple[str, Progress, dict[str, float], str]:
    """Run a trial's command; return the ending, the progress, the final metrics by name, and the
    sha256 of metrics.jsonl.

    Raises:
        SweepError: if the command fails (caused by MemoryError if memory ran out) or misreports.
    """
    folder = store.folder
    if not config.science.workload.can_resume:
        folder.clear()
    folder.work_path.mkdir(exist_ok=True)
    use_code_folder(config.code_path)
    check_code(config.science.user_code, config.science.code or {})

    report = Report(config, store)
    killed_before = oom_kills()
    ending = None
    process, log_start = _start(config, folder)
    copier = _Copier(config, folder, log_start)
    try:
        while ending is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
            has_ended = process.returncode is not None  # before its last lines are read
            copier.copy(is_last=has_ended)
            if report.read():
                watchdog.progress()
            if report.is_diverged:
                ending = "diverged"
            else:
                ending = "trained" if has_ended else should_stop()
    finally:
        _stop(process)

    metrics_sha256 = report.save()
    seconds = report.seconds
    if report.left_out:
        kept = f"each of {MOST_POINTS} parts keeps its last with, and without, validation metrics"
        print(f"the curve leaves out {report.left_out} reported steps: {kept}", flush=True)
    if ending == "trained" and process.returncode:
        oom_killed = oom_kills() > killed_before
        raise _failure(process.returncode, oom_killed, folder.log_path, log_start)
    copier.describe()

    progress = Progress(report.step, seconds_training=seconds, seconds_total=seconds)
    unknown = ("clipped_steps", *(f"seconds_{part}" for part in PARTS))
    vars(progress).update(dict.fromkeys(unknown, math.nan))

    cpu = torch.device("cpu")
    peak = machine.peak_memory_bytes(cpu, resource.RUSAGE_CHILDREN)
    # A child counts the memory of the process that started it.
    if config.execution.device == "cpu" and peak > machine.peak_memory_bytes(cpu):
        progress.peak_memory_bytes = peak

    metrics = report.final_metrics() if ending == "trained" else {}
    return ending, progress, metrics, metrics_sha256


class _Copier:
    """Appends to the log what the reader of --read finds; does nothing without one."""

    def __init__(self, config: TrialConfig, folder: TrialFolder, log_start: int) -> None:
        self.log = folder.reported_path
        self.reader = None
        self.read_at = 0.0
        reader = program_of(config).reader
        if reader is not None:
            folders = (folder.work_path, folder.resume_path)
            self.reader = build_reader(reader, Places(folders, folder.log_path, log_start))

    def copy(self, is_last: bool) -> None:
        """Append the new lines, at most twice a second."""
        if self.reader is None or not (is_last or time.monotonic() > self.read_at + READ_SECONDS):
            return
        self.read_at = time.monotonic()
        with self.log.open("a") as log:
            for line in self.reader.read(is_last):
                log.write(json.dumps(line) + "\n")

    def describe(self) -> None:
        if self.reader is not None:
            print(self.reader.describe(), flush=True)


def program_of(config: TrialConfig) -> Program:
    """Return the workload of a trial whose training is a program of the user."""
    assert isinstance(config.science.workload, Program)
    return config.science.workload


def values_of_trial(config: TrialConfig, folder: TrialFolder) -> dict[str, Any]:
    """Return the values that a program of the user may read, by the names of placeholders."""
    science = config.science
    course = Course.of_trial(config)
    examples = course.sequences_at(config.steps)
    end = science.schedule.final_fraction if science.schedule.name == "cosine" else 1.0
    per_epoch = program_of(config).examples_per_epoch
    epochs = None
    if per_epoch is not None:
        whole, rest = divmod(examples, per_epoch)
        epochs = examples / per_epoch if rest else whole
    return {
        "batch_size": science.batch_size,
        "microbatch_size": config.microbatch_size,
        "accumulation": config.gradient_accumulation_steps,
        "steps": config.steps,
        "tokens": science.tokens,
        "examples": examples,
        "epochs": epochs,
        "eval_steps": course.steps_between_evaluations(),
        "learning_rate": science.learning_rate,
        "final_learning_rate": end * science.learning_rate,
        "warmup_steps": config.warmup_steps,
        "weight_decay": science.optimizer.weight_decay,
        "beta2": science.optimizer.beta2,
        "seed": science.seed,
        "device": config.execution.device_type,
        "log": str(folder.reported_path.absolute()),
        "folder": str(folder.work_path.absolute()),
        "resume": str(folder.resume_path.absolute()),
    }


def _start(config: TrialConfig, folder: TrialFolder) -> tuple[subprocess.Popen[bytes], int]:
    """Start a trial's program; return its process, and the length of the log before its output."""
    program = program_of(config)
    execution = config.execution
    values = values_of_trial(config, folder)
    in_script = {name: value for name, value in values.items() if name != "log"}
    environment = os.environ | {
        "OMP_NUM_THREADS": str(execution.threads),
        "PYTHONUNBUFFERED": "1",  # so that an error is the last line of the log
        "SWEEP_LOG": values["log"],
        "SWEEP_TRIAL": json.dumps(in_script),
    }
    if execution.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif ":" in execution.device:  # the command sees one GPU, so that cuda is that one
        environment["CUDA_VISIBLE_DEVICES"] = machine.visible_name(execution.device)

    if program.function is None:
        (command,) = program.code
        words = fill_placeholders(command, values)
    else:
        words = [sys.executable, "-P", "-m", "sweep.training", "--call", program.function]
        if config.code_path:
            words += ["--code-folder", os.path.abspath(config.code_path)]
    print(shlex.join(words), flush=True)
    with folder.log_path.open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    return process, start


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a command that runs: SIGTERM to the group that it shares with the attempt, then SIGKILL.

    The attempt only takes note of SIGTERM, and other processes of the group end with it.
    """
    assert os.getpgrp() == os.getpid(), "an attempt leads its process group"
    if process.poll() is None:
        os.killpg(0, signal.SIGTERM)
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
    last_line = end.rpartition("\n")[2] if end else "it printed nothing"
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    error = SweepError(f"the command ended {how} (log: {log}): {last_line}")

    is_killed = oom_killed and code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if is_killed or re.search(machine.NO_MEMORY, end):
        error.__cause__ = MemoryError()
    return error
