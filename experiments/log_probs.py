"""Log-probabilities of a linear layer, without materializing its logits.

Their gradient has factors known only after the forward pass, so the backward pass computes the
logits again. Shapes: hidden (N, D) in the dtype of the products, weight (V, D), targets (N,).
"""

from typing import Any

import torch
from torch import Tensor

from .cross_entropy import row_losses, wide_dtype, widened


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability, differentiable, and each row's entropy, (N,) each."""
    return _LinearLogProbs.apply(hidden, weight, targets, rows, temperature)  # type: ignore[no-any-return, no-untyped-call]


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            transposed, parts = weight.to(hidden.dtype).T, []
            chunks = (torch.split(tensor, rows) for tensor in (hidden, targets))
            for chunk, ids in zip(*chunks, strict=True):
                logits = widened(chunk @ transposed).div_(temperature)  # (n, V)
                losses, normalizer = row_losses(logits, ids)
                mean = logits.sub(normalizer).exp_().mul_(logits).sum(-1)
                parts.append((-losses, normalizer.squeeze(1) - mean, normalizer))
                del logits
        log_probs, entropies, normalizers = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, normalizers)
        ctx.rows, ctx.temperature = rows, temperature
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            narrow = weight.to(hidden.dtype)
            weight_grad = None
            if ctx.needs_input_grad[1]:
                weight_grad = torch.zeros_like(weight, dtype=wide_dtype(weight))  # (V, D)
            hidden_grad = torch.empty_like(hidden)
            tensors = (hidden, targets, normalizers, grad / ctx.temperature, hidden_grad)
            chunks = (torch.split(tensor, ctx.rows) for tensor in tensors)
            for chunk, ids, normalizer, factors, chunk_grad in zip(*chunks, strict=True):
                logits = widened(chunk @ narrow.T).div_(ctx.temperature)
                slopes = logits.sub_(normalizer).exp_().mul_(-factors[:, None])  # -g·softmax
                slopes.scatter_add_(1, ids[:, None], factors[:, None].to(slopes.dtype))
                slopes = slopes.to(hidden.dtype)
                chunk_grad.copy_(slopes @ narrow)
                if weight_grad is not None:
                    weight_grad += slopes.T @ chunk
                del logits, slopes
        weight_grad = None if weight_grad is None else weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None
