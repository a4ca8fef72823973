"""Mirror a sweep folder to MLflow.

The folder is the truth. The mirror finds the sweep's runs by their tags and continues each one from
its own newest step. MLflow stores a point that is sent twice only once.
"""

import contextlib
import csv
import io
import json
import logging
import os
import re
import shlex
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.config.arms import arm_colors
from sweep.config.numbers import short
from sweep.errors import CorruptFile, SweepError, cut
from sweep.plan.plan import Plan, PlannedTrial, load_plan
from sweep.tracking import store
from sweep.tracking.addresses import check_tracking_uri, mlflow_address, sqlite_path
from sweep.trial.files import POSITION, read_metrics, sha256_of, write_json
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.result import Result
from sweep.trial.status import MESSAGE_CHARACTERS, State, overall_state
from sweep.version import __version__

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

LOG = logging.getLogger(__name__)
PAUSE_SECONDS = 5.0  # between two passes
PASS_SECONDS = 10.0  # the longest wait for the end of a pass
MLFLOW_RUNNING = "RUNNING"  # its word for a run, not our state of a trial
END_STATUS = {State.COMPLETE: "FINISHED", State.FAILED: "FAILED"}  # all others: KILLED
COLOR = "mlflow.runColor"
TABLE = "trials.json"
LOG_FILE = "log.txt"
CURVE_FILE = "metrics.jsonl"
MIRRORED_FILES = ("config.json", "result.json", CURVE_FILE, "valid_losses.npy", LOG_FILE)
LOG_END_BYTES = 1 << 20  # kept at the beginning and at the end of a log


