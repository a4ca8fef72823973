"""Workloads and models with unusual memory, used as `odd:Name`."""

import math
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn

from experiments.elman import Elman, ElmanLayer, spectral_scale
from sweep.config.load import load_experiment
from sweep.config.models import TransformerSettings, model_preset
from sweep.models.transformer import NORM_EPS, Block, Transformer, rotate
from sweep.workloads.quadratic import NoisyQuadratic


class Leaky(NoisyQuadratic):
    def loss_sum(self, model, batch):
        self.kept = (*getattr(self, "kept", ()), torch.zeros(1024))  # 4,096 bytes of every step
        return super().loss_sum(model, batch)


class Pairs(NoisyQuadratic):
    def loss_sum(self, model, batch):
        count = batch[0].shape[0]
        self.pairs = torch.empty(1000 * count, count)  # never written, so it takes no time
        return super().loss_sum(model, batch)


class DiesAboveFour(NoisyQuadratic):
    def loss_sum(self, model, batch):
        if batch[0].shape[0] > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss_sum(model, batch)


class Broken(NoisyQuadratic):
    def loss_sum(self, model, batch):
        if not self.is_rehearsal:  # the plan computes a loss too
            raise ValueError("sizes do not match")
        return super().loss_sum(model, batch)


class Tied(nn.Module):
    def __init__(self, vocabulary, context):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.mix = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.mix(self.embedding(ids))[0])


class NeedsValues(nn.Module):
    def __init__(self, vocabulary, context):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, vocabulary)

    def forward(self, ids):
        return self.embedding(ids) * float(ids.sum())


def plain_cell(x, z, w_x, w_h, bias):
    h, states = torch.zeros_like(x[0]), []
    for x_t in x:
        h = torch.tanh(F.linear(x_t, w_x, bias) + F.linear(h, w_h))
        states.append(h)
    return torch.stack(states) * F.silu(z)


class PlainElmanLayer(ElmanLayer):
    def forward(self, x):
        inputs, gate = self.in_proj(self.norm(x)).transpose(0, 1).chunk(2, dim=-1)
        recurrent = self.recurrent_weight * spectral_scale(self.recurrent_weight)
        weights = self.input_weight, recurrent, self.bias
        mixed = plain_cell(F.silu(inputs).contiguous(), gate.contiguous(), *weights)
        return x + self.out_proj(mixed.transpose(0, 1).contiguous())


def plain_elman(vocabulary, context):
    model = Elman(vocabulary, context, **load_experiment("elman").model.options)
    for layer in model.layers:
        layer.__class__ = PlainElmanLayer
    return model


class Norm(nn.RMSNorm):
    def forward(self, x):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS) * self.weight


class WrittenOut(Block):
    def forward(self, x, cos, sin, past):
        mixed, key, value = self.attention(self.attention_norm(x), cos, sin, past)
        x = x + mixed
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(gate * torch.sigmoid(gate) * up), key, value

    def attention(self, x, cos, sin, past):
        assert past is None
        batch, length, width = x.shape
        stacked = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = stacked.transpose(1, 3).unbind(2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mixed = softmax(scores.masked_fill(~mask, -math.inf)) @ value
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.attention_out(mixed), key, value


def softmax(x):
    weights = torch.exp(x - x.max(-1, keepdim=True).values)
    return weights / weights.sum(-1, keepdim=True)


def handwritten(vocabulary, context):
    """Write the reference model out: autograd keeps every part of norms, softmax and SwiGLU."""
    sizes = {"name": "tinystories", "vocabulary": vocabulary, "context": context}
    settings = TransformerSettings(**{**model_preset("tinystories"), **sizes})
    model = Transformer(settings, 0)
    for module in list(model.modules()):
        if isinstance(module, Block):
            module.__class__ = WrittenOut
        elif isinstance(module, nn.RMSNorm):
            module.__class__ = Norm
    return model
