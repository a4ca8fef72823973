"""The command killed, stopped or interrupted at any moment: the same command ends the sweep."""

import os
import signal
import subprocess
import sys

import pytest

from sweep.analysis.results import load_sweep
from sweep.orchestration.runner import run_plan
from sweep.tracking.store import connect, default_tracking_uri
from sweep.trial.files import read_metrics
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import is_locked, read_owner
from sweep.trial.status import State
from tests.orchestration.clusters import plan_trials, planned, states, wait_until
from tests.servers import load_stored_sweep, logged_points, stored_points

FIELDS = {"batches": [4, 8], "budget": 1200}
SWEEP = (sys.executable, "-m", "sweep")


@pytest.fixture
def slow(tmp_path, faulty, command):
    return command(plan_trials(tmp_path, "faulty:Slow", **FIELDS), "--device", "cpu")


def until_step(command, step):
    """Wait until some trial that is not finished has logged this step."""

    def is_reached():
        trials = [t for t in command.folder.trials() if not t.result_path.exists()]
        lines = [read_metrics(trial.metrics_path) for trial in trials]
        return any(line and line[-1]["step"] >= step for line in lines)

    wait_until(is_reached, command)


def science(trial):
    lines = read_metrics(trial.metrics_path)
    skipped = ("time", "perf/seconds", "perf/tokens_per_second")
    return [{k: v for k, v in line.items() if k not in skipped} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Metric lines by batch size of the same trials without a disturbance, and faster."""
    folder = plan_trials(tmp_path_factory.mktemp("whole"), "quadratic", **FIELDS)
    assert run_plan(planned(folder), folder).exit_code == 0
    return {trial.read_config().science.batch_size: science(trial) for trial in folder.trials()}


def assert_finished(command, uninterrupted):
    assert states(command.folder) == {State.COMPLETE}
    stored = load_stored_sweep(default_tracking_uri(command.folder), "question")
    folder = load_sweep(command.folder.path)
    assert stored.curves.equals(folder.curves) and stored.trials.equals(folder.trials)
    client = connect(default_tracking_uri(command.folder))
    experiment = client.get_experiment_by_name("question")
    logged_runs = client.search_runs([experiment.experiment_id])
    runs = {run.data.tags.get("sweep.trial_id"): run for run in logged_runs}
    for trial in command.folder.trials():  # nothing is lost, nothing is there twice
        assert science(trial) == uninterrupted[trial.read_config().science.batch_size]
        assert stored_points(client, runs[trial.id].info.run_id) == logged_points(trial)


def test_killed_with_sigkill_and_started_again_at_once(slow, uninterrupted):
    for step in (20, 90):
        slow.start()
        until_step(slow, step)
        slow.kill()
    assert slow.run() == 0
    assert_finished(slow, uninterrupted)


@pytest.mark.usefixtures("interruptible")
def test_a_stopped_command_checkpoints_and_resumes(slow, uninterrupted):
    for step, how in ((30, "Ctrl-C"), (80, "sweep stop")):
        slow.start()
        until_step(slow, step)
        if how == "Ctrl-C":  # reaches the whole group
            os.killpg(slow.process.pid, signal.SIGINT)
        else:
            subprocess.run([*SWEEP, "stop", str(slow.folder.path)], check=True)
            assert not is_locked(slow.folder.lock_path)
        assert slow.wait() == 130
        assert states(slow.folder) == {State.WAITING}
        assert any(trial.checkpoints() for trial in slow.folder.trials())
    assert slow.run() == 0
    assert_finished(slow, uninterrupted)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("presses", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_stops_a_command_whose_terminal_or_tee_is_gone(slow, presses):
    words = [word for word in slow.words if word != "--quiet"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    slow.process = subprocess.Popen(words, **pipe, start_new_session=True)
    slow.output.touch()
    until_step(slow, 30)
    slow.process.stdout.close()
    for _ in range(presses):
        slow.process.send_signal(signal.SIGINT)
    assert slow.wait() == 130
    assert states(slow.folder) == {State.WAITING}


@pytest.mark.slow
def test_a_command_that_was_started_with_ctrl_c_ignored_goes_on(slow, uninterrupted):
    slow.words = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *slow.words]
    slow.start()
    until_step(slow, 30)
    os.killpg(slow.process.pid, signal.SIGINT)
    assert slow.wait() == 0
    assert_finished(slow, uninterrupted)


@pytest.mark.slow
def test_a_killed_worker_is_retried(slow, uninterrupted):
    slow.start()
    until_step(slow, 30)
    running = next(trial for trial in slow.folder.trials() if is_locked(trial.lease_path))
    os.kill(read_owner(running.lease_path)["pid"], signal.SIGKILL)
    assert slow.wait() == 0
    assert running.read_status().attempts == 2
    assert_finished(slow, uninterrupted)


@pytest.mark.slow
def test_stop_ends_a_command_that_still_prepares_its_data(tmp_path, command, monkeypatch):
    text = tmp_path / "text"
    text.mkdir()
    story = "once upon a time a small cat number {} sat on a mat and looked at a bird. " * 20
    for name, count in (("train", 5_000), ("valid", 100)):
        stories = (story.replace("{}", str(i)) + "\n<|endoftext|>\n" for i in range(count))
        (text / f"{name}.txt").write_text("".join(stories))
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "deep" / "sweep"
    flags = ["--data", str(text), "--vocabulary", "5000", "--out", str(out), "--device", "cpu"]
    run = command(SweepFolder(out))
    run.words, run.output = [*SWEEP, "run", "quick", *flags, "--yes"], tmp_path / "output.txt"
    run.start()
    wait_until(lambda: is_locked(run.folder.lock_path), run)
    subprocess.run([*SWEEP, "stop", str(out)], check=True)
    assert run.wait() == 130
    assert not (tmp_path / "deep").exists()


@pytest.mark.slow
def test_a_bare_worker_that_was_started_with_ctrl_c_ignored_goes_on(slow, uninterrupted):
    trial = slow.folder.trials()[0]
    worker = [sys.executable, "-m", "sweep.training", str(trial.path)]
    slow.words = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *worker]
    slow.start()
    until_step(slow, 30)
    os.killpg(slow.process.pid, signal.SIGINT)
    assert slow.wait() == 0
    assert science(trial) == uninterrupted[trial.read_config().science.batch_size]


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("sweep stop", marks=pytest.mark.slow)])
def test_a_stopped_bare_worker_resumes_from_its_checkpoint(
    tmp_path, command, go, uninterrupted, how
):
    worker = command(plan_trials(tmp_path, "faulty:SlowUntilGo", **FIELDS))
    trial = worker.folder.trials()[0]
    worker.words = [sys.executable, "-m", "sweep.training", str(trial.path)]
    worker.start()
    until_step(worker, 40)
    second = subprocess.run(worker.words, capture_output=True, text=True)
    assert second.returncode == 2 and "in use" in second.stderr
    if how == "SIGTERM":
        worker.process.terminate()
    else:
        subprocess.run([*SWEEP, "stop", str(worker.folder.path)], check=True)
    assert worker.wait() == 130
    go.touch()
    assert not trial.state_path.exists() and trial.checkpoints()
    assert worker.run() == 0
    assert science(trial) == uninterrupted[trial.read_config().science.batch_size]
