"""States, checkpoints and fences of a trial's folder."""

import os
import shutil

import pytest

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.errors import CorruptFile, Superseded, SweepError
from sweep.trial.files import read_json, refuse_links, write_json
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import Lease
from sweep.trial.status import Cause, State, TrialStatus
from tests.fakes.results import result_of
from tests.plans import build_plan


@pytest.fixture
def trial(tmp_path):
    folder = TrialFolder(tmp_path / "0123456789ab")
    folder.path.mkdir()
    return folder


@pytest.mark.parametrize("fencing", [None, "2", [2]])
def test_a_request_to_stop_without_a_number_is_ignored(trial, fencing):
    trial.ask_to_stop(2)
    assert trial.is_asked_to_stop(2) and not trial.is_asked_to_stop(3)
    write_json(trial.stop_path, {"id": trial.id, "fencing": fencing})
    assert not trial.is_asked_to_stop(0)


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
    trial.write_status(TrialStatus(State.PRUNED))
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


def write_trial(sweep, batch=4):
    """Write the config of a trial of the quadratic; return its folder."""
    settings = load_experiment(
        "quadratic", {"batches": [batch], "budget": 400, "precision": "fp32"}
    )
    plan = build_plan(settings, Execution(device="cpu"))
    trial = sweep.trial(str(plan.trials[0].id))
    trial.write_config(plan.trial_config(plan.trials[0], sweep.name))
    return trial


def write_result(trial, **changes):
    write_json(trial.result_path, result_of(trial.id) | changes)


def test_a_trial_is_complete_only_with_a_readable_result_of_its_own(trial):
    trial.write_status(TrialStatus(State.COMPLETE, attempts=1, fencing=1))
    assert trial.read_status().state is State.WAITING
    write_result(trial)
    assert trial.read_status() == TrialStatus(State.COMPLETE, attempts=1, fencing=1)
    write_result(trial, state="FAILED", cause="diverged", final_valid_loss=None)
    assert trial.read_status().cause is Cause.DIVERGED
    for changes in ({"id": "ba9876543210"}, {"final_valid_loss": None}, {"state": "DONE"}):
        write_result(trial, **changes)
        assert trial.read_status().state is State.WAITING and trial.find_result() is None
        with pytest.raises(CorruptFile):
            trial.read_result()


@pytest.mark.parametrize("document", [{"id": "ba9876543210"}, {"state": "DONE"}, {"attempts": "x"}])
def test_a_damaged_state_costs_no_result_and_no_fence(trial, document):
    write_json(trial.state_path, {"id": trial.id, **document})
    with Lease(trial.lease_path, fencing=3):
        status = trial.read_status()
    assert (status.state, status.fencing) == (State.WAITING, 3) and status.message
    write_result(trial)
    assert trial.read_status().state is State.COMPLETE


def test_settings_must_hash_to_the_id_of_their_folder(tmp_path):
    sweep = SweepFolder(tmp_path)
    trial, other = write_trial(sweep), write_trial(sweep, batch=8)
    assert trial.read_config().id == trial.id
    shutil.copy(other.config_path, trial.config_path)
    with pytest.raises(CorruptFile, match=other.id):
        trial.read_config()
    settings = read_json(other.config_path) | {"id": trial.id}  # sealed again
    write_json(trial.config_path, settings)
    with pytest.raises(CorruptFile, match="settings"):
        trial.read_config()


@pytest.mark.parametrize("name", ["../../elsewhere", "0123456789AB", "0123456789abc", "", "x\n"])
def test_only_ids_name_trials(tmp_path, name):
    with pytest.raises(CorruptFile, match="12 hexadecimal digits"):
        SweepFolder(tmp_path).trial(name)


def test_links_out_of_a_folder_and_pipes_are_refused(tmp_path):
    sweep, outside = tmp_path / "sweep", tmp_path / "outside"
    for folder in (sweep / "trials", outside):
        folder.mkdir(parents=True)
    (sweep / "copy").symlink_to("trials")
    refuse_links(sweep)
    for target in (outside, outside / "absent"):
        link = sweep / "trials" / "0123456789ab"
        link.symlink_to(target)
        with pytest.raises(SweepError, match="0123456789ab"):
            refuse_links(sweep)
        link.unlink()
    os.mkfifo(sweep / "plan.json")
    with pytest.raises(SweepError, match=r"plan\.json"):
        refuse_links(sweep)
