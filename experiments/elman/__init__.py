"""The E1 language model: a Mamba-gated Elman network with tied embeddings.

h_t = tanh(W_x x_t + W_h h_{t-1} + b), gated by silu(z_t); W_h is spectrally normalized. The cell
saves the same tensors as the fused kernel of the published measurements.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Elman(nn.Module):
    """Map token ids (B, T) to logits (B, T, V)."""

    activation_checkpointing = False

    def __init__(self, vocabulary: int, context: int, d_model: int, layers: int) -> None:
        super().__init__()
        rows = torch.empty(vocabulary, d_model)  # skips the default initialization
        self.embedding: nn.Embedding = nn.Embedding.from_pretrained(rows, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(ElmanLayer(d_model) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if name.startswith("embedding") else d_model**-0.5
                nn.init.normal_(parameter, std=std)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)  # (B, T, D)
        recomputes = self.activation_checkpointing and self.training
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
        return self.norm(x)  # type: ignore[no-any-return]

    def output_weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.hidden(ids), self.output_weight())


class ElmanLayer(nn.Module):
    """Pre-norm, recurrent cell with its projections, residual: (B, T, D) to (B, T, D)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.in_proj = nn.Linear(d_model, 2 * d_model, bias=False)
        self.input_weight = nn.Parameter(torch.empty(d_model, d_model))
        self.recurrent_weight = nn.Parameter(torch.empty(d_model, d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inputs, gate = self.in_proj(self.norm(x)).chunk(2, dim=-1)  # (B, T, D) each
        inputs = F.silu(inputs).transpose(0, 1).contiguous()  # (T, B, D), the order of the cell
        gate = gate.transpose(0, 1).contiguous()
        recurrent = self.recurrent_weight * spectral_scale(self.recurrent_weight)
        dtype = inputs.dtype
        mixed = FusedCell.apply(  # type: ignore[no-untyped-call]
            inputs,
            gate,
            self.input_weight.to(dtype),
            recurrent.to(dtype),
            self.bias.to(dtype),
        )
        return x + self.out_proj(mixed.transpose(0, 1).contiguous())  # type: ignore[no-any-return]


@torch.no_grad()
def spectral_scale(weight: Tensor) -> Tensor:
    """Return the factor that gives a matrix the spectral norm 0.99, by power iteration."""
    u = torch.ones_like(weight[0]) * weight.shape[0] ** -0.5
    for _ in range(3):
        v = F.normalize(weight.T @ u, dim=0)
        u = F.normalize(weight @ v, dim=0)
    return 0.99 / (u @ (weight @ v))  # type: ignore[no-any-return]


class FusedCell(torch.autograd.Function):
    """Map inputs and gates (T, B, D), weights (D, D) and bias (D,) to gated states (T, B, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, w_x: Tensor, w_h: Tensor, bias: Tensor) -> Tensor:
        v = F.linear(x, w_x, bias)  # (T, B, D)
        steps, *shape = x.shape
        h = torch.empty(steps + 1, *shape, dtype=x.dtype, device=x.device)

        states = h.unbind(0)
        states[0].zero_()
        for t, v_t in enumerate(v.unbind(0)):
            v_t.addmm_(states[t], w_h.T)
            states[t + 1].copy_(v_t).tanh_()

        ctx.save_for_backward(x, z, w_x, w_h, h, v)
        return F.silu(z).mul_(h[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, z, w_x, w_h, h, _ = ctx.saved_tensors
        grad = grad.contiguous()

        gate = torch.sigmoid(z)
        dz = (grad * h[1:]).mul_(gate * (1 + z * (1 - gate)))
        dh = (grad * z).mul_(gate)
        del gate

        dv = (h[1:] * h[1:]).neg_().add_(1)  # the derivative of tanh
        slopes = dv.unbind(0)
        gradients = dh.unbind(0)
        slopes[-1].mul_(gradients[-1])
        for t in range(x.shape[0] - 2, -1, -1):
            slopes[t].mul_(gradients[t].addmm_(slopes[t + 1], w_h))

        flat = dv.flatten(0, 1)
        dx = (flat @ w_x).view_as(x)
        dw_x = flat.T @ x.flatten(0, 1)
        dw_h = flat.T @ h[:-1].flatten(0, 1)
        return dx, dz, dw_x, dw_h, flat.sum(0)
