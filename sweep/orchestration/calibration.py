"""Estimate training time: seconds per step as a line in the batch size.

The line is fitted to the complete trials of the sweep, or else to trials that this machine trained
before (kept in the cache by device, model, precision and threads), or else to one short
measurement. Estimates from different sources are never mixed in one plan.
"""

import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.config.paths import cache_dir
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.orchestration.jobs import run_job
from sweep.plan.plan import Plan
from sweep.trial.files import read_json, sha256_of, write_json
from sweep.trial.folder import SweepFolder

# Settings of the execution that change how long a step takes.
TIMED = {
    *("device", "devices", "zero", "strategy", "threads", "compile"),
    "activation_checkpointing",
}
MEASURED_SEQUENCES = 4
MEASURED_SECONDS = 5.0
LEAST_SECONDS = 2.0  # shorter trials are not remembered
UNCERTAIN = 2.0  # factor of uncertainty of a short measurement, or of a single batch size


@dataclass(frozen=True)
class StepTime:
    """Seconds per step at batch size B: per_step + per_sequence · B.

    Attributes:
        per_step: seconds.
        per_sequence: seconds.
        factor: largest ratio between a measurement and the line, at least 1.
        overhead: seconds per trial outside of training; None if unknown.
    """

    per_step: float
    per_sequence: float
    factor: float = UNCERTAIN
    overhead: float | None = None

    def at(self, batch_size: int) -> float:
        """Return seconds per step."""
        return self.per_step + self.per_sequence * batch_size


def fit_step_time(seconds: Mapping[int, float], overhead: float | None = None) -> StepTime:
    """Fit seconds per step by batch size, minimizing relative errors, with no negative part."""
    import numpy as np

    sizes, times = np.array([*seconds]), np.array([*seconds.values()])
    columns = np.stack([1 / times, sizes / times], axis=1)  # fitted to 1
    (per_step, per_sequence), *_ = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)
    if len(sizes) == 1 or per_step < 0:
        column = columns[:, 1]
        per_step, per_sequence = 0.0, column.sum() / (column @ column)
    elif per_sequence < 0:
        column = columns[:, 0]
        per_step, per_sequence = column.sum() / (column @ column), 0.0
    line = per_step + per_sequence * sizes
    factor = float(np.maximum(line / times, times / line).max())
    if len(sizes) == 1:
        factor = UNCERTAIN
    return StepTime(float(per_step), float(per_sequence), factor, overhead)


def estimate_seconds(plan: Plan, folder: SweepFolder) -> tuple[dict[tuple[int, int], float], float]:
    """Estimate the seconds of each trial.

    Args:
        plan: with absolute paths.
        folder: of the sweep.

    Returns:
        Seconds by batch size and tokens, {} if nothing is known, and the factor of uncertainty.
    """
    line = _step_time(plan, folder)
    if line is None:
        return {}, UNCERTAIN
    evaluation = plan.settings.evaluation
    sequences = (evaluation.sequences or 0) * (evaluation.points + 4)
    forward = line.per_sequence / 3  # a forward pass is a third of a step
    seconds = {}
    for row in plan.trials:
        overhead = line.overhead
        if overhead is None:
            overhead = sequences * forward / row.devices
        seconds[row.batch_size, row.tokens] = row.steps * line.at(row.batch_size) + overhead
    return seconds, line.factor


def _step_time(plan: Plan, folder: SweepFolder) -> StepTime | None:
    complete = _complete_trials(plan, folder)
    if complete:
        overhead = statistics.median(r["seconds_total"] - r["seconds_training"] for r in complete)
        by_batch: dict[int, list[float]] = {}
        for result in complete:
            seconds = result["seconds_training"] / result["steps"]
            by_batch.setdefault(result["batch_size"], []).append(seconds)
        return fit_step_time({b: statistics.median(s) for b, s in by_batch.items()}, overhead)
    path = _calibration_path(plan)
    stored = _load(path)
    if trials := stored.get("seconds_per_step"):
        return fit_step_time({int(batch): seconds for batch, seconds in trials.items()})
    if "measured" not in stored:
        row = max(plan.trials, key=lambda row: row.batch_size)
        try:
            stored["measured"] = run_job(time_one_step, plan.sample_config(row), seconds=60)
        except SweepError:  # a step that cannot run here
            return None
        _save(path, stored)
    measured = stored["measured"]
    per_sequence = measured["seconds_per_sequence"] / plan.execution.devices
    return StepTime(measured["seconds_per_update"], per_sequence)


def _complete_trials(plan: Plan, folder: SweepFolder) -> list[dict[str, Any]]:
    results = (folder.trial(str(row.id)).read_result() for row in plan.known_trials)
    return [r for r in results if r and r["state"] == "COMPLETE" and r["seconds_training"]]


def record_measurement(plan: Plan, result: dict[str, Any]) -> None:
    """Remember how long a step of a finished trial took, for later plans on this machine."""
    path, seconds = _calibration_path(plan), result["seconds_training"]
    if seconds >= LEAST_SECONDS:
        stored = _load(path)
        trials = stored.get("seconds_per_step", {})
        per_step = {**trials, str(result["batch_size"]): seconds / result["steps"]}
        _save(path, {**stored, "seconds_per_step": per_step})


def _calibration_path(plan: Plan) -> Path:
    settings = plan.settings
    key = {
        "machine": [platform.node(), platform.processor(), platform.machine()],
        "execution": plan.execution.model_dump(mode="json", include=TIMED),
        "science": settings.model_dump(
            mode="json", include={"model", "workload", "precision", "grpo"}
        ),
        "code": plan.code,
    }
    return cache_dir() / "calibration" / f"{sha256_of(key)[:16]}.json"


def _load(path: Path) -> dict[str, Any]:
    try:
        return {k: v for k, v in read_json(path).items() if k != "format_version"}
    except (OSError, SweepError):
        return {}


def _save(path: Path, calibration: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, calibration)
    except OSError:
        return  # without a writable cache every plan measures again


def time_one_step(config: TrialConfig, should_stop: object) -> dict[str, float]:
    """Return seconds of a forward-backward per sequence, and of an optimizer update.

    A workload that samples is timed with two groups, because sampling one completion takes nearly
    as long as sampling several.
    """
    import torch

    from sweep.training.step import TrainingStep

    torch.set_num_threads(config.execution.threads)
    execution = config.execution.model_copy(update={"compile": False})
    samples = config.science.traits.samples
    most = 2 * config.group_size if samples else MEASURED_SEQUENCES
    eager = config.model_copy(update={"execution": execution})
    step = TrainingStep(eager, torch.device(execution.device), most)

    def seconds(sequences: int) -> float:
        batch = step.workload.random_batch(sequences)
        start = time.perf_counter()
        batch = step.rolled_out(batch)
        for _ in range(step.rollouts.updates_per_step if step.rollouts else 1):
            step.backward(batch).item()
        return time.perf_counter() - start

    first, deadline = seconds(1), time.perf_counter() + MEASURED_SECONDS
    count = most if first * most < MEASURED_SECONDS / 2 or samples else 1
    timings = [seconds(count)]
    while len(timings) < 3 and time.perf_counter() + timings[0] < deadline:
        timings.append(seconds(count))
    update = 0.0
    for _ in range(2):  # the first update allocates
        start = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(step.parameters, 1.0).item()
        if step.optimizer is not None:
            step.optimizer.step()
        update = time.perf_counter() - start
    return {"seconds_per_sequence": min(timings) / count, "seconds_per_update": update}
