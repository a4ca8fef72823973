"""How long will it take: from this machine's stored calibration, or one short measurement.

Always an estimate. Stored in the cache, by device, model, precision and threads; trials that this
machine finished replace the short measurement by what they took. Within a sweep its own complete
trials count first, wherever they ran.
"""

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweep.config.paths import cache_dir
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError, WorkerDied
from sweep.plan.plan import Plan
from sweep.training.process import FreshProcess, ShouldStop
from sweep.trial.files import read_json, sha256_of, write_json
from sweep.trial.folder import SweepFolder

MOST_SEQUENCES = 4
MOST_SECONDS = 5.0
# What of an execution a time is of.
TIMED = ("device", "devices", "zero", "strategy", "threads", "compile", "activation_checkpointing")
LEAST_SECONDS = 2.0  # of training, from which a trial tells more than the short measurement


def estimate_seconds(plan: Plan, known: Mapping[int, float]) -> dict[tuple[int, int], float]:
    """Return estimated seconds of one trial by batch size and tokens, where anything is known.

    Args:
        plan: with data where they lie from here.
        known: seconds a token by batch size, of trials of this sweep; from `seconds_of_finished`.
    """
    wanted = {(row.batch_size, row.tokens) for row in plan.trials}
    estimates = {key: key[1] * known[key[0]] for key in wanted if key[0] in known}
    if len(estimates) < len(wanted):
        estimates = {**_estimates_of_machine(plan), **estimates}
    return estimates


def seconds_of_finished(plan: Plan, folder: SweepFolder) -> dict[int, float]:
    """Return the median seconds a token by batch size of a sweep's complete trials, if any."""
    found: dict[int, list[float]] = {}
    for row in plan.known_trials:
        result = folder.trial(str(row.id)).read_result()
        if result and result["state"] == "COMPLETE":
            total = result["seconds_total"] / result["tokens"]
            found.setdefault(row.batch_size, []).append(total)
    return {batch: statistics.median(each) for batch, each in found.items()}


def _estimates_of_machine(plan: Plan) -> dict[tuple[int, int], float]:
    """Return estimates by what this machine's steps took; {} if none was measured."""
    path = _calibration_path(plan)
    calibration = _read(path)
    if "seconds_per_sequence" not in calibration:
        row = max(plan.trials, key=lambda row: row.batch_size)
        calibration = {**_measure(plan.sample_config(row)), **calibration}
        _store(path, calibration)
    if "seconds_per_sequence" not in calibration:
        return {}
    context = plan.tokens_per_sequence
    evaluated = (plan.settings.evaluation.sequences or 0) * (plan.settings.evaluation.points + 4)
    estimates = {}
    for row in plan.trials:
        per_sequence = calibration["seconds_per_sequence"]
        per_token = calibration.get(f"batch {row.batch_size}")
        if per_token is None:
            steps = row.tokens / context * per_sequence / row.devices
            steps += row.steps * calibration["seconds_per_update"]
        else:
            steps = row.tokens * per_token
        # A forward is a third of a step. What several devices send each other is not counted.
        estimates[row.batch_size, row.tokens] = steps + evaluated / 3 * per_sequence / row.devices
    return estimates


def record_measurement(plan: Plan, result: dict[str, Any]) -> None:
    """Keep what training took in a finished trial, for later plans on this machine."""
    path, seconds = _calibration_path(plan), result["seconds_training"]
    if seconds < LEAST_SECONDS:
        return
    measured = {f"batch {result['batch_size']}": seconds / result["tokens"]}
    _store(path, {**_read(path), **measured})


def _calibration_path(plan: Plan) -> Path:
    import platform

    key = {
        "machine": [platform.node(), platform.processor(), platform.machine()],
        "execution": plan.execution.model_dump(mode="json", include=set(TIMED)),
        "model": plan.settings.model.model_dump(mode="json"),
        "workload": plan.settings.workload,
        "precision": plan.settings.precision,
    }
    if plan.settings.grpo is not None:
        key["grpo"] = plan.settings.grpo.model_dump(mode="json")
    return cache_dir() / "calibration" / f"{sha256_of(key)[:16]}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        return {k: v for k, v in read_json(path).items() if k != "format_version"}
    except (OSError, SweepError):
        return {}


def _store(path: Path, calibration: dict[str, Any]) -> None:
    if not calibration:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, calibration)
    except OSError:
        return  # an unwritable cache only means measuring again


def _measure(config: TrialConfig) -> dict[str, float]:
    """Time one forward-backward in a fresh process, so that this one touches no device."""
    try:
        process = FreshProcess("sweep.orchestration.calibration:time_one_step", config)
        return dict(process.result(timeout=60))
    except WorkerDied:
        return {}


def time_one_step(config: TrialConfig, should_stop: ShouldStop) -> dict[str, float]:
    """Return seconds of a forward-backward per sequence, and of an optimizer update.

    Of GRPO with sampling: two groups at once, since sampling one completion takes nearly as long.
    """
    import torch

    from sweep.training.step import TrainingStep

    torch.set_num_threads(config.execution.threads)
    device = torch.device(config.execution.device)
    eager = config.model_copy(
        update={"execution": config.execution.model_copy(update={"compile": False})}
    )
    is_sampled = config.science.grpo is not None
    most = 2 * config.group_size if is_sampled else MOST_SEQUENCES
    step = TrainingStep(eager, device, most)

    def seconds(sequences: int) -> float:
        batch = step.workload.random_batch(sequences)
        start = time.perf_counter()
        batch = step.rolled_out(batch)
        for _ in range(step.rollouts.updates_per_step if step.rollouts else 1):
            step.backward(batch).item()
        return time.perf_counter() - start

    first, deadline = seconds(1), time.perf_counter() + MOST_SECONDS
    count = most if first * most < MOST_SECONDS / 2 or is_sampled else 1
    timings = [seconds(count)]
    while len(timings) < 3 and time.perf_counter() + timings[0] < deadline:
        timings.append(seconds(count))
    forward_backward = min(timings)
    start = time.perf_counter()
    for _ in range(2):  # the first one allocates
        start = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(step.parameters, 1.0).item()
        if step.optimizer is not None:
            step.optimizer.step()
    update = time.perf_counter() - start
    return {"seconds_per_sequence": forward_backward / count, "seconds_per_update": update}
