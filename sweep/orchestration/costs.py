"""Estimate what a plan costs: seconds, memory, epochs and disk here; makespan on a cluster."""

import contextlib
import heapq
import math
import os
import platform
import shutil
import statistics
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from sweep.config.numbers import format_bytes, parse_count
from sweep.config.trial import TrialConfig, tokenizer_of
from sweep.errors import SweepError
from sweep.memory.presets import forecast_rows
from sweep.orchestration.executors import attempt_slots
from sweep.orchestration.planning import Planned, read_request
from sweep.plan.plan import Plan
from sweep.training.process import run_job
from sweep.trial.files import cache_dir, read_json, sha256_of, write_json
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
            stored["measured"] = run_job(time_one_step, plan.trial_config(row), seconds=60)
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


# Before the text is tokenized.
BYTES_PER_TOKEN = {"bpe": 4.0, "bytes": 1.0, "pretrained": 4.0}
SMALL_TEXT = 1 << 22  # bytes
OVERHEAD_BYTES = 1 << 20  # curves, log, losses and MLflow, per trial


def plan_sweep(
    experiment: str = "tinystories", *, out: str | Path | None = None, **settings: Any
) -> Plan:
    """Plan a sweep; trains and writes nothing.

    Args:
        experiment: a shipped name or the path of a TOML file.
        out: the sweep's folder; if it has a plan, that plan grows.
        **settings: any setting of `sweep run` by name: budget, batches, model, lr, device, …

    Raises:
        SweepError: if this cannot be planned.
    """
    request = read_request(experiment, settings, out)
    return estimate(request.plan(), request.folder).command_rows()


def estimate(planned: Planned, folder: SweepFolder) -> Planned:
    """Fill in the estimates of a plan."""
    plan = planned.plan
    here = plan.located(folder)
    seconds, factor = estimate_seconds(here, folder)
    peaks = _forecast_bytes(here)
    rows = tuple(
        row.model_copy(
            update={
                "forecast_seconds": seconds.get((row.batch_size, row.tokens)),
                "forecast_bytes": peaks.get((row.batch_size, row.microbatch_size)),
            }
        )
        for row in plan.trials
    )
    epochs, is_exact = _epochs(plan, folder)
    slots = len(attempt_slots(plan.execution.device, plan.execution.devices)) or 1
    plan = plan.model_copy(
        update={
            "trials": rows,
            "forecast_factor": factor if seconds else None,
            "epochs": epochs,
            "epochs_are_estimated": not is_exact,
        }
    )
    return replace(planned, plan=with_disk(plan, slots))


def with_disk(plan: Plan, at_once: int) -> Plan:
    """Return the plan with the most bytes that it writes while `at_once` trials run at a time.

    A checkpoint has the weights and AdamW's two moments in float32; two are kept while a third is
    written.
    """
    parameters = plan.model["parameters"]
    if parameters is None:
        return plan
    weights, checkpoint = 4 * parameters, 12 * parameters
    kept = {"none": 0, "weights": weights, "checkpoints": weights + 2 * checkpoint}
    reports = sum(row.stage == "report" for row in plan.trials)
    running = min(at_once, len(plan.trials)) * 3 * checkpoint
    disk = running + reports * kept[plan.execution.keep] + len(plan.trials) * OVERHEAD_BYTES
    return plan.model_copy(update={"disk_bytes": disk})


