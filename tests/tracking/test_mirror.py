"""The mirror on a real SQLite store: everything there, nothing twice, nothing left RUNNING."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from sweep.errors import SweepError
from sweep.tracking.mirror import Mirror, is_mirrored
from sweep.tracking.reader import read_store
from sweep.tracking.store import children_of, connect, default_tracking_uri
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import Cause, State
from sweep.trial.lease import FileLock


def client_of(sweep):
    return connect(default_tracking_uri(sweep.folder))


def record_of(sweep):
    return read_json(sweep.folder.tracking_path)


def run_of(sweep, index):
    return client_of(sweep).get_run(record_of(sweep)["trials"][sweep.ids[index]]["run_id"])


def parent_of(sweep):
    return client_of(sweep).get_run(record_of(sweep)["parent_run_id"])


def sync(sweep):
    mirror = Mirror(sweep.folder, sweep.plan, None)
    assert mirror.sync(), mirror.status
    return mirror


def assert_mirrored(sweep, indices=(0, 1, 2), uri=None):
    stored = read_store(uri or default_tracking_uri(sweep.folder), "words")
    for index in indices:
        assert stored.curves[sweep.ids[index]] == sweep.lines(index)


def test_a_finished_sweep_is_mirrored_whole(sweep, points):
    (sweep.folder.path / "mlflow.db").unlink()
    for index in range(3):
        sweep.train(index, 12)
    assert not is_mirrored(sweep.folder)
    sync(sweep)
    assert is_mirrored(sweep.folder)
    run, client = run_of(sweep, 0), client_of(sweep)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "batch 4 seed 0 lr 0.001"
    assert run.data.params["batch_size"] == "4" and run.data.params["optimizer.beta2"] == "0.999"
    assert run.data.tags["sweep.torch_version"] == "2.13.0"
    assert run.data.tags["mlflow.source.git.commit"] == "abc1234"
    assert run.data.metrics["final/valid_loss"] == 2.0 / 3
    assert [given.dataset.name for given in run.inputs.dataset_inputs] == ["synthetic"]
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == {"config.json", "result.json", "valid_losses.npy", "log.txt"}
    assert (sweep.folder.path / "mlartifacts").is_dir()
    parent = parent_of(sweep)
    assert parent.info.status == "FINISHED" and parent.info.run_name == "words sweep"
    losses = [p for p in points(client, run.info.run_id) if p[0] == "train/loss"]
    for (_, step, timestamp, value), line in zip(
        losses, [line for line in sweep.lines(0) if "train/loss" in line], strict=True
    ):
        assert (step, value) == (line["tokens"], line["train/loss"])
        assert timestamp == round(line["time"] * 1000)


def test_a_second_pass_sends_nothing(sweep, points):
    sweep.train(0, 12)
    sync(sweep)
    client, run_id = client_of(sweep), run_of(sweep, 0).info.run_id
    before = points(client, run_id), run_of(sweep, 0).to_dictionary()
    sync(sweep)
    assert (points(client, run_id), run_of(sweep, 0).to_dictionary()) == before


@pytest.mark.parametrize("lost", ["offsets", "entries", "file"])
def test_replay_makes_no_point_and_no_run_twice(sweep, points, lost):
    for index in range(3):
        sweep.train(index, 250)  # more than one batch
    sync(sweep)
    client, record = client_of(sweep), record_of(sweep)
    run_ids = [record["trials"][trial_id]["run_id"] for trial_id in sweep.ids]
    before = [points(client, run_id) for run_id in run_ids]
    assert max(Counter(before[0]).values()) == 1
    if lost == "file":
        sweep.folder.tracking_path.unlink()
    elif lost == "entries":
        write_json(sweep.folder.tracking_path, record | {"trials": {}})
    else:
        for entry in record["trials"].values():
            entry |= {"offset": 0, "last_tokens": -1, "last_milliseconds": 0, "final": False}
        write_json(sweep.folder.tracking_path, record)
    sync(sweep)
    children = children_of(client, record["experiment_id"], record["parent_run_id"])
    assert {run.info.run_id for run in children} == set(run_ids)
    assert [points(client, run_id) for run_id in run_ids] == before
    assert len(client.search_runs([record["experiment_id"]])) == 4
    assert len(run_of(sweep, 0).inputs.dataset_inputs) == 1


def test_runs_that_were_made_by_requests_whose_answers_came_too_late_are_deleted(sweep):
    sweep.train(0, 3)
    sync(sweep)
    client, experiment = client_of(sweep), record_of(sweep)["experiment_id"]
    for made in (parent_of(sweep), run_of(sweep, 0)):
        client.create_run(experiment, tags=made.data.tags)
    assert len(client.search_runs([experiment])) == 4
    kept = {parent_of(sweep).info.run_id, run_of(sweep, 0).info.run_id}
    sync(sweep)
    assert {run.info.run_id for run in client.search_runs([experiment])} == kept


def test_a_run_that_was_deleted_in_mlflow_is_made_anew(sweep):
    sweep.train(0, 3)
    sync(sweep)
    client_of(sweep).delete_run(run_of(sweep, 0).info.run_id)
    sync(sweep)
    assert_mirrored(sweep, [0])
    client_of(sweep).delete_run(parent_of(sweep).info.run_id)
    sync(sweep)
    assert_mirrored(sweep, [0])


def test_a_batch_that_was_half_accepted_is_completed(sweep, points):
    from mlflow.entities import Metric

    sweep.set_state(0, State.RUNNING)
    mirror = sync(sweep)
    run_id, line = run_of(sweep, 0).info.run_id, None
    sweep.write_lines(0, 30)
    for line in sweep.lines(0)[:7]:
        if "train/loss" in line:
            time_ms = round(line["time"] * 1000)
            half = [Metric("train/loss", line["train/loss"], time_ms, line["tokens"])]
            client_of(sweep).log_batch(run_id, metrics=half)
    assert mirror.sync()
    assert max(Counter(points(client_of(sweep), run_id)).values()) == 1
    assert_mirrored(sweep, [0])


def test_only_lines_that_no_resume_takes_back_are_mirrored(sweep):
    sweep.set_state(0, State.RUNNING)
    sweep.write_lines(0, 10)
    kept = sweep.lines(0)
    sweep.write_lines(0, 10, settled=False)
    mirror = sync(sweep)
    stored = read_store(default_tracking_uri(sweep.folder), "words")
    assert stored.curves[sweep.ids[0]] == kept
    settled = sweep.trial(0).settled_length()
    sweep.write_lines(0, 15, keep=settled)  # the resumed attempt writes other times
    sweep.finish(0)
    assert mirror.sync()
    assert_mirrored(sweep, [0])


def test_a_stopped_or_killed_trial_does_not_stay_running_and_resumes_in_its_run(sweep):
    sweep.set_state(0, State.RUNNING)
    sweep.set_state(1, State.RUNNING)
    with FileLock(sweep.folder.lock_path):
        mirror = sync(sweep)
        assert run_of(sweep, 0).info.status == parent_of(sweep).info.status == "RUNNING"
        sweep.set_state(0, State.WAITING)
        assert mirror.sync()
        assert run_of(sweep, 0).info.status == "KILLED"
        assert run_of(sweep, 0).data.tags["sweep.state"] == "WAITING"
        assert run_of(sweep, 1).info.status == "RUNNING"
    sync(sweep)  # by `sweep report`: the runner died, and state.json still says RUNNING
    assert run_of(sweep, 1).info.status == parent_of(sweep).info.status == "KILLED"
    before = run_of(sweep, 0).info.run_id
    with FileLock(sweep.folder.lock_path):
        sweep.set_state(0, State.RUNNING)
        sync(sweep)
        assert run_of(sweep, 0).info.status == parent_of(sweep).info.status == "RUNNING"
        assert run_of(sweep, 0).info.run_id == before


def test_the_end_of_trials_and_sweep_is_told(sweep):
    sweep.train(0, 3)
    sweep.set_state(1, State.RUNNING)
    sweep.finish(1, State.PRUNED)
    sweep.set_state(2, State.RUNNING)
    sweep.set_state(2, State.FAILED, cause=Cause.DIVERGED, message="loss 9.9 above 4.0")
    sync(sweep)
    assert [run_of(sweep, i).info.status for i in range(3)] == ["FINISHED", "KILLED", "FAILED"]
    assert run_of(sweep, 2).data.tags["sweep.cause"] == "diverged"
    assert parent_of(sweep).info.status == "FINISHED"
    sweep.set_state(2, State.FAILED, cause=Cause.LOST, attempts=2)
    assert not is_mirrored(sweep.folder)
    sync(sweep)
    assert parent_of(sweep).info.status == "FAILED"
    assert is_mirrored(sweep.folder)


def test_a_trial_that_began_anew_gets_another_run(sweep):
    sweep.train(0, 20)
    sync(sweep)
    old = run_of(sweep, 0).info.run_id
    sweep.trial(0).clear()
    sweep.train(0, 20)
    told = []
    mirror = Mirror(sweep.folder, sweep.plan, None, lambda *ids: told.append(ids))
    assert mirror.sync()
    new = run_of(sweep, 0).info.run_id
    assert new != old and (sweep.ids[0], new) in told
    assert client_of(sweep).get_run(old).data.tags["sweep.superseded"] == "true"
    assert_mirrored(sweep, [0])


def test_a_plan_that_grows_gets_its_runs(sweep):
    sweep.train(0, 3)
    mirror = sync(sweep)
    sweep.grow(batches="2,4,8,16")
    sweep.train(3, 3)
    assert mirror.sync()
    stored = read_store(default_tracking_uri(sweep.folder), "words")
    assert stored.plan == sweep.folder.read_plan()
    assert_mirrored(sweep, [0, 3])


def test_the_thread_mirrors_and_closing_sends_what_is_left(sweep, until):
    told = []
    mirror = Mirror(sweep.folder, sweep.plan, None, lambda *ids: told.append(ids))
    sweep.set_state(0, State.RUNNING)
    mirror.start()
    until(lambda: told)
    sweep.write_lines(0, 10)
    mirror.wake()
    (sweep.folder.figures_path).mkdir()
    (sweep.folder.figures_path / "loss.png").write_bytes(b"png")
    sweep.finish(0)
    (sweep.folder.path / "report.md").write_text("# Report\n")
    mirror.log_report()
    status = mirror.close(30)
    assert status.is_complete, status
    parent = parent_of(sweep)
    files = {file.path for file in client_of(sweep).list_artifacts(parent.info.run_id)}
    assert files == {"plan.json", "report.md", "figures"}
    assert parent.info.status == "KILLED"  # two trials still wait
    assert_mirrored(sweep, [0])


def test_the_runs_of_another_process_s_sweep_are_left_to_it(sweep):
    sweep.train(0, 3)
    code = (
        "import sys; from pathlib import Path; from sweep.trial.lease import FileLock\n"
        f"lock = FileLock(Path({str(sweep.folder.lock_path)!r})); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"held\n"
        assert not Mirror(sweep.folder, sweep.plan, None).sync()
    assert not sweep.folder.tracking_path.exists()


def test_a_moved_folder_gets_a_store_that_knows_its_place(sweep):
    sweep.train(0, 3)
    sync(sweep)
    moved = sweep.folder.path.with_name("moved")
    sweep.folder.path.rename(moved)
    sweep.folder = type(sweep.folder)(moved)
    sync(sweep)
    assert str(moved.as_uri()) in run_of(sweep, 0).info.artifact_uri
    assert (moved / "mlflow-moved.db").exists()
    assert not sweep.folder.path.with_name("words sweep").exists()
    assert_mirrored(sweep, [0])


def test_a_damaged_trial_does_not_keep_the_others_from_the_store(sweep):
    for index in range(3):
        sweep.train(index, 3)
    good = sweep.trial(1).result_path.read_text()
    sweep.trial(1).result_path.write_text("{")
    mirror = Mirror(sweep.folder, sweep.plan, None)
    assert not mirror.sync()
    assert sweep.ids[1] in str(mirror.status) and mirror.status.trials == 1
    assert_mirrored(sweep, [0, 2])
    sweep.trial(1).result_path.write_text(good)
    assert mirror.sync() and mirror.status.is_complete


def test_a_path_is_refused_before_anything_is_written(sweep):
    for uri in ("mlruns", "file:///tmp/mlruns", "ftp://host", "http://", "sqlite:///"):
        with pytest.raises(SweepError, match="tracking URI must be a server or a database"):
            Mirror(sweep.folder, sweep.plan, uri)
    assert not sweep.folder.tracking_path.exists()


KILLED_CODE = """
import sys
from pathlib import Path
from sweep.plan.plan import Plan
from sweep.tracking.mirror import Mirror
from sweep.trial.folder import SweepFolder
folder = SweepFolder(Path(sys.argv[1]))
plan = folder.require_plan()
plan.pop("format_version")
Mirror(folder, Plan.model_validate(plan), None).sync()
"""


def count_points(database: Path) -> int:
    import sqlite3

    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return int(connection.execute("select count(*) from metrics").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


@pytest.mark.parametrize("kill_at", [pytest.param(1, marks=pytest.mark.slow), 4000])
def test_a_mirror_killed_in_mid_pass_is_completed_by_another(sweep, points, kill_at):
    for index in range(3):
        sweep.train(index, 700)
    database = sweep.folder.path / "mlflow.db"
    process = subprocess.Popen([sys.executable, "-c", KILLED_CODE, str(sweep.folder.path)])
    killed = threading.Event()
    while process.poll() is None and not killed.is_set():
        if count_points(database) >= kill_at:
            os.kill(process.pid, signal.SIGKILL)
            killed.set()
        time.sleep(0.005)
    process.wait()
    assert killed.is_set() and not is_mirrored(sweep.folder)
    sync(sweep)
    assert_mirrored(sweep)
    client, record = client_of(sweep), record_of(sweep)
    assert len(client.search_runs([record["experiment_id"]])) == 4
    for index in range(3):
        held = points(client, run_of(sweep, index).info.run_id)
        assert max(Counter(held).values()) == 1


@pytest.mark.slow
def test_a_pass_over_a_thousand_and_more_finished_trials_takes_less_than_a_second(sweep):
    sweep.grow(seeds=400)
    for index in range(1200):
        sweep.set_state(index, State.FAILED, cause=Cause.ERROR)
    mirror = sync(sweep)
    start = time.monotonic()
    assert mirror.sync()
    assert time.monotonic() - start < 1
    start = time.monotonic()
    assert is_mirrored(sweep.folder)
    assert time.monotonic() - start < 1
