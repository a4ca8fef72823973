"""A sweep read back from a store is the sweep that was in the folder."""

import pytest

from sweep.errors import SweepError
from sweep.tracking.reader import read_store
from sweep.tracking.store import default_tracking_uri
from sweep.trial.folder import Cause, State


def test_plan_results_and_curves_come_back_as_they_were(sweep):
    sweep.train(0, 30)
    sweep.set_state(1, State.RUNNING)
    sweep.write_lines(1, 5)
    sweep.set_state(1, State.FAILED, cause=Cause.LOST, message="killed", microbatch_size=2)
    sweep.sync()
    (sweep.folder.path / "trials").rename(sweep.folder.path / "elsewhere")
    (sweep.folder.path / "mlartifacts").rename(sweep.folder.path / "gone")
    stored = read_store(default_tracking_uri(sweep.folder), "words")
    (sweep.folder.path / "elsewhere").rename(sweep.folder.path / "trials")
    assert stored.name == "words sweep"
    assert stored.plan == sweep.folder.read_plan()
    complete, failed, waiting = stored.results
    assert complete == sweep.trial(0).read_result()
    known = {"state": "FAILED", "cause": "lost", "message": "killed"}
    known |= {"attempts": 1, "microbatch_size": 2}
    assert failed == {"id": sweep.ids[1], **known}
    assert waiting == {"id": sweep.ids[2], "state": "WAITING"}
    assert stored.curves == {sweep.ids[0]: sweep.lines(0), sweep.ids[1]: sweep.lines(1)}


def test_a_result_of_an_earlier_attempt_is_not_that_of_a_trial_that_runs_again(sweep):
    sweep.set_state(0, State.RUNNING)
    sweep.finish(0, State.FAILED, cause=Cause.ERROR)
    sweep.sync()
    sweep.trial(0).result_path.unlink()
    sweep.set_state(0, State.FAILED, cause=Cause.LOST, attempts=2)
    sweep.sync()
    stored = read_store(default_tracking_uri(sweep.folder), "words")
    assert (stored.results[0]["cause"], stored.results[0]["attempts"]) == ("lost", 2)
    assert "final_valid_loss" not in stored.results[0]


def test_the_newest_sweep_is_read_unless_one_is_named(sweep, tmp_path):
    uri = f"sqlite:///{tmp_path / 'words sweep' / 'mlflow.db'}"
    sweep.train(0, 2)
    sweep.sync(uri)
    first = read_store(uri, "words")
    sweep.folder.tracking_path.unlink()
    other = sweep.beside("other")
    other.train(0, 2)
    other.sync(uri)
    assert read_store(uri, "words").name == "other"
    assert read_store(uri, "words", first.run_id) == first
    with pytest.raises(SweepError, match=f"parent run .* got 'abc'. There are: .*{first.run_id}"):
        read_store(uri, "words", "abc")


def test_what_cannot_be_read_is_said_in_a_sentence(sweep, tmp_path):
    uri = default_tracking_uri(sweep.folder)
    sweep.train(0, 2)
    sweep.sync()
    with pytest.raises(SweepError, match=r"\(Default, words\), got 'wrods'"):
        read_store(uri, "wrods")
    with pytest.raises(SweepError, match="holds no sweep"):
        read_store(uri, "Default")
    with pytest.raises(SweepError, match="must be an MLflow database, and is not there"):
        read_store(f"sqlite:///{tmp_path}/none.db", "words")
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(SweepError, match=r"cannot be read: API request to .* Check the address"):
        read_store("http://127.0.0.1:9", "words")
