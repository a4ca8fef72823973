"""Estimate what a plan costs on this machine: seconds, memory, epochs and disk."""

import contextlib
import os
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from sweep.config.numbers import format_bytes
from sweep.config.trial import tokenizer_of
from sweep.errors import SweepError
from sweep.memory import jobs
from sweep.orchestration.calibration import estimate_seconds
from sweep.orchestration.jobs import run_job
from sweep.orchestration.local import attempt_slots
from sweep.orchestration.planning import Planned, read_request
from sweep.plan.plan import Plan
from sweep.trial.folder import SweepFolder

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
    configs = [plan.sample_config(row) for row in rows.values()]
    try:
        forecasts = run_job(jobs.forecast_rows, configs)
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