def _epochs(plan: Plan, folder: SweepFolder) -> tuple[float | None, bool]:
    """Return the most epochs of a trial, and whether the tokens were counted."""
    from sweep.data.sources import estimate_training_bytes
    from sweep.data.tokens import find_prepared

    if plan.data is None:
        return None, False
    text = find_prepared(plan.data, tokenizer_of(plan.settings))
    if text is not None:
        tokens = len(text.train)
    elif size := estimate_training_bytes(plan.data, folder.locate(plan.data_path)):
        tokens = int(size / BYTES_PER_TOKEN[plan.settings.tokenizer])
    else:
        return None, False
    sequence = plan.tokens_per_sequence
    windows = max(1, (tokens - 1) // sequence)
    most = max(row.tokens for row in plan.trials)
    return float(Fraction(most, windows * sequence)), text is not None


def _forecast_bytes(plan: Plan) -> dict[tuple[int, int], int]:
    """Return peak bytes by batch and microbatch size; {} if they cannot be forecast."""
    rows = {(row.batch_size, row.microbatch_size): row for row in plan.trials}
    configs = [plan.trial_config(row) for row in rows.values()]
    try:
        forecasts = run_job(forecast_rows, configs)
    except SweepError:  # a user's model that fake tensors cannot run
        return {}
    return {key: forecast.peak_bytes for key, forecast in zip(rows, forecasts, strict=True)}


def is_quickly_prepared(plan: Plan, folder: SweepFolder) -> bool:
    """Return True if tokenizing takes a second or two."""
    from sweep.data.sources import estimate_training_bytes

    if plan.data is None:
        return True
    size = estimate_training_bytes(plan.data, folder.locate(plan.data_path))
    return size is not None and size <= SMALL_TEXT


def check_disk(plan: Plan, folder: SweepFolder) -> None:
    """Refuse a sweep that the disk has no room for."""
    existing = next(p for p in (folder.path, *folder.path.absolute().parents) if p.exists())
    free, written = shutil.disk_usage(existing).free, 0
    for parent, _, names in os.walk(folder.path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # attempts may be running
                written += os.stat(os.path.join(parent, name)).st_size
    needed = (plan.disk_bytes or 0) - written
    if needed > free:
        raise SweepError(
            f"the disk must have {format_bytes(needed)} free for this sweep, got "
            f"{format_bytes(free)} at {existing}. Free some, choose another --out, or --keep none."
        )


@dataclass(frozen=True)
class ClusterCost:
    """What a plan takes on a cluster whose devices are all held until the last trial ends."""

    devices: int
    trials: int  # that are still to run
    makespan_seconds: float
    device_hours: float  # of all devices, idle or not
    busy_device_hours: float
    price: float | None  # of the device-hours; None without --price

    def as_document(self) -> dict[str, Any]:
        """Return the JSON that `sweep plan --json` prints under "cluster"."""
        return asdict(self)


def parse_cluster(text: str) -> tuple[int, int]:
    """Read `nodes=16,gpus=8`, or `gpus=8` for one node; return nodes and GPUs per node.

    Raises:
        SweepError: if the text has another form.
    """
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    values = {name: value for name, _, value in parts}
    if len(values) < len(parts) or "gpus" not in values or values.keys() - {"nodes", "gpus"}:
        raise SweepError(
            f"cluster must be nodes=N,gpus=G, or gpus=G for one node, got {text!r}. Write it such "
            "as nodes=16,gpus=8."
        )
    nodes = parse_count(values.get("nodes", 1), "cluster: nodes")
    return nodes, parse_count(values["gpus"], "cluster: gpus")


def cost_on_cluster(
    plan: Plan,
    nodes: int,
    gpus: int,
    price_per_device_hour: float | None = None,
    finished: Collection[str] = (),
) -> ClusterCost:
    """Schedule a plan's unfinished trials, the longest first, and return what that takes.

    Each trial starts on the slot that is free first; this makespan is within 4/3 of the optimum
    (Graham 1969). Trials whose rate awaits tuning start after all tuning trials have ended.

    Args:
        plan: with its estimates; devices of the cluster count as equally fast.
        nodes: machines.
        gpus: devices per machine; a trial must fit on one machine.
        price_per_device_hour: in any currency.
        finished: ids of trials that will not run again.

    Raises:
        SweepError: if a trial does not fit on a node, or has no estimate.
    """
    if price_per_device_hour is not None and not 0 <= price_per_device_hour < math.inf:
        raise SweepError(f"price must be at least 0 and finite, got {price_per_device_hour}.")
    per_trial = plan.execution.devices
    if per_trial > gpus:
        raise SweepError(
            f"a trial must fit on one node of the cluster, got {per_trial} devices per trial and "
            f"gpus={gpus}. Use larger nodes, or fewer devices per trial."
        )
    rows = [row for row in plan.trials if row.id not in finished]
    unknown = sorted({row.batch_size for row in rows if row.forecast_seconds is None})
    if unknown:
        raise SweepError(
            "every trial needs a time estimate for --cluster, but batch size "
            f"{', '.join(map(str, unknown))} has none. Run one trial of each here first."
        )
    is_tuning = any(row.id is None for row in rows)
    rounds: list[list[float]] = [[], [], []]  # known rates, tuning, reports that await a rate
    for row in rows:
        number = 2 if row.id is None else int(is_tuning and row.stage == "tune")
        rounds[number].append(row.forecast_seconds or 0.0)
    slots, makespan = nodes * (gpus // per_trial), 0.0
    for lengths in rounds:
        free = [makespan] * slots
        for seconds in sorted(lengths, reverse=True):
            heapq.heapreplace(free, free[0] + seconds)
        makespan = max(free)
    devices = nodes * gpus
    hours = devices * makespan / 3600
    return ClusterCost(
        devices=devices,
        trials=len(rows),
        makespan_seconds=makespan,
        device_hours=hours,
        busy_device_hours=per_trial * sum(map(sum, rounds)) / 3600,
        price=None if price_per_device_hour is None else price_per_device_hour * hours,
    )
