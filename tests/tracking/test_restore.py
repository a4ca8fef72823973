"""A sweep folder that is restored from a store reads like the original."""

import pytest

from sweep.analysis.frames import load_stored_sweep, load_sweep
from sweep.errors import SweepError
from sweep.orchestration.runner import run_sweep
from sweep.tracking.restore import restore_sweep
from sweep.tracking.store import connect, default_tracking_uri
from sweep.trial.files import read_metrics
from sweep.trial.folder import Cause, State


def test_the_folder_comes_back_as_it_was(sweep, tmp_path):
    sweep.train(0, 30)
    sweep.set_state(1, State.RUNNING)
    sweep.write_lines(1, 5)
    sweep.sync()  # the second trial is restored from its metric history, without nulls
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
    lines = read_metrics(original.trial(sweep.ids[1]).metrics_path)
    shown = [{key: value for key, value in line.items() if value is not None} for line in lines]
    assert read_metrics(restored.trial(sweep.ids[1]).metrics_path) == shown
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
    other = sweep.beside("other")
    other.train(0, 2)
    other.sync(uri)
    assert load_stored_sweep(uri, "words").name == "other"
    assert load_stored_sweep(uri, "words", sweep.record["run_id"]).name == "words sweep"
    with pytest.raises(SweepError, match=f"got 'abc'. Parent runs: .*{sweep.record['run_id']}"):
        load_stored_sweep(uri, "words", "abc")


def test_a_store_that_cannot_be_read_is_refused_in_one_sentence(sweep, tmp_path):
    uri = default_tracking_uri(sweep.folder)
    sweep.train(0, 2)
    sweep.sync()
    for address, experiment, sentence in (
        (uri, "wrods", r"\(Default, words\), got 'wrods'"),
        (uri, "Default", "got none"),
        (f"sqlite:///{tmp_path}/none.db", "words", "existing MLflow database"),
        ("http://127.0.0.1:9", "words", "cannot be read: API request to .* Check the address"),
    ):
        with pytest.raises(SweepError, match=sentence):
            load_stored_sweep(address, experiment)
    assert not (tmp_path / "none.db").exists()


def test_nothing_is_written_outside_the_folder(sweep, tmp_path):
    sweep.train(0, 2)
    sweep.sync()
    uri, run_id = default_tracking_uri(sweep.folder), sweep.record["run_id"]
    connect(uri).set_tag(run_id, "sweep.name", "../../outside")
    (tmp_path / "a").mkdir()
    assert restore_sweep(uri, "words", None, tmp_path / "a").path.parent == tmp_path / "a"
    connect(uri).set_tag(sweep.run(0).info.run_id, "sweep.trial_id", "../../../out")
    rows = [row.model_copy(update={"id": "../../../out"}) for row in sweep.plan.trials]
    plan = sweep.plan.model_copy(update={"trials": tuple(rows)})
    sweep.write_plan(plan)
    connect(uri).log_artifact(run_id, str(sweep.folder.plan_path))
    (tmp_path / "b").mkdir()
    with pytest.raises(SweepError, match="12 hexadecimal digits"):
        restore_sweep(uri, "words", None, tmp_path / "b")
    assert not list(tmp_path.glob("**/out*"))


def test_metrics_of_grpo_are_stored_as_they_were_logged(tmp_path):
    grpo = {"prompt_tokens": 40, "new_tokens": 12, "group_size": 4, "kl": 0.1}
    fields = {"batches": "8", "budget": 8 * 52 * 4, "model": "quick", "data": "synthetic"}
    summary = run_sweep(
        "grpo-words", out=tmp_path / "sweep", device="cpu", **fields, lr="3e-3", grpo=grpo
    )
    assert summary.exit_code == 0 and not summary.untracked
    (trial,) = summary.folder.trials()
    client = connect(default_tracking_uri(summary.folder))
    run = client.get_run(trial.read_status().mlflow_run_id)
    names = {"reward/mean", "reward/words", "grpo/kl", "grpo/entropy", "grpo/ratio"}
    assert names <= run.data.metrics.keys()
    for name in names:
        logged = [
            line[name] for line in read_metrics(trial.metrics_path) if line.get(name) is not None
        ]
        assert [point.value for point in client.get_metric_history(run.info.run_id, name)] == logged
