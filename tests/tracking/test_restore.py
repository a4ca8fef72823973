"""A sweep folder that is restored from a store reads like the original."""

import shutil
from dataclasses import replace

import pytest

from sweep.analysis.frames import load_stored_sweep, load_sweep
from sweep.errors import SweepError
from sweep.tracking.restore import restore_sweep
from sweep.tracking.store import connect, default_tracking_uri
from sweep.trial.folder import Cause, State, SweepFolder


def test_the_folder_comes_back_as_it_was(sweep, tmp_path):
    sweep.train(0, 30)
    sweep.set_state(1, State.RUNNING)
    sweep.write_lines(1, 5)
    sweep.sync()
    uri = default_tracking_uri(sweep.folder)
    sweep.folder.path.rename(tmp_path / "elsewhere")
    (tmp_path / "words sweep").mkdir()
    for name in ("mlflow.db", "mlartifacts"):
        (tmp_path / "elsewhere" / name).rename(tmp_path / "words sweep" / name)
    original = type(sweep.folder)(tmp_path / "elsewhere")
    (tmp_path / "restored").mkdir()
    restored = restore_sweep(uri, "words", None, tmp_path / "restored")
    assert restored.path == tmp_path / "restored" / "words sweep"
    assert restored.read_plan() == original.read_plan()
    for name in ("result.json", "metrics.jsonl", "valid_losses.npy"):
        path = restored.trial(sweep.ids[0]).path / name
        assert path.read_bytes() == (original.trial(sweep.ids[0]).path / name).read_bytes()
    states = [restored.trial(trial_id).read_status().state for trial_id in sweep.ids]
    assert states == [State.COMPLETE, State.RUNNING, State.WAITING]
    assert not restored.trial(sweep.ids[1]).metrics_path.exists()  # it has not finished
    tables = load_sweep(restored.path), load_sweep(original.path)
    assert tables[0].trials.equals(tables[1].trials) and not tables[0].warnings


def test_the_result_of_an_earlier_attempt_is_not_restored(sweep):
    sweep.set_state(0, State.RUNNING)
    sweep.finish(0, State.FAILED, cause=Cause.ERROR)
    sweep.sync()
    sweep.trial(0).result_path.unlink()
    sweep.set_state(0, State.FAILED, cause=Cause.LOST, message="killed", attempts=2)
    sweep.sync()
    stored = load_stored_sweep(default_tracking_uri(sweep.folder), "words").trials.iloc[0]
    assert (stored["cause"], stored["attempts"], stored["message"]) == ("lost", 2, "killed")
    assert stored["final_valid_loss"] != stored["final_valid_loss"]  # not a number


def test_the_newest_sweep_is_restored_unless_one_is_named(sweep, tmp_path):
    uri = default_tracking_uri(sweep.folder)
    sweep.train(0, 2)
    sweep.sync(uri)
    folder = SweepFolder(tmp_path / "other")
    shutil.copytree(sweep.folder.path / "trials", folder.path / "trials")
    shutil.copy(sweep.folder.plan_path, folder.plan_path)
    other = replace(sweep, folder=folder)
    other.sync(uri)
    assert load_stored_sweep(uri, "words").name == "other"
    first = sweep.runs()["parent"].info.run_id
    assert load_stored_sweep(uri, "words", first).name == "words sweep"
    with pytest.raises(SweepError, match=f"got abc. Parent runs: .*{first}"):
        load_stored_sweep(uri, "words", "abc")


def test_a_store_that_cannot_be_read_is_refused_in_one_sentence(sweep, tmp_path):
    uri = default_tracking_uri(sweep.folder)
    sweep.train(0, 2)
    sweep.sync()
    for address, experiment, sentence in (
        (uri, "wrods", r"\(Default, words\), got 'wrods'"),
        (uri, "Default", "Parent runs: none"),
        (f"sqlite:///{tmp_path}/none.db", "words", "existing MLflow database"),
        ("http://127.0.0.1:9", "words", "cannot be read: API request to .* Check the address"),
    ):
        with pytest.raises(SweepError, match=sentence):
            load_stored_sweep(address, experiment)
    assert not (tmp_path / "none.db").exists()


def test_nothing_is_written_outside_the_folder(sweep, tmp_path):
    sweep.train(0, 2)
    sweep.sync()
    uri, run_id = default_tracking_uri(sweep.folder), sweep.runs()["parent"].info.run_id
    connect(uri).set_tag(run_id, "sweep.name", "../../outside")
    (tmp_path / "a").mkdir()
    assert restore_sweep(uri, "words", None, tmp_path / "a").path.parent == tmp_path / "a"
    connect(uri).set_tag(sweep.run(0).info.run_id, "sweep.trial_id", "../../../out")
    (tmp_path / "b").mkdir()
    restore_sweep(uri, "words", None, tmp_path / "b")
    assert not list(tmp_path.glob("**/out*"))
