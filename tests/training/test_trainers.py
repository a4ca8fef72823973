"""Callbacks and readers with the trainers of other libraries (`make test-peers`)."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import sweep
from sweep.usercode.readers import Places, build_reader

pytestmark = pytest.mark.peers
TRIAL = {
    "batch_size": 8,
    "microbatch_size": 4,
    "accumulation": 2,
    "steps": 12,
    "tokens": 96,
    "examples": 96,
    "learning_rate": 0.1,
    "final_learning_rate": 0.01,
    "warmup_steps": 1,
    "weight_decay": 0.0,
    "beta2": 0.99,
    "seed": 3,
    "eval_steps": 4,
    "epochs": None,
    "device": "cpu",
}


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """Let this process be that of a trial."""
    folder = tmp_path / "work"
    folder.mkdir()
    values = {**TRIAL, "folder": str(folder), "resume": str(tmp_path / "resume")}
    monkeypatch.setenv("SWEEP_TRIAL", json.dumps(values))
    monkeypatch.setenv("SWEEP_LOG", str(tmp_path / "log"))
    return sweep.settings()


def lines_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def values_of(lines, name):
    return {line["step"]: pytest.approx(line[name], rel=1e-6) for line in lines if name in line}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x=None, labels=None):
        loss = torch.nn.functional.mse_loss(self.layer(x).squeeze(-1), labels)
        return {"loss": loss, "logits": self.layer(x)}


def examples(count):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row.sum()} for row in x]


def test_a_trainer_takes_the_values_of_the_trial_and_reports_all_evaluations(trial, tmp_path):
    from transformers import Trainer, TrainingArguments

    given = TrainingArguments(
        output_dir="elsewhere", use_cpu=True, logging_steps=1, report_to="none"
    )
    args = sweep.training_arguments(given)
    assert args is given and args.output_dir == trial.resume
    torch.manual_seed(trial.seed)
    trainer = Trainer(
        Net(),
        args,
        train_dataset=examples(64),
        eval_dataset=examples(16),
        callbacks=[sweep.TrainerCallback()],
    )
    trainer.train()
    lines = lines_of(tmp_path)
    assert [*values_of(lines, "valid/loss")] == [0, 4, 8, 12]
    assert [*values_of(lines, "train/loss")] == [*range(1, 13)]
    places = Places((tmp_path / "work", tmp_path / "resume"), tmp_path / "log", 0)
    trainer.save_state()
    read = [*build_reader("trainer_state.json", places).read()]
    assert values_of(lines, "valid/loss") == {
        line["step"]: line["valid/loss"] for line in read if "valid/loss" in line
    }


def test_no_example_of_the_validation_is_dropped_and_a_smaller_step_is_warned_of(trial, tmp_path):
    from transformers import Trainer, TrainingArguments

    class Counting(Trainer):
        seen = 0

        def prediction_step(self, model, inputs, *args, **kwargs):
            self.seen += len(inputs["labels"])
            return super().prediction_step(model, inputs, *args, **kwargs)

    given = TrainingArguments(output_dir="elsewhere", use_cpu=True, report_to="none")
    trainer = Counting(
        Net(),
        sweep.training_arguments(given),
        train_dataset=examples(20),
        eval_dataset=examples(13),
        callbacks=[sweep.TrainerCallback()],
    )
    with pytest.warns(UserWarning, match="each epoch has 4 of 8 examples"):
        trainer.train()
    assert trainer.seen == 4 * 13


def test_arguments_outside_of_a_trial_stay_as_they_are(monkeypatch):
    from transformers import TrainingArguments

    monkeypatch.delenv("SWEEP_TRIAL", raising=False)
    args = TrainingArguments(output_dir="mine", use_cpu=True)
    assert sweep.settings() is None
    assert sweep.training_arguments(args).output_dir == "mine" and args.max_steps == -1


@pytest.mark.filterwarnings("ignore")  # of Lightning and TensorBoard about torch and NumPy
def test_lightning_reports_whole_steps_and_its_loggers_are_read_alike(trial, tmp_path):
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            loss = self.net(*batch)["loss"]
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(*batch)["loss"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), trial.learning_rate)

    seed_everything(trial.seed)
    x = torch.randn(64, 4)
    data = TensorDataset(x, x.sum(-1))
    trainer = Trainer(
        accelerator="cpu",
        max_steps=trial.steps,
        max_epochs=-1,
        accumulate_grad_batches=trial.accumulation,
        num_sanity_val_steps=-1,
        val_check_interval=trial.eval_steps * trial.accumulation,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        callbacks=[sweep.LightningCallback()],
        logger=[CSVLogger(trial.folder), TensorBoardLogger(trial.folder, name="tb")],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, trial.microbatch_size), DataLoader(data, 16))
    lines = lines_of(tmp_path)
    assert [*values_of(lines, "valid/loss")] == [0, 4, 8, 12]
    assert [*values_of(lines, "train/loss")] == [*range(1, 13)]
    logged = {step: loss for step, loss in values_of(lines, "valid/loss").items() if step > 0}
    places = Places((tmp_path / "work", tmp_path / "resume"), tmp_path / "log", 0)
    for reader in ("metrics.csv", "tensorboard:tb", "tensorboard:."):
        read = [*build_reader(reader, places).read()]
        found = {line["step"]: line["valid/loss"] for line in read if "valid/loss" in line}
        assert logged == found, reader
        assert max(line["step"] for line in read) == trial.steps
