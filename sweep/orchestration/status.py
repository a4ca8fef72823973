"""Read the status of a sweep from its folder."""

from collections.abc import Mapping
from typing import Any

from sweep.config.objective import Objective
from sweep.errors import SweepError
from sweep.plan.plan import Plan, PlannedTrial, parse_plan
from sweep.plan.policies import is_tuned
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import is_locked, read_owner
from sweep.trial.status import State, TrialStatus, overall_state


def sweep_status(folder: SweepFolder) -> dict[str, Any]:
    """Return the document that `sweep status --json` prints."""
    plan = parse_plan(folder.require_plan(), str(folder.plan_path))
    if folder.is_published:
        raise SweepError(f"{folder.path} is published and has no states. Call `sweep answer`.")

    has_runner = is_locked(folder.lock_path)
    metric = plan.settings.evaluated
    target = plan.settings.target
    rows = []
    for planned in plan.trials:
        if planned.id is None:
            rows.append(_row_of_status(planned, TrialStatus(), {}, metric))
        else:
            rows.append(_trial_status(folder.trial(planned.id), planned, has_runner, metric))
    _forecast_ends(rows, plan)
    seconds = time_left(rows)

    ends = [(row["state"], row["cause"]) for row in rows]
    if plan.waiting_searches or plan.later_budgets or _awaits_finals(folder, plan):
        seconds = None
        ends.append((State.WAITING, None))  # tuning will plan more trials
    is_running = has_runner or any(state is State.RUNNING for state, _ in ends)
    state = State.RUNNING if is_running else overall_state(ends)

    complete = [r for r in rows if r["state"] == State.COMPLETE and r["value"] is not None]
    largest = max([row["budget"] or 0 for row in complete], default=0)
    of_largest = [row for row in complete if (row["budget"] or 0) == largest]
    best_id = None
    if of_largest and target is None:
        best_id = min(of_largest, key=lambda row: metric.sign * row["value"])["id"]
    return {
        "sweep": folder.name,
        "state": state,
        "eta_seconds": seconds,
        "best": best_id,  # trial so far, at the largest budget
        "metric": metric.name,
        "unit": plan.settings.token_unit,
        "trials": rows,
    }


def _forecast_ends(rows: list[dict[str, Any]], plan: Plan) -> None:
    """Enter when open trials end, at their own speed, that of their arm, or as forecast."""
    pairs = [*zip(rows, plan.trials, strict=True)]
    rates = {}
    for row, planned in pairs:
        if row["tokens_per_second"]:
            rates[planned.arm] = row["tokens_per_second"]

    for row, planned in pairs:
        if not State(row["state"]).is_finished:
            rate = row["tokens_per_second"] or rates.get(planned.arm)
            remaining = planned.tokens - row["tokens"]
            row["eta_seconds"] = remaining / rate if rate else planned.forecast_seconds


def _awaits_finals(folder: SweepFolder, plan: Plan) -> bool:
    """Return True if an arm was tuned and has no final trials yet."""
    tuned = [row for row in plan.known_trials if is_tuned(row.policy)]
    with_finals = {(row.policy, row.arm) for row in tuned if row.stage == "final"}
    without_finals = [row for row in tuned if (row.policy, row.arm) not in with_finals]
    trials = (folder.trial(str(row.id)) for row in without_finals)
    return any(is_complete(trial, plan.settings.target) for trial in trials)


def _trial_status(
    trial: TrialFolder, row: PlannedTrial, has_runner: bool, metric: Objective
) -> dict[str, Any]:
    status = trial.read_status()
    state = status.state
    if state is State.RUNNING and not is_locked(trial.lease_path):  # dead, or waits for a cluster
        has_started = read_owner(trial.lease_path).get("fencing") == status.fencing
        state = State.RUNNING if has_runner and has_started else State.WAITING
    result = trial.find_result() if state.is_finished else None
    if result is not None:
        last = result.as_row()
    else:  # the newest of each metric
        last = {}
        for line in trial.find_metrics():
            last |= line
    return _row_of_status(row, status.changed(state=state), last, metric)


def _row_of_status(
    row: PlannedTrial, status: TrialStatus, last: Mapping[str, Any], metric: Objective
) -> dict[str, Any]:
    """Return a trial of the document; `last` are its last values by metric."""
    names = {"id", "stage", "optimizer", "budget", "batch_size", "seed", "learning_rate"}
    return {
        **row.model_dump(include=names),
        "state": status.state,
        "cause": status.cause,
        "message": " ".join(status.message.split()),
        "tokens": last.get("tokens", 0),
        "planned_tokens": row.tokens,
        "loss": last.get("final_valid_loss", last.get("valid/loss")),
        "value": last.get(metric.name, last.get(metric.curve)),
        "tokens_per_second": last.get("tokens_per_second", last.get("perf/tokens_per_second")),
        "eta_seconds": None,
    }


def is_complete(trial: TrialFolder, target: float | None) -> bool:
    """Return True if a trial is complete, and reached the target if there is one."""
    result = trial.find_result()
    if result is None or result.state is not State.COMPLETE:
        return False
    return target is None or bool(result.tokens_to_target)


def time_left(rows: list[dict[str, Any]]) -> float | None:
    """Return the seconds until all trials have ended, at the present number of running trials."""
    seconds = [row["eta_seconds"] for row in rows if not State(row["state"]).is_finished]
    running = sum(row["state"] == State.RUNNING for row in rows)
    return None if None in seconds else sum(seconds) / max(1, running)
