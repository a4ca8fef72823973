"""Results of tuning trials, read from their folders."""

import math

from sweep.plan.tuning import TuningResult
from sweep.trial.folder import Cause, State, TrialFolder
from sweep.trial.metrics import read_metrics


def read_tuning_result(
    trial: TrialFolder, values: dict[str, float], rungs: tuple[int, ...], target: float | None
) -> TuningResult:
    """Read one tuning trial.

    Args:
        trial: its folder.
        values: its rate and other dimensions, as its study knows them.
        rungs: steps at which trials are compared.
        target: loss to train to, if there is one.
    """
    is_pruned = trial.read_status().state is State.PRUNED and target is None
    return TuningResult(values, _loss(trial, target), is_pruned, tuple(_losses_at(trial, rungs)))


def is_complete(trial: TrialFolder, target: float | None) -> bool:
    """Return True if a trial is complete, and reached the target if there is one."""
    result = trial.read_result() or {}
    return result.get("state") == State.COMPLETE and (
        target is None or bool(result["tokens_to_target"])
    )


def _loss(trial: TrialFolder, target: float | None) -> float | None:
    """Return what tuning minimizes: the final loss, or the tokens to the target."""
    status = trial.read_status()
    if status.state is State.FAILED and status.cause is not Cause.DIVERGED:
        return None  # it will be tried again
    if target is not None and status.state in (State.COMPLETE, State.PRUNED):
        return _tokens_to_target(trial, target)
    if status.state is State.COMPLETE:
        return float((trial.read_result() or {})["final_valid_loss"])
    return math.inf if status.state.is_finished else None


def _tokens_to_target(trial: TrialFolder, target: float) -> float:
    """Return the tokens to the target, or more than were trained if it was not reached.

    They grow with the distance to the target, which tells the search where to continue.
    """
    if tokens := (trial.read_result() or {}).get("tokens_to_target"):
        return float(tokens)
    lines = [line for line in read_metrics(trial.metrics_path) if "valid/loss" in line]
    if not lines or lines[-1]["valid/loss"] is None:
        return math.inf
    return float(lines[-1]["tokens"] * (1 + max(0.0, lines[-1]["valid/loss"] - target)))


def _losses_at(trial: TrialFolder, rungs: tuple[int, ...]) -> list[tuple[int, float]]:
    lines = {line["step"]: line for line in read_metrics(trial.metrics_path)}
    losses = []
    for step in rungs:
        if step not in lines or "valid/loss" not in lines[step]:
            break
        loss = lines[step]["valid/loss"]
        losses.append((step, math.inf if loss is None else float(loss)))
    return losses
