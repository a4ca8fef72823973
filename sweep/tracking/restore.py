"""Restore a sweep folder from an MLflow store, to be read like any other sweep folder."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.errors import SweepError
from sweep.tracking import store
from sweep.trial.folder import SweepFolder, TrialFolder, TrialStatus

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

DOWNLOADS = 4  # trials at a time, from a server
FILES = ("result.json", "metrics.jsonl", "valid_losses.npy")  # artifacts of a trial


def restore_sweep(
    tracking_uri: str, experiment: str, run_id: str | None, parent: Path
) -> SweepFolder:
    """Restore plan.json and the states, results and metrics of a sweep.

    Args:
        tracking_uri: a server or a database.
        experiment: name of the MLflow experiment.
        run_id: a parent run; None: the newest.
        parent: existing folder in which the sweep folder is created, under the sweep's name.
    """
    uri = store.check_tracking_uri(tracking_uri)
    shown = store.without_password(uri)
    if uri.startswith("sqlite") and not store.sqlite_path(uri).is_file():
        raise SweepError(f"tracking URI must be an existing MLflow database, got {shown!r}.")
    try:
        client = store.connect(uri)
        run = _find_parent(client, shown, experiment, run_id)
        folder = SweepFolder(parent / re.sub(r"[^\w .+-]|^\.+", "_", run.data.tags["sweep.name"]))
        folder.path.mkdir()
        client.download_artifacts(run.info.run_id, "plan.json", str(folder.path))
        plan, uid = folder.require_plan(), run.data.tags["sweep.uid"]
        found = store.search_runs(client, run.info.experiment_id, "sweep.uid", uid)
        runs = {run.data.tags.get("sweep.trial_id"): run for run in found}
        rows = [row for row in plan["trials"] if row["id"] in runs]

        def restore(row: dict[str, Any]) -> None:
            if not re.fullmatch(r"[0-9a-f]{12}", row["id"]):
                raise SweepError(f"trial id must be 12 hexadecimal digits, got {row['id']!r}.")
            tokens_per_step = row["batch_size"] * plan["tokens_per_sequence"]
            _restore_trial(client, runs[row["id"]], folder.trial(row["id"]), tokens_per_step)

        with ThreadPoolExecutor(DOWNLOADS if uri.startswith("http") else 1) as pool:
            list(pool.map(restore, rows))
    except SweepError:
        raise
    except Exception as error:  # anything that a store, its driver or its contents can raise
        raise SweepError(
            f"MLflow at {shown} cannot be read: {store.one_sentence(error)} Check the address."
        ) from error
    return folder


def _find_parent(client: "MlflowClient", uri: str, name: str, run_id: str | None) -> "Run":
    experiment = client.get_experiment_by_name(name)
    if experiment is None or experiment.lifecycle_stage != "active":
        names = ", ".join(sorted(known.name for known in client.search_experiments()))
        raise SweepError(
            f"experiment must be one that MLflow at {uri} holds ({names}), got {name!r}. "
            "Name it with --experiment."
        )
    found = store.search_runs(client, experiment.experiment_id, "sweep.role", "sweep")
    runs = [run for run in found if "sweep.files" in run.data.tags]  # they have a plan.json
    for run in runs:
        if run_id in (None, run.info.run_id):
            return run
    if run_id is None:
        raise SweepError(f"MLflow experiment {name!r} at {uri} must hold a sweep, got none.")
    raise SweepError(
        f"run must be a sweep's parent run in experiment {name!r}, got {run_id!r}. "
        f"Parent runs: {', '.join(run.info.run_id for run in runs) or 'none'}."
    )


def _restore_trial(
    client: "MlflowClient", run: "Run", trial: TrialFolder, tokens_per_step: int
) -> None:
    """Restore a trial's state and artifacts; an unfinished one's metrics from their histories."""
    trial.path.mkdir(parents=True)
    if "sweep.status" in run.data.tags:
        status = json.loads(run.data.tags["sweep.status"])
        trial.write_status(TrialStatus(**status))
    files = run.data.tags.get("sweep.files", "").split()
    for name in FILES:
        if name in files:
            client.download_artifacts(run.info.run_id, name, str(trial.path))
    if "metrics.jsonl" not in files:
        lines: dict[int, dict[str, Any]] = {}
        for key in (key for key in run.data.metrics if not key.startswith("final/")):
            for point in client.get_metric_history(run.info.run_id, key):
                line = {"time": point.timestamp / 1000, "step": point.step // tokens_per_step}
                lines.setdefault(point.step, {**line, "tokens": point.step})[key] = point.value
        text = "".join(json.dumps(lines[tokens]) + "\n" for tokens in sorted(lines))
        trial.metrics_path.write_text(text)
