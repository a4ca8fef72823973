"""The reference model written like course solutions: `handwritten:build`.

Autograd keeps every part of norms, softmax, attention and SwiGLU.
"""

import math

import torch
from torch import nn

from sweep.config.models import MODEL_PRESETS, TransformerSettings
from sweep.models.transformer import NORM_EPS, Block, Transformer, rotate


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


def build(vocabulary, context):
    sizes = {"name": "tinystories", "vocabulary": vocabulary, "context": context}
    settings = TransformerSettings(**{**dict(MODEL_PRESETS["tinystories"]), **sizes})
    model = Transformer(settings, 0)
    for module in list(model.modules()):
        if isinstance(module, Block):
            module.__class__ = WrittenOut
        elif isinstance(module, nn.RMSNorm):
            module.__class__ = Norm
    return model
