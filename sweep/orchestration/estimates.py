"""Estimate what a plan costs: seconds, memory, epochs and disk here; makespan on a cluster."""

import contextlib
import heapq
import logging
import math
import os
import re
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sweep.config.gpus import Gpu, find_gpu
from sweep.config.numbers import format_bytes, parse_count
from sweep.config.trial import TrialConfig, tokenizer_of
from sweep.data.tokens import count_windows, find_prepared
from sweep.errors import SweepError, WorkerDied
from sweep.memory.search import Forecast
from sweep.orchestration.executors.local import attempt_slots
from sweep.plan.plan import Plan, PlannedTrial, stages_of
from sweep.training.process import run_job
from sweep.trial.folder import SweepFolder
from sweep.trial.status import State

LOG = logging.getLogger(__name__)
UNCERTAIN = 1.5  # factor of uncertainty of a measurement on an idle machine, docs/planning.md
BUSY = 0.15  # other programs' share of the processors
TIMING_SECONDS = 60  # a plan does not wait longer for an estimate of its time
ASSUMED_SHARES = (0.2, 0.45)  # least and most of the peak rate, where no step was measured
LEAST_STEP = 0.002  # seconds, for the same
LONGEST_STEP = 2.0  # seconds; longer steps are not timed


def estimate(unestimated: Plan, folder: SweepFolder) -> Plan:
    """Fill in the estimates of a plan: seconds and memory of each trial, epochs and disk."""
    plan = folder.located(unestimated)
    LOG.info("Estimating time and memory")
    times: dict[PlannedTrial, float | None] = {}
    factor = 0.0
    reason = ""
    for name in dict.fromkeys(row.optimizer for row in plan.trials):
        part = [row for row in plan.trials if row.optimizer == name]
        seconds, part_factor, why = estimate_seconds(plan, part, folder)
        times |= zip(part, seconds, strict=True)
        factor, reason = max((factor, reason), (part_factor or 0.0, why))

    peaks: list[int | None] = [None] * len(plan.trials)
    if plan.settings.workload.has_known_model:
        with contextlib.suppress(SweepError):  # a user's model that fake tensors cannot run
            forecasts = run_job(forecast_rows, [plan.trial_config(row) for row in plan.trials])
            peaks = [forecast.peak_bytes for forecast in forecasts]

    rows = tuple(
        row.model_copy(update={"forecast_seconds": times[row], "forecast_bytes": peak})
        for row, peak in zip(plan.trials, peaks, strict=True)
    )
    at_once = len(attempt_slots(plan.execution))
    changes: dict[str, Any] = {
        "forecast_factor": factor or None,
        "forecast_reason": reason,
        "trials": rows,
        "disk_bytes": disk_bytes(plan, at_once),
    }

    tokens = _windows(plan, "train") * plan.tokens_per_sequence
    if tokens and not plan.awaits_times:
        changes["epochs"] = max(row.tokens for row in plan.trials) / tokens
    return unestimated.model_copy(update=changes)


def _windows(plan: Plan, split: str) -> int:
    """Return the sequences of a split; 0 if it is not tokenized yet."""
    tokenizer = tokenizer_of(plan.settings)
    if plan.data is None or tokenizer is None:
        return 0
    text = find_prepared(plan.data, tokenizer)
    if text is None:
        return 0
    return count_windows(len(getattr(text, split)), plan.tokens_per_sequence)


def forecast_rows(configs: list[TrialConfig]) -> list[Forecast]:
    from sweep.memory.forecast import Forecasts

    forecasts = Forecasts(configs[0].execution.devices, configs[0].execution.zero)
    return [forecasts.of(config) for config in configs]


