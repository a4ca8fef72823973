"""Checkpoints of one process, by both of its writers, and the progress that they contain."""

import gc
import math

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.errors import Superseded, UnusableCheckpoint
from sweep.resources import sha256_of_file
from sweep.training.checkpoint import DIVERGED_POINTS, CheckpointStore, Progress
from sweep.training.optimizer import WeightAverage
from sweep.training.step import TrainingStep
from sweep.trial.files import MetricsLog
from sweep.trial.folder import TrialFolder
from sweep.trial.status import TrialStatus
from tests.plans import build_plan

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")  # in torch 2.13


class Trial:
    def __init__(self, path, **fields):
        fields = {"batches": [4], "budget": 400, "precision": "fp32", **fields}
        execution = Execution(device="cpu", threads=1)
        plan = build_plan(load_experiment("quadratic", fields), execution, data=None)
        self.config = plan.trial_config(plan.trials[0], "sweep")
        self.folder = TrialFolder(path)
        self.folder.write_config(self.config)
        self.folder.write_status(TrialStatus(attempts=1, fencing=1))
        self.start()

    def start(self):
        self.store = CheckpointStore(self.folder, 1)
        self.step, self.progress = TrainingStep(self.config, CPU), Progress()
        length = self.store.load(self.step, self.progress)
        self.log = MetricsLog(self.folder.metrics_path, length, self.store.fence)
        return length

    def train(self, steps=1):
        for _ in range(steps):
            self.step(self.step.workload.build_batch(4 * self.progress.step, 4), 0.05)
            self.progress.step += 1
            self.log.append({"step": self.progress.step})

    def save(self):
        self.store.save(self.step, self.progress, self.log)

    def restart(self):
        self.log.close()
        return self.start()

    def steps(self):
        return [checkpoint.step for checkpoint in self.folder.checkpoints()]

    def weights(self):
        return [p.detach().clone() for p in self.step.parameters]


@pytest.fixture(params=["safetensors", "distributed"])
def trial(request, tmp_path):
    if request.param == "distributed":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    created = Trial(tmp_path / "x")
    yield created
    if request.param == "distributed":
        # Its step holds the group. The last reference to a group waits for a thread of gloo, which
        # may wait for the interpreter.
        del created.step
        gc.collect()
        dist.destroy_process_group()


