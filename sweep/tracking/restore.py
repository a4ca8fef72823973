"""Restore a sweep folder from an MLflow store, to be read like any other sweep folder."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.errors import SweepError
from sweep.tracking import store
from sweep.trial.folder import SweepFolder, TrialStatus

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

FILES = ("result.json", "metrics.jsonl", "valid_losses.npy")  # artifacts of a trial


def restore_sweep(
    tracking_uri: str, experiment: str, run_id: str | None, parent: Path
) -> SweepFolder:
    """Restore plan, states and results of a parent run, by default the newest, in a new folder."""
    uri = store.check_tracking_uri(tracking_uri)
    address = store.without_password(uri)
    if (path := store.sqlite_path(uri)) and not path.is_file():
        raise SweepError(f"tracking URI must be an existing MLflow database, got {address!r}.")
    try:
        client = store.connect(uri)
        run = _find_parent(client, address, experiment, run_id)
        folder = SweepFolder(parent / re.sub(r"[^\w .+-]|^\.+", "_", run.data.tags["sweep.name"]))
        folder.path.mkdir()
        client.download_artifacts(run.info.run_id, "plan.json", str(folder.path))
        uid = run.data.tags["sweep.uid"]
        for trial_run in store.search_runs(client, run.info.experiment_id, "sweep.uid", uid):
            _restore_trial(client, trial_run, folder)
    except SweepError:
        raise
    except Exception as error:  # anything that a store, its driver or its contents can raise
        raise SweepError(
            f"MLflow at {address} cannot be read: {store.one_sentence(error)} Check the address."
        ) from error
    return folder


def _find_parent(client: "MlflowClient", address: str, name: str, run_id: str | None) -> "Run":
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        names = ", ".join(sorted(stored.name for stored in client.search_experiments()))
        raise SweepError(f"experiment must be one of those at {address} ({names}), got {name!r}.")
    parents = store.search_runs(client, experiment.experiment_id, "sweep.role", "sweep")
    runs = {run.info.run_id: run for run in parents if "sweep.files" in run.data.tags}
    chosen = run_id or next(iter(runs), None)
    if chosen not in runs:
        raise SweepError(
            f"run must be a sweep's parent run in the MLflow experiment {name!r} at {address}, "
            f"got {chosen}. Parent runs: {', '.join(runs) or 'none'}."
        )
    return runs[chosen]


def _restore_trial(client: "MlflowClient", run: "Run", folder: SweepFolder) -> None:
    trial_id = run.data.tags.get("sweep.trial_id", "")
    if not re.fullmatch(r"[0-9a-f]{12}", trial_id) or "sweep.status" not in run.data.tags:
        return  # the parent run, or one that is still being written
    trial = folder.trial(trial_id)
    trial.path.mkdir(parents=True)
    trial.write_status(TrialStatus(**json.loads(run.data.tags["sweep.status"])))
    for name in set(FILES) & set(run.data.tags["sweep.files"].split()):
        client.download_artifacts(run.info.run_id, name, str(trial.path))
