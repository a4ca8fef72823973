"""Train the LSTM of `lightning.pytorch.demos` with Lightning's Trainer on the text of prepare.py.

    sweep run experiments/studies/programs/lightning.toml

The demo itself has a batch size of 20, SGD with a rate of 20, a larger LSTM and no validation.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos import WikiText2
from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from torch import Tensor
from torch.utils.data import DataLoader, random_split

import sweep

trial = sweep.settings()


class Demo(LightningLSTM):  # type: ignore[misc]
    def prepare_data(self) -> None:
        """Download nothing."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.hidden = None  # sequences are shuffled
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.hidden = None
        self.log("valid_loss", super().training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=trial.learning_rate)


text = WikiText2(Path("results/programs/data"), download=False)
train, valid = random_split(text, [len(text) - 512, 512], torch.Generator().manual_seed(0))
seed_everything(trial.seed)
demo = Demo()
demo.model = SimpleLSTM(text.vocab_size, ninp=128, nhid=128, nlayers=1, dropout=0.0)
trainer = Trainer(
    accelerator="cpu",
    max_steps=trial.steps,
    max_epochs=-1,
    accumulate_grad_batches=trial.accumulation,
    deterministic=True,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    num_sanity_val_steps=-1,  # validates before the first step, on all data
    val_check_interval=trial.eval_steps * trial.accumulation,
    check_val_every_n_epoch=None,
    callbacks=[sweep.LightningCallback()],
)
loader = DataLoader(train, trial.microbatch_size, shuffle=True, drop_last=True)
trainer.fit(demo, loader, DataLoader(valid, 128))
