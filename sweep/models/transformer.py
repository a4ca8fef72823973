"""The reference transformer: RMSNorm, rotary positions, SwiGLU, no biases (DESIGN.md §8)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sweep.config.models import TransformerSettings

NORM_EPS = 1e-5
ROTARY_THETA = 10_000.0
TRUNCATE = 3.0  # standard deviations


KeyValues = list[tuple[Tensor, Tensor]]  # of each layer, (B, H, T, D/H) each


class Transformer(nn.Module):
    """Token ids (B, T) to logits (B, T, V).

    Args:
        settings: the sizes.
        seed: of the initial weights.
        activation_checkpointing: recompute each block in the backward pass.
    """

    def __init__(
        self, settings: TransformerSettings, seed: int, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        width, vocabulary = settings.d_model, settings.vocabulary
        rows = torch.empty(vocabulary, width)  # nn.Embedding's own start would be drawn in vain
        self.embedding = nn.Embedding(vocabulary, width, _weight=rows)
        self.blocks = nn.ModuleList(
            Block(width, settings.heads, settings.d_ff) for _ in range(settings.layers)
        )
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))
        cos, sin = rotary_tables(settings.context, settings.d_model // settings.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Linear weights N(0, 2/(in+out)), embeddings N(0, 1), both truncated at 3σ; norms 1."""
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Embedding):
                _truncated_normal(module.weight, 1.0, generator)
            elif isinstance(module, Stacked):
                for part in module.weight.chunk(module.parts):
                    _truncated_normal(part, math.sqrt(2 / sum(part.shape)), generator)
            elif isinstance(module, nn.Linear):
                _truncated_normal(module.weight, math.sqrt(2 / sum(module.weight.shape)), generator)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the normalised states before the output projection, (B, T, D)."""
        return self._states(ids, None)

    def extend(self, ids: Tensor, past: KeyValues | None) -> tuple[Tensor, KeyValues]:
        """Return the states of tokens that follow others, and the keys and values of all.

        Args:
            ids: (B, T).
            past: of the S tokens before them, brought up to date layer by layer, so that old and
                new are never held side by side; None: they are the first.

        Returns:
            Normalised states (B, T, D), and keys and values of S + T tokens.
        """
        known: KeyValues = [] if past is None else past
        return self._states(ids, known), known

    def repeat(self, past: KeyValues, copies: int) -> KeyValues:
        """Return keys and values in which each sequence stands so many times, side by side."""
        return [
            (key.repeat_interleave(copies, dim=0), value.repeat_interleave(copies, dim=0))
            for key, value in past
        ]

    def pad_past(self, past: KeyValues, tokens: int) -> KeyValues:
        """Make keys and values as long as those of so many more tokens, for forecasts."""
        for index, (key, value) in enumerate(past):
            past[index] = F.pad(key, (0, 0, 0, tokens)), F.pad(value, (0, 0, 0, tokens))
        return past

    def _states(self, ids: Tensor, known: KeyValues | None) -> Tensor:
        start = known[0][0].shape[2] if known else 0
        places = slice(start, start + ids.shape[1])
        cos, sin = self.get_buffer("cos")[places], self.get_buffer("sin")[places]
        x = self.embedding(ids)  # (B, T, D)
        for index, block in enumerate(self.blocks):
            arguments = (x, cos, sin, known[index] if start and known else None)
            if self.activation_checkpointing and self.training:
                x, *now = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x, *now = block(*arguments)
            if known is not None:
                known[index : index + 1] = [(now[0], now[1])]  # appended where it is the first
            del now, arguments
        return self.norm(x)  # type: ignore[no-any-return]

    def output_weight(self) -> Tensor:
        """Return the output projection, (V, D)."""
        return self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits, (B, T, V)."""
        return self.head(self.hidden(ids))  # type: ignore[no-any-return]


class Stacked(nn.Linear):
    """Several projections of one input, stacked into one matrix; each starts as if alone."""

    def __init__(self, inputs: int, outputs: int, parts: int) -> None:
        super().__init__(inputs, parts * outputs, bias=False)
        self.parts = parts


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each with a residual connection."""

    def __init__(self, d_model: int, heads: int, d_ff: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.query_key_value = Stacked(d_model, d_model, 3)
        self.attention_out = nn.Linear(d_model, d_model, bias=False)
        self.feed_forward_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.gate_up = Stacked(d_model, d_ff, 2)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map (B, T, D) to (B, T, D); also return keys and values, those of `past` first."""
        mixed, key, value = self.attention(self.attention_norm(x), cos, sin, past)
        x = x + mixed
        del mixed
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)  # (B, T, F) each
        return x + self.down(F.silu(gate) * up), key, value

    def attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Causal self-attention, (B, T, D) to (B, T, D), also to the tokens of `past`."""
        batch, length, width = x.shape
        stacked = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = stacked.transpose(1, 3).unbind(2)  # (B, H, T, D/H) each
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mask = None
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
            if length > 1:  # token t sees the past and 0 … t
                ones = torch.ones(length, key.shape[2], dtype=torch.bool, device=x.device)
                mask = ones.tril(key.shape[2] - length)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=past is None
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.attention_out(mixed), key, value


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (T, head_width / 2) each, in float32 (Su et al. 2021)."""
    frequencies = ROTARY_THETA ** (
        -torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    )
    angles = torch.arange(context, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x_i, x_{i+half}) by their position's angles; x is (B, H, T, D/H)."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)


def _truncated_normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    nn.init.trunc_normal_(weight, std=std, a=-TRUNCATE * std, b=TRUNCATE * std, generator=generator)
