"""Tuned sweeps that share PostgreSQL and an MLflow server are stored once, and separately."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest

from sweep.analysis.results import load_sweep
from sweep.cli import main
from sweep.orchestration.tuning import named_trials, open_storage
from sweep.plan.plan import load_plan
from sweep.tracking.store import connect, is_mirrored, search_runs
from sweep.trial.files import read_json
from sweep.trial.folder import SweepFolder
from sweep.trial.status import State
from tests.servers import (
    MlflowServer,
    Postgres,
    Service,
    is_healthy,
    load_stored_sweep,
    logged_points,
    postgres_server,
    stored_points,
)

pytestmark = pytest.mark.postgres
FAULTY = Path(__file__).parents[1] / "orchestration"
EXPERIMENT = """
question = "Do shared stores hold every trial once?"
workload = "faulty:Slow"
budget = 480
batches = [16]
lr = "tuned"
seeds = 1
model_option = {dimensions = 30}
[tuning]
centre = 0.05
prune = false
"""


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with postgres_server("mlflow", "optuna") as server:
        yield server


@pytest.fixture(scope="session")
def mlflow(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    store = postgres.address("mlflow", "").replace("://", "+psycopg://")
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"), store, PGPASSWORD=postgres.password)
    try:
        server.start()
        yield server
    finally:
        server.die()


@pytest.fixture
def both(postgres: Postgres, mlflow: MlflowServer) -> dict[str, str]:
    return {
        "SWEEP_RUN_TRACKING_URI": mlflow.uri,
        "SWEEP_RUN_STORAGE": postgres.address("optuna", ""),
        "PGPASSWORD": postgres.password,
    }


class Command(Service):
    def __init__(self, folder: Path, environment: dict[str, str], *flags: str) -> None:
        super().__init__(folder.with_name(f"{folder.name} command"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results, toml = folder, self.folder / f"{folder.name}.toml"
        toml.write_text(EXPERIMENT)
        self.arguments = [sys.executable, "-m", "sweep", "run", str(toml), "--out", str(folder)]
        self.arguments += ["--device", "cpu", *flags]
        paths = f"{FAULTY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.environment = os.environ | environment | {"PYTHONPATH": paths}

    @property
    def output(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> "Command":
        self.launch(self.arguments, lambda: True, env=self.environment)
        return self

    def wait(self) -> int:
        code = self.process.wait()
        print(self.output)
        return code

    def kill(self) -> None:  # and not its workers
        self.process.kill()
        self.process.wait()

    def until(self, is_true: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 300
        while not is_true():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.05)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def build(name: str, environment: dict[str, str], *flags: str) -> Command:
        commands.append(Command(tmp_path / name, environment, *flags))
        return commands[-1]

    yield build
    for started in commands:
        started.die()


def studies_of(storage, name):
    opened = open_storage(storage)
    names = [study for study in optuna.get_all_study_names(opened) if study.startswith(f"{name}: ")]
    return [optuna.load_study(study_name=study, storage=opened) for study in names]


def tuned_losses(folder):
    rows = [row for row in folder.read_plan()["trials"] if row["stage"] == "tune"]
    results = {row["id"]: folder.trial(row["id"]).read_result() for row in rows}
    return {trial_id: result.final_valid_loss for trial_id, result in results.items()}


def study_losses(study):
    assert {trial.state.name for trial in named_trials(study).values()} == {"COMPLETE"}
    return {trial_id: trial.value for trial_id, trial in named_trials(study).items()}


def assert_tracked_once(folder, uri):
    """Compare the sweep's runs with its folder; return the ids of its runs."""
    assert is_mirrored(folder, None)
    client = connect(uri)
    experiment_id = client.get_experiment_by_name(folder.path.name).experiment_id
    runs = list(search_runs(client, experiment_id, "sweep.uid", load_plan(folder).sweep_uid))
    children = {run.data.tags.get("sweep.trial_id"): run for run in runs}
    parent = children.pop(None)
    stored = load_stored_sweep(uri, folder.path.name, parent.info.run_id)
    assert stored.trials.equals(load_sweep(folder.path).trials)
    trial_ids = [trial.id for trial in folder.trials()]
    assert sorted(children) == sorted(trial_ids) and len(runs) == 1 + len(trial_ids)
    for trial in folder.trials():
        assert trial.read_status().state is State.COMPLETE
        assert stored_points(client, children[trial.id].info.run_id) == logged_points(trial)
    return [run.info.run_id for run in runs]


def count_finished(path):
    return len(list(path.glob("trials/*/result.json")))


def is_training(path):
    logs = path.glob("trials/*/metrics.jsonl")
    return any(log.stat().st_size and not log.with_name("result.json").exists() for log in logs)


def test_a_sweep_that_is_killed_twice_is_in_both_stores_once(command, postgres, mlflow):
    secret = postgres.password
    run = command(
        "killed",
        {},
        *("--storage", postgres.address("optuna")),
        *("--tracking-uri", mlflow.uri.replace("://", f"://sweep:{secret}@")),
    )
    for finished in (1, 6):
        run.start()
        run.until(lambda n=finished: count_finished(run.results) >= n and is_training(run.results))
        run.kill()
    assert run.start().wait() == 0
    folder = SweepFolder(run.results)
    assert_tracked_once(folder, mlflow.uri)
    (study,) = studies_of(postgres.address("optuna"), "killed")
    losses = study_losses(study)
    assert losses == tuned_losses(folder)
    unnamed = [t for t in study.trials if t.user_attrs.get("sweep.trial_id") not in losses]
    assert {trial.state.name for trial in unnamed} <= {"FAIL"}  # asked for, but not yet planned
    assert secret not in run.output
    files = [path for path in run.results.rglob("*") if path.is_file()]
    assert files and not [path for path in files if secret.encode() in path.read_bytes()]


