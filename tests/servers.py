"""Real servers on loopback that a test can kill, and what an MLflow store holds of a trial."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    return sorted(
        (key, line["tokens"], round(line["time"] * 1000), value)
        for line in read_metrics(trial.metrics_path)
        for key, value in line.items()
        if "/" in key and value is not None
    )
