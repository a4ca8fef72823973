"""MLflow stores: connections, tracking.json, restored sweeps, and pages of MLflow's UI.

MLflow is imported by `connect` only, so that a mirrored sweep is recognised without it.
"""

import base64
import contextlib
import json
import logging
import os
import re
import sqlite3
import sys
import tempfile
import zlib
from collections.abc import Iterator
from http.client import HTTPException
from itertools import chain, count
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

from sweep.errors import CorruptFile, SweepError, causes_of, cut, without_secrets
from sweep.plan.plan import Plan
from sweep.resources import read_toml, sha256_of_file
from sweep.tracking.addresses import (
    check_tracking_uri,
    mlflow_address,
    sqlite_address,
    sqlite_path,
    with_driver,
    without_password,
)
from sweep.trial.files import find_json, refuse_super_journal, sha256_of
from sweep.trial.folder import SweepFolder
from sweep.trial.status import TrialStatus

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

LOG = logging.getLogger(__name__)
ANSWER_SECONDS = "10"  # PGCONNECT_TIMEOUT unless the user sets it
TIMING_FILE = "timing.json"
SECONDS = "answer/seconds"  # metric of the parent run, by batch size
# Artifacts that are written after the trials.
LAST_FILES = (TIMING_FILE, "report.md", "report.html", "trials.csv", "answer.json")
VIEW = "mlflow.sharedViewState."
KIND = "mlflow.experimentKind"
FIRST_VERSION = (3, 15)  # first MLflow that reads saved views with a name
ENVIRONMENT = {  # set only if the user has not set it
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the mirror repeats its passes; MLflow's default is 7
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # seconds
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # read by the server that `sweep ui` starts
    "PGCONNECT_TIMEOUT": ANSWER_SECONDS,
}


def one_sentence(error: BaseException) -> str:
    """Return the first line of an error of a database, a driver or a server, shortened."""
    original = getattr(error, "orig", None)  # the driver's
    text = str(original or error).strip()
    first_line = text.splitlines()[0] if text else type(error).__name__
    return cut(without_secrets(first_line))


