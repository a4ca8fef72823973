"""The mirror: a thread that brings an MLflow store up to date with the trial folders.

The folders are the truth. The mirror finds the sweep's runs by their tags and continues each one
from its own newest step. MLflow stores a point that is sent twice only once.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.errors import SweepError
from sweep.plan.plan import Plan, PlannedTrial, load_plan
from sweep.tracking import store
from sweep.trial.files import read_metrics_with_offsets, write_json
from sweep.trial.folder import (
    MESSAGE_CHARACTERS,
    Cause,
    State,
    SweepFolder,
    TrialFolder,
    TrialStatus,
)
from sweep.trial.lease import is_locked
from sweep.version import __version__

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PAUSE_SECONDS = 5.0  # between two passes
BATCH_METRICS = 1000  # MLflow's limit per request
POSITION = ("time", "step", "tokens")  # keys of a line of metrics.jsonl that are not metrics
END_STATUS = {State.COMPLETE: "FINISHED", State.FAILED: "FAILED"}  # all others: KILLED
TRIAL_FILES = ("config.json", "result.json", "metrics.jsonl", "valid_losses.npy", "log.txt")
NO_PARAMS = {"id", "forecast_bytes", "forecast_seconds"}  # fields of a planned trial
RESULT_TAGS = {
    "git_commit": "mlflow.source.git.commit",
    "torch_version": "sweep.torch_version",
    "device": "sweep.device",
}


class Mirror:
    """Mirrors one sweep to MLflow; the caller holds the sweep's lock.

    Args:
        folder: the sweep folder.
        plan: its plan; the mirror reads plan.json again when it grows.
        tracking_uri: a server or a database; None: the recorded one, else SQLite in the folder.
        note_run: called in the mirror's thread with a trial's id and its MLflow run id.
    """

    def __init__(
        self,
        folder: SweepFolder,
        plan: Plan,
        tracking_uri: str | None,
        note_run: Callable[[str, str], None] | None = None,
    ) -> None:
        self.folder, self.plan, self._note_run = folder, plan, note_run
        address = store.check_tracking_uri(tracking_uri) if tracking_uri else None
        self._record = store.load_record(folder, address)
        self._address = address or self._record.tracking_uri
        self._client: MlflowClient | None = None  # None: the store has to be searched
        self._experiment_id = ""
        self._runs: dict[str, Run] = {}  # by trial id; the parent run's key is empty
        self._sent: dict[str, tuple[TrialStatus, int]] = {}  # with the bytes of metrics.jsonl
        self._plan_time = 0  # modification time of the plan that the store has
        self._has_report = False
        self._error = "it has not answered in time"  # empty: the last pass sent everything
        self._deadline = float("inf")  # monotonic
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="mirror", daemon=True)

    @property
    def sweep_uid(self) -> str:
        """The random name that identifies this sweep in shared stores."""
        return self._record.sweep_uid

    def start(self) -> None:
        """Start the thread."""
        self._save_record()
        self._thread.start()

    def log_report(self) -> None:
        """Upload the report in the next pass; it is complete on disk now."""
        self._has_report = True

    def close(self, seconds: float) -> str:
        """End the thread after a last pass; return a sentence if the store lacks something."""
        self._deadline = time.monotonic() + seconds
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return self._undelivered()

    def deliver(self) -> str:
        """Do one pass in the calling thread; return a sentence if the store lacks something."""
        self._save_record()
        self._try_pass(is_last=True)
        return self._undelivered()

    def _undelivered(self) -> str:
        if self._record.mirrored_sha256:
            return ""
        return (
            f"MLflow at {self._record.tracking_uri} does not hold all of this sweep yet "
            f"({self._error or 'the time limit has passed'}). "
            f"Nothing is lost: `sweep report {self.folder.path}` delivers the rest."
        )

    def _loop(self) -> None:
        is_last = False
        while not is_last or (self._client is None and time.monotonic() < self._deadline):
            is_last, started = self._closing.is_set(), time.monotonic()
            self._try_pass(is_last)
            if not is_last:
                took = time.monotonic() - started
                self._closing.wait(max(PAUSE_SECONDS, min(10 * took, 60)))  # many trials: rarer
            elif self._client is None:
                time.sleep(max(0.0, min(1.0, self._deadline - time.monotonic())))

    def _try_pass(self, is_last: bool) -> None:
        """Do one pass; if it fails, the next one searches the store again."""
        try:
            digest = store.digest(self.folder) if is_last else ""
            self._error = self._pass(is_last)
            if is_last and not self._error:
                self._save_record(digest)
        except Exception as error:  # no failure of a store may reach training
            self._error, self._client = store.one_sentence(error), None

    def _pass(self, is_last: bool) -> str:
        """Send everything that the store lacks; return the first error of a single trial."""
        client = self._client = self._client or self._connect()
        self._mirror_parent(client, is_last)
        error = ""
        for row in self.plan.known_trials:
            if time.monotonic() > self._deadline:
                return error or "the time limit has passed"
            try:
                self._mirror_trial(client, row, is_last)
            except (SweepError, ValueError, KeyError) as damage:  # of this trial's files
                error = error or f"trial {row.id}: {store.one_sentence(damage)}"
        return error

    def _save_record(self, mirrored_sha256: str = "") -> None:
        self._record.mirrored_sha256 = mirrored_sha256
        write_json(self.folder.tracking_path, asdict(self._record))

    def _connect(self) -> "MlflowClient":
        """Connect, and find the sweep's runs by their tags; create the parent run if necessary."""
        client, record = store.connect(self._address), self._record
        name = self.plan.experiment
        self._experiment_id = store.require_experiment(client, name, record, self.folder.path)
        self._find_runs(client)
        if not self._runs and not record.run_id:
            record.sweep_uid = self._recover_uid(client)
            self._find_runs(client)
        if "" not in self._runs:
            tags = {"sweep.role": "sweep", "sweep.name": self.folder.name}
            parent = self._create_run(client, self.folder.name, tags)
            for run in self._runs.values():  # the user deleted their parent
                client.set_tag(run.info.run_id, "mlflow.parentRunId", parent.info.run_id)
            self._runs[""] = parent
        record.run_id, self._plan_time = self._runs[""].info.run_id, 0
        self._save_record()
        return client

    def _find_runs(self, client: "MlflowClient") -> None:
        """Search the store for the sweep's runs, and delete empty duplicates."""
        self._runs = {}
        for run in store.search_runs(client, self._experiment_id, "sweep.uid", self.sweep_uid):
            trial_id = run.data.tags.get("sweep.trial_id", "")
            if other := self._runs.get(trial_id):  # created twice, as the first answer was lost
                empty, run = sorted((run, other), key=lambda run: len(run.data.tags))
                client.delete_run(empty.info.run_id)
            self._runs[trial_id] = run

    def _recover_uid(self, client: "MlflowClient") -> str:
        """Return the uid of this sweep's runs if tracking.json was lost, else the recorded one."""
        run_ids = {trial.read_status().mlflow_run_id for trial in self.folder.trials()} - {None}
        if run_ids or self._record.is_default:
            for run in store.search_runs(
                client, self._experiment_id, "mlflow.source.name", "sweep"
            ):
                if self._record.is_default or run.info.run_id in run_ids:
                    return run.data.tags["sweep.uid"]
        return self.sweep_uid

    def _create_run(
        self, client: "MlflowClient", name: str, tags: dict[str, str], start_time: int | None = None
    ) -> "Run":
        tags = {"mlflow.runName": name, "mlflow.source.name": "sweep", **tags}
        tags |= {"sweep.uid": self.sweep_uid, "sweep.version": __version__}
        return client.create_run(self._experiment_id, start_time, tags)

    def _mirror_parent(self, client: "MlflowClient", is_last: bool) -> None:
        """Upload plan.json if it has grown, and at the end the report; set the run's status."""
        run, plan_time = self._runs[""], self.folder.plan_path.stat().st_mtime_ns
        if plan_time != self._plan_time:
            self.plan = load_plan(self.folder) or self.plan
            client.log_artifact(run.info.run_id, str(self.folder.plan_path))
            self._plan_time = plan_time
        if is_last and self._has_report:
            _log_files(client, run, self.folder.path, store.REPORT_FILES)
            if self.folder.figures_path.is_dir():
                client.log_artifacts(run.info.run_id, str(self.folder.figures_path), "figures")
        settings = self.plan.settings.model_dump(mode="json")
        status = self._end_status() if is_last else "RUNNING"
        self._runs[""] = _update(client, run, settings, {"sweep.files": "plan.json"}, status)

    def _end_status(self) -> str:
        """Return FAILED if `sweep run` exits with 1, KILLED if trials wait, else FINISHED."""
        statuses = [trial.read_status() for trial in self.folder.trials()]
        if any(s.state is State.FAILED and s.cause is not Cause.DIVERGED for s in statuses):
            return "FAILED"
        return "FINISHED" if all(status.state.is_finished for status in statuses) else "KILLED"

    def _mirror_trial(self, client: "MlflowClient", row: PlannedTrial, is_last: bool) -> None:
        """Bring a trial's run up to date if the trial has changed since the last pass."""
        trial_id = str(row.id)
        trial, run = self.folder.trial(trial_id), self._runs.get(trial_id)
        sent = self._sent.get(trial_id)
        if sent and sent[0].state is State.COMPLETE:
            return
        status = trial.read_status()
        if run is None and status.state is State.WAITING:
            return
        length = trial.settled_length()  # before reading: no resume takes these lines back
        is_running = status.state is State.RUNNING
        if sent == (status, length) and not (is_last and is_running):
            return
        run_status = END_STATUS.get(status.state, "KILLED")
        if is_running and (not is_last or is_locked(trial.lease_path)):
            run_status = "RUNNING"
        tags = _status_tags(trial, status)
        is_current = run and run.info.status == run_status and tags.items() <= run.data.tags.items()
        if run is None or not (status.state.is_finished and is_current):
            lines = read_metrics_with_offsets(trial.metrics_path)
            points = [_point(line) for line, _ in lines]
            newest = _newest_point(client, run) if run else None
            if run and newest and newest not in points:  # the trial began again
                client.set_tag(run.info.run_id, "sweep.superseded", "true")
                client.set_terminated(run.info.run_id, "KILLED")
                del self._runs[trial_id]
                return self._mirror_trial(client, row, is_last)
            if run is None:
                run = self._create_trial_run(client, row, points[0][1] if points else None)
                self._runs[trial_id] = run
            first = newest[0] if newest else 0  # sent again, as it may be incomplete
            settled = [line for line, end in lines if end <= length and line["tokens"] >= first]
            _log_lines(client, run, settled)
            if status.state.is_finished:
                tags |= _log_end(client, run, trial, lines[-1][0] if lines else {})
            end_time = trial.state_path.stat().st_mtime_ns // 10**6
            params = row.model_dump(exclude=NO_PARAMS)
            run = self._runs[trial_id] = _update(client, run, params, tags, run_status, end_time)
        if self._note_run and status.mlflow_run_id != run.info.run_id:
            self._note_run(trial_id, run.info.run_id)
        self._sent[trial_id] = status, length

    def _create_trial_run(
        self, client: "MlflowClient", row: PlannedTrial, start_time: int | None
    ) -> "Run":
        name = f"batch {row.batch_size} seed {row.seed} lr {row.learning_rate:g}"
        tags = {
            "mlflow.parentRunId": self._record.run_id,
            "sweep.trial_id": str(row.id),
            "sweep.stage": row.stage,
            "sweep.policy": row.policy,
        }
        name = f"tune: {name}" if row.stage == "tune" else name
        return self._create_run(client, name, tags, start_time)


