"""The mirror on a real SQLite store: everything there, nothing twice, nothing left RUNNING."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from sweep.errors import SweepError
from sweep.tracking import delivery
from sweep.tracking.delivery import Delivery
from sweep.tracking.mirror import Mirror
from sweep.tracking.reader import read_store
from sweep.tracking.record import Record, is_mirrored, load_record
from sweep.tracking.store import children_of, connect, default_tracking_uri
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import Cause, State, TrialFolder
from sweep.trial.lease import FileLock


def record_of(sweep):
    return read_json(sweep.folder.tracking_path)


def client_of(sweep):
    return connect(record_of(sweep)["tracking_uri"])


def deliver(sweep):
    return Delivery(sweep.folder, sweep.plan, load_record(sweep.folder, None), None)


def run_of(sweep, index):
    return client_of(sweep).get_run(record_of(sweep)["trials"][sweep.ids[index]]["run_id"])


def parent_of(sweep):
    return client_of(sweep).get_run(record_of(sweep)["parent_run_id"])


def run_statuses(sweep):
    """The status of the parent run, then of the trials' runs, in the plan's order."""
    record = load_record(sweep.folder, None)
    entries = [record.trials[i] for i in sweep.ids if i in record.trials]
    run_ids = [record.parent_run_id, *(entry.run_id for entry in entries)]
    client = connect(record.tracking_uri)
    return [client.get_run(run_id).info.status for run_id in run_ids if run_id]


def assert_mirrored(sweep, indices=(0, 1, 2), uri=None):
    stored = read_store(uri or default_tracking_uri(sweep.folder), "words")
    for index in indices:
        assert stored.curves[sweep.ids[index]] == sweep.lines(index)


def test_a_finished_sweep_is_mirrored_whole(sweep, points):
    (sweep.folder.path / "mlflow.db").unlink()
    for index in range(3):
        sweep.train(index, 12)
    assert not is_mirrored(sweep.folder)
    sweep.sync()
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
    sweep.sync()
    client, run_id = client_of(sweep), run_of(sweep, 0).info.run_id
    before = points(client, run_id), run_of(sweep, 0).to_dictionary()
    sweep.sync()
    assert (points(client, run_id), run_of(sweep, 0).to_dictionary()) == before


@pytest.mark.parametrize("lost", ["offsets", "entries", "file"])
def test_replay_makes_no_point_and_no_run_twice(sweep, points, lost):
    for index in range(3):
        sweep.train(index, 250)  # more than one batch
    sweep.sync()
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
    sweep.sync()
    children = children_of(client, record["experiment_id"], record["parent_run_id"])
    assert {run.info.run_id for run in children} == set(run_ids)
    assert [points(client, run_id) for run_id in run_ids] == before
    assert len(client.search_runs([record["experiment_id"]])) == 4
    assert len(run_of(sweep, 0).inputs.dataset_inputs) == 1


def test_runs_that_were_made_by_requests_whose_answers_came_too_late_are_deleted(sweep):
    sweep.train(0, 3)
    sweep.sync()
    client, experiment = client_of(sweep), record_of(sweep)["experiment_id"]
    for made in (parent_of(sweep), run_of(sweep, 0)):
        client.create_run(experiment, tags=made.data.tags)
    assert len(client.search_runs([experiment])) == 4
    kept = {parent_of(sweep).info.run_id, run_of(sweep, 0).info.run_id}
    sweep.sync()
    assert {run.info.run_id for run in client.search_runs([experiment])} == kept


def test_a_run_that_was_deleted_in_mlflow_is_made_anew(sweep):
    sweep.train(0, 3)
    sweep.sync()
    client_of(sweep).delete_run(run_of(sweep, 0).info.run_id)
    sweep.sync()
    assert_mirrored(sweep, [0])
    client_of(sweep).delete_run(parent_of(sweep).info.run_id)
    sweep.sync()
    assert_mirrored(sweep, [0])


def test_a_batch_that_was_half_accepted_is_completed(sweep, points):
    from mlflow.entities import Metric

    sweep.set_state(0, State.RUNNING)
    sweep.sync()
    run_id, line = run_of(sweep, 0).info.run_id, None
    sweep.write_lines(0, 30)
    for line in sweep.lines(0)[:7]:
        if "train/loss" in line:
            time_ms = round(line["time"] * 1000)
            half = [Metric("train/loss", line["train/loss"], time_ms, line["tokens"])]
            client_of(sweep).log_batch(run_id, metrics=half)
    sweep.sync()
    assert max(Counter(points(client_of(sweep), run_id)).values()) == 1
    assert_mirrored(sweep, [0])


def test_only_lines_that_no_resume_takes_back_are_mirrored(sweep):
    sweep.set_state(0, State.RUNNING)
    sweep.write_lines(0, 10)
    kept = sweep.lines(0)
    sweep.write_lines(0, 10, settled=False)
    sweep.sync()
    stored = read_store(default_tracking_uri(sweep.folder), "words")
    assert stored.curves[sweep.ids[0]] == kept
    settled = sweep.trial(0).settled_length()
    sweep.write_lines(0, 15, keep=settled)  # the resumed attempt writes other times
    sweep.finish(0)
    sweep.sync()
    assert_mirrored(sweep, [0])


def test_a_stopped_or_killed_trial_does_not_stay_running_and_resumes_in_its_run(sweep, until):
    sweep.set_state(0, State.RUNNING)
    sweep.set_state(1, State.RUNNING)
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.start()
    until(lambda: run_statuses(sweep) == ["RUNNING"] * 3)
    sweep.set_state(0, State.WAITING)
    mirror.wake()
    until(lambda: run_statuses(sweep) == ["RUNNING", "KILLED", "RUNNING"])
    assert run_of(sweep, 0).data.tags["sweep.state"] == "WAITING"
    mirror.close(0)  # no time to tell anybody: as if the runner was killed
    until(lambda: "mirror" not in [thread.name for thread in threading.enumerate()])
    assert run_statuses(sweep) == ["RUNNING", "KILLED", "RUNNING"]
    sweep.sync()  # by `sweep report`: state.json still says RUNNING
    assert run_statuses(sweep) == ["KILLED"] * 3
    before = run_of(sweep, 0).info.run_id
    sweep.set_state(0, State.RUNNING)
    sweep.set_state(1, State.WAITING)
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.start()
    until(lambda: run_statuses(sweep) == ["RUNNING", "RUNNING", "KILLED"])
    assert run_of(sweep, 0).info.run_id == before
    assert mirror.close(60).is_complete
    assert run_statuses(sweep) == ["KILLED"] * 3


def test_the_record_is_written_as_often_for_many_trials_as_for_few(monkeypatch, sweep):
    """It holds all of them: written for each, it would take their square."""
    monkeypatch.setattr(delivery, "SAVE_SECONDS", 1e9)
    written, save = [], Record.save
    monkeypatch.setattr(Record, "save", lambda *given: written.append(1) or save(*given))
    counts = []
    for ended in (1, len(sweep.ids)):
        beside, before = sweep.beside(f"with-{ended}"), len(written)
        for index in range(ended):
            beside.train(index, 20)
        beside.sync()
        counts.append(len(written) - before)
    assert counts[0] == counts[1] > 0


def test_a_patient_end_does_not_wait_for_what_is_refused_again_and_again(sweep):
    for index in range(2):
        sweep.train(index, 20)
    lines = sweep.trial(0).metrics_path
    lines.write_bytes(lines.read_bytes().replace(b'"tokens"', b'"tokans"'))
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.log_report()
    status = mirror.close(2.0, is_hurried=False)
    assert status.trials == 1 and sweep.ids[0] in str(status)
    assert_mirrored(sweep, [1])


def test_the_trial_of_a_bare_worker_runs_until_its_lease_is_free(sweep):
    sweep.set_state(0, State.RUNNING)
    with FileLock(sweep.trial(0).lease_path):
        sweep.sync()
        assert run_statuses(sweep) == ["KILLED", "RUNNING"]
    sweep.sync()
    assert run_statuses(sweep) == ["KILLED", "KILLED"]


def test_the_end_of_trials_and_sweep_is_told(sweep):
    sweep.train(0, 3)
    sweep.set_state(1, State.RUNNING)
    sweep.finish(1, State.PRUNED)
    sweep.set_state(2, State.RUNNING)
    sweep.set_state(2, State.FAILED, cause=Cause.DIVERGED, message="loss 9.9 above 4.0")
    sweep.sync()
    assert [run_of(sweep, i).info.status for i in range(3)] == ["FINISHED", "KILLED", "FAILED"]
    assert run_of(sweep, 2).data.tags["sweep.cause"] == "diverged"
    assert parent_of(sweep).info.status == "FINISHED"
    sweep.set_state(2, State.FAILED, cause=Cause.LOST, attempts=2)
    assert not is_mirrored(sweep.folder)
    sweep.sync()
    assert parent_of(sweep).info.status == "FAILED"
    assert is_mirrored(sweep.folder)


@pytest.mark.parametrize("lost", ["everything", "checkpoints"])
def test_a_trial_that_began_anew_gets_another_run(sweep, points, lost):
    sweep.set_state(0, State.RUNNING)
    sweep.write_lines(0, 20)
    if lost == "everything":
        sweep.finish(0, State.FAILED, cause=Cause.DIVERGED)
    sweep.sync()
    old, client = run_of(sweep, 0).info.run_id, client_of(sweep)
    before = points(client, old)
    if lost == "everything":
        sweep.trial(0).clear()
    sweep.set_state(0, State.RUNNING, cause=None)
    sweep.write_lines(0, 25, keep=0)
    told = []
    mirror = Mirror(sweep.folder, sweep.plan, None, lambda *ids: told.append(ids))
    assert mirror.close(60).is_complete
    new = run_of(sweep, 0).info.run_id
    assert new != old and (sweep.ids[0], new) in told
    assert client.get_run(old).data.tags["sweep.superseded"] == "true"
    assert points(client, old) == before
    assert_mirrored(sweep, [0])


def test_a_trial_that_began_anew_after_a_first_batch_of_unknown_fate_gets_another_run(
    sweep, monkeypatch
):
    from mlflow import MlflowClient

    sweep.train(0, 5)
    send = MlflowClient.log_batch

    def send_and_die(client, run_id, metrics=(), **more):
        send(client, run_id, metrics=metrics, **more)
        if metrics:
            patched.setattr(Record, "save", lambda *_: None)  # the dead note nothing
            raise ConnectionError

    with monkeypatch.context() as patched, pytest.raises(ConnectionError):
        patched.setattr(MlflowClient, "log_batch", send_and_die)
        deliver(sweep).run(is_alive=True)
    old = run_of(sweep, 0).info.run_id
    sweep.trial(0).clear()
    sweep.train(0, 5)
    sweep.sync()
    assert run_of(sweep, 0).info.run_id != old
    assert_mirrored(sweep, [0])


def test_a_plan_that_grows_gets_its_runs(sweep, until):
    sweep.train(0, 3)
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.start()
    until(lambda: len(run_statuses(sweep)) == 2)
    sweep.grow(batches="2,4,8,16")
    sweep.train(3, 3)
    assert mirror.close(60).is_complete
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
    from sweep.cli import sweep as command

    code = (
        "import sys; from pathlib import Path; from sweep.trial.lease import FileLock\n"
        f"lock = FileLock(Path({str(sweep.folder.lock_path)!r})); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    report = ["report", str(sweep.folder.path), "--tracking-uri"]
    report.append(default_tracking_uri(sweep.folder))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"held\n"
        CliRunner().invoke(command, report, catch_exceptions=False)
        assert not sweep.folder.tracking_path.exists()
        assert owner.stdin is not None
        owner.stdin.close()
        owner.wait()
    CliRunner().invoke(command, report, catch_exceptions=False)
    assert run_statuses(sweep) == ["KILLED"]


def test_a_lost_tracking_file_finds_its_sweep_among_others_in_a_named_store(sweep, points):
    uri = f"sqlite:///{sweep.folder.path.parent}/named.db"
    shutil.copy(sweep.folder.path / "mlflow.db", sweep.folder.path.parent / "named.db")
    sweep.train(0, 5)
    sweep.sync(uri)
    record, run = record_of(sweep), run_of(sweep, 0)
    sweep.trial(0).write_status(sweep.trial(0).read_status().changed(mlflow_run_id=run.info.run_id))
    other = sweep.beside("other")
    other.train(0, 5)
    other.sync(uri)
    before = points(client_of(sweep), run.info.run_id)
    sweep.folder.tracking_path.write_text("{")
    sweep.sync(uri)
    assert record_of(sweep)["parent_run_id"] == record["parent_run_id"]
    assert run_of(sweep, 0).info.run_id == run.info.run_id
    assert points(client_of(sweep), run.info.run_id) == before
    assert len(client_of(sweep).search_runs([record["experiment_id"]])) == 4


def test_a_finished_sweep_is_not_recognised_where_another_store_is_named(sweep):
    from sweep.orchestration.planning import Planned
    from sweep.orchestration.runner import finished_summary

    def is_recognised(uri):
        planned = Planned(sweep.plan, tuple(sweep.ids), True)
        return finished_summary(planned, sweep.folder, uri) is not None

    for index in range(3):
        sweep.train(index, 3)
    assert not is_recognised(None)
    sweep.sync()
    own, other = default_tracking_uri(sweep.folder), f"sqlite:///{sweep.folder.path}/other.db"
    assert [is_recognised(uri) for uri in (None, own, other)] == [True, True, False]
    sweep.sync(other)
    assert [is_recognised(uri) for uri in (None, own, other)] == [True, False, True]


def test_a_moved_folder_gets_a_store_that_knows_its_place(sweep):
    sweep.train(0, 3)
    sweep.sync()
    moved = sweep.folder.path.with_name("moved")
    sweep.folder.path.rename(moved)
    sweep.folder = type(sweep.folder)(moved)
    sweep.sync()
    assert str(moved.as_uri()) in run_of(sweep, 0).info.artifact_uri
    assert (moved / "mlflow-moved.db").exists()
    assert not sweep.folder.path.with_name("words sweep").exists()
    assert_mirrored(sweep, [0])


def test_a_damaged_trial_does_not_keep_the_others_from_the_store(sweep, until):
    for index in range(3):
        sweep.train(index, 3)
    good = sweep.trial(1).result_path.read_text()
    sweep.trial(1).result_path.write_text("{")
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.start()
    until(lambda: mirror.status.error)
    assert sweep.ids[1] in str(mirror.status) and mirror.status.trials == 1
    assert_mirrored(sweep, [0, 2])
    sweep.trial(1).result_path.write_text(good)
    assert mirror.close(30).is_complete
    assert_mirrored(sweep)


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
Mirror(folder, Plan.model_validate(plan), None).close(60)
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
    sweep.sync()
    assert_mirrored(sweep)
    client, record = client_of(sweep), record_of(sweep)
    assert len(client.search_runs([record["experiment_id"]])) == 4
    for index in range(3):
        held = points(client, run_of(sweep, index).info.run_id)
        assert max(Counter(held).values()) == 1


def test_what_is_mirrored_is_read_no_more(sweep, monkeypatch):
    sweep.grow(seeds=20)
    for index in range(60):
        sweep.set_state(index, State.FAILED, cause=Cause.ERROR)
    delivery = deliver(sweep)
    assert delivery.run(is_alive=False) is None
    read, read_status = [], TrialFolder.read_status
    monkeypatch.setattr(
        TrialFolder, "read_status", lambda trial: read.append(trial.id) or read_status(trial)
    )
    assert delivery.run(is_alive=True) is None
    assert read == []
    assert delivery.run(is_alive=False) is None  # how did the sweep end?
    assert is_mirrored(sweep.folder)
    assert max(Counter(read).values()) == 2
