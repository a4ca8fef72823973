"""Workloads that cause a fault in the second of two processes, and a model: `custom:Name`."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from sweep.trial.folder import TrialFolder
from sweep.workloads import ranks
from sweep.workloads.pretrain import Pretrain


def is_first_time() -> bool:
    marker = Path(os.environ["FAULTS_FOLDER"]) / "fault"
    if marker.exists():
        return False
    marker.touch()
    return True


class Faulty(Pretrain):
    is_due = False  # to fail, with the first microbatch of step 21

    def build_batch(self, first, count):
        self.is_due = first == (20 * 2 + 1) * count
        return super().build_batch(first, count)

    def loss_sum(self, model, batch):
        if self.is_due:
            self.is_due = False
            self.fail(batch[0].shape[0])
        return super().loss_sum(model, batch)


class Killed(Faulty):
    def fail(self, sequences):
        if is_first_time():
            os.kill(os.getpid(), signal.SIGKILL)


class OutOfMemory(Faulty):
    def fail(self, sequences):
        if sequences > 1:
            raise torch.OutOfMemoryError("out of memory")


class Raising(Faulty):
    def fail(self, sequences):
        raise RuntimeError("one of two failed")


class Drawing(Pretrain):
    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * (random.random() + np.random.random())


class DrawingAndCounting(Drawing):
    def loss_sum(self, model, batch):
        self.meter.add("train/mean_token", batch[0].double().mean(), 1)
        return super().loss_sum(model, batch)


def raise_io_error(*_):
    raise OSError(5, "an I/O error")


class CannotReadTensors(Pretrain):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        if ranks.rank() == 1:
            HuggingFaceStorageReader.read_metadata = raise_io_error


class CannotReadNotes(Pretrain):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        if ranks.rank() == 1:
            TrialFolder.verify_checkpoint = raise_io_error


class OutOfMemoryAtTheEnd(Pretrain):
    def evaluate_finally(self, model):
        if ranks.rank() == 1 and is_first_time():
            raise torch.OutOfMemoryError("out of memory")
        return super().evaluate_finally(model)


class Tied(nn.Module):
    """Two modules share one weight, as GPT-2's do; token ids (B, T) to logits (B, T, V)."""

    def __init__(self, vocabulary, context, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.output(x)


class Stateful(nn.Module):
    """Draw random numbers and average over batches; token ids (B, T) to logits (B, T, V)."""

    def __init__(self, vocabulary, context, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(width)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.dropout(self.embedding(ids))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.output(x)
