"""Small sweep folders of real files, and real MLflow servers to mirror them to."""

import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.plan.growth import grow_plan
from sweep.plan.plan import Plan
from sweep.tracking import mirror
from sweep.tracking.mirror import Mirror
from sweep.tracking.store import connect
from sweep.trial.files import MetricsLog, find_sha256, read_json, read_metrics, write_json
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.status import State
from tests.fakes.results import result_of
from tests.plans import build_plan
from tests.servers import MlflowServer, logged_points, stored_points

TOML = """
budget = "200k"
batches = "4,8,16"
seeds = 1
lr = "1e-3"
data = "synthetic"
tokenizer = "bytes"
precision = "fp32"
[model]
preset = "quick"
"""
EPOCH = 1_760_000_000.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PAUSE_SECONDS", 0.1)
    # MLflow 3.17 uses a deprecated loader of SQLAlchemy 2.1.
    warnings.filterwarnings("ignore", message="The ``noload`` loader strategy")


@dataclass
class FakeSweep:
    """A sweep folder, and methods that write what the runner and the workers would write."""

    folder: SweepFolder
    plan: Plan
    written: dict[str, int] = field(default_factory=dict)

    @property
    def ids(self) -> list[str]:
        return [str(row.id) for row in self.plan.known_trials]

    def trial(self, index: int) -> TrialFolder:
        return self.folder.trial(self.ids[index])

    def set_state(self, index: int, state: State, **fields: Any) -> None:
        trial = self.trial(index)
        if not trial.config_path.exists():
            row = self.plan.known_trials[index]
            trial.write_config(self.plan.trial_config(row, self.folder.name))
        status = trial.read_status().changed(state=state, **fields)
        if state is State.RUNNING:
            status = status.changed(attempts=status.attempts + 1, fencing=status.fencing + 1)
        trial.write_status(status)

    def write_lines(self, index: int, count: int, settled: bool = True, keep: int | None = None):
        trial = self.trial(index)
        size = trial.metrics_path.stat().st_size if trial.metrics_path.exists() else 0
        log = MetricsLog(trial.metrics_path, size if keep is None else keep, lambda: None)
        first = len(read_metrics(trial.metrics_path))
        now = EPOCH + 7.1 * self.written.get(trial.id, 0) + index
        self.written[trial.id] = self.written.get(trial.id, 0) + 1
        for number in range(first, first + count):
            step, row = 10 * (number + 1), self.plan.known_trials[index]
            tokens = step * row.batch_size * self.plan.tokens_per_sequence
            position = {"time": round(now + number * 0.1234567, 3), "step": step, "tokens": tokens}
            loss = 6.0 / (1 + number) + index / 3
            line = {**position, "train/loss": loss, "train/lr": 1e-3 / 3, "perf/mfu": None}
            line["memory/allocated_bytes"] = 1e6 + number
            if number % 5 == 0:
                line |= {"valid/loss": loss + 0.1, "train/clipped": 0}
            log.append(line)
        log.close()
        if settled:
            trial.remove_checkpoints()
            for step in (10 * (first + count), 10 * (first + count) + 1):
                (trial.path / f"checkpoint-{step}-{log.length}").write_bytes(b"tensors")

    def finish(self, index: int, state: State = State.COMPLETE, **fields: Any) -> None:
        trial, row = self.trial(index), self.plan.known_trials[index]
        np.save(trial.losses_path, np.array([[3.0, 2.0], [5.0, 4.0]]))
        trial.log_path.write_text("trained\n")
        trial.metrics_path.touch()
        fields_of_plan = {"stage", "policy", "batch_size", "seed", "learning_rate", "tokens"}
        result = result_of(
            trial.id,
            **row.model_dump(include={*fields_of_plan, "steps", "warmup_steps"}),
            state=state,
            cause=fields.get("cause"),
            final_valid_loss=2.0 / 3 + index,
            seconds_training=10.0,
            seconds_total=12.0,
            metrics_sha256=find_sha256(trial.metrics_path),
            valid_losses_sha256=find_sha256(trial.losses_path),
            execution=self.plan.execution.model_dump(mode="json"),
        )
        write_json(trial.result_path, result)
        self.set_state(index, state, **fields)

    def train(self, index: int, lines: int) -> None:
        self.set_state(index, State.RUNNING)
        self.write_lines(index, lines)
        self.finish(index)

    def sync(self, uri: str | None = None) -> None:
        """Bring the store up to date, as `sweep report` does."""
        assert Mirror(self.folder, self.plan, uri).deliver() == ""

    @property
    def record(self) -> dict[str, Any]:
        return read_json(self.folder.tracking_path)

    def runs(self, uri: str | None = None) -> dict[str, Any]:
        """Return the MLflow runs by trial id, the parent's as "parent"; each must be there once."""
        client = connect(uri or self.record["tracking_uri"])
        experiment = client.get_experiment_by_name("words")
        uid = f"tags.`sweep.uid` = '{self.plan.sweep_uid}'"
        stored = client.search_runs([experiment.experiment_id], uid) if experiment else []
        runs = {run.data.tags.get("sweep.trial_id", "parent"): run for run in stored}
        assert len(runs) == len(stored)
        return runs

    def run(self, index: int, uri: str | None = None) -> Any:
        return self.runs(uri)[self.ids[index]]

    def assert_mirrored(self, *indices: int, uri: str | None = None) -> None:
        client, runs = connect(uri or self.record["tracking_uri"]), self.runs(uri)
        for index in indices or range(len(self.ids)):
            run_id = runs[self.ids[index]].info.run_id
            assert stored_points(client, run_id) == logged_points(self.trial(index))

    def grow(self, **overrides: Any) -> None:
        self.set_plan(grow_plan(self.plan, make_plan(self.folder.path.parent, **overrides)))

    def set_plan(self, plan: Plan) -> None:
        self.plan = plan
        write_json(self.folder.plan_path, plan.model_dump(mode="json"))


def make_plan(tmp_path: Path, **overrides: Any) -> Plan:
    toml = tmp_path / "words.toml"
    toml.write_text(TOML)
    experiment = load_experiment(str(toml), overrides)
    execution = Execution(device="cpu", threads=1)
    plan = build_plan(experiment, execution, data={"name": "synthetic", "sha256": "5" * 64})
    return plan.model_copy(update={"sweep_uid": uuid.uuid4().hex})


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        connect(f"sqlite:///{path}")
    return path


@pytest.fixture
def sweep(tmp_path: Path, empty_store: Path) -> FakeSweep:
    folder = SweepFolder(tmp_path / "words sweep")
    folder.path.mkdir()
    shutil.copy(empty_store, folder.path / "mlflow.db")
    made = FakeSweep(folder, make_plan(tmp_path))
    made.grow()
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    made = MlflowServer(tmp_path_factory.mktemp("server"))
    yield made
    made.die()


def until(is_true: Callable[[], Any]) -> None:
    end = time.monotonic() + 300
    while not is_true():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.05)
