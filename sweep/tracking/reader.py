"""A sweep read back from an MLflow store alone: its plan, its results, its curves.

No artifact is needed: plan and results are in tags, curves in raw metric histories, complete
and in full precision (MLflow's own charts sample them).
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sweep.errors import SweepError
from sweep.tracking.address import one_sentence, without_password
from sweep.tracking.store import (
    check_tracking_uri,
    children_of,
    connect,
    read_document,
    search_all,
    sqlite_path,
)
from sweep.trial.folder import State

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

REQUESTS = 4  # at a time, of a server


@dataclass(frozen=True)
class StoredSweep:
    """One sweep as an MLflow store holds it."""

    experiment: str
    run_id: str  # of the parent run
    name: str  # of the sweep
    plan: dict[str, Any]  # as plan.json
    results: list[dict[str, Any]]
    """One per planned trial, in the plan's order: as result.json; where there is none, what is
    known of `id`, `state`, `cause`, `attempts` and `microbatch_size`."""
    curves: dict[str, list[dict[str, Any]]]  # trial id -> lines as in metrics.jsonl, without nulls


def read_store(tracking_uri: str, experiment: str, run_id: str | None = None) -> StoredSweep:
    """Read a sweep from MLflow.

    Args:
        tracking_uri: of a server or a database.
        experiment: name of the MLflow experiment, which is the sweep's experiment.
        run_id: of a parent run; None: the newest.

    Raises:
        SweepError: if the store cannot be reached, or does not hold such a sweep.
    """
    uri = check_tracking_uri(tracking_uri)
    shown = without_password(uri)
    if uri.startswith("sqlite") and not sqlite_path(uri).is_file():
        raise SweepError(f"{sqlite_path(uri)} must be an MLflow database, and is not there.")
    try:
        client = connect(uri)
        parent = _find_parent(client, shown, experiment, run_id)
        plan = read_document(parent.data.tags, "sweep.plan")
        found = children_of(client, parent.info.experiment_id, parent.info.run_id)
        children = {run.data.tags["sweep.trial_id"]: run for run in found}
        rows = [row for row in plan["trials"] if row["id"]]
        known = [row for row in rows if row["id"] in children]
        curves = _read_curves(
            client,
            [children[row["id"]] for row in known],
            [row["batch_size"] * plan["tokens_per_sequence"] for row in known],
        )
    except SweepError:
        raise
    except Exception as error:
        raise SweepError(
            f"MLflow at {shown} cannot be read: {one_sentence(error)} Check the address."
        ) from error
    results = [_result(row["id"], children.get(row["id"])) for row in rows]
    name = parent.data.tags["sweep.name"]
    return StoredSweep(experiment, parent.info.run_id, name, plan, results, curves)


def _find_parent(client: "MlflowClient", uri: str, experiment: str, run_id: str | None) -> "Run":
    found = client.get_experiment_by_name(experiment)
    if found is None or found.lifecycle_stage != "active":
        names = ", ".join(sorted(known.name for known in client.search_experiments()))
        raise SweepError(
            f"experiment must be one that MLflow at {uri} holds ({names}), got {experiment!r}. "
            "Name it with --experiment."
        )
    held = []
    for run in search_all(client, found.experiment_id, {"sweep.role": "sweep"}):
        if run_id in (None, run.info.run_id) and "sweep.plan" in run.data.tags:
            return run
        held.append(run.info.run_id)
    if run_id is None:
        raise SweepError(f"MLflow experiment {experiment!r} at {uri} holds no sweep.")
    raise SweepError(
        f"run must be a sweep's parent run in experiment {experiment!r}, got {run_id!r}. "
        f"There are: {', '.join(held) or 'none'}."
    )


def _result(trial_id: str, run: "Run | None") -> dict[str, Any]:
    tags = {} if run is None else run.data.tags
    if "sweep.state" not in tags:
        return {"id": trial_id, "state": "WAITING"}
    state, cause = tags["sweep.state"], tags["sweep.cause"] or None
    if State(state).is_finished and (result := read_document(tags, "sweep.result")):
        return dict(result)
    known = {
        "id": trial_id,
        "state": state,
        "cause": cause,
        "message": tags.get("sweep.message") if cause else None,
        "attempts": int(tags["sweep.attempts"]),
    }
    size = tags.get("sweep.microbatch_size")  # other than planned, after out of memory
    return known | ({"microbatch_size": int(size)} if size else {})


def _read_curves(
    client: "MlflowClient", runs: list["Run"], step_tokens: list[int]
) -> dict[str, list[dict[str, Any]]]:
    def read(run: "Run", tokens: int) -> tuple[str, list[dict[str, Any]]]:
        keys = [key for key in run.data.metrics if not key.startswith("final/")]
        histories = (client.get_metric_history(run.info.run_id, key) for key in keys)
        return run.data.tags["sweep.trial_id"], _lines(zip(keys, histories, strict=True), tokens)

    is_server = client.tracking_uri.startswith("http")
    with ThreadPoolExecutor(REQUESTS if is_server else 1) as pool:
        return dict(pool.map(read, runs, step_tokens))


def _lines(histories: Iterable[tuple[str, list[Any]]], step_tokens: int) -> list[dict[str, Any]]:
    """Put the points of one run together again: its lines are told apart by their tokens."""
    lines: dict[int, dict[str, Any]] = {}
    for key, points in histories:
        for point in points:
            tokens = point.step
            place = {"time": point.timestamp / 1000, "step": tokens // step_tokens}
            lines.setdefault(tokens, {**place, "tokens": tokens})[key] = point.value
    return [lines[tokens] for tokens in sorted(lines)]
