"""What the folders of tuning trials show: how good their rates are, as far as they came."""

import math

from sweep.plan.tuning import Shown
from sweep.trial.folder import Cause, State, TrialFolder
from sweep.trial.metrics import read_metrics


def show(
    trial: TrialFolder, values: dict[str, float], rungs: tuple[int, ...], target: float | None
) -> Shown:
    """Read one tuning trial.

    Args:
        trial: its folder.
        values: what it was to try, as its study knows them.
        rungs: steps at which trials are compared on the way.
        target: the loss that trials are to reach, if there is one.
    """
    is_pruned = trial.read_status().state is State.PRUNED and target is None
    return Shown(values, _loss(trial, target), is_pruned, tuple(_losses_at(trial, rungs)))


def has_ended_well(trial: TrialFolder, target: float | None) -> bool:
    """Tell whether a trial is complete, and at the target where there is one."""
    result = trial.read_result() or {}
    return result.get("state") == State.COMPLETE and (
        target is None or bool(result["tokens_to_target"])
    )


def _loss(trial: TrialFolder, target: float | None) -> float | None:
    """Return what is to be least: the final loss, or the tokens that the target took."""
    status = trial.read_status()
    if status.state is State.FAILED and status.cause is not Cause.DIVERGED:
        return None  # tried again
    if target is not None and status.state in (State.COMPLETE, State.PRUNED):
        return _tokens(trial, target)
    if status.state is State.COMPLETE:
        return float((trial.read_result() or {})["final_valid_loss"])
    return math.inf if status.state.is_finished else None


def _tokens(trial: TrialFolder, target: float) -> float:
    """Return the tokens to the target; where it was not reached, more than were trained.

    The more loss is lacking the more, so that the search knows on which side to go on.
    """
    if tokens := (trial.read_result() or {}).get("tokens_to_target"):
        return float(tokens)
    lines = [line for line in read_metrics(trial.metrics_path) if "valid/loss" in line]
    if not lines or lines[-1]["valid/loss"] is None:
        return math.inf
    return float(lines[-1]["tokens"] * (1 + max(0.0, lines[-1]["valid/loss"] - target)))


def _losses_at(trial: TrialFolder, rungs: tuple[int, ...]) -> list[tuple[int, float]]:
    lines = {line["step"]: line for line in read_metrics(trial.metrics_path)}
    found = []
    for step in rungs:
        if step not in lines or "valid/loss" not in lines[step]:
            break
        loss = lines[step]["valid/loss"]
        found.append((step, math.inf if loss is None else float(loss)))
    return found