def sqlite_fault(error: BaseException | None) -> str | None:
    """Return `locked` or `damaged` if SQLite's error of that kind led to this one."""
    for cause in causes_of(error):
        match getattr(cause, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return "locked"
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return "damaged"
            case sqlite3.SQLITE_ERROR if "no such" in str(cause):  # table or column
                return "damaged"
    return None


def set_aside_damaged(path: Path, experiment: str = "", location: str = "") -> None:
    """Rename a damaged SQLite database and log it; its content is rebuilt from the folder.

    MLflow's is also renamed if the artifacts of the experiment are not at `location`: the folder
    was moved, or a stranger's database names other files, which would be overwritten.
    """
    if not path.exists():
        return
    elsewhere = """
        SELECT 1 FROM experiments e LEFT JOIN runs r ON r.experiment_id = e.experiment_id
        WHERE e.name = :name AND (
            e.artifact_location IS NOT :location OR r.run_uuid GLOB '*[^0-9a-f]*'
            OR r.artifact_uri != :location || '/' || r.run_uuid || '/artifacts')"""
    problem = "is damaged"
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            is_whole = connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
            if is_whole and connection.execute("SELECT * FROM alembic_version").fetchall():
                names = {"name": experiment, "location": location}
                if not (experiment and connection.execute(elsewhere, names).fetchone()):
                    return
                problem = "names artifacts of another folder"
    except sqlite3.Error as error:
        if sqlite_fault(error) != "damaged":
            raise
    LOG.warning("%s %s; it is written again. The old one: %s", path, problem, set_aside(path))


def set_aside(path: Path) -> Path:
    """Rename a database, with SQLite's journals, to a name that is free."""
    names = (path.with_name(f"{path.stem}-old-{number}{path.suffix}") for number in count(1))
    new = next(name for name in names if not name.exists())
    for journal in path.parent.glob(f"{path.name}-*"):
        journal.replace(new.with_name(journal.name.replace(path.name, new.name)))
    path.replace(new)
    return new


def default_tracking_uri(folder: SweepFolder) -> str:
    return sqlite_address(folder.path / "mlflow.db")


def check_answers(uri: str) -> None:
    """Refuse a wrong address, or a database that cannot be opened; a server may be down."""
    uri = check_tracking_uri(uri)
    path = sqlite_path(uri)
    if path:
        if not path.parent.is_dir():
            problem = f"must lie in a folder that exists, got {str(path)!r}"
            remedy = "Create it, or correct the path: a % in a name is written %25"
            raise SweepError(f"the file of --tracking-uri {problem}. {remedy}.")
        return
    if uri.startswith("http"):
        return
    import sqlalchemy

    prepare_environment()
    with reading("MLflow", uri):
        sqlalchemy.create_engine(with_driver(uri), poolclass=sqlalchemy.NullPool).connect().close()


@contextlib.contextmanager
def reading(subject: str, uri: str) -> Iterator[None]:
    """Turn any error of a store, its driver, its address or its contents into one sentence."""
    address = without_password(uri)
    try:
        yield
    except SweepError:
        raise
    except Exception as error:
        problem = f"cannot be read: {one_sentence(error).rstrip('.')}"
        raise SweepError(f"{subject} at {address} {problem}. Check the address.") from error


def read_record(folder: SweepFolder) -> dict[str, Any]:
    """Return what tracking.json records, or the record of a sweep that was never mirrored."""
    record: dict[str, Any] = {
        "tracking_uri": "",  # not mirrored yet
        "is_default": True,  # the store in the folder
        "mirrored_sha256": "",  # `digest` of the folder when the store last held all of it
    }
    try:
        stored = find_json(folder.tracking_path)
        if stored is not None:
            record |= stored
    except CorruptFile as damage:
        remedy = "If the sweep was tracked elsewhere, name that store with --tracking-uri"
        LOG.warning("%s It is replaced. %s.", damage, remedy)
    return record


def recorded_uri(folder: SweepFolder, record: dict[str, Any]) -> str:
    """Return the address that a record names, or refuse to use it.

    A stranger may have written the record: a file outside the folder may be the user's, and a
    server would receive the user's token. MLflow's own variable may name such a store as well.
    """
    if record["is_default"]:
        return default_tracking_uri(folder)
    uri = check_tracking_uri(str(record["tracking_uri"]))
    with contextlib.suppress(SweepError):  # MLflow knows more kinds of addresses
        own = check_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", ""))
        if without_password(own) == uri:
            return own
    remedy = f"If it is yours, add --tracking-uri {uri} or set MLFLOW_TRACKING_URI to it"
    raise SweepError(f"{folder.tracking_path} names {uri}. {remedy}.")


def choose_store(folder: SweepFolder, tracking_uri: str | None) -> dict[str, Any]:
    """Return the record of this store; None: the recorded store, by default the folder's own."""
    record = read_record(folder)
    uri = without_password(tracking_uri or recorded_uri(folder, record))
    if uri == record["tracking_uri"]:
        return record
    is_default = uri == default_tracking_uri(folder)
    return record | {"tracking_uri": uri, "is_default": is_default, "mirrored_sha256": ""}


def is_mirrored(folder: SweepFolder, tracking_uri: str | None) -> bool:
    """Return True if this store (None: the recorded one) holds all of the folder; ask no store."""
    if tracking_uri:
        record = choose_store(folder, check_tracking_uri(tracking_uri))
    else:
        record = read_record(folder)
    if record["is_default"] and not (folder.path / "mlflow.db").exists():
        return False
    return bool(record["mirrored_sha256"] == digest(folder))


def digest(folder: SweepFolder) -> str:
    files = [(trial.state_path, trial.result_path) for trial in folder.trials()]
    paths = [*chain(*files), *(folder.path / name for name in LAST_FILES)]
    hashes = [sha256_of_file(path) if path.exists() else None for path in paths]
    return sha256_of([folder.require_plan(), hashes])


def prepare_environment() -> None:
    """Set those of MLflow's settings that the user has not set; call it before importing MLflow."""
    if "DO_NOT_TRACK" not in os.environ:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.update({**ENVIRONMENT, **os.environ})


def connect(uri: str) -> "MlflowClient":
    """Import MLflow, and return a client of this store; create the tables of a new SQLite file."""
    prepare_environment()
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    path = sqlite_path(uri)
    if path:  # a connection that is kept would write to a file that is gone
        os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
    if path and not path.exists():
        create_database(path)
    address = mlflow_address(uri)
    return MlflowClient(address, address)


def create_database(path: Path) -> None:
    """Create an SQLite file with MLflow's tables, whole or not at all.

    MLflow creates them one by one, and a command killed meanwhile must leave no database. The name
    given to MLflow must be new, because it initializes a path only once per process.
    """
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory(".part", f".{path.name}.", path.parent) as folder:
        new = Path(folder) / path.name
        address = mlflow_address(sqlite_address(new))
        MlflowClient(address, address).search_experiments()
        new.replace(path)


def metric_name(name: str, unit: str) -> str:
    """Return MLflow's name of a metric or of a column final_…; system/… are "System metrics"."""
    name = re.sub("^final_", "final/", name)
    name = re.sub("^(perf|final)/tokens", rf"\1/{unit}", name)
    return f"system/{name}" if name.startswith(("perf/", "memory/")) else name


def search_runs(client: "MlflowClient", experiment: str, tag: str, value: str) -> "list[Run]":
    """Return the runs of an experiment (id) with a tag, newest first, except deleted ones."""
    return client.search_runs(
        [experiment],
        f"tags.`{tag}` = '{value}'",
        max_results=50_000,  # its limit
        order_by=["attributes.start_time DESC"],
    )


def restore_sweep(uri: str, experiment: str, run_id: str | None, parent: Path) -> SweepFolder:
    """Restore plan, states and results of a parent run, by default the newest, in a new folder."""
    uri = check_tracking_uri(uri)
    address = without_password(uri)
    path = sqlite_path(uri)
    if path:
        refuse_super_journal(path.with_name(f"{path.name}-journal"))
    if path and not path.is_file():
        raise SweepError(f"tracking URI must be an existing MLflow database, got {address!r}.")
    with reading("MLflow", uri):
        client = connect(uri)
        run = _find_parent(client, address, experiment, run_id)
        folder = SweepFolder(parent / re.sub(r"[^\w .+-]|^\.+", "_", run.data.tags["sweep.name"]))
        folder.path.mkdir()
        for name in {"plan.json", TIMING_FILE} & set(run.data.tags["sweep.files"].split()):
            client.download_artifacts(run.info.run_id, name, str(folder.path))
        uid = run.data.tags["sweep.uid"]
        for trial_run in search_runs(client, run.info.experiment_id, "sweep.uid", uid):
            tags = trial_run.data.tags
            is_trial = re.fullmatch(r"[0-9a-f]{12}", tags.get("sweep.trial_id", ""))
            if not is_trial or "sweep.status" not in tags:
                continue  # the parent run, or one that is still being written
            trial = folder.trial(tags["sweep.trial_id"])
            trial.path.mkdir(parents=True)
            trial.write_status(TrialStatus(**json.loads(tags["sweep.status"])))
            files = {"result.json", "metrics.jsonl", "valid_losses.npy"}
            for name in files & set(tags["sweep.files"].split()):
                client.download_artifacts(trial_run.info.run_id, name, str(trial.path))
    return folder


def find_experiment(client: "MlflowClient", address: str, name: str) -> str:
    """Return the id of an experiment; refuse a name that the store does not have."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        names = cut(", ".join(sorted(stored.name for stored in client.search_experiments())))
        raise SweepError(f"experiment must be one of those at {address} ({names}), got {name!r}.")
    return str(experiment.experiment_id)


def _find_parent(client: "MlflowClient", address: str, name: str, run_id: str | None) -> "Run":
    experiment = find_experiment(client, address, name)
    parents = search_runs(client, experiment, "sweep.role", "sweep")
    runs = {run.info.run_id: run for run in parents if "sweep.files" in run.data.tags}
    chosen = run_id
    if not chosen:
        chosen = next(iter(runs), None)
    if chosen not in runs:
        ids = cut(", ".join(runs)) if runs else "none"
        actual = f"got {cut(str(chosen))}. Parent runs: {ids}."
        raise SweepError(f"run must be a sweep's parent run in {name!r} at {address}, {actual}")
    return runs[chosen]


def refuse_remote_artifacts(path: Path) -> None:
    """Refuse a database with artifacts on a server, which would get the user's token."""
    columns = {"experiments": "artifact_location", "runs": "artifact_uri"}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for table, column in columns.items():
            is_remote = f"{column} LIKE '%:/%' AND {column} NOT LIKE 'file:%'"
            with contextlib.suppress(sqlite3.Error):  # MLflow's server says what is wrong
                rows = connection.execute(f"SELECT {column} FROM {table} WHERE {is_remote}")
                row = rows.fetchone()
                if row:
                    problem = f"names artifacts on a server, {str(row[0])!r}"
                    raise SweepError(f"{path} {problem}. Remove it, and call `sweep report`.")


def ui_command(folder: SweepFolder, uri: str, port: int) -> list[str]:
    """Return the command that serves this sweep's store with MLflow's UI, on loopback only."""
    path = sqlite_path(uri)
    if path and not path.exists():
        remedy = f"Create it with `sweep report {folder.path}`."
        raise SweepError(f"{folder.path} must have an MLflow store, got none at {uri}. {remedy}")
    if path and uri == default_tracking_uri(folder):  # the user has named any other one
        refuse_remote_artifacts(path)
    prepare_environment()
    artifacts = (folder.path.absolute() / "mlartifacts").as_uri()
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--backend-store-uri", mlflow_address(uri)]
    command += ["--default-artifact-root", artifacts, "--no-serve-artifacts", "--workers", "1"]
    command += ["--uvicorn-opts", "--log-level warning"]  # no line for each request
    return [*command, "--host", "127.0.0.1", "--port", str(port)]


def view_state(plan: Plan) -> str:
    """Return the state of the page of MLflow's UI that compares a sweep's batch sizes."""
    objective = plan.settings.objective
    unit = plan.settings.token_unit
    names = {"curve": objective.curve, "final": metric_name(objective.name, unit)}
    names["training"] = "reward/mean" if plan.settings.workload.samples else "train/loss"
    template = Template(json.dumps(read_toml(__file__, "view.toml")))
    return template.substitute(names, uid=plan.sweep_uid, unit=unit)


def save_view(client: "MlflowClient", parent: "Run", plan: Plan) -> None:
    """Save the view in the experiment; its page then opens on training runs, not on traces."""
    from mlflow.exceptions import RestException

    compressed = zlib.compress(view_state(plan).encode())
    view = {
        "name": f"{parent.data.tags['sweep.name']}: batch sizes",
        "createdAt": parent.info.start_time,
        "state": f"deflate;{base64.b64encode(compressed).decode()}",
    }
    tags = {VIEW + plan.sweep_uid: json.dumps(view), KIND: "custom_model_development"}
    experiment = parent.info.experiment_id
    for key in tags.keys() - client.get_experiment(experiment).tags.keys():
        with contextlib.suppress(RestException):  # `sweep ui` does without what a server refuses
            client.set_experiment_tag(experiment, key, tags[key])


def server_version(address: str) -> tuple[int, ...]:
    """Return the version of the MLflow server at an address; empty if none answers."""
    direct = build_opener(ProxyHandler({}))
    try:
        with direct.open(f"{address}/version", timeout=9) as file:
            version = file.read().split(b".")[:2]
        return tuple(map(int, version))
    except (OSError, ValueError, HTTPException):
        return ()


def page_address(address: str, uri: str, plan: Plan) -> str:
    """Return the address of the comparison in the UI at an address; without a view, a filter's."""
    with reading("MLflow", uri):
        experiment = connect(uri).get_experiment_by_name(plan.experiment)
    if not experiment:
        return address
    query = {"searchFilter": json.loads(view_state(plan))["searchFilter"]}
    if VIEW + plan.sweep_uid in experiment.tags and server_version(address) >= FIRST_VERSION:
        query = {"viewStateShareKey": plan.sweep_uid}
    query |= {"compareRunsMode": "CHART", "workflowType": "machine_learning"}
    return f"{address}/#/experiments/{experiment.experiment_id}/runs?{urlencode(query)}"