def truncate(checkpoint):
    file = next(checkpoint.path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def test_the_kept_weights_are_the_averages_if_there_are_any(trial):
    trial.step.average = WeightAverage(trial.step.parameters, 0.1)
    trial.train(3)
    trial.store.save_weights(trial.step)
    kept = load_file(trial.folder.weights_path)["weights"]
    assert torch.equal(kept, trial.step.average.values[0])
    assert not torch.equal(kept, trial.weights()[0])


def test_restoring_gives_what_was_saved_although_training_continued(trial):
    trial.train(3)
    trial.save()
    saved = trial.weights()
    trial.train(5)
    assert not torch.equal(saved[0], trial.weights()[0])
    length = trial.store.load(trial.step, trial.progress)
    assert trial.progress.step == 3
    assert all(map(torch.equal, saved, trial.weights()))
    assert trial.folder.metrics_path.read_bytes()[:length].count(b"\n") == 3


def test_the_newest_two_are_kept_and_a_superseded_attempt_writes_none(trial):
    for _ in range(4):
        trial.train()
        trial.save()
    assert trial.steps() == [4, 3]
    trial.folder.write_status(TrialStatus(attempts=2, fencing=2))
    trial.train()
    with pytest.raises(Superseded):
        trial.save()
    assert trial.steps() == [4, 3]
    assert len(list(trial.folder.path.glob("*checkpoint*"))) == 2


def test_a_step_that_has_a_checkpoint_is_not_written_again(trial):
    trial.train(2)
    trial.save()
    for _ in range(2):  # by the attempt that wrote it, and by the next
        (kept,) = trial.folder.checkpoints()
        before, weights = kept.path.stat(), trial.weights()
        trial.save()
        assert kept.path.stat() == before and trial.steps() == [2]
        assert trial.restart() and trial.progress.step == 2
        assert all(map(torch.equal, weights, trial.weights()))


def test_tensors_that_cannot_be_read_lead_to_the_older_checkpoint(trial):
    for _ in range(2):
        trial.train(2)
        trial.save()
    weights = trial.weights()
    file = next(trial.folder.checkpoints()[0].path.glob("*.safetensors"))
    file.write_bytes(b"\xff" * file.stat().st_size)  # of the right size
    trial.restart()
    assert trial.progress.step == 2
    trial.train(2)
    assert all(map(torch.equal, weights, trial.weights()))


def test_a_damaged_checkpoint_is_replaced_when_its_step_is_taken_again(trial):
    for _ in range(2):
        trial.train(2)
        trial.save()
    newest, _ = trial.folder.checkpoints()
    truncate(newest)
    trial.restart()
    assert trial.progress.step == 2
    trial.train(2)
    trial.save()
    assert newest in trial.folder.checkpoints() and trial.steps() == [4, 2]
    assert trial.restart() and trial.progress.step == 4


def test_a_damaged_checkpoint_does_not_count_as_newer_than_later_ones(trial):
    for _ in range(2):
        trial.train(2)
        trial.save()
    for checkpoint in trial.folder.checkpoints():
        truncate(checkpoint)
    assert trial.restart() == trial.progress.step == 0
    trial.train()
    trial.save()
    assert trial.steps() == [1]
    assert trial.restart() and trial.progress.step == 1


@pytest.mark.parametrize(
    ("losses", "has_diverged"),
    [
        ([math.nan], True),
        ([math.inf], True),
        ([10.3] * DIVERGED_POINTS, True),
        ([10.3] * (DIVERGED_POINTS - 1), False),
        ([12.0, 12.0, 9.0] * 10, False),
    ],
)
def test_a_trial_diverges_with_its_last_loss_or_not_at_all(losses, has_diverged):
    progress = Progress(start_loss=9.2)
    *earlier, last = [progress.is_diverging(loss, 1.0) for loss in losses]
    assert not any(earlier) and last is has_diverged


def test_a_loss_that_does_not_measure_what_the_start_did_is_not_compared_with_it():
    progress = Progress(start_loss=-200.0)
    assert not any(progress.is_diverging(1e9) for _ in range(100))
    assert progress.is_diverging(math.nan)


def test_every_second_is_charged_once():
    progress = Progress(charged_at=0.0)
    for account in ("other", "training", "evaluation", "checkpoint", "compile", "noise"):
        progress.charge(account)
    names = [name for name in vars(progress) if name.startswith("seconds_")]
    parts = sum(getattr(progress, name) for name in names if name != "seconds_total")
    assert len(names) == 6 and 0 < parts < progress.seconds_total  # the rest is other


def test_an_intact_checkpoint_that_cannot_be_restored_is_removed(trial):
    trial.train(2)
    trial.save()
    (kept,) = trial.folder.checkpoints()
    (kept.path / "progress.json").write_text("{}")  # as another version may write it
    (kept.path / "checkpoint.json").unlink()
    digest = sha256_of_file(trial.folder.metrics_path)
    trial.folder.seal_checkpoint(kept.path, kept.step, kept.metrics_length, digest)
    with pytest.raises(UnusableCheckpoint):
        trial.restart()
    assert trial.steps() == []


@pytest.mark.parametrize("name", ["checkpoint.json", "progress.json", "tensors"])
def test_one_wrong_bit_in_the_newest_checkpoint_restores_the_one_before_it(trial, name):
    for _ in range(2):
        trial.train()
        trial.save()
    newest, _ = trial.folder.checkpoints()
    path = newest.path / name if name != "tensors" else next(newest.path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    trial.restart()
    assert trial.progress.step == 1
