"""Workloads and models with unusual memory, used as `odd:Name`."""

import os
import signal

import torch
from torch import nn

from sweep.workloads.quadratic import NoisyQuadratic


class Leaky(NoisyQuadratic):
    """Keeps 4,096 bytes of every step."""

    def loss_sum(self, model, batch):
        self.kept = (*getattr(self, "kept", ()), torch.zeros(1024))
        return super().loss_sum(model, batch)


class Pairs(NoisyQuadratic):
    """Holds a number for every pair of sequences, so memory is not linear."""

    def loss_sum(self, model, batch):
        count = batch[0].shape[0]
        self.pairs = torch.empty(1000 * count, count)  # never written, so it takes no time
        return super().loss_sum(model, batch)


class DiesAboveFour(NoisyQuadratic):
    """Its process is killed at larger sizes."""

    def loss_sum(self, model, batch):
        if batch[0].shape[0] > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss_sum(model, batch)


class Broken(NoisyQuadratic):
    """Its loss raises an error."""

    def loss_sum(self, model, batch):
        raise ValueError("sizes do not match")


class Tied(nn.Module):
    """A recurrent model with tied embeddings."""

    def __init__(self, vocabulary, context):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.mix = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.mix(self.embedding(ids))[0])


class NeedsValues(nn.Module):
    """A model that reads its input, which fake tensors do not allow."""

    def __init__(self, vocabulary, context):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, vocabulary)

    def forward(self, ids):
        return self.embedding(ids) * float(ids.sum())
