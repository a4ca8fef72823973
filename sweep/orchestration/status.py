"""Read the status of a sweep from its folder, and remove files that it no longer needs."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.errors import SweepError
from sweep.trial import files
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder
from sweep.trial.lease import Lease, is_locked, read_owner

TAIL_BYTES = 8192


def sweep_status(folder: SweepFolder) -> dict[str, Any]:
    """Return the document that `sweep status --json` prints (DESIGN.md §5).

    A RUNNING trial whose command and worker have died, or that waits for a cluster, counts as
    WAITING.
    """
    plan = folder.require_plan()
    has_runner = is_locked(folder.lock_path)
    rows = [_trial_status(folder.trial(row["id"]), row, has_runner) for row in plan["trials"]]
    rates = {row["batch_size"]: row["tokens_per_second"] for row in rows}
    for row, planned in zip(rows, plan["trials"], strict=True):
        rate = row["tokens_per_second"] or rates[row["batch_size"]]
        if not State(row["state"]).is_finished:
            remaining = planned["tokens"] - row["tokens"]
            row["eta_seconds"] = remaining / rate if rate else planned["forecast_seconds"]
    states, seconds = {row["state"] for row in rows}, time_left(rows)
    if _is_tuning(folder, plan):
        states.add(State.WAITING)  # tuning will plan more trials
        seconds = None
    failed = any(r["state"] == State.FAILED and r["cause"] != Cause.DIVERGED for r in rows)
    if has_runner or State.RUNNING in states:
        state = State.RUNNING
    elif State.WAITING in states:
        state = State.WAITING
    else:
        state = State.FAILED if failed else State.COMPLETE
    return {"sweep": folder.name, "state": state, "eta_seconds": seconds, "trials": rows}


def _trial_status(trial: TrialFolder, row: dict[str, Any], has_runner: bool) -> dict[str, Any]:
    status = trial.read_status()
    state = status.state
    if state is State.RUNNING and not is_locked(trial.lease_path):
        has_started = read_owner(trial.lease_path).get("fencing") == status.fencing
        state = State.RUNNING if has_runner and has_started else State.WAITING
    line = last_line(trial.metrics_path)
    result = (trial.read_result() if state.is_finished else None) or {}
    return {
        "id": row["id"],
        "stage": row["stage"],
        "batch_size": row["batch_size"],
        "seed": row["seed"],
        "learning_rate": row["learning_rate"],
        "state": state,
        "cause": status.cause,
        "message": status.message,
        "tokens": line.get("tokens", 0),
        "loss": result.get("final_valid_loss", line.get("train/loss")),
        "tokens_per_second": result.get("tokens_per_second", line.get("perf/tokens_per_second")),
        "eta_seconds": None,
    }


def _is_tuning(folder: SweepFolder, plan: dict[str, Any]) -> bool:
    """Return True if a batch size has completed tuning trials and no reporting trials yet."""
    tuned = [row for row in plan["trials"] if row["policy"] == "tuned"]
    reported = {row["batch_size"] for row in tuned if row["stage"] == "report"}
    unreported = (row for row in tuned if row["batch_size"] not in reported)
    target = plan["settings"].get("target")
    return any(is_complete(folder.trial(row["id"]), target) for row in unreported)


def is_complete(trial: TrialFolder, target: float | None) -> bool:
    """Return True if a trial is complete, and reached the target if there is one."""
    result = trial.read_result() or {}
    return result.get("state") == State.COMPLETE and (
        target is None or bool(result["tokens_to_target"])
    )


def time_left(rows: list[dict[str, Any]]) -> float | None:
    """Return the seconds until all trials have ended, at the present number of running trials."""
    seconds = [row["eta_seconds"] for row in rows if not State(row["state"]).is_finished]
    running = sum(row["state"] == State.RUNNING for row in rows)
    return None if None in seconds else sum(seconds) / max(1, running)


def last_line(path: Path) -> dict[str, Any]:
    """Return the last complete line of metrics.jsonl that has a training loss, or {}."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):  # the first line may be incomplete
            metrics = json.loads(line)
            if isinstance(metrics, dict) and "train/loss" in metrics:
                return metrics
    return {}


def find_trial(folder: SweepFolder, prefix: str) -> TrialFolder:
    """Return the planned trial whose id starts with `prefix`; exactly one must exist."""
    trials = [trial for trial in folder.trials() if trial.id.startswith(prefix)]
    if len(trials) != 1:
        raise SweepError(
            f"a trial id must match one trial of {folder.path}, got {prefix!r}, which matches "
            f"{len(trials)}. `sweep status {folder.path}` lists the ids."
        )
    return trials[0]


@dataclass(frozen=True)
class Unneeded:
    """A file or folder that can be removed."""

    path: Path
    reason: str

    @property
    def size(self) -> int:
        """Bytes, with everything in a folder."""
        parts = (self.path, *self.path.rglob("*"))
        return sum(part.stat().st_size for part in parts if part.is_file())


def list_unneeded(folder: SweepFolder, weights: bool = False) -> list[Unneeded]:
    """List checkpoints of finished trials and half-written files; weights only on request."""
    unneeded = [Unneeded(path, "half-written") for path in folder.path.glob(".*.part")]
    for trial in folder.trials():
        if trial.read_status().state in (State.COMPLETE, State.PRUNED):
            reason = "checkpoint of a finished trial"
            unneeded += [Unneeded(checkpoint.path, reason) for checkpoint in trial.checkpoints()]
            if weights and trial.weights_path.exists():
                unneeded.append(Unneeded(trial.weights_path, "weights"))
        unneeded += [Unneeded(path, "half-written") for path in trial.path.glob(".*.part")]
    return unneeded


def remove(folder: SweepFolder, unneeded: list[Unneeded]) -> None:
    """Remove files and folders, unless a command runs the sweep."""
    with Lease(folder.lock_path):
        for item in unneeded:
            files.remove(item.path)