def _point(line: dict[str, Any]) -> tuple[int, int]:
    """Return a line's tokens and its time in milliseconds: step and timestamp of its points."""
    return line["tokens"], round(line["time"] * 1000)


def _newest_point(client: "MlflowClient", run: "Run") -> tuple[int, int] | None:
    """Return step and timestamp of the newest point of a run, except its final metrics."""
    keys = [key for key in run.data.metrics if not key.startswith("final/")]
    histories = [client.get_metric_history(run.info.run_id, key) for key in keys]
    return max(((p.step, p.timestamp) for points in histories for p in points), default=None)


def _status_tags(trial: TrialFolder, status: TrialStatus) -> dict[str, str]:
    """Return the tags that describe a trial's state and the artifacts that belong to it."""
    names = [name for name in TRIAL_FILES if (trial.path / name).exists()]
    message = status.message[:MESSAGE_CHARACTERS]
    return {
        "sweep.state": str(status.state),
        "sweep.cause": str(status.cause or ""),
        "sweep.status": json.dumps(asdict(status.changed(message=message, mlflow_run_id=None))),
        "sweep.files": " ".join(names) if status.state.is_finished else "",
    }


def _update(
    client: "MlflowClient",
    run: "Run",
    params: Mapping[str, Any],
    tags: dict[str, str],
    status: str,
    end_time: int | None = None,
) -> "Run":
    """Set a run's tags and status, and with the first tags its params; return it as stored."""
    from mlflow.entities import Param, RunTag

    run_id, is_new = run.info.run_id, not tags.keys() & run.data.tags.keys()
    if not tags.items() <= run.data.tags.items():
        pairs = [(key, str(value)) for key, value in params.items() if value is not None]
        new_params = [Param(*pair) for pair in pairs] if is_new else []
        new_tags = [RunTag(*pair) for pair in tags.items()]
        client.log_batch(run_id, params=new_params, tags=new_tags, synchronous=True)
    if status != run.info.status and status == "RUNNING":
        client.update_run(run_id, status)
    elif status != run.info.status:
        client.set_terminated(run_id, status, end_time)
    return client.get_run(run_id)


