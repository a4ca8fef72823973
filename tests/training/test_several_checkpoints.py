"""Checkpoints of trials on several devices: each attempt goes on from them, to the same end."""

import pytest
import torch
from safetensors.torch import load_file

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.orchestration.planning import make_plan
from sweep.orchestration.runner import run_plan
from sweep.trial.folder import State, SweepFolder
from tests.training.several_devices import (
    MIDDLE,
    assert_same_trial,
    attempt,
    complete,
    curves,
    gone_on_from,
    on,
    pause,
    planned,
)


@pytest.mark.parametrize(
    ("zero", "processes"),
    [
        (3, (2, 2)),
        (1, (2, 1)),
        *(pytest.param(zero, counts, marks=pytest.mark.slow) for zero, counts in
          [(0, (4, 2)), (1, (2, 4)), (2, (2, 2)), (2, (4, 2)), (3, (2, 4)), (3, (4, 1))]),
    ],
)  # fmt: skip
def test_a_trial_goes_on_with_any_number_of_processes(tmp_path, alone, zero, processes):
    before, after = processes
    trial = planned(tmp_path, before, zero)
    pause(trial)
    checkpoint = trial.checkpoints()[0]
    assert {path.suffix for path in checkpoint.path.iterdir()} == {".safetensors", ".json"}
    complete(on(trial, after))
    assert gone_on_from(trial) == [MIDDLE]
    assert len(curves(trial)["train/loss"]) == len(curves(alone)["train/loss"])
    assert_same_trial(trial, alone)
    assert not trial.checkpoints()


def test_what_one_process_cannot_read_all_leave_alone(tmp_path, meddling, alone):
    trial = planned(tmp_path, 2, workload="meddling:CannotReadNotes")
    pause(trial)
    complete(trial)
    assert gone_on_from(trial) == []
    assert_same_trial(trial, alone)


@pytest.mark.slow
def test_tensors_that_one_process_cannot_read_end_the_attempt_in_all(tmp_path, meddling):
    trial = planned(tmp_path, 2, workload="meddling:CannotReadTensors")
    pause(trial)
    found = attempt(trial)
    assert found.kind == "error" and "no checkpoint could be read" in found.message


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_with_as_many_processes_it_goes_on_to_the_same_bits(tmp_path, undisturbed, zero):
    whole, trial = undisturbed(2, zero), planned(tmp_path, 2, zero)
    pause(trial)
    complete(trial)
    assert gone_on_from(trial) == [MIDDLE]
    weights, others = load_file(trial.weights_path), load_file(whole.weights_path)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert trial.losses_path.read_bytes() == whole.losses_path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_averaged_weights_are_evaluated_and_kept(tmp_path, zero):
    averaging = {"schedule": {"name": "constant", "average": 0.1}}
    whole = complete(planned(tmp_path / "alone", **averaging))
    trial = planned(tmp_path / "several", 2, zero, **averaging)
    pause(trial)
    complete(trial)
    assert gone_on_from(trial) == [MIDDLE]
    assert_same_trial(trial, whole)


@pytest.mark.slow
def test_a_torn_checkpoint_falls_back_to_the_older_one(tmp_path, alone):
    trial = planned(tmp_path, 2, 3)
    pause(trial, 9)
    pause(trial)
    newest, _ = trial.checkpoints()
    torn = next(newest.path.glob("*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-100])
    complete(trial)
    assert f"{newest.path.name} is damaged" in trial.log_path.read_text()
    assert gone_on_from(trial) == [9, 9]
    assert_same_trial(trial, alone)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tuning_pauses_trials_on_several_devices_as_on_one(tmp_path):
    """Pruning lets all wait at a quarter and at half of the tokens, and the better half go on."""
    fields = {"batches": "16", "budget": 3200, "lr": "tuned", "seeds": 1}
    experiment = load_experiment("quadratic", {**fields, "tuning": {"centre": 0.05}})
    found = []
    for devices, zero in ((1, None), (2, 3)):
        folder = SweepFolder(tmp_path / str(devices))
        logistics = Execution(device="cpu", devices=devices, zero=zero)
        assert run_plan(make_plan(experiment, logistics, folder), folder).exit_code == 0
        found.append(folder.trials())
    on_one, on_several = found
    assert [trial.id for trial in on_one] == [trial.id for trial in on_several]
    for one, trial in zip(on_one, on_several, strict=True):
        assert trial.read_status().state is one.read_status().state
        assert gone_on_from(trial) == gone_on_from(one)
        torch.testing.assert_close(curves(trial), curves(one), rtol=1e-4, atol=1e-5)
    paths = {(trial.read_status().state, *gone_on_from(trial)) for trial in on_several}
    assert {(State.PRUNED,), (State.PRUNED, 50), (State.COMPLETE, 50, 100)} <= paths
