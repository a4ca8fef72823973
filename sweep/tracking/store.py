"""Where MLflow keeps things: addresses, the client, experiments, and long documents in tags.

Importing this costs nothing; MLflow itself is imported by `connect` and `import_ahead`.
"""

import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.errors import SweepError
from sweep.tracking.address import (
    ANSWER_SECONDS,
    one_sentence,
    with_driver,
    without_password,
)
from sweep.trial.files import read_json, replacing
from sweep.trial.folder import SweepFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")
TAG_CHARACTERS = 7500  # of a tag's value; MLflow cuts longer ones than 8000 silently
ENVIRONMENT = {  # set only where the user did not
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the mirror has its own pauses; MLflow: 7, minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # seconds
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # of `sweep ui`
    "PGCONNECT_TIMEOUT": ANSWER_SECONDS,
}


def default_tracking_uri(folder: SweepFolder) -> str:
    """Return the address of the SQLite store inside the sweep folder."""
    return f"sqlite:///{folder.path.absolute() / 'mlflow.db'}"


def check_tracking_uri(uri: str) -> str:
    """Return the address if MLflow can keep runs there.

    Raises:
        SweepError: for a path, `file:`, an unknown scheme, or a driver that is not installed.
    """
    shown = without_password(uri)
    scheme = re.match(r"([a-z]+)(\+[a-z0-9_]+)?://", uri)
    if not scheme or scheme[1] not in SCHEMES or not uri[scheme.end() :].strip("/"):
        raise SweepError(
            "tracking URI must be a server or a database such as http://host:5000 or "
            f"sqlite:////absolute/path/mlflow.db, got {shown!r}. MLflow keeps no runs in plain "
            "folders any more."
        )
    if scheme[1] == "sqlite":
        return f"sqlite:///{Path(uri.partition(':///')[2]).absolute()}"
    with_driver(uri)
    return uri.rstrip("/") if scheme[1] in ("http", "https") else uri


def check_answers(uri: str) -> None:
    """Refuse a database that cannot be opened; a server may be down, and comes back.

    Raises:
        SweepError: if it does not answer, refuses the password, or does not exist.
    """
    if uri.startswith(("http", "sqlite")):
        return
    import sqlalchemy

    prepare_environment()
    try:
        sqlalchemy.create_engine(with_driver(uri), poolclass=sqlalchemy.NullPool).connect().close()
    except Exception as error:  # whatever a database, its driver or an address can raise
        raise SweepError(
            f"tracking URI must be a database that can be opened, got {without_password(uri)!r} "
            f"({one_sentence(error)}). Correct --tracking-uri."
        ) from error


def sqlite_path(uri: str) -> Path:
    """Return the file of a checked `sqlite:///` address."""
    return Path(uri.partition(":///")[2])


def import_ahead(folder: SweepFolder, tracking_uri: str | None) -> None:
    """Import MLflow, and make a new SQLite store's tables, in a thread that the process ends after.

    Three seconds of one core, for a command that waits for something else before it trains: its
    first trial would pay them. Once a process. What fails here is done again by `connect`.
    """
    global _ahead
    if _ahead is None:
        prepare_environment()
        uri = tracking_uri or default_tracking_uri(folder)
        _ahead = _Ahead(uri.startswith("sqlite") and not sqlite_path(uri).exists())
        _ahead.start()


class _Ahead(threading.Thread):
    """Imports MLflow, and makes an empty database."""

    def __init__(self, makes_tables: bool) -> None:
        super().__init__(name="import-ahead")
        self._makes_tables = makes_tables
        self.database: bytes | None = None

    def run(self) -> None:
        with contextlib.suppress(Exception), tempfile.TemporaryDirectory() as name:
            import mlflow  # noqa: F401

            if self._makes_tables:
                path = Path(name) / "mlflow.db"
                _make_tables(path)
                self.database = path.read_bytes()


_ahead: _Ahead | None = None


def connect(uri: str) -> "MlflowClient":
    """Import MLflow, quietly and without telemetry, and return a client of this store.

    A new SQLite database gets its schema here.
    """
    prepare_environment()
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    uri = with_driver(uri)
    if uri.startswith("sqlite") and not sqlite_path(uri).exists():
        if _ahead:
            _ahead.join()
        # MLflow makes its tables one by one: whoever is killed meanwhile must leave none of them.
        with replacing(sqlite_path(uri)) as part:
            if _ahead and _ahead.database:
                part.write_bytes(_ahead.database)
            else:
                _make_tables(part)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _make_tables(path: Path) -> None:
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    MlflowClient(f"sqlite:///{path}", f"sqlite:///{path}").search_experiments()


