"""The command killed, stopped or interrupted at any moment: the same command ends the sweep."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sweep.analysis.frames import load_stored_sweep, load_sweep
from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.runner import run_plan
from sweep.tracking.store import connect, default_tracking_uri
from sweep.trial.files import read_metrics
from sweep.trial.folder import State, SweepFolder
from sweep.trial.lease import is_locked


class Command:
    """`sweep run` on slow quadratic trials, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = SweepFolder(folder)
        self.arguments = [
            *(sys.executable, "-m", "sweep", "run", "quadratic", "--workload", "faulty:Slow"),
            *("--batches", "4,8", "--budget", "1200", "--out", str(folder), "--device", "cpu"),
        ]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        here = str(Path(__file__).parent)
        self.process = subprocess.Popen(
            self.arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": here},
            start_new_session=True,
        )

    def wait(self) -> int:
        output, _ = self.process.communicate(timeout=120)
        print(output)
        return self.process.returncode

    def until_step(self, step: int) -> None:
        """Wait until some trial that is not finished has logged this step."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for trial in self.folder.trials() if self.folder.plan_path.exists() else []:
                lines = read_metrics(trial.metrics_path)
                if lines and lines[-1]["step"] >= step and not trial.result_path.exists():
                    return
            time.sleep(0.02)
        raise AssertionError("the sweep did not get there")


@pytest.fixture
def command(tmp_path):
    command = Command(tmp_path / "sweep")
    yield command
    if command.process:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
        command.process.wait()
        command.process.stdout.close()


def science(trial):
    lines = read_metrics(trial.metrics_path)
    skipped = ("time", "perf/tokens_per_second")
    return [{k: v for k, v in line.items() if k not in skipped} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Metric lines by batch size of the same trials without a disturbance, and faster."""
    folder = SweepFolder(tmp_path_factory.mktemp("whole") / "sweep")
    settings = {"batches": "4,8", "budget": "1200"}
    planned = make_plan(load_experiment("quadratic", settings), Execution(device="cpu"), folder)
    assert run_plan(planned, folder).exit_code == 0
    return {trial.read_config().science.batch_size: science(trial) for trial in folder.trials()}


def assert_finished(command, uninterrupted):
    for trial in command.folder.trials():
        assert trial.read_status().state is State.COMPLETE
        assert science(trial) == uninterrupted[trial.read_config().science.batch_size]
    stored = load_stored_sweep(default_tracking_uri(command.folder), "quadratic")
    folder = load_sweep(command.folder.path)
    assert stored.curves.equals(folder.curves) and stored.trials.equals(folder.trials)
    client = connect(default_tracking_uri(command.folder))
    experiment = client.get_experiment_by_name("quadratic")
    found = client.search_runs([experiment.experiment_id])
    runs = {run.data.tags.get("sweep.trial_id"): run for run in found}
    for trial in command.folder.trials():  # nothing is lost, nothing is there twice
        run = runs[trial.id]
        lines = read_metrics(trial.metrics_path)
        for name in (key for key in run.data.metrics if not key.startswith("final/")):
            history = client.get_metric_history(run.info.run_id, name)
            logged = [(line["tokens"], line[name]) for line in lines if line.get(name) is not None]
            assert [(point.step, point.value) for point in history] == logged


def test_killed_with_sigkill_and_started_again_at_once(command, uninterrupted):
    for step in (20, 90):
        command.start()
        command.until_step(step)
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.communicate()
    command.start()
    assert command.wait() == 0
    assert_finished(command, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_checkpoints_and_exits_with_130(command, uninterrupted, number):
    command.start()
    command.until_step(30)
    os.kill(command.process.pid, number)
    assert command.wait() == 130
    states = {trial.read_status().state for trial in command.folder.trials()}
    assert states == {State.WAITING}
    assert any(trial.checkpoints() for trial in command.folder.trials())
    command.start()
    assert command.wait() == 0
    assert_finished(command, uninterrupted)


def test_ctrl_c_reaches_the_whole_group_and_still_checkpoints(command, uninterrupted):
    command.start()
    command.until_step(30)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait() == 130
    assert any(trial.checkpoints() for trial in command.folder.trials())


def test_stop_ends_it_and_the_same_command_goes_on(command, uninterrupted):
    command.start()
    command.until_step(10)
    stop = [sys.executable, "-m", "sweep", "stop", str(command.folder.path)]
    assert subprocess.run(stop, check=False, capture_output=True).returncode == 0
    assert not is_locked(command.folder.lock_path)
    assert command.wait() == 130
    command.start()
    assert command.wait() == 0
    assert_finished(command, uninterrupted)


def test_a_killed_worker_is_seen_and_retried(command, uninterrupted):
    command.start()
    command.until_step(30)
    from sweep.trial.lease import read_owner

    running = [t for t in command.folder.trials() if is_locked(t.lease_path)]
    os.kill(read_owner(running[0].lease_path)["pid"], signal.SIGKILL)
    assert command.wait() == 0
    assert running[0].read_status().attempts == 2
    assert_finished(command, uninterrupted)


def test_a_second_command_is_refused_while_the_first_lives(command):
    command.arguments[command.arguments.index("1200")] = "120000"  # outlives any start-up
    command.start()
    command.until_step(5)
    second = subprocess.run(
        command.arguments,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert second.returncode == 2
    assert "in use by process" in second.stderr and "Traceback" not in second.stderr


def test_stop_ends_a_command_that_still_prepares_its_data(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    story = "once upon a time a small cat number {} sat on a mat and looked at a bird. " * 20
    for name, count in (("train", 20_000), ("valid", 100)):
        stories = (story.replace("{}", str(i)) + "\n<|endoftext|>\n" for i in range(count))
        (text / f"{name}.txt").write_text("".join(stories))
    out = tmp_path / "deep" / "sweep"
    flags = ["--data", str(text), "--vocabulary", "5000", "--out", str(out), "--device", "cpu"]
    command = [sys.executable, "-m", "sweep", "run", "quick", *flags, "--yes"]
    environment = {**os.environ, "SWEEP_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        while not is_locked(out / "sweep.lock"):
            assert process.poll() is None
            time.sleep(0.05)
        stopped = subprocess.run(
            [sys.executable, "-m", "sweep", "stop", str(out)], capture_output=True, text=True
        )
        assert stopped.returncode == 0 and "Stopped" in stopped.stdout
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert not (tmp_path / "deep").exists()


def test_a_bare_worker_that_is_told_to_stop_goes_on_from_its_checkpoint(
    command, uninterrupted, monkeypatch
):
    fields = {"batches": "4,8", "budget": "1200", "workload": "faulty:Slow"}
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    planned = make_plan(
        load_experiment("quadratic", fields), Execution(device="cpu"), command.folder
    )
    save_plan(planned.plan, command.folder)
    trial = command.folder.trials()[0]
    command.arguments = [sys.executable, "-m", "sweep.training", str(trial.path)]
    command.start()
    command.until_step(20)
    second = subprocess.run(command.arguments, capture_output=True, text=True)
    assert second.returncode == 2 and "in use" in second.stderr
    assert (trial.read_status().state, trial.read_status().attempts) == (State.RUNNING, 1)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 130
    assert trial.read_status().state is State.WAITING and trial.checkpoints()
    command.start()
    assert command.wait() == 0
    assert science(trial) == uninterrupted[trial.read_config().science.batch_size]
