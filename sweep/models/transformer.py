"""The reference transformer: RMSNorm, rotary positions, SwiGLU, no biases."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sweep.config.models import TransformerSettings

NORM_EPS = 1e-5
TRUNCATE = 3.0  # standard deviations

KeyValues = list[tuple[Tensor, Tensor]]  # per layer, (B, H, T, D/H) each


class Transformer(nn.Module):
    """Map token ids (B, T) to logits (B, T, V)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, settings: TransformerSettings, seed: int, recomputes: bool = False) -> None:
        super().__init__()
        self.activation_checkpointing = recomputes
        width = settings.d_model
        rows = torch.empty(settings.vocabulary, width)  # skips the default initialization
        self.embedding = nn.Embedding.from_pretrained(rows, freeze=False)  # type: ignore[no-untyped-call]
        blocks = (Block(width, settings.heads, settings.d_ff) for _ in range(settings.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, settings.vocabulary, bias=False)

        generator = torch.Generator().manual_seed(seed)
        rows_of = {weight: rows for weight, rows, _ in self.stacked_weights()}
        for name, parameter in self.named_parameters():
            if parameter.ndim != 2:
                continue
            for part in torch.split(parameter.detach(), rows_of.get(parameter, [len(parameter)])):
                std = 1.0 if name == "embedding.weight" else math.sqrt(2 / sum(part.shape))
                limit = TRUNCATE * std
                nn.init.trunc_normal_(part, 0.0, std, -limit, limit, generator=generator)

        cos, sin = rotary_tables(settings.context, width // settings.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def extend(self, ids: Tensor, past: KeyValues | None) -> tuple[Tensor, KeyValues]:
        """Return the states of new tokens, (B, T, D), and the past, which is extended in place."""
        cache: KeyValues = [] if past is None else past
        return self.hidden(ids, cache), cache

    def pad_past(self, past: KeyValues, tokens: int) -> KeyValues:
        padding = (0, 0, 0, tokens)
        for index, (key, value) in enumerate(past):
            past[index] = (F.pad(key, padding), F.pad(value, padding))
        return past

    def hidden(self, ids: Tensor, cache: KeyValues | None = None) -> Tensor:
        start = cache[0][0].shape[2] if cache else 0
        positions = slice(start, start + ids.shape[1])
        cos = self.cos[positions]
        sin = self.sin[positions]
        x = self.embedding(ids)  # (B, T, D)
        for index, block in enumerate(self.blocks):
            arguments = (x, cos, sin, cache[index] if start and cache else None)
            if self.activation_checkpointing and self.training:
                x, key, value = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x, key, value = block(*arguments)
            if cache is not None:
                cache[index : index + 1] = [(key, value)]  # replace or append
            del key, value, arguments
        return self.norm(x)  # type: ignore[no-any-return]

    def output_weight(self) -> Tensor:
        return self.head.weight

    def stacked_weights(self) -> list[tuple[Tensor, list[int], int]]:
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        return [stacked for block in blocks for stacked in block.stacked_weights()]

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each with a residual connection."""

    def __init__(self, d_model: int, heads: int, d_ff: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.attention_out = nn.Linear(d_model, d_model, bias=False)
        self.feed_forward_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def stacked_weights(self) -> list[tuple[Tensor, list[int], int]]:
        d_model = self.down.out_features
        d_ff = self.down.in_features
        return [
            (self.query_key_value.weight, [d_model] * 3, 0),
            (self.gate_up.weight, [d_ff] * 2, 0),
        ]

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map (B, T, D) to (B, T, D); also return the keys and values, after those of `past`."""
        mixed, key, value = self.attention(self.attention_norm(x), cos, sin, past)
        x = x + mixed
        del mixed
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)  # (B, T, F) each
        return x + self.down(F.silu(gate) * up), key, value

    def attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, width = x.shape
        stacked = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = stacked.transpose(1, 3).unbind(2)  # (B, H, T, D/H) each
        query = rotate(query, cos, sin)
        key = rotate(key, cos, sin)
        if past is not None:
            assert length == 1, "a past is extended token by token"
            key = torch.cat((past[0], key), dim=2)
            value = torch.cat((past[1], value), dim=2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.attention_out(mixed), key, value


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (T, head_width / 2) each, in float32 (Su et al. 2021)."""
    exponents = -torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    positions = torch.arange(context, dtype=torch.float64)[:, None]
    angles = positions * 10_000.0**exponents
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+half}) by the angles of their position; x is (B, H, T, D/H)."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.type_as(x)