def prepare_environment() -> None:
    """Choose MLflow's settings that the user left open; before its first import."""
    if not {"MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"} & os.environ.keys():
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def require_experiment(client: "MlflowClient", name: str, uri: str, folder: Path) -> str:
    """Return the id of an MLflow experiment, created if need be.

    Artifacts of a SQLite store lie beside it, in `mlartifacts`, and those of another database in
    the folder of the experiment's first sweep; a server has its own place.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        location = None
        if not uri.startswith("http"):
            place = sqlite_path(uri).parent if uri.startswith("sqlite") else folder.absolute()
            location = (place / "mlartifacts").as_uri()
        return str(client.create_experiment(name, artifact_location=location))
    if found.lifecycle_stage != "active":
        raise SweepError(
            f"MLflow experiment {name!r} at {uri} must not be deleted, and is. Restore it with "
            f"`mlflow experiments restore --experiment-id {found.experiment_id}`."
        )
    return str(found.experiment_id)


def search_all(
    client: "MlflowClient",
    experiment_id: str,
    wanted: Mapping[str, str],
    on_page: Callable[[], None] = lambda: None,
) -> Iterator["Run"]:
    """Yield the live runs with these tags, newest first; call `on_page` with every answer."""
    clauses = [f"tags.`{key}` = '{value}'" for key, value in wanted.items()]
    token = None
    while True:
        page = client.search_runs(
            [experiment_id],
            " and ".join(clauses),
            max_results=500,
            order_by=["attributes.start_time DESC"],
            page_token=token,
        )
        on_page()
        yield from page
        token = page.token
        if not token:
            return


def children_of(
    client: "MlflowClient",
    experiment_id: str,
    parent_run_id: str,
    on_page: Callable[[], None] = lambda: None,
) -> list["Run"]:
    """List the runs of a sweep's trials, oldest first, without superseded ones."""
    wanted = {"mlflow.parentRunId": parent_run_id}
    runs = list(search_all(client, experiment_id, wanted, on_page))
    return [
        run
        for run in reversed(runs)
        if "sweep.trial_id" in run.data.tags and "sweep.superseded" not in run.data.tags
    ]


def document_tags(name: str, document: Any) -> dict[str, str]:
    """Write a document as JSON into one tag, or into `name`, `name.1`, … where it is long."""
    text = json.dumps(document, separators=(",", ":"))
    parts = [text[i : i + TAG_CHARACTERS] for i in range(0, len(text), TAG_CHARACTERS)]
    return {f"{name}.{i}" if i else name: part for i, part in enumerate(parts)}


def read_document(tags: Mapping[str, str], name: str) -> Any:
    """Read a document of `document_tags`; parts left from a longer one before do no harm."""
    parts = [tags[name]]
    while (part := tags.get(f"{name}.{len(parts)}")) is not None:
        parts.append(part)
    return json.JSONDecoder().raw_decode("".join(parts))[0]


def ui_command(folder: SweepFolder, port: int) -> list[str]:
    """Return the command of MLflow's own server on this sweep's store, on loopback only.

    Args:
        folder: of the sweep.
        port: to listen on.

    Raises:
        SweepError: if the store is a server, which has its own address, or there is none yet.
    """
    uri = default_tracking_uri(folder)
    try:
        record = read_json(folder.tracking_path)
        uri = uri if record["is_default"] else record["tracking_uri"]
    except FileNotFoundError:
        pass
    if uri.startswith("http"):
        raise SweepError(f"{folder.path} is tracked by a server. Open {uri} in a browser.")
    if uri == default_tracking_uri(folder) and not (folder.path / "mlflow.db").exists():
        raise SweepError(
            f"{folder.path} must hold an MLflow store, and has none. "
            f"Make one with `sweep report {folder.path}`."
        )
    prepare_environment()
    artifacts = (folder.path.absolute() / "mlartifacts").as_uri()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", with_driver(uri)]
    command += ["--default-artifact-root", artifacts, "--no-serve-artifacts", "--workers", "1"]
    return [*command, "--host", "127.0.0.1", "--port", str(port)]