def _log_lines(client: "MlflowClient", run: "Run", lines: list[dict[str, Any]]) -> None:
    from mlflow.entities import Metric

    metrics = [
        Metric(key, float(value), _point(line)[1], line["tokens"])
        for line in lines
        for key, value in line.items()
        if key not in POSITION and value is not None
    ]
    for start in range(0, len(metrics), BATCH_METRICS):
        batch = metrics[start : start + BATCH_METRICS]
        client.log_batch(run.info.run_id, batch, synchronous=True)


def _log_end(
    client: "MlflowClient", run: "Run", trial: TrialFolder, last_line: dict[str, Any]
) -> dict[str, str]:
    """Log a finished trial's measured numbers and files; return the tags of its result."""
    result = trial.read_result() or {}
    position = {key: last_line.get(key, 0) for key in POSITION}
    final = {
        f"final/{name.removeprefix('final_')}": value
        for name, value in result.items()
        if isinstance(value, int | float) and name not in PlannedTrial.model_fields
    }
    _log_lines(client, run, [position | final])
    _log_files(client, run, trial.path, TRIAL_FILES)
    return {tag: str(result[key]) for key, tag in RESULT_TAGS.items() if result.get(key)}


def _log_files(client: "MlflowClient", run: "Run", folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (folder / name).exists():
            client.log_artifact(run.info.run_id, str(folder / name))