class Mirror(threading.Thread):
    """A thread that mirrors one sweep to MLflow; the caller holds the sweep's lock."""

    def __init__(self, folder: SweepFolder, plan: Plan, tracking_uri: str | None) -> None:
        super().__init__(name="mirror", daemon=True)
        self.folder = folder
        self.plan = plan

        address = check_tracking_uri(tracking_uri) if tracking_uri else None
        self._record = store.choose_store(folder, address) | {"sweep_uid": plan.sweep_uid}
        self._address: str = address or self._record["tracking_uri"]
        if self._address.startswith("http"):
            with contextlib.suppress(ImportError):  # before MLflow does while matplotlib uses it
                import IPython  # noqa: F401

        self._client: MlflowClient
        self._is_connected = False  # the runs are known; otherwise the store has to be searched
        self._experiment_id = ""
        self._runs: dict[str, Run] = {}  # by trial id; the parent run's key is empty
        self._sent: dict[str, tuple[Any, ...]] = {}  # state of each trial at its last pass
        self._plan_time = 0  # modification time of the plan that the store has
        self._colors = arm_colors(row.arm for row in plan.trials)

        self._is_locked = False  # another process locks the database
        self._error = "it has not answered in time"  # empty: the last pass came to its end
        # Sentences with remedies about what no later pass can send: all, or damaged trials by id.
        self._refusal = ""
        self._damage: dict[str, str] = {}

        self._deadline = float("inf")  # monotonic
        self._closing = threading.Event()
        self._passing = threading.Lock()  # held during each pass, except the last
        self._save_record("")

    def close(self, seconds: float) -> str:
        """End the thread after a last pass; return a sentence if the store lacks something."""
        self._deadline = time.monotonic() + seconds
        self._closing.set()
        while self.is_alive() and time.monotonic() < self._deadline:
            self.join(min(seconds, 1.0))
        if self._record["mirrored_sha256"]:
            return ""

        uri = self._record["tracking_uri"]
        command = f"sweep report {shlex.quote(str(self.folder.path))}"
        if not self._record["is_default"]:
            command += f" --tracking-uri {shlex.quote(uri)}"

        problems = [self._refusal] if self._refusal else [*self._damage.values()]
        if problems:
            others = len(problems) - 1
            more = f" {others} more trials have damaged files." if others else ""
            lack = f"MLflow at {uri} lacks a part of this sweep: {problems[0]}{more}"
            return f"{lack} Then `{command}` delivers the rest."

        reason = self._error if self._error else "the time limit has passed"
        lack = f"MLflow at {uri} lacks a part of this sweep ({reason})"
        return f"{lack}. Nothing is lost: `{command}` delivers the rest."

    def deliver(self) -> str:
        """Do the last pass in the calling thread; return what `close` returns."""
        self._try_pass(is_last=True)
        while self._is_locked:
            time.sleep(1.0)
            self._try_pass(is_last=True)
        return self.close(0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Start no pass meanwhile, because it would take processors from what is being timed."""
        is_held = self._passing.acquire(timeout=PASS_SECONDS)
        try:
            yield
        finally:
            if is_held:
                self._passing.release()

    def run(self) -> None:
        while not self._closing.is_set():
            with self._passing:
                self._try_pass(is_last=False)
            self._closing.wait(PAUSE_SECONDS)

        self._try_pass(is_last=True)
        while not (self._is_connected or self._refusal) and time.monotonic() < self._deadline:
            time.sleep(1.0)
            self._try_pass(is_last=True)

    def _save_record(self, mirrored_sha256: str) -> None:
        self._record["mirrored_sha256"] = mirrored_sha256
        write_json(self.folder.tracking_path, self._record)

    def _try_pass(self, is_last: bool) -> None:
        try:
            digest = store.digest(self.folder) if is_last else ""
            if not self._is_connected:
                self._connect()
            self._error = ""
            self._refusal = ""
            self._is_locked = False

            self._mirror_parent(is_last)
            for row in self.plan.known_trials:
                if time.monotonic() > self._deadline:
                    raise TimeoutError("the time limit has passed")
                try:
                    self._mirror_trial(row, is_last)
                except (SweepError, ValueError, KeyError) as damage:  # a file is damaged
                    self._note(str(row.id), damage)

            if is_last and not self._damage:
                self._save_record(digest)
        except SweepError as error:
            self._refusal = str(error)
            self._is_connected = False
        except Exception as error:  # no failure of a store may reach training
            self._error = store.one_sentence(error)
            self._is_connected = False
            was_locked = self._is_locked
            self._is_locked = store.sqlite_fault(error) == "locked"
            if self._is_locked:
                if not was_locked:
                    LOG.warning("MLflow's database is locked by another process; waiting for it.")
                self._deadline = max(self._deadline, time.monotonic() + 30.0)

    def _note(self, trial_id: str, damage: Exception) -> None:
        is_ours = isinstance(damage, SweepError)  # with a remedy
        sentence = str(damage) if is_ours else f"{store.one_sentence(damage).rstrip('.')}."
        self._damage[trial_id] = f"trial {trial_id}: {sentence}"

    def _connect(self) -> None:
        name = self.plan.experiment
        default_database = self.folder.path / "mlflow.db"
        database = sqlite_path(self._address)
        if database is None:
            database = default_database.absolute()
        location = (database.parent / "mlartifacts").as_uri()
        if self._record["is_default"]:
            store.set_aside_damaged(default_database, name, location)

        self._client = client = store.connect(self._address)
        experiment = client.get_experiment_by_name(name)
        if experiment is not None:
            self._experiment_id = experiment.experiment_id
            if experiment.lifecycle_stage == "deleted":  # MLflow refuses new runs
                raise SweepError(self._deleted_experiment(name))
        else:  # a server chooses the location of artifacts
            is_served = self._address.startswith("http")
            self._experiment_id = client.create_experiment(name, None if is_served else location)

        self._runs = {}
        self._plan_time = 0
        for run in store.search_runs(client, self._experiment_id, "sweep.uid", self.plan.sweep_uid):
            trial_id = run.data.tags.get("sweep.trial_id", "")
            other = self._runs.get(trial_id)
            if other is not None:  # created twice, as the first answer was lost
                empty, run = sorted((run, other), key=lambda run: len(run.data.tags))
                client.delete_run(empty.info.run_id)
            self._runs[trial_id] = run

        if "" not in self._runs:
            tags = {"sweep.role": "sweep", "sweep.name": self.folder.name}
            self._create_run("", self.folder.name, tags, None)
        store.save_view(client, self._runs[""], self.plan)
        self._is_connected = True

    def _deleted_experiment(self, name: str) -> str:
        """Return a sentence with the command that brings a deleted experiment back."""
        uri = shlex.quote(mlflow_address(self._record["tracking_uri"]))
        restore = f"mlflow experiments restore --experiment-id {self._experiment_id}"
        remedy = f"Restore it with `MLFLOW_TRACKING_URI={uri} {restore}`."
        return f"its experiment {name!r} was deleted. {remedy}"

    def _create_run(self, key: str, name: str, tags: dict[str, str], start: int | None) -> "Run":
        tags |= {"mlflow.runName": name, "mlflow.source.name": "sweep"}
        tags |= {"sweep.uid": self.plan.sweep_uid, "sweep.version": __version__}
        self._runs[key] = run = self._client.create_run(self._experiment_id, start, tags)
        return run

    def _mirror_parent(self, is_last: bool) -> None:
        run = self._runs[""]
        plan_time = self.folder.plan_path.stat().st_mtime_ns
        if plan_time != self._plan_time:
            plan = load_plan(self.folder)
            if plan is not None:
                self.plan = plan
            self._colors = arm_colors(row.arm for row in self.plan.trials)
            self._log_files(run, self.folder.path, ("plan.json",))
            self._plan_time = plan_time

        run_status = MLFLOW_RUNNING
        tags = {"sweep.files": "plan.json"}
        if is_last:
            self._log_files(run, self.folder.path, store.LAST_FILES)
            if self.folder.timing_path.exists():
                tags["sweep.files"] += f" {store.TIMING_FILE}"
            for figure in sorted((self.folder.path / "figures").glob("[!.]*.png")):
                self._client.log_artifact(run.info.run_id, str(figure), "figures")
            ends = []
            for trial in self.folder.trials():
                with contextlib.suppress(SweepError):  # `_mirror_trial` reports a damaged file
                    status = trial.read_status()
                    ends.append((status.state, status.cause))
            run_status = END_STATUS.get(overall_state(ends), "KILLED")
            tags |= self._log_answer(run.info.run_id)

        self._update("", self._settings(), tags, run_status, None)

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the sweep that apply to its workload."""
        settings = self.plan.settings
        used = settings.workload.used_settings
        if used is None:
            return settings.model_dump(mode="json")
        # Trials have the values of the optimizer and the schedule that they receive. The model has
        # the context.
        logged = {*used, "model"} - {"optimizer", "schedule"}
        return settings.model_dump(mode="json", include=logged)

    def _log_answer(self, run_id: str) -> dict[str, str]:
        """Log the table of trials and each batch size's result; return tags with the answer."""
        tags = {}

        report = self.folder.path / "report.md"
        if report.exists():
            tags["mlflow.note.content"] = _note_of(report.read_text("utf-8"))

        table = self.folder.path / "trials.csv"
        if table.exists():  # `log_table` would append to an earlier one
            columns, *rows = csv.reader(io.StringIO(table.read_text("utf-8")))
            self._client.log_dict(run_id, {"columns": columns, "data": rows}, TABLE)
            tags["mlflow.loggedArtifacts"] = json.dumps([{"path": TABLE, "type": "table"}])

        answer = self.folder.path / "answer.json"
        document = json.loads(answer.read_text("utf-8")) if answer.exists() else None
        if document:
            rows = document["batch_sizes"]
            means = {row["batch_size"]: row["mean"] for row in rows}
            name = store.metric_name(document["metric"], self.plan.settings.token_unit)
            self._log_by_batch_size(run_id, name, means)
            seconds = {row["batch_size"]: row["seconds"] for row in rows}
            self._log_by_batch_size(run_id, store.SECONDS, seconds)
        return tags

    def _log_by_batch_size(
        self, run_id: str, name: str, values: Mapping[int, float | None]
    ) -> None:
        """Log the value of each batch size, which is the step, unless the store has it."""
        from mlflow.entities import Metric

        history = self._client.get_metric_history(run_id, name)
        history = sorted(history, key=lambda point: point.timestamp)
        stored = {point.step: point.value for point in history}

        now = round(1000 * time.time())
        points = []
        for batch_size, value in values.items():
            if value is not None and value != stored.get(batch_size):
                points.append(Metric(name, value, now, batch_size))
        self._client.log_batch(run_id, metrics=points, synchronous=True)

    def _mirror_trial(self, row: PlannedTrial, is_last: bool) -> None:
        trial = self.folder.trial(str(row.id))
        result = trial.read_result()  # refuses a damaged one
        status = trial.read_status()
        length = trial.settled_length()
        run = self._runs.get(trial.id)
        color = self._colors[row.arm]

        sent = status, length, is_last, color
        is_unstarted = run is None and status.state is State.WAITING
        if is_unstarted or self._sent.get(trial.id) == sent:
            return
        self._damage.pop(trial.id, None)

        is_finished = status.state.is_finished
        is_running = status.state is State.RUNNING and not is_last
        run_status = MLFLOW_RUNNING if is_running else END_STATUS.get(status.state, "KILLED")
        files = [name for name in MIRRORED_FILES if (trial.path / name).exists()]
        if result and CURVE_FILE not in files:
            files.append(CURVE_FILE)  # it is missing, so no run has all files of this state
        shortened = status.changed(message=cut(status.message, MESSAGE_CHARACTERS))
        tags = {
            "mlflow.parentRunId": self._runs[""].info.run_id,
            "sweep.state": str(status.state),
            "sweep.cause": "" if status.cause is None else str(status.cause),
            "sweep.status": json.dumps(asdict(shortened)),
            "sweep.files": " ".join(files) if is_finished else "",  # files of this state
        }

        is_delivered = False
        if run is not None:
            if run.data.tags.get(COLOR) != color:
                self._client.set_tag(run.info.run_id, COLOR, color)
            has_tags = tags.items() <= run.data.tags.items()
            is_delivered = is_finished and has_tags and run.info.status == run_status
        if not is_delivered:
            lines = self._read_curve(trial)
            if lines is None:
                files.remove(CURVE_FILE)
                tags["sweep.files"] = " ".join(files) if is_finished else ""
            run = self._mirror_lines(trial, row, lines, length)
            if is_finished:
                self._log_files(run, trial.path, tuple(files))

            last_file = trial.result_path if result else trial.state_path
            end_time = last_file.stat().st_mtime_ns // 10**6
            if lines:
                end_time = max(end_time, _point(lines[-1])[1])
            self._update(trial.id, self._params(row), tags, run_status, max(end_time, 0))
        self._sent[trial.id] = sent

    def _params(self, row: PlannedTrial) -> dict[str, Any]:
        settings = self.plan.settings
        excluded = {"id", "forecast_bytes", "forecast_seconds", *settings.workload.unused}
        params = row.model_dump(exclude=excluded)
        params[settings.token_unit] = params.pop("tokens")
        return params

    def _read_curve(self, trial: TrialFolder) -> list[dict[str, Any]] | None:
        """Return the lines of metrics.jsonl; None if it is damaged, which is noted."""
        try:
            return trial.read_metrics()
        except CorruptFile as damage:
            self._note(trial.id, damage)
            return None

    def _mirror_lines(
        self,
        trial: TrialFolder,
        row: PlannedTrial,
        lines: list[dict[str, Any]] | None,
        length: int,
    ) -> "Run":
        """Log the settled lines, which are the first `length` bytes, and the numbers of the result.

        Without lines, because the curve is damaged, a run keeps those that it has. Returns the run.
        """
        from mlflow.entities import Metric

        run = self._runs.get(trial.id)
        result = trial.read_result()
        points = [] if lines is None else [_point(line) for line in lines]

        newest = None
        if run is not None and lines is not None:
            newest = self._newest_point(run)
            if newest and newest not in points:  # the trial began again
                self._client.delete_run(run.info.run_id)
                run = newest = None
        if run is None:
            start = points[0][1] if points else None
            tags = {"sweep.trial_id": trial.id, COLOR: self._colors[row.arm]}
            run = self._create_run(trial.id, self._run_name(row), tags, start)

        final = {} if result is None else _final_metrics(result)
        if lines:
            position = {key: lines[-1][key] for key in POSITION}
        elif lines is None and result is not None:
            position = {"time": trial.result_path.stat().st_mtime, "tokens": result.tokens}
        else:
            position = dict.fromkeys(POSITION, 0)

        first = newest[0] if newest else 0  # sent again, as it may be incomplete
        settled = [] if lines is None else read_metrics(trial.metrics_path, length)
        new_lines = [line for line in settled if line["tokens"] >= first]
        unit = self.plan.settings.token_unit  # or examples
        metrics = []
        for line in [*new_lines, position | final]:
            tokens, milliseconds = _point(line)
            for key, value in line.items():
                if key not in POSITION and value is not None:
                    name = store.metric_name(key, unit)
                    metrics.append(Metric(name, float(value), milliseconds, tokens))
        self._client.log_batch(run.info.run_id, metrics, synchronous=True)  # in several requests
        return run

    def _newest_point(self, run: "Run") -> tuple[int, int] | None:
        """Return the largest step of a run's curves, with its timestamp."""
        points = []
        for key in run.data.metrics:
            if not key.startswith("final/"):
                history = self._client.get_metric_history(run.info.run_id, key)
                points += [(point.step, point.timestamp) for point in history]
        return max(points, default=None)

    def _run_name(self, row: PlannedTrial) -> str:
        largest = max(arm.batch_size for arm in self._colors)
        digits = max(4, len(str(largest)))  # names then sort by batch size
        parts = [f"batch {str(row.batch_size).zfill(digits)}"]
        if row.optimizer:
            parts.insert(0, row.optimizer)
        if row.stage == "tune":
            parts.insert(0, "tune:")
        rate = short(float(f"{row.learning_rate:.3g}"))
        return f"{' '.join(parts)} · lr {rate} · seed {row.seed}"

    def _log_files(self, run: "Run", folder: Path, names: tuple[str, ...]) -> None:
        for name in names:
            path = folder / name
            if not path.exists():
                continue
            with tempfile.TemporaryDirectory() as parent:
                if name == LOG_FILE and path.stat().st_size > 2 * LOG_END_BYTES:
                    path = _shorten_log(path, Path(parent))
                self._client.log_artifact(run.info.run_id, str(path))

    def _update(
        self, key: str, params: dict[str, Any], tags: dict[str, str], status: str, end: int | None
    ) -> None:
        from mlflow.entities import Param, RunTag

        run = self._runs[key]
        run_id = run.info.run_id
        pairs = [] if run.data.params else params.items()
        new_params = [Param(name, str(value)) for name, value in pairs if value is not None]
        new_tags = [RunTag(name, value) for name, value in tags.items()]
        self._client.log_batch(run_id, params=new_params, tags=new_tags, synchronous=True)

        data = self.plan.data
        has_inputs = run.inputs and run.inputs.dataset_inputs
        if data and not has_inputs:
            self._log_data(run_id, data)

        if status != run.info.status and status == MLFLOW_RUNNING:
            self._client.update_run(run_id, status)
        elif status != run.info.status:
            if not end:
                end = round(1000 * time.time())
            end = max(end, run.info.start_time)  # the clock may jump
            self._client.set_terminated(run_id, status, end)
        self._runs[key] = self._client.get_run(run_id)

    def _log_data(self, run_id: str, data: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput

        source = str(data.get("repository") or self.plan.settings.data)
        if "repository" in data:
            kind = "hugging_face"
            origin = {"path": source}
        else:
            kind = "local"
            origin = {"uri": source}
        digest = sha256_of(data)[:36]  # MLflow's limit
        name = Path(source).name
        text = Dataset(name, digest, kind, json.dumps(origin), profile=json.dumps(data))
        self._client.log_inputs(run_id, [DatasetInput(text)])


def _note_of(report: str) -> str:
    """Return the beginning of a report, without its title and figures."""
    text = report.partition("\n## ")[0]
    text = re.sub(r"!\[.*\n*(\*.*\n*)?", "", text)  # a figure and its caption
    return text.partition("\n")[2].strip()[:5000]  # MLflow's limit


def _final_metrics(result: Result) -> dict[str, float]:
    """Return the numbers of a result that the plan does not have, by their names in MLflow."""
    return {
        f"final/{name.removeprefix('final_')}": value
        for name, value in result.as_row().items()
        if isinstance(value, int | float) and name not in PlannedTrial.model_fields
    }


def _point(line: dict[str, Any]) -> tuple[int, int]:
    """Return the step and the timestamp (in milliseconds) of a line's points."""
    return line["tokens"], round(line["time"] * 1000)


def _shorten_log(log: Path, folder: Path) -> Path:
    """Copy the beginning and the end of a log into a folder, with a line about the rest."""
    copy = folder / log.name
    with log.open("rb") as source, copy.open("wb") as target:
        size = source.seek(0, os.SEEK_END)
        left_out = size - 2 * LOG_END_BYTES
        source.seek(0)
        target.write(source.read(LOG_END_BYTES))
        place = f"{log.absolute()} on {socket.gethostname()}"
        target.write(f"\n[… {left_out} bytes are left out here; all are in {place}]\n".encode())
        source.seek(size - LOG_END_BYTES)
        target.write(source.read(LOG_END_BYTES))
    return copy
