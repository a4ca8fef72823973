"""What a plan costs on this machine: seconds, memory, epochs, disk. Estimates, all of them."""

import contextlib
import os
import shutil
from dataclasses import replace

from sweep.config.numbers import format_bytes
from sweep.errors import SweepError, WorkerDied
from sweep.orchestration.execution import FORECAST_SECONDS
from sweep.orchestration.planning import Planned
from sweep.plan.estimates import disk_needed, with_estimates
from sweep.plan.plan import Plan, tokenizer_of
from sweep.training.process import FreshProcess
from sweep.trial.folder import SweepFolder

# For estimates before anything is tokenized.
BYTES_PER_TOKEN = {"bpe": 4.0, "bytes": 1.0, "pretrained": 4.0}
SMALL_TEXT = 1 << 22  # bytes


def estimate(planned: Planned, folder: SweepFolder) -> Planned:
    """Fill in seconds, epochs and disk: estimates, from this machine's calibration."""
    from sweep.data.sources import estimate_training_bytes
    from sweep.data.tokens import find_prepared
    from sweep.orchestration.calibration import estimate_seconds, seconds_of_finished
    from sweep.orchestration.local import attempt_slots

    plan = planned.plan
    here = plan.located(folder)
    seconds = estimate_seconds(here, seconds_of_finished(plan, folder))
    tokens, is_exact = None, False
    if plan.data is not None:
        text = find_prepared(plan.data, tokenizer_of(plan.settings))
        if text is not None:
            tokens, is_exact = len(text.train), True
        elif size := estimate_training_bytes(plan.data, folder.locate(plan.data_path)):
            tokens = int(size / BYTES_PER_TOKEN[plan.settings.tokenizer])
    at_once = len(attempt_slots(plan.execution.device, plan.execution.devices)) or 1  # elsewhere
    plan = with_estimates(plan, seconds, _forecast_bytes(here), tokens, is_exact, at_once)
    return replace(planned, plan=plan)


def at_most_at_once(plan: Plan, trials: int) -> Plan:
    """Return the plan with the disk that it takes where so many trials run at a time."""
    parameters, rows = plan.model["parameters"], plan.trials
    if parameters is None:
        return plan
    disk = disk_needed(parameters, rows, plan.execution.keep, min(trials, len(rows)))
    return plan.model_copy(update={"disk_bytes": disk})


def _forecast_bytes(plan: Plan) -> dict[tuple[int, int], int]:
    """Return forecast peaks by batch and microbatch size; {} where they cannot be forecast."""
    rows = {(row.batch_size, row.microbatch_size): row for row in plan.trials}
    configs = [plan.sample_config(row) for row in rows.values()]
    try:
        process = FreshProcess("sweep.memory.forecast:forecast_rows", configs)
        found = process.result(timeout=FORECAST_SECONDS)
    except WorkerDied:  # a user's model that fake tensors cannot run
        return {}
    return {key: one.peak_bytes for key, one in zip(rows, found, strict=True)}


def is_quickly_prepared(plan: Plan, folder: SweepFolder) -> bool:
    """Tell whether the data are tokenized in a second or two: a small text, or built in."""
    from sweep.data.sources import estimate_training_bytes

    if plan.data is None:
        return True
    size = estimate_training_bytes(plan.data, folder.locate(plan.data_path))
    return size is not None and size <= SMALL_TEXT


def check_disk(plan: Plan, folder: SweepFolder) -> None:
    """Refuse a sweep that the disk cannot hold."""
    existing = next(
        path for path in (folder.path, *folder.path.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(existing).free
    held = 0
    for place, _, names in os.walk(folder.path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # an attempt may still run
                held += os.stat(os.path.join(place, name)).st_size
    needed = (plan.disk_bytes or 0) - held
    if needed > free:
        raise SweepError(
            f"the disk must have {format_bytes(needed)} free for this sweep, got "
            f"{format_bytes(free)} at {existing}. Free some, choose another --out, or --keep none."
        )
