"""Checkpoints written at once, and in the background while training goes on."""

import threading

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.errors import Superseded
from sweep.plan.plan import build_plan
from sweep.training.checkpoint import CheckpointStore
from sweep.training.progress import Progress
from sweep.training.step import TrainingStep
from sweep.trial.folder import TrialFolder, TrialStatus
from sweep.trial.metrics import MetricsLog

CPU = torch.device("cpu")


class Trial:
    """A trial of the quadratic whose checkpoints are saved one by one."""

    def __init__(self, path, in_background):
        fields = {"batches": [4], "budget": 400, "precision": "fp32"}
        execution = Execution(device="cpu", threads=1)
        plan = build_plan(load_experiment("quadratic", fields), execution, data=None)
        row = plan.trials[0].model_copy(update={"learning_rate": 0.05, "id": "x"})
        self.config = plan.trial_config(row, "sweep")
        self.folder = TrialFolder(path)
        self.folder.write_config(self.config)
        self.folder.write_status(TrialStatus(attempts=1, fencing=1))
        self.store = CheckpointStore(self.folder, 1, in_background)
        self.log = MetricsLog(self.folder.metrics_path, 0, self.store.check)
        self.step, self.progress = TrainingStep(self.config, CPU, 4), Progress()

    def train(self, steps=1):
        for _ in range(steps):
            batch = self.step.workload.build_batch(4 * self.progress.step, 4)
            self.step(batch, 0.05)
            self.progress.step += 1
            self.log.append({"step": self.progress.step})

    def save(self):
        self.store.save(self.step, self.progress, self.log)

    def weights(self):
        return [p.detach().clone() for p in self.step.parameters]


@pytest.mark.parametrize("in_background", [False, True])
def test_what_is_restored_is_what_was_saved_though_training_went_on(tmp_path, in_background):
    trial = Trial(tmp_path / "x", in_background)
    trial.train(3)
    trial.save()
    saved = trial.weights()
    trial.train(5)
    assert not torch.equal(saved[0], trial.weights()[0])
    trial.store.wait()
    length = trial.store.load(trial.step, trial.progress)
    assert trial.progress.step == 3
    assert all(map(torch.equal, saved, trial.weights()))
    assert trial.folder.metrics_path.read_bytes()[:length].count(b"\n") == 3


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    trial, may_end, real = Trial(tmp_path / "x", True), threading.Event(), torch.save

    def slow_save(state, path):
        assert may_end.wait(30)
        real(state, path)

    monkeypatch.setattr(torch, "save", slow_save)
    trial.train(2)
    trial.save()
    trial.train(2)  # would hang here if saving held it up
    assert trial.folder.checkpoints() == []
    may_end.set()
    trial.save()  # waits for the first
    assert [found.step for found in trial.folder.checkpoints()][-1] == 2
    trial.store.wait()
    assert [found.step for found in trial.folder.checkpoints()] == [4, 2]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_newest_two_are_kept(tmp_path, in_background):
    trial = Trial(tmp_path / "x", in_background)
    for _ in range(4):
        trial.train()
        trial.save()
    trial.store.wait()
    assert [found.step for found in trial.folder.checkpoints()] == [4, 3]


def test_what_fails_in_the_background_is_raised_and_leaves_nothing(tmp_path):
    trial = Trial(tmp_path / "x", True)
    trial.train()
    trial.folder.write_status(TrialStatus(attempts=2, fencing=2))
    trial.save()
    with pytest.raises(Superseded):
        trial.store.wait()
    assert not list(trial.folder.path.glob("*checkpoint*"))
    trial.store.wait()  # said once
