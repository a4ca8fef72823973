"""Small sweep folders of real files, and real MLflow servers to mirror them to."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.plan.plan import Plan, grow_plan
from sweep.tracking.mirror import Mirror
from sweep.tracking.store import connect
from sweep.trial.files import MetricsLog, read_json, read_metrics, write_json
from sweep.trial.folder import State, SweepFolder, TrialFolder
from tests.plans import build_plan

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
def no_warnings_of_mlflow() -> None:
    """MLflow 3.17 on SQLAlchemy 2.1 uses a deprecated loader."""
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
        """Write state.json as the runner does; one attempt per RUNNING."""
        trial = self.trial(index)
        if not trial.config_path.exists():
            row = self.plan.known_trials[index]
            trial.write_config(self.plan.trial_config(row, self.folder.name))
        status = trial.read_status().changed(state=state, **fields)
        if state is State.RUNNING:
            status = status.changed(attempts=status.attempts + 1, fencing=status.fencing + 1)
        trial.write_status(status)

    def write_lines(self, index: int, count: int, settled: bool = True, keep: int | None = None):
        """Append lines as a worker does, and save two checkpoints after them."""
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
            log.append(
                line | ({"valid/loss": loss + 0.1, "train/clipped": 0} if number % 5 == 0 else {})
            )
        log.close()
        for path in [kept.path for kept in trial.checkpoints()] if settled else []:
            path.unlink()
        for step in (10 * (first + count), 10 * (first + count) + 1) if settled else ():
            (trial.path / f"checkpoint-{step}-{log.length}").write_bytes(b"tensors")

    def finish(self, index: int, state: State = State.COMPLETE, **fields: Any) -> None:
        """Write what a worker leaves at the end, and the state."""
        trial, row = self.trial(index), self.plan.known_trials[index]
        np.save(trial.losses_path, np.array([[3.0, 2.0], [5.0, 4.0]]))
        trial.log_path.write_text("trained\n")
        result = {
            **row.model_dump(include={"id", "stage", "policy", "batch_size", "seed"}),
            **row.model_dump(include={"learning_rate", "tokens", "steps", "warmup_steps"}),
            "state": state,
            "cause": fields.get("cause"),
            "final_valid_loss": 2.0 / 3 + index,
            "mfu": None,
            "execution": self.plan.execution.model_dump(mode="json"),
            "device": "cpu",
            "torch_version": "2.13.0",
            "git_commit": "abc1234",
        }
        write_json(trial.result_path, result)
        self.set_state(index, state, **fields)

    def train(self, index: int, lines: int) -> None:
        """Write everything of a trial that trained to its end."""
        self.set_state(index, State.RUNNING)
        self.write_lines(index, lines)
        self.finish(index)

    def lines(self, index: int) -> list[dict[str, Any]]:
        """Read metrics.jsonl without nulls."""
        lines = read_metrics(self.trial(index).metrics_path)
        return [{key: v for key, v in line.items() if v is not None} for line in lines]

    def sync(self, uri: str | None = None) -> None:
        """Bring the store up to date, as `sweep report` does."""
        assert Mirror(self.folder, self.plan, uri).deliver() == ""

    @property
    def record(self) -> dict[str, Any]:
        """tracking.json."""
        return read_json(self.folder.tracking_path)

    def runs(self, uri: str | None = None) -> dict[str, Any]:
        """Return the MLflow runs by trial id, the parent's as "parent"; each must be there once."""
        client = connect(uri or self.record["tracking_uri"])
        experiment = client.get_experiment_by_name("words")
        uid = f"tags.`sweep.uid` = '{self.record['sweep_uid']}'"
        stored = client.search_runs([experiment.experiment_id], uid) if experiment else []
        runs = {run.data.tags.get("sweep.trial_id", "parent"): run for run in stored}
        assert len(runs) == len(stored)
        return runs

    def run(self, index: int, uri: str | None = None) -> Any:
        """Return the MLflow run of a trial."""
        return self.runs(uri)[self.ids[index]]

    def assert_mirrored(self, *indices: int, uri: str | None = None) -> None:
        """Check that the runs of these trials hold their lines, each point once."""
        client, runs = connect(uri or self.record["tracking_uri"]), self.runs(uri)
        for index in indices or range(len(self.ids)):
            expected = [
                (key, line["tokens"], round(line["time"] * 1000), value)
                for line in self.lines(index)
                for key, value in line.items()
                if "/" in key
            ]
            assert stored_points(client, runs[self.ids[index]].info.run_id) == sorted(expected)

    def sibling(self, name: str) -> "FakeSweep":
        """Create another sweep with the same plan."""
        folder = SweepFolder(self.folder.path.with_name(name))
        folder.path.mkdir()
        shutil.copy(self.folder.plan_path, folder.plan_path)
        return FakeSweep(folder, self.plan)

    def grow(self, **overrides: Any) -> None:
        """Plan the same experiment with more batch sizes or seeds."""
        self.write_plan(grow_plan(self.plan, make_plan(self.folder.path.parent, **overrides)))

    def write_plan(self, plan: Plan) -> None:
        """Write plan.json."""
        self.plan = plan
        write_json(self.folder.plan_path, plan.model_dump(mode="json"))


def make_plan(tmp_path: Path, **overrides: Any) -> Plan:
    toml = tmp_path / "words.toml"
    toml.write_text(TOML)
    experiment = load_experiment(str(toml), overrides)
    execution = Execution(device="cpu", threads=1)
    return build_plan(experiment, execution, data={"name": "synthetic", "sha256": "5" * 64})


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables; creating them takes two seconds."""
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
    made.write_plan(made.plan)
    return made


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def free_port() -> int:
    """A port without a listener."""
    return find_free_port()


class Server:
    """A real MLflow server on loopback, that can be killed and started again."""

    def __init__(self, path: Path) -> None:
        self.path, self.port = path, find_free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None:
            return
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.path}/server.db"]
        command += ["--artifacts-destination", str(self.path / "artifacts")]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.path / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.wait()

    def wait(self) -> None:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError((self.path / "server.log").read_text())

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that the first test of the module starts."""
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.kill()


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], None]:
    """Wait until a condition becomes true."""

    def wait(is_true: Callable[[], Any], seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < end, "the condition did not become true"
            time.sleep(0.05)

    return wait


def stored_points(client: Any, run_id: str) -> list[tuple[Any, ...]]:
    """Return the raw points of a run except its final ones; a point stored twice is there twice."""
    keys = [key for key in client.get_run(run_id).data.metrics if not key.startswith("final/")]
    points = [point for key in keys for point in client.get_metric_history(run_id, key)]
    return sorted((p.key, p.step, p.timestamp, p.value) for p in points)