def estimate_seconds(
    plan: Plan, rows: Sequence[PlannedTrial], folder: SweepFolder
) -> tuple[list[float | None], float | None, str]:
    """Estimate seconds of trials with one optimizer from complete ones, or else measured steps.

    The plan must have absolute paths. Times of trials that shared a device are not used.

    Returns:
        Seconds of each trial, the factor by which they may be wrong, and the reason for a large
        factor. Seconds and factor are None if a step cannot run here.
    """
    settings = plan.settings
    reason = ""
    is_timed = False
    results = [folder.trial(str(row.id)).find_result() for row in rows if row.id]
    complete = [
        result
        for result in results
        if result is not None and result.state is State.COMPLETE and result.seconds_training
    ]
    complete = [result for result in complete if result.was_alone]
    if complete:
        times: dict[int, list[float]] = {}  # seconds per step by batch size
        for result in complete:
            seconds_per_step = result.seconds_training / result.steps
            times.setdefault(result.batch_size, []).append(seconds_per_step)
        medians = {size: statistics.median(of_size) for size, of_size in times.items()}
        per_step, per_sequence, factor = fit_step_time(medians)
        outside = statistics.median(r.seconds_total - r.seconds_training for r in complete)
    elif plan.execution.gpu is not None:
        return _assumed_seconds(plan, rows, find_gpu(plan.execution.gpu))
    elif not settings.workload.has_known_model:  # the user's program, which only trials run
        return [None] * len(rows), None, "a step cannot run here"
    else:
        config = plan.trial_config(max(rows, key=lambda row: row.batch_size))
        try:
            measured, load = run_job(time_steps, config, seconds=TIMING_SECONDS)
        except SweepError as error:
            reason = "a step cannot run here"
            if isinstance(error.__cause__, WorkerDied) and error.__cause__.timed_out:
                reason = f"timing a few steps took longer than {TIMING_SECONDS} s"
            return [None] * len(rows), None, reason
        per_step, per_sequence, _ = fit_step_time(measured)
        per_sequence /= plan.execution.devices
        factor = UNCERTAIN
        if load > BUSY:  # it may end, or double
            factor /= 1 - min(load, 0.9)
            reason = f"other programs use {load:.0%} of the processors now"

        # Evaluations take place outside of training, the last one on the whole validation split. A
        # forward pass is a third of a step.
        final = 0 if settings.workload.samples else _windows(plan, "valid")
        milestones = settings.evaluation.points + 4
        sequences = (settings.evaluation.sequences or 0) * milestones + final
        outside = sequences * per_sequence / 3
        is_timed = True

    seconds: list[float | None] = []
    for row in rows:
        course = plan.course(row)
        sequences = course.sequences_at(course.steps)
        training = course.steps * per_step + sequences * per_sequence
        if settings.time_budget_seconds is not None:
            training = settings.time_budget_seconds
        probed = 0.0  # sequences; the seconds of complete trials contain them
        if is_timed and plan.measures_noise(row):
            probed = settings.noise_scale.share * sequences
        seconds.append(training + outside + probed * per_sequence)
    return seconds, factor, reason


def _assumed_seconds(
    plan: Plan, rows: Sequence[PlannedTrial], gpu: Gpu
) -> tuple[list[float | None], float | None, str]:
    """Return seconds on a GPU that is not here, by an assumed share of its peak rate.

    Returns:
        As `estimate_seconds`: the geometric mean of both ends, and their ratio to it.
    """
    peak = gpu.peak_of(plan.settings.precision)
    flops = plan.model.flops_per_token
    if peak is None:
        reason = f"{gpu.title} has no units for {plan.settings.precision} (--precision fp32)"
        return [None] * len(rows), None, reason
    if not flops or plan.settings.workload.samples:
        return [None] * len(rows), None, "the FLOPs of a step are not known"
    low, high = ASSUMED_SHARES
    factor = math.sqrt(high / low)
    rate = math.sqrt(low * high) * peak * plan.execution.devices
    seconds: list[float | None] = []
    for row in rows:
        course = plan.course(row)
        training = plan.tokens_per_sequence * course.sequences_at(course.steps) * flops / rate
        seconds.append(max(training, course.steps * LEAST_STEP * factor))
    text = f"{low:.0%} to {high:.0%} of the peak of {gpu.name} are assumed, and at least "
    reason = f"{text}{1000 * LEAST_STEP:g} ms a step, without evaluations"
    return seconds, factor, reason


def fit_step_time(seconds: Mapping[int, float]) -> tuple[float, float, float]:
    """Fit seconds by batch size, minimizing relative errors: per step, per sequence, and factor.

    The factor is the largest ratio between a measurement and the line; no part is negative.
    """
    import numpy as np
    from scipy.optimize import nnls

    sizes = np.array([*seconds])
    times = np.array([*seconds.values()])
    columns = np.stack([sizes / times, 1 / times], axis=1)  # fitted to 1
    (per_sequence, per_step), _ = nnls(columns, np.ones(len(sizes)))

    factor = UNCERTAIN
    if len(sizes) > 2:  # a line through two points has no error
        ratios = (per_step + per_sequence * sizes) / times
        factor = float(np.maximum(ratios, 1 / ratios).max())
    return float(per_step), float(per_sequence), factor


