"""The judge of all faults: after recovery a sweep equals one that was never disturbed.

A scene is a sweep of two trials in one of its states, which is copied for each fault.
"""

import os
import shutil
from pathlib import Path

import psutil
from mlflow import MlflowClient
from mlflow.entities import Run

from sweep.config.execution import Services
from sweep.config.settings import Settings
from sweep.orchestration.executors.local import LocalExecutor
from sweep.orchestration.runner import run_plan
from sweep.orchestration.schedule import Scheduler
from sweep.plan.plan import load_plan
from sweep.tracking.mirror import Mirror
from sweep.tracking.store import connect, default_tracking_uri
from sweep.trial.damage import find_damage
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import is_locked
from sweep.trial.status import State
from tests.orchestration.clusters import LOCAL, ON_CPU, Command, plan_trials, planned
from tests.servers import logged_points, stored_points

# What two equal trainings may differ in.
PER_ATTEMPT = ("time", "perf/seconds", "perf/tokens_per_second")
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
        for key, value in result.as_document().items()
        if key not in MAY_DIFFER and not key.startswith("seconds_")
    }
    files = [path.read_bytes() for path in (trial.weights_path, trial.losses_path)]
    return {"metrics": lines, "result": kept, "files": files}


class Scene:
    """A sweep of two trials in `path`, with copies of its states, and the undisturbed results."""

    def __init__(self, path: Path, services: Services = LOCAL, at_once: int = 1) -> None:
        self.services = services
        self.folder = plan_trials(path, "quadratic", at_once, batches=[4, 8], budget=800)
        self._states = path / "states"
        self._keep("planned")
        plan = load_plan(self.folder)
        assert plan is not None
        executor = LocalExecutor(Settings(), ON_CPU, self.folder)
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
        shutil.rmtree(self.folder.path, ignore_errors=True)  # a test may have moved it
        shutil.copytree(self._states / state, self.folder.path)
        if self.services.tracking_uri:  # the store, which is not in the folder, has other runs
            client, runs = self._stored_runs(self.folder)
            for run in runs:
                client.delete_run(run.info.run_id)
            if state == "finished":
                plan = load_plan(self.folder)
                assert Mirror(self.folder, plan, self.services.tracking_uri).deliver() == ""
        return self.folder

    def kept(self, state: str, path: Path) -> Path:
        """Return the copy of a file in a state."""
        return self._states / state / path.relative_to(self.folder.path)

    def run(self) -> int:
        return run_plan(planned(self.folder, self.services), self.folder, self.services).exit_code

    def command(self, *options: str) -> Command:
        """Return `sweep run` as a process of its own."""
        chosen = self.services.model_dump(exclude_defaults=True)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
        return Command(self.folder, "--device", "cpu", *flags, *options)

    def judge(self, has_points: bool = True, folder: SweepFolder | None = None) -> None:
        """Assert that the sweep, or a copy, has ended as if nothing had happened; MLflow too."""
        folder = folder or self.folder
        assert {trial.id: science(trial) for trial in folder.trials()} == self.undisturbed
        assert {trial.read_status().state for trial in folder.trials()} == {State.COMPLETE}
        assert find_damage(folder) == []
        assert [path for path in folder.path.rglob(".*") if "mlartifacts" not in path.parts] == []
        locks = [folder.lock_path, *(trial.lease_path for trial in folder.trials())]
        assert not any(map(is_locked, locks))
        self._judge_store(folder, has_points)
        mine = [
            p
            for p in psutil.process_iter(["cmdline"])
            if str(folder.path) in " ".join(p.info["cmdline"] or ())
        ]
        assert [p for p in mine if p.pid != os.getpid()] == []

    def _stored_runs(self, folder: SweepFolder) -> tuple[MlflowClient, list[Run]]:
        plan = load_plan(folder)
        client = connect(self.services.tracking_uri or default_tracking_uri(folder))
        experiment = client.get_experiment_by_name(plan.settings.name)
        uid = f"tags.`sweep.uid` = '{plan.sweep_uid}'"  # a server holds others
        return client, client.search_runs([experiment.experiment_id], uid) if experiment else []

    def _judge_store(self, folder: SweepFolder, has_points: bool) -> None:
        client, runs = self._stored_runs(folder)
        assert all(run.info.start_time <= run.info.end_time for run in runs)
        stored = {run.data.tags.get("sweep.trial_id", ""): run.info.run_id for run in runs}
        assert set(stored) == {"", *(trial.id for trial in folder.trials())}
        assert len(stored) == len(runs)
        for trial in folder.trials() if has_points else ():
            assert stored_points(client, stored[trial.id]) == logged_points(trial)
