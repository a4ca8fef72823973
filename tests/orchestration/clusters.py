"""Sweeps of the quadratic workload, trials that a test can disturb, and commands to run them."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sweep.config.execution import Execution, Services
from sweep.config.load import load_experiment
from sweep.orchestration.planning import Planned, make_plan, save_plan
from sweep.orchestration.request import Request
from sweep.orchestration.runner import run_plan
from sweep.trial.files import read_metrics
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.status import State

RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}
IMPORTED = os.pathsep.join((str(Path(__file__).parent), str(Path(__file__).parents[2])))
STEPS = 100  # of a trial; faulty:WaitsForGo waits at step 50
SECONDS = 200.0  # longer than anything takes
ON_CPU = Execution(device="cpu")
LOCAL = Services()


def run_in(
    path, executor=None, services=LOCAL, execution=ON_CPU, retried_causes=frozenset(), **settings
):
    experiment = load_experiment(settings.pop("experiment", "quadratic"), settings)
    folder = SweepFolder(path)
    planned = make_plan(Request(experiment, execution, folder, services))
    return run_plan(planned, folder, services, executor=executor, retried_causes=retried_causes)


def plan_trials(
    path: Path, workload: str = "faulty:WaitsForGo", at_once: int = 1, **fields: object
) -> SweepFolder:
    """Plan trials that save a checkpoint after nearly every step; return the folder path/sweep."""
    folder = SweepFolder(path / "sweep")
    fields = {"batches": [4], "budget": 4 * STEPS, "workload": workload, **fields}
    lines = ['question = "Does it end well?"', 'lr = "0.05"']
    lines += [f"{key} = {value!r}" for key, value in fields.items()]
    path.mkdir(exist_ok=True)
    (path / "question.toml").write_text("\n".join(lines).replace("'", '"'))
    plan = planned(folder).plan
    execution = plan.execution.model_copy(update={"checkpoint_seconds": 0.01, "at_once": at_once})
    save_plan(plan.model_copy(update={"execution": execution}), folder)
    return folder


def planned(folder: SweepFolder, services: Services = LOCAL) -> Planned:
    question = load_experiment(str(folder.path.parent / "question.toml"))
    return make_plan(Request(question, ON_CPU, folder, services))


class Command:
    """`sweep run` in a process of its own, on the trials of `plan_trials`."""

    def __init__(self, folder: SweepFolder, *options: str) -> None:
        self.folder = folder
        question = str(folder.path.parent / "question.toml")
        words = [sys.executable, "-m", "sweep", "run", question, "--out", str(folder.path)]
        self.words = [*words, "--quiet", "--yes", *options]
        self.output = folder.path.parent / "output.txt"  # jobs may hold a pipe open
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                self.words, stdout=file, stderr=file, start_new_session=True
            )

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def wait(self) -> int:
        code = self.process.wait(SECONDS)
        print(self.output.read_text())
        return code

    def run(self) -> int:
        self.start()
        return self.wait()

    def start_and_wait_for_trial(self) -> TrialFolder:
        self.start()
        return wait_for_trial(self.folder, self)


def wait_until(condition: Callable[[], object], command: Command | None = None) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        assert not command or command.process.poll() is None, command.output.read_text()
        time.sleep(0.05)


def wait_for_trial(folder: SweepFolder, command: Command | None = None) -> TrialFolder:
    """Wait until a trial has trained for 40 steps and has checkpoints; return it."""

    def is_waiting(trial: TrialFolder) -> bool:
        lines = read_metrics(trial.metrics_path)
        is_far = bool(lines) and lines[-1]["step"] >= 40 and len(trial.checkpoints()) > 1
        return is_far and trial.read_status().state is State.RUNNING and not trial.read_result()

    wait_until(lambda: any(map(is_waiting, folder.trials())), command)
    return next(filter(is_waiting, folder.trials()))


def states(folder: SweepFolder) -> set[State]:
    return {trial.read_status().state for trial in folder.trials()}


def checkpointed(trial: TrialFolder) -> bytes:
    """Return the metrics up to the newest checkpoint; a trial that starts again writes others."""
    lines = trial.metrics_path.read_bytes()[: trial.checkpoints()[0].metrics_length]
    assert lines
    return lines


def assert_resumed(trial: TrialFolder, lines: bytes, attempts: int) -> None:
    """Assert that a trial is COMPLETE and continued after the checkpoint with these lines."""
    status = trial.read_status()
    assert (status.state, status.attempts) == (State.COMPLETE, attempts)
    assert trial.metrics_path.read_bytes().startswith(lines)
    steps = [line["step"] for line in read_metrics(trial.metrics_path)]
    assert steps == sorted(set(steps)) and steps[-1] == trial.read_config().steps


def assert_same(folder: SweepFolder, other: SweepFolder) -> None:
    for trial in folder.trials():
        twin = other.trial(trial.id)
        assert trial.weights_path.read_bytes() == twin.weights_path.read_bytes()
        assert trial.losses_path.read_bytes() == twin.losses_path.read_bytes()
