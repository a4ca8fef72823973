"""States, checkpoints and fences of a trial's folder."""

import pytest

from sweep.errors import Superseded, SweepError
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder, TrialStatus


@pytest.fixture
def trial(tmp_path):
    folder = TrialFolder(tmp_path / "0123456789ab")
    folder.path.mkdir()
    return folder


def test_a_trial_is_waiting_until_its_status_is_written(trial):
    assert trial.read_status() == TrialStatus() and not State.WAITING.is_finished
    status = TrialStatus(State.FAILED, Cause.LOST, "killed", 2, 3, 4)
    trial.write_status(status)
    assert trial.read_status() == status


def test_a_superseded_fence_raises(trial):
    trial.write_status(TrialStatus(fencing=1))
    trial.fence(1)
    trial.write_status(TrialStatus(fencing=2))
    with pytest.raises(Superseded):
        trial.fence(1)


def test_settled_lines_are_those_no_resume_takes_back(trial):
    trial.metrics_path.write_bytes(b"x" * 100)
    assert trial.settled_length() == 0
    for step, length in ((1, 10), (20, 50), (3, 30)):
        (trial.path / f"checkpoint-{step:010d}-{length:010d}").touch()
    (trial.path / ".checkpoint-0000000099-0000000099.1.part").touch()
    assert [name.step for name in trial.checkpoints()] == [20, 3, 1]
    assert trial.settled_length() == 30
    trial.result_path.touch()
    assert trial.settled_length() == 100


def test_folders_that_are_not_a_sweep_are_refused(tmp_path):
    assert SweepFolder(tmp_path).read_plan() is None
    with pytest.raises(SweepError, match=r"plan\.json"):
        SweepFolder(tmp_path).require_plan()
    with pytest.raises(SweepError, match=r"config\.json"):
        TrialFolder(tmp_path).read_config()


def test_half_written_files_go_but_the_runners_own(trial):
    for name in (".result.json.7.part", ".checkpoint-1-1.7.part", ".state.json.9.part"):
        (trial.path / name).touch()
    trial.remove_half_written()
    assert [path.name for path in trial.path.iterdir()] == [".state.json.9.part"]