def time_steps(config: TrialConfig) -> tuple[dict[int, float], float]:
    """Time eager steps of up to three batch sizes, up to a whole microbatch.

    Returns:
        The least seconds per step by batch size, and other programs' share of all processors.
    """
    import psutil
    import torch

    from sweep.training.device import use_device
    from sweep.training.step import TrainingStep

    torch.set_num_threads(config.execution.threads)
    eager = config.with_microbatch(config.microbatch_size, compile=False, graph_bound=0)
    science = config.science.model_copy(update={"start": None})  # needs no weights
    eager = eager.model_copy(update={"science": science})
    step = TrainingStep(eager, use_device(config.execution.device))

    small = config.sequences_per_group
    factor = 2 if config.science.workload.samples else 4
    sizes = sorted({small, factor * small, max(small, config.microbatch_size)})
    seconds: dict[int, float] = {}
    began = time.perf_counter()
    cpu_began = time.process_time()
    psutil.cpu_percent()  # begins the measurement
    for size in sizes:
        if seconds:
            last = max(seconds)
            if size / last * seconds[last] > LONGEST_STEP:
                break
        for _ in range(3):  # the first step allocates
            batch = step.workload.random_batch(size)
            start = time.perf_counter()
            step(batch, 1e-9).item()
            seconds[size] = min(seconds.get(size, math.inf), time.perf_counter() - start)

    cores_used = (time.process_time() - cpu_began) / (time.perf_counter() - began)
    share_used = cores_used / (psutil.cpu_count() or 1)
    return seconds, max(0.0, psutil.cpu_percent() / 100 - share_used)


def disk_bytes(plan: Plan, at_once: int) -> int | None:
    """Return the most bytes that a plan writes while `at_once` trials run at a time."""
    is_lora = plan.settings.model.adapter_rank is not None  # only adapters are written
    parameters = plan.model.trained_parameters if is_lora else plan.model.parameters
    if parameters is None:
        return None

    weights = 4 * parameters  # float32
    checkpoint = 12 * parameters  # with AdamW's two moments
    running = min(max(1, at_once), len(plan.trials))
    bytes_of_running = running * 3 * checkpoint  # the third while it is written

    bytes_by_keep = {"none": 0, "weights": weights, "checkpoints": weights + 2 * checkpoint}
    bytes_of_ended = sum(bytes_by_keep[plan.execution.kept_of(row.stage)] for row in plan.trials)
    bytes_of_curves = len(plan.trials) << 20  # with log, losses and MLflow
    return bytes_of_running + bytes_of_ended + bytes_of_curves


def refuse_small_disk(plan: Plan, folder: SweepFolder, at_once: int) -> None:
    """Refuse a sweep that the disk has no room for."""
    existing = next(p for p in (folder.path, *folder.path.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    written = 0
    for parent, _, names in os.walk(folder.path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # attempts may be running
                written += os.stat(os.path.join(parent, name)).st_size
    needed = (disk_bytes(plan, at_once) or 0) - written
    if needed > free:
        raise SweepError(
            f"the disk must have {format_bytes(needed)} free for this sweep, got "
            f"{format_bytes(free)} at {existing}. Free some, choose another --out, or --keep none."
        )


def parse_cluster(text: str) -> tuple[int, int]:
    """Parse `nodes=16,gpus=8`, or `gpus=8` for one node, into nodes and GPUs per node."""
    match = re.fullmatch(r"(?:nodes=([^,]+),)?gpus=([^,]+)", text.replace(" ", ""))
    if match is None:
        raise SweepError(f"cluster must be nodes=N,gpus=G, or gpus=G for one node, got {text!r}.")
    return parse_count(match[1] or 1, "cluster: nodes"), parse_count(match[2], "cluster: gpus")


def cost_on_cluster(plan: Plan, nodes: int, gpus: int) -> dict[str, Any]:
    """Return the cost of a plan's trials on equally fast devices, as JSON values.

    The longest trial starts first, on the slot that is free first: within 4/3 of the least makespan
    (Graham 1969). All devices are paid for until the last trial has ended.
    """
    per_trial = plan.execution.devices
    if per_trial > gpus:
        raise SweepError(
            f"a trial must fit on one node, got {per_trial} devices per trial and gpus={gpus}. Use "
            "larger nodes, or fewer devices per trial."
        )
    rows = plan.trials
    unknown = sorted({row.batch_size for row in rows if row.forecast_seconds is None})
    if unknown:
        raise SweepError(
            f"--cluster needs a time estimate at batch size {', '.join(map(str, unknown))}. "
            "Complete one trial of this sweep on such a device, with this --out."
        )

    slot_count = nodes * (gpus // per_trial)
    makespan = 0.0
    for stage in stages_of(rows):
        lengths = [row.forecast_seconds or 0.0 for row in stage]
        free_at = [makespan] * slot_count  # when each slot becomes free
        for seconds in sorted(lengths, reverse=True):
            heapq.heapreplace(free_at, free_at[0] + seconds)
        makespan = max(free_at)

    hours = nodes * gpus * makespan / 3600
    price = plan.settings.answer.price
    factor = plan.forecast_factor or 1.0
    return {
        "devices": nodes * gpus,
        "trials": len(rows),  # still to run
        "makespan_seconds": makespan,
        "device_hours": hours,
        "busy_device_hours": per_trial * sum(row.forecast_seconds or 0.0 for row in rows) / 3600,
        "price": None if price is None else price * hours,
        "price_range": None if price is None else [price * hours / factor, price * hours * factor],
    }
