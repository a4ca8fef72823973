"""One pass of the mirror: the parent run, a run per trial, and what each of them lacks.

Before anything is sent, the store is asked which runs of this sweep it has, so that an answer
lost on the way, or a crash, makes nothing twice.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.plan.plan import Plan, PlannedTrial, load_plan
from sweep.tracking import runs
from sweep.tracking.address import one_sentence
from sweep.tracking.record import REPORT_FILES, Mirrored, Record, report_digest
from sweep.tracking.store import (
    children_of,
    connect,
    document_tags,
    require_experiment,
    search_all,
)
from sweep.trial.files import sha256_of
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder, TrialStatus
from sweep.trial.lease import is_locked
from sweep.version import __version__

if TYPE_CHECKING:
    from mlflow import MlflowClient

SAVE_SECONDS = 1.0  # at least, between two writes of tracking.json within a pass
REST = 9  # times what a look or a write took, until the next: a tenth of the time is enough


class OutOfTime(Exception):
    """The time that closing was given is over."""


class Delivery:
    """Brings one store up to date.

    Args:
        address: of the store, with its password; None: as recorded.

    Attributes:
        deadline: monotonic time after which nothing more is sent.
        patience: seconds by which it moves on whenever the store takes something, or is looked
            through for the first time since; None: it stays.
        has_report: whether the report on disk is whole.
        look_seconds: what the last pass took to look for what changed, and to write its record.
    """

    def __init__(
        self,
        folder: SweepFolder,
        plan: Plan,
        record: Record,
        announce: Callable[[str, str], None] | None,
        address: str | None = None,
    ) -> None:
        self.folder, self.plan, self.record, self._announce = folder, plan, record, announce
        self._address = address or record.tracking_uri
        self.deadline, self.has_report, self.look_seconds = float("inf"), False, 0.0
        self.patience: float | None = None
        # through the runs that there are, and the store took nothing since
        self._has_looked = False
        self._client: MlflowClient | None = None
        self._stamps: dict[Path, tuple[int, int]] = {}  # of files whose content the store has
        self._save_again = 0.0  # monotonic

    def disconnect(self) -> None:
        """Forget the client: the next pass asks the store anew what it has."""
        self._client = None

    def run(self, is_alive: bool) -> str | None:
        """Do one pass.

        Args:
            is_alive: whether a runner lives; without one no run stays RUNNING.

        Returns:
            The first trouble that concerned a single trial only.
        """
        client = self._client = self._client or self._connect()
        try:
            self._mirror_plan(client)
            if is_alive:
                self._set_parent_status(client, "RUNNING")
            rows = self._changed()
            trouble = self._each(rows, lambda row: self._prepare(client, row))
            if rows:
                self._save(now=True)  # before the first points: were a trial reset, it must be seen
            mirrored = self._each(rows, lambda row: self._mirror_trial(client, row, is_alive))
            trouble = trouble or mirrored
            if self.has_report:
                self._mirror_report(client)
            if not is_alive:
                self._set_parent_status(client, self._end_status())
        finally:
            self._save(now=True)
        return trouble

    def _each(
        self, rows: list[PlannedTrial], deliver: Callable[[PlannedTrial], None]
    ) -> str | None:
        """Call this with each row; return the first trouble that concerned one of them only."""
        trouble = None
        for row in rows:
            self._check_time()
            try:
                deliver(row)
            except Exception as error:
                if not runs.concerns_one_run(error):
                    raise
                trouble = trouble or f"trial {row.id}: {one_sentence(error)}"
        return trouble

    def _changed(self) -> list[PlannedTrial]:
        """Return the rows whose state is not known to be mirrored."""
        started = time.monotonic()
        paths = ((row, self.folder.trial(str(row.id)).state_path) for row in self.plan.known_trials)
        found = [row for row, path in paths if self._stamps.get(path) != _stamp(path)]
        self.look_seconds = time.monotonic() - started
        return found

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def _note_progress(self) -> None:
        self._check_time()
        if self.patience is not None:
            self.deadline = time.monotonic() + self.patience

    def _save(self, now: bool) -> None:
        started = time.monotonic()
        if now or started > self._save_again:
            self.record.save(self.folder)
            ended = time.monotonic()
            self.look_seconds += ended - started
            self._save_again = ended + max(SAVE_SECONDS, REST * (ended - started))
        if not now:
            self._has_looked = False
            self._note_progress()

    # ---------------------------------------------------------------- the parent run

    def _connect(self) -> "MlflowClient":
        """Reach the store, and learn which runs of this sweep it has."""
        client = connect(self._address)
        name, uri = self.plan.experiment, self.record.tracking_uri
        experiment = require_experiment(client, name, uri, self.folder.path)
        parent = self._require_parent(client, experiment)
        children: dict[str, list[str]] = {}
        on_page = self._check_time if self._has_looked else self._note_progress
        for run in children_of(client, experiment, parent, on_page):
            children.setdefault(run.data.tags["sweep.trial_id"], []).append(run.info.run_id)
        found = {}  # what is not there was deleted in MLflow, and is made anew
        for trial_id, run_ids in children.items():
            entry = self.record.trials.get(trial_id)
            if entry is None or entry.run_id not in run_ids:
                entry = Mirrored(run_id=run_ids[0])
            found[trial_id] = entry
            runs.delete_others(client, run_ids, entry.run_id)
        self.record.trials, self._has_looked = found, True
        self._stamps.clear()
        return client

    def _require_parent(self, client: "MlflowClient", experiment: str) -> str:
        """Find or make the parent run; its uid is on disk before a run bears it."""
        record = self.record
        found = _run_ids(client, experiment, {"sweep.uid": record.sweep_uid})
        if not found and not record.parent_run_id:
            record.sweep_uid = self._lost_uid(client, experiment) or record.sweep_uid
            found = _run_ids(client, experiment, {"sweep.uid": record.sweep_uid})
        if record.parent_run_id not in found:  # new, or another store took this one's place
            fields = record.model_dump(include={"tracking_uri", "is_default", "sweep_uid"})
            record = self.record = Record(**fields, experiment_id=experiment)
            record.save(self.folder)
            tags = {
                "mlflow.runName": self.folder.name,
                "sweep.role": "sweep",
                "sweep.name": self.folder.name,
                "sweep.uid": record.sweep_uid,
            }
            record.parent_run_id = found[-1] if found else self._create(client, tags)
            record.save(self.folder)
        runs.delete_others(client, found, record.parent_run_id)
        return record.parent_run_id

    def _lost_uid(self, client: "MlflowClient", experiment: str) -> str | None:
        """Find the uid again after tracking.json was lost: by a trial's run, or the own store."""
        known = {status.mlflow_run_id for status in self._statuses()} - {None}
        if not known and not self.record.is_default:
            return None
        parents = list(search_all(client, experiment, {"sweep.role": "sweep"}))
        for parent in parents:
            children = children_of(client, experiment, parent.info.run_id)
            if known & {run.info.run_id for run in children}:
                return parent.data.tags["sweep.uid"]
        return parents[0].data.tags["sweep.uid"] if parents and self.record.is_default else None

    def _create(
        self, client: "MlflowClient", tags: dict[str, str], start: int | None = None
    ) -> str:
        tags = {"sweep.version": __version__, "mlflow.source.name": "sweep", **tags}
        run = client.create_run(self.record.experiment_id, start, tags)
        return str(run.info.run_id)

    def _mirror_plan(self, client: "MlflowClient") -> None:
        """Read plan.json if it grew, and keep it with the parent run."""
        path, stamp = self.folder.plan_path, _stamp(self.folder.plan_path)
        if stamp == self._stamps.get(path):
            return
        self.plan, document = load_plan(self.folder) or self.plan, self.folder.require_plan()
        parent, digest = self.record.parent_run_id, sha256_of(document)
        if digest != self.record.plan_sha256:
            tags: dict[str, str] = {}
            for name in ("settings", "execution", "data"):
                tags |= document_tags(f"sweep.{name}", document[name])
            runs.set_tags(client, parent, tags | document_tags("sweep.plan", document))
            if self.record.plan_sha256 is None:
                runs.log_params(client, parent, document["settings"])
            client.log_artifact(parent, str(path))
            self.record.plan_sha256 = digest
        self._stamps[path] = stamp

    def _mirror_report(self, client: "MlflowClient") -> None:
        digest, parent = report_digest(self.folder), self.record.parent_run_id
        if digest is None or digest == self.record.report_sha256:
            return
        for name in REPORT_FILES:
            if (self.folder.path / name).exists():
                client.log_artifact(parent, str(self.folder.path / name))
        if self.folder.figures_path.is_dir():
            client.log_artifacts(parent, str(self.folder.figures_path), "figures")
        self.record.report_sha256 = digest

    def _set_parent_status(self, client: "MlflowClient", status: str) -> None:
        if status != self.record.parent_status:
            runs.set_run_status(client, self.record.parent_run_id, status)
            self.record.parent_status = status

    def _end_status(self) -> str:
        """FAILED as `sweep run` would exit with 1; KILLED while trials wait; else FINISHED."""
        statuses = self._statuses()
        if any(s.state is State.FAILED and s.cause is not Cause.DIVERGED for s in statuses):
            return "FAILED"
        return "FINISHED" if all(s.state.is_finished for s in statuses) else "KILLED"

    def _statuses(self) -> list[TrialStatus]:
        return [self.folder.trial(str(row.id)).read_status() for row in self.plan.known_trials]

    # ---------------------------------------------------------------- the children

    def _prepare(self, client: "MlflowClient", row: PlannedTrial) -> None:
        """Give a trial its run, another one if it began anew, and note when its lines begin."""
        trial = self.folder.trial(str(row.id))
        entry = self.record.trials.get(trial.id)
        if entry is not None and runs.began_anew(trial, entry):
            self._supersede(client, trial.id, entry)
            entry = None
        if entry is None and trial.read_status().state is not State.WAITING:
            entry = self._begin(client, trial, row)
        if entry is not None and entry.began is None and trial.settled_length():
            entry.began = runs.first_time(trial)

    def _mirror_trial(self, client: "MlflowClient", row: PlannedTrial, is_alive: bool) -> None:
        trial = self.folder.trial(str(row.id))
        stamp = _stamp(trial.state_path)
        if stamp == self._stamps.get(trial.state_path):
            return
        status, entry = trial.read_status(), self.record.trials.get(trial.id)
        if entry is None and status.state is not State.WAITING:
            return  # it began since it was prepared: the next pass
        if entry is not None:
            has_lines = entry.began is None and trial.settled_length() > 0
            if has_lines or runs.began_anew(trial, entry):
                return  # likewise
            self._bring_up_to_date(client, trial, row, entry, status, is_alive)
        if status.state is not State.RUNNING:
            self._stamps[trial.state_path] = stamp

    def _begin(self, client: "MlflowClient", trial: TrialFolder, row: PlannedTrial) -> Mirrored:
        config = self.plan.trial_config(row, self.folder.name)
        tags = {
            "mlflow.parentRunId": self.record.parent_run_id,
            "mlflow.runName": runs.run_name(config),
            "sweep.trial_id": trial.id,
            "sweep.stage": row.stage,
            "sweep.policy": row.policy,
        }
        run_id = self._create(client, tags, runs.first_time(trial))
        entry = self.record.trials[trial.id] = Mirrored(run_id=run_id)
        self._save(now=False)
        return entry

    def _bring_up_to_date(
        self,
        client: "MlflowClient",
        trial: TrialFolder,
        row: PlannedTrial,
        entry: Mirrored,
        status: TrialStatus,
        is_alive: bool,
    ) -> None:
        if self._announce is not None and status.mlflow_run_id != entry.run_id:
            self._announce(trial.id, entry.run_id)
        if not entry.is_described:
            runs.describe(client, entry.run_id, self.plan.trial_config(row, self.folder.name))
            entry.is_described = True
        if entry.covers(status):
            return
        entry.final = False
        runs.log_lines(client, trial, entry, lambda: self._save(now=False))
        if status.state.is_finished:
            runs.log_end(client, trial, entry, status)
            entry.final = True
            self._save(now=False)
        elif status.state is State.RUNNING and (is_alive or is_locked(trial.lease_path)):
            runs.set_status(client, trial, entry, status, "RUNNING")
        else:
            runs.set_status(client, trial, entry, status, "KILLED")

    def _supersede(self, client: "MlflowClient", trial_id: str, entry: Mirrored) -> None:
        """Set the run of a cleared trial aside; the trial gets another."""
        runs.set_tags(client, entry.run_id, {"sweep.superseded": "true"})
        if entry.run_status in ("", "RUNNING"):
            client.set_terminated(entry.run_id, "KILLED")
        del self.record.trials[trial_id]


def _stamp(path: Path) -> tuple[int, int]:
    """Tell one version of a file that is replaced by renames from another."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (found.st_ino, found.st_mtime_ns)


def _run_ids(client: "MlflowClient", experiment: str, tags: dict[str, str]) -> list[str]:
    return [run.info.run_id for run in search_all(client, experiment, tags)]
