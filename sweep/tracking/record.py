"""tracking.json: which MLflow run holds which trial, and how far it was mirrored.

A note to the mirror itself: lost or damaged, it is rebuilt without duplicates. No MLflow here.
"""

import uuid

from pydantic import BaseModel, Field, ValidationError

from sweep.errors import CorruptFile
from sweep.tracking.address import without_password
from sweep.tracking.store import check_tracking_uri, default_tracking_uri
from sweep.trial.files import read_json, sha256_of, sha256_of_file, write_json
from sweep.trial.folder import SweepFolder, TrialStatus

REPORT_FILES = ("report.md", "report.html", "trials.csv")


class Mirrored(BaseModel):
    """What MLflow holds of one trial."""

    run_id: str
    is_described: bool = False  # params and inputs are there
    began: int | None = None  # time of the first line, noted before it is sent, in milliseconds
    offset: int = 0  # bytes of metrics.jsonl that the server accepted
    last_tokens: int = -1  # of the last line up to the offset; and
    last_milliseconds: int = 0  # its timestamp in MLflow
    run_status: str = ""  # as set in MLflow: RUNNING, FINISHED, FAILED, KILLED
    told: TrialStatus | None = None  # state.json as last mirrored, without its run id
    final: bool = False  # result and artifacts are there too

    def covers(self, status: TrialStatus) -> bool:
        """Tell whether the run holds all of a trial that ended with this status."""
        return self.final and self.told == status.changed(mlflow_run_id=None)


class Record(BaseModel):
    """tracking.json."""

    tracking_uri: str  # without a password
    is_default: bool  # the store in the sweep folder
    sweep_uid: str = Field(
        default_factory=lambda: uuid.uuid4().hex
    )  # finds the parent run; in the names of studies
    experiment_id: str = ""
    parent_run_id: str = ""
    parent_status: str = ""
    plan_sha256: str | None = None  # of the plan that the parent run holds
    report_sha256: str | None = None  # of the report that the parent run holds
    trials: dict[str, Mirrored] = {}

    def save(self, folder: SweepFolder) -> None:
        """Write tracking.json, durably."""
        write_json(folder.tracking_path, self.model_dump(mode="json"))


def load_record(folder: SweepFolder, tracking_uri: str | None) -> Record:
    """Read tracking.json for this store, or begin one.

    Args:
        folder: of the sweep.
        tracking_uri: the user's choice; None: as before, else the store in the folder.
    """
    default, old = default_tracking_uri(folder), _read(folder)
    if tracking_uri is None:
        tracking_uri = default if old is None or old.is_default else old.tracking_uri
    tracking_uri = without_password(tracking_uri)
    record = Record(tracking_uri=tracking_uri, is_default=tracking_uri == default)
    if old is None:
        return record
    if tracking_uri == old.tracking_uri:
        return old
    database = folder.path / "mlflow.db"
    if old.is_default and record.is_default and database.exists():
        # The folder was moved, and its store names the old place: begin another store.
        database.replace(folder.path / "mlflow-moved.db")
    record.sweep_uid = old.sweep_uid
    return record


def _read(folder: SweepFolder) -> Record | None:
    try:
        return Record.model_validate(read_json(folder.tracking_path))
    except (FileNotFoundError, CorruptFile, ValidationError):
        return None


def report_digest(folder: SweepFolder) -> str | None:
    """Return a hash of the report on disk, or None while there is none."""
    paths = [folder.path / name for name in REPORT_FILES]
    if not paths[0].exists():
        return None
    return sha256_of([sha256_of_file(path) if path.exists() else "" for path in paths])


def is_recorded(folder: SweepFolder, tracking_uri: str | None) -> bool:
    """Tell whether this is the store that the sweep is mirrored to; None: whichever it is."""
    record = _read(folder)
    return tracking_uri is None or (
        record is not None
        and record.tracking_uri == without_password(check_tracking_uri(tracking_uri))
    )


def is_mirrored(folder: SweepFolder) -> bool:
    """Tell whether every trial has ended and its store holds all of it, without asking it."""
    record, plan = _read(folder), folder.read_plan()
    if record is None or plan is None or record.parent_status in ("", "RUNNING"):
        return False
    if record.is_default and not (folder.path / "mlflow.db").exists():
        return False
    if (record.plan_sha256, record.report_sha256) != (sha256_of(plan), report_digest(folder)):
        return False
    entries = [(trial.read_status(), record.trials.get(trial.id)) for trial in folder.trials()]
    return all(entry is not None and entry.covers(status) for status, entry in entries)
