"""tracking.json: which MLflow run holds which trial, and how far it was mirrored.

A note to the mirror itself: lost or damaged, it is rebuilt without duplicates. No MLflow here.
"""

import dataclasses
import hashlib
import uuid
from dataclasses import asdict, dataclass, field

from sweep.errors import CorruptFile
from sweep.tracking.store import check_tracking_uri, default_tracking_uri
from sweep.trial.files import read_json, sha256_of, write_json
from sweep.trial.folder import SweepFolder, TrialStatus

REPORT_FILES = ("report.md", "report.html", "trials.csv")


@dataclass
class Mirrored:
    """What MLflow holds of one trial."""

    run_id: str
    is_described: bool = False  # params and inputs are there
    offset: int = 0  # bytes of metrics.jsonl that the server accepted
    line_start: int = 0  # the last line up to the offset (before any: the first): where it lies,
    line_end: int = 0
    line_sha256: str = ""  # and what it is
    last_tokens: int = -1  # of the last line up to the offset; and
    last_milliseconds: int = 0  # its timestamp in MLflow
    status: str = ""  # as set in MLflow: RUNNING, FINISHED, FAILED, KILLED
    state: str = ""  # of state.json, as last mirrored, with the two that follow
    attempts: int = 0
    fencing: int = 0
    final: bool = False  # result and artifacts are there too

    def covers(self, status: TrialStatus) -> bool:
        """Tell whether the run holds all of a trial that ended with this status."""
        mirrored = (self.state, self.attempts, self.fencing)
        return self.final and mirrored == (status.state, status.attempts, status.fencing)


@dataclass
class Record:
    """tracking.json."""

    tracking_uri: str
    is_default: bool  # the store in the sweep folder
    sweep_uid: str = field(default_factory=lambda: uuid.uuid4().hex)  # finds the parent run
    experiment_id: str | None = None
    parent_run_id: str | None = None
    parent_status: str = ""
    plan_sha256: str | None = None  # of the plan that the parent run holds
    report_sha256: str | None = None  # of the report that the parent run holds
    trials: dict[str, Mirrored] = field(default_factory=dict)

    def emptied(self) -> "Record":
        """Return a record of the same sweep in a store that holds nothing of it."""
        return Record(self.tracking_uri, self.is_default, self.sweep_uid)

    def save(self, folder: SweepFolder) -> None:
        """Write tracking.json, durably."""
        write_json(folder.tracking_path, asdict(self))


def load_record(folder: SweepFolder, tracking_uri: str | None) -> Record:
    """Read tracking.json for this store, or begin one.

    Args:
        folder: of the sweep.
        tracking_uri: the user's choice; None: as before, else the store in the folder.
    """
    default = default_tracking_uri(folder)
    old = _read(folder)
    if old is None:
        return Record(tracking_uri or default, is_default=tracking_uri in (None, default))
    if tracking_uri is None:
        tracking_uri = default if old.is_default else old.tracking_uri
    if tracking_uri == old.tracking_uri:
        return old
    if old.is_default and tracking_uri == default:
        # The folder was moved, and its store names the old place: begin another store.
        database = folder.path / "mlflow.db"
        if database.exists():
            database.replace(folder.path / "mlflow-moved.db")
    return Record(tracking_uri, tracking_uri == default, old.sweep_uid)


def _read(folder: SweepFolder) -> Record | None:
    try:
        data = read_json(folder.tracking_path)
    except (FileNotFoundError, CorruptFile):
        return None
    known = {name.name for name in dataclasses.fields(Record)}
    trials = {key: Mirrored(**entry) for key, entry in data["trials"].items()}
    return Record(**{key: data[key] for key in known & data.keys()} | {"trials": trials})


def report_digest(folder: SweepFolder) -> str | None:
    """Return a hash of the report on disk, or None while there is none."""
    paths = [folder.path / name for name in REPORT_FILES]
    if not paths[0].exists():
        return None
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


def is_recorded(folder: SweepFolder, tracking_uri: str | None) -> bool:
    """Tell whether this is the store that the sweep is mirrored to; None: whichever it is."""
    record = _read(folder)
    return tracking_uri is None or (
        record is not None and record.tracking_uri == check_tracking_uri(tracking_uri)
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
    for trial in folder.trials():
        entry = record.trials.get(trial.id)
        if entry is None or not entry.covers(trial.read_status()):
            return False
    return True
