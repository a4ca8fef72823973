"""The mirror on a real store or server: everything is there once, and no run stays RUNNING."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from sweep.analysis.results import load_sweep
from sweep.cli import sweep as command
from sweep.config.arms import Arm, batch_colors
from sweep.errors import CorruptFile
from sweep.tracking.mirror import Mirror
from sweep.tracking.store import connect, default_tracking_uri, is_mirrored
from sweep.trial.damage import find_damage
from sweep.trial.files import sha256_of
from sweep.trial.lease import Lease
from sweep.trial.status import Cause, State
from sweep.trial.timing import write_timing
from tests.fakes.times import timing_of
from tests.servers import Proxy, Service, load_stored_sweep, logged_points, stored_points
from tests.tracking.conftest import until

FILES = {"config.json", "result.json", "metrics.jsonl", "valid_losses.npy", "log.txt"}


def statuses(sweep):
    runs = sweep.runs()
    return [runs[key].info.status for key in ("parent", *sweep.ids) if key in runs]


def artifacts(sweep, run):
    client = connect(sweep.record["tracking_uri"])
    return {file.path for file in client.list_artifacts(run.info.run_id)}


def test_a_finished_sweep_is_mirrored_whole(sweep):
    (sweep.folder.path / "mlflow.db").unlink()
    for index in range(3):
        sweep.train(index, 12)
    assert not is_mirrored(sweep.folder, None)
    sweep.sync()
    assert is_mirrored(sweep.folder, None)
    sweep.assert_mirrored()
    run, parent = sweep.run(0), sweep.runs()["parent"]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "batch 0004 · lr 1e-3 · seed 0")
    assert (run.data.params["batch_size"], run.data.params["beta2"]) == ("4", "0.999")
    assert run.data.params["policy"] == "fixed"
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert run.data.metrics["final/valid_loss"] == 2.0 / 3
    assert artifacts(sweep, run) == FILES
    assert (sweep.folder.path / "mlartifacts").is_dir()
    assert (parent.info.status, parent.info.run_name) == ("FINISHED", "words sweep")
    assert parent.data.params["budget"] == "200000"
    (data,) = run.inputs.dataset_inputs
    assert json.loads(data.dataset.profile) == sweep.plan.data
    assert sha256_of(sweep.plan.data).startswith(data.dataset.digest)
    sweep.sync()  # a second pass sends nothing
    assert sweep.run(0).to_dictionary() == run.to_dictionary()


def test_the_parent_run_has_the_answer_once(sweep):
    def report():
        arguments = ["report", str(sweep.folder.path)]
        CliRunner().invoke(command, arguments, catch_exceptions=False)
        client, parent = connect(sweep.record["tracking_uri"]), sweep.runs()["parent"]
        table = client.download_artifacts(parent.info.run_id, "trials.json")
        history = client.get_metric_history(parent.info.run_id, "final/valid_loss")
        means = [(point.step, point.value) for point in history]
        return parent, json.loads(Path(table).read_text()), means

    sweep.train(0, 12)
    sweep.train(1, 12)
    assert report()[2] == [(4, 2 / 3), (8, 1 + 2 / 3)]  # batch size 16 has no result yet
    sweep.train(2, 12)
    parent, table, means = report()
    answer = json.loads((sweep.folder.path / "answer.json").read_text())
    seconds = {row["batch_size"]: row["seconds"] for row in answer["batch_sizes"]}
    client = connect(sweep.record["tracking_uri"])
    history = client.get_metric_history(parent.info.run_id, "answer/seconds")
    assert {point.step: point.value for point in history} == seconds
    assert artifacts(sweep, parent) > {"report.md", "answer.json", "trials.csv", "trials.json"}
    note = parent.data.tags["mlflow.note.content"]
    text = (sweep.folder.path / "report.md").read_text()
    assert note.splitlines()[0] == text.splitlines()[2] and "](figures" not in note
    ids = [dict(zip(table["columns"], row, strict=True))["id"] for row in table["data"]]
    assert ids == sweep.ids
    assert json.loads(parent.data.tags["mlflow.loggedArtifacts"])[0]["path"] == "trials.json"
    assert means == [(4, 2 / 3), (8, 1 + 2 / 3), (16, 2 + 2 / 3)]
    assert report()[1:] == (table, means)
    sweep.grow(seeds=2)
    sweep.train(sweep.ids.index(str(sweep.plan.known_trials[-1].id)), 3)  # of batch size 16
    (changed,) = {*report()[2]} - {*means}
    assert changed[0] == 16


def test_the_color_of_a_batch_size_follows_the_plan_without_sending_a_trial_again(sweep):
    def colors():
        runs = [sweep.run(index) for index in range(3)]
        sizes = [int(run.data.params["batch_size"]) for run in runs]
        return dict(zip(sizes, [run.data.tags["mlflow.runColor"] for run in runs], strict=True))

    for index in range(3):
        sweep.train(index, 3)
    sweep.sync()
    assert colors() == batch_colors([4, 8, 16])
    connect(sweep.record["tracking_uri"]).set_tag(sweep.run(0).info.run_id, "mlflow.runName", "x")
    sweep.grow(batches="2,4,8,16")
    sweep.sync()
    after = batch_colors([2, 4, 8, 16])
    assert colors() == {size: after[size] for size in (4, 8, 16)}
    assert sweep.run(0).info.run_name == "x"
    sweep.assert_mirrored(0, 1, 2)


def test_trials_of_tuning_are_named_so_and_large_batch_sizes_stay_sortable(sweep):
    rows = sweep.plan.known_trials
    tune = rows[0].model_copy(update={"id": "a" * 12, "stage": "tune", "learning_rate": 1.2345e-2})
    large = rows[0].model_copy(update={"id": "b" * 12, "batch_size": 16384})
    sweep.set_plan(sweep.plan.model_copy(update={"trials": (*rows, tune, large)}))
    for index in (0, 3, 4):
        sweep.train(index, 1)
    sweep.sync()
    names = [sweep.run(index).info.run_name for index in (0, 3, 4)]
    assert names[0] == "batch 00004 · lr 1e-3 · seed 0"
    assert names[1:] == ["tune: batch 00004 · lr 0.0123 · seed 0", "batch 16384 · lr 1e-3 · seed 0"]


def test_runs_that_a_lost_answer_created_twice_are_deleted(sweep):
    sweep.train(0, 3)
    sweep.sync()
    client, before = connect(sweep.record["tracking_uri"]), sweep.runs()
    for run in before.values():
        names = ("sweep.uid", "sweep.trial_id", "sweep.role")
        tags = {name: run.data.tags[name] for name in names if name in run.data.tags}
        client.create_run(run.info.experiment_id, tags=tags)
    sweep.sync()
    ids = [{key: run.info.run_id for key, run in runs.items()} for runs in (before, sweep.runs())]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("which", ["trial", "parent"])
def test_a_run_that_the_user_deleted_is_created_again(sweep, which):
    sweep.train(0, 3)
    sweep.sync()
    run = sweep.runs()["parent"] if which == "parent" else sweep.run(0)
    connect(sweep.record["tracking_uri"]).delete_run(run.info.run_id)
    sweep.sync()
    sweep.assert_mirrored(0)
    parent = sweep.runs()["parent"].info.run_id
    assert sweep.run(0).data.tags["mlflow.parentRunId"] == parent
    assert run.info.run_id not in {run.info.run_id for run in sweep.runs().values()}


def test_a_line_that_was_half_accepted_is_completed(sweep):
    from mlflow.entities import Metric

    sweep.set_state(0, State.RUNNING)
    sweep.sync()
    run_id = sweep.run(0).info.run_id
    sweep.write_lines(0, 30)
    rows = sorted(logged_points(sweep.trial(0)), key=lambda row: row[1])[:17]
    points = [Metric(key, value, time, tokens) for key, tokens, time, value in rows]
    connect(sweep.record["tracking_uri"]).log_batch(run_id, metrics=points)
    sweep.sync()
    sweep.assert_mirrored(0)


def test_only_lines_that_no_resume_takes_back_are_mirrored(sweep):
    sweep.set_state(0, State.RUNNING)
    sweep.write_lines(0, 10)
    length = sweep.trial(0).metrics_path.stat().st_size
    sweep.write_lines(0, 10, settled=False)
    sweep.sync()
    sweep.write_lines(0, 0, settled=False, keep=length)
    sweep.assert_mirrored(0)
    run_id = sweep.run(0).info.run_id
    sweep.write_lines(0, 15)  # the resumed attempt writes other times
    sweep.finish(0)
    sweep.sync()
    sweep.assert_mirrored(0)
    assert sweep.run(0).info.run_id == run_id


@pytest.mark.parametrize("lost", ["everything", "checkpoints"])
def test_a_trial_that_began_again_gets_another_run(sweep, lost):
    sweep.set_state(0, State.RUNNING)
    sweep.write_lines(0, 20)
    if lost == "everything":
        sweep.finish(0, State.FAILED, cause=Cause.DIVERGED)
    sweep.sync()
    old = sweep.run(0).info.run_id
    if lost == "everything":
        sweep.trial(0).clear()
    sweep.set_state(0, State.RUNNING, cause=None)
    sweep.write_lines(0, 25, keep=0)
    sweep.sync()
    assert sweep.run(0).info.run_id != old
    assert connect(sweep.record["tracking_uri"]).get_run(old).info.lifecycle_stage == "deleted"
    sweep.assert_mirrored(0)


def test_a_stopped_or_killed_trial_does_not_stay_running_and_resumes_in_its_run(sweep):
    sweep.set_state(0, State.RUNNING)
    sweep.set_state(1, State.RUNNING)
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.start()
    until(lambda: sweep.runs() and statuses(sweep) == ["RUNNING"] * 3)
    sweep.set_state(0, State.WAITING)
    until(lambda: statuses(sweep) == ["RUNNING", "KILLED", "RUNNING"])
    assert sweep.run(0).data.tags["sweep.state"] == "WAITING"
    assert mirror.close(0)  # as if the runner was killed
    until(lambda: "mirror" not in [thread.name for thread in threading.enumerate()])
    sweep.sync()  # by `sweep report`; state.json of the second trial still says RUNNING
    assert statuses(sweep) == ["KILLED"] * 3
    before = sweep.run(0).info.run_id
    sweep.set_state(0, State.RUNNING)
    sweep.set_state(1, State.WAITING)
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.start()
    until(lambda: statuses(sweep) == ["RUNNING", "RUNNING", "KILLED"])
    assert sweep.run(0).info.run_id == before
    assert mirror.close(60) == ""
    assert statuses(sweep) == ["KILLED"] * 3


def test_runs_end_as_their_trials_and_the_sweep_end(sweep):
    sweep.train(0, 3)
    sweep.set_state(1, State.RUNNING)
    sweep.finish(1, State.PRUNED)
    sweep.set_state(2, State.RUNNING)
    sweep.finish(2, State.FAILED, cause=Cause.DIVERGED, message="loss 9.9 above 4.0")
    sweep.sync()
    assert statuses(sweep) == ["FINISHED", "FINISHED", "KILLED", "FAILED"]
    assert sweep.run(2).data.tags["sweep.cause"] == "diverged"
    sweep.set_state(2, State.FAILED, cause=Cause.LOST, attempts=2)
    assert not is_mirrored(sweep.folder, None)
    sweep.sync()
    assert statuses(sweep)[0] == "FAILED"
    assert is_mirrored(sweep.folder, None)


def test_the_thread_mirrors_a_growing_plan_and_at_the_end_the_report(sweep):
    sweep.set_state(0, State.RUNNING)
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.start()
    until(lambda: sweep.ids[0] in sweep.runs())
    sweep.write_lines(0, 10)
    sweep.finish(0)
    sweep.grow(batches="2,4,8,16")
    sweep.train(3, 3)
    (sweep.folder.path / "figures").mkdir()
    (sweep.folder.path / "figures" / "loss.png").write_bytes(b"png")
    (sweep.folder.path / "report.md").write_text("# Report\n")
    write_timing(sweep.folder, timing_of({Arm(None, 4): [0.1]}))
    assert mirror.close(60) == ""
    sweep.assert_mirrored(0, 3)
    parent = sweep.runs()["parent"]
    assert artifacts(sweep, parent) == {"plan.json", "timing.json", "report.md", "figures"}
    assert parent.info.status == "KILLED"  # two trials still wait


def test_a_paused_mirror_makes_no_pass_until_the_pause_ends(sweep):
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.start()
    until(lambda: "parent" in sweep.runs())
    with mirror.paused():
        sweep.train(0, 3)
        mirror.join(1.0)  # ten times as long as between two passes
        assert sweep.ids[0] not in sweep.runs()
    until(lambda: sweep.ids[0] in sweep.runs())
    assert mirror.close(60) == ""


def test_report_leaves_the_runs_of_a_running_command_alone(sweep):
    report = ["report", str(sweep.folder.path), "--tracking-uri"]
    report.append(default_tracking_uri(sweep.folder))
    sweep.folder.trials_path.mkdir()
    with Lease(sweep.folder.lock_path):
        CliRunner().invoke(command, report, catch_exceptions=False)
        assert not sweep.folder.tracking_path.exists()
    CliRunner().invoke(command, report, catch_exceptions=False)
    assert statuses(sweep) == ["KILLED"]


def test_a_sweep_is_mirrored_only_in_the_store_that_is_recorded(sweep):
    own, other = default_tracking_uri(sweep.folder), f"sqlite:///{sweep.folder.path}/other.db"
    shutil.copy(sweep.folder.path / "mlflow.db", sweep.folder.path / "other.db")
    sweep.train(0, 3)
    for uri in (own, other):
        assert not is_mirrored(sweep.folder, uri)
        sweep.sync(uri)
        names = [name for name in (None, own, other) if is_mirrored(sweep.folder, name)]
        assert names == [None, uri]


def test_a_moved_folder_gets_a_store_with_its_new_path(sweep):
    sweep.train(0, 3)
    sweep.sync()
    moved = sweep.folder.path.with_name("moved")
    sweep.folder.path.rename(moved)
    sweep.folder = type(sweep.folder)(moved)
    sweep.sync()
    assert str(moved.as_uri()) in sweep.run(0).info.artifact_uri
    assert (moved / "mlflow-old-1.db").exists()
    assert not sweep.folder.path.with_name("words sweep").exists()
    sweep.assert_mirrored(0)


@pytest.mark.parametrize("name", ["result_path", "metrics_path"])
def test_a_damaged_trial_does_not_keep_the_others_from_the_store(sweep, name):
    for index in range(3):
        sweep.train(index, 3)
    damaged = getattr(sweep.trial(1), name)
    good = damaged.read_text()
    damaged.write_text("{")
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.start()
    assert sweep.ids[1] in mirror.close(300)
    sweep.assert_mirrored(0, 2)
    assert not is_mirrored(sweep.folder, None)
    damaged.write_text(good)
    sweep.sync()
    sweep.assert_mirrored()


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_curve_keeps_no_result_from_the_store_and_names_its_remedy(sweep, damage):
    for index in range(2):
        sweep.train(index, 3)
    path = sweep.trial(1).metrics_path
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(good[:-1] + b" \n")
    for _ in range(2):  # it is said again, as long as it holds
        sentence = Mirror(sweep.folder, sweep.plan, None).deliver()
        assert str(sweep.trial(1).path) in sentence and "Restore" in sentence
        assert not is_mirrored(sweep.folder, None)
    sweep.assert_mirrored(0)
    run = sweep.run(1)
    assert (run.info.status, run.data.tags["sweep.state"]) == ("FINISHED", "COMPLETE")
    assert run.data.metrics["final/valid_loss"] == 2.0 / 3 + 1
    assert artifacts(sweep, run) == FILES - {"metrics.jsonl"}
    with pytest.raises(CorruptFile) as problem:
        sweep.trial(1).read_metrics()
    assert str(problem.value) in sentence
    assert str(problem.value) in find_damage(sweep.folder)  # `sweep status --verify`
    assert str(problem.value) in load_sweep(sweep.folder.path).warnings[0]
    path.write_bytes(good)
    sweep.sync()
    sweep.assert_mirrored(0, 1)
    assert sweep.run(1).info.run_id == run.info.run_id
    assert artifacts(sweep, sweep.run(1)) == FILES


def test_a_curve_that_is_damaged_later_stays_in_the_store(sweep):
    sweep.train(0, 3)
    sweep.sync()
    sweep.assert_mirrored(0)
    before = stored_points(connect(sweep.record["tracking_uri"]), sweep.run(0).info.run_id)
    sweep.trial(0).metrics_path.write_text("damaged")
    sweep.set_state(0, State.COMPLETE, message="its state has changed")
    assert Mirror(sweep.folder, sweep.plan, None).deliver()
    assert stored_points(connect(sweep.record["tracking_uri"]), sweep.run(0).info.run_id) == before


def test_a_long_log_is_mirrored_with_its_beginning_and_its_end(sweep):
    sweep.train(0, 3)
    log = sweep.trial(0).log_path
    lines = [f"line {number:08}\n" for number in range(300_000)]
    log.write_text("".join(lines))
    sweep.train(1, 3)
    sweep.sync()
    client = connect(sweep.record["tracking_uri"])
    copy = Path(client.download_artifacts(sweep.run(0).info.run_id, "log.txt"))
    text, whole = copy.read_bytes(), log.read_bytes()
    mib = 1 << 20
    assert text[:mib] == whole[:mib] and text[-mib:] == whole[-mib:]
    between = text[mib:-mib].decode()
    assert str(len(whole) - 2 * mib) in between and str(log) in between
    assert len(between) < 1000 and log.read_bytes() == whole
    short = Path(client.download_artifacts(sweep.run(1).info.run_id, "log.txt"))
    assert short.read_bytes() == sweep.trial(1).log_path.read_bytes()


def test_the_command_that_restores_a_deleted_experiment_works(sweep):
    sweep.train(0, 3)
    sweep.sync()
    client = connect(sweep.record["tracking_uri"])
    client.delete_experiment(client.get_experiment_by_name("words").experiment_id)
    sweep.train(1, 3)
    mirror = Mirror(sweep.folder, sweep.plan, None)
    mirror.start()
    start = time.monotonic()
    sentence = mirror.close(60)
    assert time.monotonic() - start < 30  # no later pass could send it
    commands = re.findall("`(.*?)`", sentence)
    program = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{program}:{os.environ['PATH']}"}
    for words in commands:
        subprocess.run(words, shell=True, check=True, env=environment, cwd=sweep.folder.path.parent)
    assert [words.split()[0] for words in commands][1] == "sweep"
    sweep.assert_mirrored(0, 1)
    assert is_mirrored(sweep.folder, None)


def count_points(database):
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return connection.execute("select count(*) from metrics").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


def test_a_mirror_that_is_killed_in_a_pass_is_completed_by_another(sweep):
    for index in range(3):
        sweep.train(index, 700)
    code = (
        "import sys; from pathlib import Path; from sweep.plan.plan import load_plan\n"
        "from sweep.tracking.mirror import Mirror; from sweep.trial.folder import SweepFolder\n"
        "folder = SweepFolder(Path(sys.argv[1]))\n"
        "Mirror(folder, load_plan(folder), None).deliver()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(sweep.folder.path)])
    while count_points(sweep.folder.path / "mlflow.db") < 4000:
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not is_mirrored(sweep.folder, None)
    sweep.sync()
    sweep.assert_mirrored()
    assert len(sweep.runs()) == 4


def assert_stored_once(sweep, uri, *indices):
    sweep.assert_mirrored(*indices, uri=uri)
    assert len(sweep.runs(uri)) == 1 + len(indices)
    run_id = sweep.runs(uri)["parent"].info.run_id
    stored = load_stored_sweep(uri, "words", run_id).trials.set_index("id")
    for index in indices:
        result = sweep.trial(index).read_result()
        assert stored.loc[sweep.ids[index], "final_valid_loss"] == result.final_valid_loss


def test_a_server_that_is_down_comes_is_killed_and_comes_back(sweep, server):
    server.die()
    mirror = Mirror(sweep.folder, sweep.plan, server.uri)
    mirror.start()
    sweep.set_state(0, State.RUNNING)
    sweep.write_lines(0, 400)
    time.sleep(1)  # passes that fail
    server.start()
    until(lambda: sweep.ids[0] in sweep.runs(server.uri))
    until(lambda: sweep.run(0, server.uri).data.metrics)

    sweep.write_lines(0, 2000)
    before = sweep.run(0, server.uri).data.metrics["train/loss"]
    until(lambda: sweep.run(0, server.uri).data.metrics["train/loss"] != before)
    server.die()  # between two requests, or during one
    sweep.finish(0)
    sweep.train(1, 50)
    assert "Nothing is lost" in mirror.close(1.0)
    assert not is_mirrored(sweep.folder, None)

    server.start()
    following = Mirror(sweep.folder, sweep.plan, server.uri)
    following.start()
    assert following.close(60) == ""
    assert_stored_once(sweep, server.uri, 0, 1)
    assert artifacts(sweep, sweep.run(0, server.uri)) == FILES


def test_a_server_that_never_answers_does_not_hold_up_the_command(sweep):
    sweep.train(0, 10)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mirror = Mirror(sweep.folder, sweep.plan, f"http://127.0.0.1:{silent.getsockname()[1]}")
        mirror.start()
        assert mirror.close(0.5)
        assert mirror.is_alive()  # still waiting for an answer


def test_a_slow_server_whose_answers_get_lost_has_everything_once(sweep, server):
    server.start()
    proxy = Proxy(server.port, 0.05)
    for index in range(2):
        sweep.train(index, 300)
    mirror = Mirror(sweep.folder, sweep.plan, proxy.uri)
    mirror.start()
    for answers in range(1, 5):  # the first answers of several passes
        proxy.dropped = answers % 2 + 1
        until(lambda: not proxy.dropped)
    assert mirror.close(60) == ""
    assert_stored_once(sweep, server.uri, 0, 1)
    proxy.close()


def test_a_password_in_the_address_is_used_and_neither_stored_nor_shown(sweep, server, tmp_path):
    def with_password(port):
        return f"http://user:secret@127.0.0.1:{port}"

    server.start()
    sweep.train(0, 3)
    sentence = Mirror(sweep.folder, sweep.plan, with_password(Service(tmp_path).port)).deliver()
    assert sentence and "secret" not in sentence
    sweep.sync(with_password(server.port))
    assert sweep.record["tracking_uri"] == f"http://127.0.0.1:{server.port}"
    assert is_mirrored(sweep.folder, with_password(server.port))
    assert b"secret" not in b"".join(p.read_bytes() for p in sweep.folder.path.rglob("*.json"))
    assert_stored_once(sweep, server.uri, 0)
