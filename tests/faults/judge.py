"""The judge of all faults: after recovery a sweep equals one that was never disturbed.

A scene is a sweep of two trials in one of its states, which is copied for each fault.
"""

import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import psutil

from sweep.orchestration.executors import LocalExecutor
from sweep.orchestration.runner import run_plan
from sweep.orchestration.schedule import Scheduler
from sweep.plan.plan import load_plan
from sweep.tracking.store import connect, default_tracking_uri, search_runs
from sweep.trial.folder import State, SweepFolder, TrialFolder
from sweep.trial.lease import is_locked
from sweep.trial.verify import find_damage
from tests.orchestration.clusters import plan_trials, planned
from tests.servers import logged_points, stored_points

PER_ATTEMPT = ("time", "perf/tokens_per_second")  # what two equal trainings may differ in
MAY_DIFFER = {"attempts", "tokens_per_second", "peak_memory_bytes", "metrics_sha256", "git_commit"}


def science(trial: TrialFolder) -> dict[str, object]:
    """Return everything that a trial measured and that does not depend on time."""
    lines = [
        {key: value for key, value in line.items() if key not in PER_ATTEMPT}
        for line in trial.read_metrics()
    ]
    result = trial.read_result()
    assert result is not None, trial.read_status()
    kept = {
        key: value
        for key, value in result.items()
        if key not in MAY_DIFFER and not key.startswith("seconds_")
    }
    files = [path.read_bytes() for path in (trial.weights_path, trial.losses_path)]
    return {"metrics": lines, "result": kept, "files": files}


class Scene:
    """A sweep of two trials in `path`, with copies of its states, and the undisturbed results."""

    def __init__(self, path: Path, workload: str = "quadratic", **fields: object) -> None:
        fields = {"batches": [4, 8], "budget": 800, **fields}
        self.folder = plan_trials(path, workload, **fields)
        self._states = path / "states"
        self._keep("planned")
        plan = load_plan(self.folder)
        assert plan is not None
        executor = LocalExecutor("cpu")
        steps = min(row.steps for row in plan.known_trials)
        for pause in (steps // 3, steps // 2):
            schedule = Scheduler(plan, self.folder, executor)
            schedule.run({str(row.id): pause for row in plan.known_trials})
        executor.close()
        self._keep("interrupted")
        self.run()
        self._keep("finished")
        self.undisturbed = {trial.id: science(trial) for trial in self.folder.trials()}

    def _keep(self, state: str) -> None:
        shutil.copytree(self.folder.path, self._states / state, symlinks=True)

    def enter(self, state: str) -> SweepFolder:
        """Put the sweep into a state: planned, interrupted or finished."""
        shutil.rmtree(self.folder.path)
        shutil.copytree(self._states / state, self.folder.path)
        return self.folder

    def kept(self, state: str, path: Path) -> Path:
        """Return the copy of a file in a state."""
        return self._states / state / path.relative_to(self.folder.path)

    def run(self) -> int:
        return run_plan(planned(self.folder), self.folder).exit_code

    def judge(self, has_points: bool = True) -> None:
        """Assert that the sweep has ended as if nothing had happened, also in MLflow."""
        assert {trial.id: science(trial) for trial in self.folder.trials()} == self.undisturbed
        assert {trial.read_status().state for trial in self.folder.trials()} == {State.COMPLETE}
        assert find_damage(self.folder) == []
        assert [
            path for path in self.folder.path.rglob(".*") if "mlartifacts" not in path.parts
        ] == []
        locks = [self.folder.lock_path, *(trial.lease_path for trial in self.folder.trials())]
        assert not any(map(is_locked, locks))
        self._judge_store(has_points)
        mine = [
            p
            for p in psutil.process_iter(["cmdline"])
            if str(self.folder.path) in " ".join(p.info["cmdline"] or ())
        ]
        assert [p for p in mine if p.pid != os.getpid()] == []

    def _judge_store(self, has_points: bool) -> None:
        client = connect(default_tracking_uri(self.folder))
        (experiment,) = [e for e in client.search_experiments() if e.name != "Default"]
        runs = client.search_runs([experiment.experiment_id])
        ids = Counter(run.data.tags.get("sweep.trial_id", "") for run in runs)
        assert ids == Counter(["", *(trial.id for trial in self.folder.trials())])
        for trial in self.folder.trials() if has_points else ():
            (run,) = search_runs(client, experiment.experiment_id, "sweep.trial_id", trial.id)
            assert stored_points(client, run.info.run_id) == logged_points(trial)


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file, whose number is counted modulo its size."""
    data = bytearray(path.read_bytes())
    index, shift = divmod(bit % (8 * len(data)), 8)
    data[index] ^= 1 << shift
    path.write_bytes(data)


def lock_database(path: Path) -> sqlite3.Connection:
    """Lock a database exclusively until the connection is closed."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    return connection