def test_eight_sweeps_tune_at_once_and_stay_apart(command, postgres, mlflow, both):
    names = [f"{parent}/{name}" for name in ("red", "green", "blue", "grey") for parent in "ab"]
    runs = [command(name, both).start() for name in names]
    assert [run.wait() for run in runs] == [0] * 8
    folders = [SweepFolder(run.results) for run in runs]
    run_ids = [run_id for folder in folders for run_id in assert_tracked_once(folder, mlflow.uri)]
    assert len(set(run_ids)) == len(run_ids)
    attempts = {trial.read_status().attempts for folder in folders for trial in folder.trials()}
    assert attempts == {1}
    client = connect(mlflow.uri)
    for a, b in zip(folders[::2], folders[1::2], strict=True):
        experiment = client.get_experiment_by_name(a.path.name)
        stored = client.search_runs([experiment.experiment_id])
        assert len(stored) == sum(1 + len(folder.read_plan()["trials"]) for folder in (a, b))
        studies = studies_of(postgres.address("optuna"), a.path.name)
        assert [study_losses(study) for study in studies] == [tuned_losses(a), tuned_losses(b)]
        assert {len(study.trials) for study in studies} == {len(tuned_losses(a))}


def test_a_sweep_outlives_the_death_of_both_servers(command, postgres, mlflow, both):
    run = command("outlived", both).start()
    run.until(lambda: count_finished(run.results) >= 1 and is_training(run.results))
    mlflow.die()
    postgres.die()
    finished = count_finished(run.results)
    run.until(lambda: "Tuning waits" in run.output)
    assert count_finished(run.results) > finished, "training went on"
    postgres.start()
    mlflow.start()
    assert run.wait() == 0
    folder = SweepFolder(run.results)
    while not is_mirrored(folder, None):  # on a busy machine the last delivery may time out
        assert run.start().wait() == 0
    assert "Traceback" not in run.output
    assert_tracked_once(folder, mlflow.uri)
    (study,) = studies_of(postgres.address("optuna"), "outlived")
    assert study_losses(study) == tuned_losses(folder)


def test_eight_threads_at_once_create_the_tables_of_an_empty_database(postgres):
    postgres.execute("postgres", "CREATE DATABASE empty")
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(open_storage, [postgres.address("empty")] * 8))
    assert [storage.get_all_studies() for storage in opened] == [[]] * 8


def test_a_database_can_be_the_store_of_mlflow_without_a_server(command, postgres, tmp_path):
    postgres.execute("postgres", "CREATE DATABASE direct")
    uri = postgres.address("direct")
    flags = ("--lr", "0.05", "--tracking-uri")
    assert command("direct", {}, *flags, uri).start().wait() == 0
    folder = SweepFolder(tmp_path / "direct")
    without_password = uri.replace(f":{postgres.password}", "")
    assert read_json(folder.tracking_path)["tracking_uri"] == without_password
    assert_tracked_once(folder, uri)
    assert list(folder.path.glob("mlartifacts/*/artifacts/report.md"))
    # Later commands use the recorded address only if it is the user's own, and read the password
    # from the environment.
    grown = ("--lr", "0.05", "--seeds", "2")
    variables = {"PGPASSWORD": postgres.password}
    assert command("direct", variables, *grown).start().wait() == 2
    variables["MLFLOW_TRACKING_URI"] = without_password
    assert command("direct", variables, *grown).start().wait() == 0
    assert_tracked_once(folder, uri)


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):

    def call(*flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["sweep", "run", "quick", "--lr=tuned", "--yes", *flags])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert (ended.value.code, out, list(tmp_path.iterdir())) == (2, "", [])
        assert err.startswith("Error: ") and err.count("\n") == 1, err
        return err

    return call


@pytest.mark.parametrize("flag", ["--storage", "--tracking-uri"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("password", "password authentication failed"),
        ("database", 'database "nowhere" does not exist'),
        ("port", "Connection refused"),
        ("silence", "timeout expired"),
        ("sign", "percent-encoded"),
    ],
)
def test_a_database_that_cannot_be_opened_is_refused_in_one_sentence(
    refused, postgres, flag, wrong, says
):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as mute:
        port = mute.getsockname()[1]
        address = {
            "password": postgres.address("optuna", "hunter2"),
            "database": postgres.address("nowhere", None),
            "port": "postgresql://sweep:hunter2@127.0.0.1:1/optuna",
            "silence": f"postgresql://sweep:hunter2@127.0.0.1:{port}/x?connect_timeout=2",
            "sign": postgres.address("optuna", "hunter2@home"),
        }[wrong]
        sentence = refused(flag, address)
    assert says in sentence
    assert "hunter2" not in sentence and postgres.password not in sentence


def test_optuna_refuses_the_database_of_mlflow(refused, postgres, mlflow):
    sentence = refused("--storage", postgres.address("mlflow"))
    assert "a database of its own" in sentence and postgres.password not in sentence
    assert is_healthy(f"{mlflow.uri}/health")
