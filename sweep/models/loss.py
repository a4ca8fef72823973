"""Cross-entropies and log-probabilities of a linear layer, without materializing its logits.

Shapes: hidden (N, D) in the dtype of the products, weight (V, D), targets (N,).
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIGER_ABOVE = 32_768  # rows; the kernel waits for the host, which slows down small steps
FusedKernel = Callable[..., Tensor]


@functools.cache
def load_fused_kernel() -> FusedKernel | None:
    """Import the fused kernel of the extra `cuda`; return None without it.

    Call it before compiling, because a compiled step cannot import, and only in the process that
    uses the GPU: Liger initializes the CUDA driver, which a process forked later could not use.
    """
    if torch.version.cuda is None or importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy  # type: ignore[no-any-return]


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, kernel: FusedKernel | None = None
) -> Tensor:
    """Return the summed cross-entropy in nats, at least float32, with `rows` logits at a time.

    Args:
        kernel: computes large batches on a GPU instead.
    """
    if kernel is not None and hidden.is_cuda and len(hidden) > LIGER_ABOVE:
        options = {"reduction": "sum", "accum_dtype": wide_dtype(weight)}
        return kernel(hidden, weight.to(hidden.dtype), targets, **options).float()
    return _LinearCrossEntropy.apply(hidden, weight, targets, rows)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def linear_cross_entropies(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """Return the cross-entropy of each row, (N,), without gradients."""
    transposed = weight.to(hidden.dtype).T
    chunks = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    return torch.cat([row_losses(widened(chunk @ transposed), ids)[0] for chunk, ids in chunks])


def widened(logits: Tensor) -> Tensor:
    return logits.to(wide_dtype(logits))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def row_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss (n,) and the log of the normalizer (n, 1) of each row of logits (n, V)."""
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    return (normalizer - logits.gather(1, targets[:, None])).squeeze(1), normalizer


class _LinearCrossEntropy(torch.autograd.Function):
    """The forward pass also computes the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            narrow = weight.to(hidden.dtype)
            dtype = wide_dtype(weight)
            hidden_grad = torch.empty_like(hidden)  # (N, D)
            weight_grad = None  # (V, D)
            total = torch.zeros((), dtype=dtype, device=hidden.device)
            chunks = (torch.split(tensor, rows) for tensor in (hidden, targets, hidden_grad))
            for chunk, ids, chunk_grad in zip(*chunks, strict=True):
                logits = widened(chunk @ narrow.T)  # (n, V)
                losses, normalizer = row_losses(logits, ids)
                total += losses.sum()

                grad = logits.sub_(normalizer).exp_()  # softmax, in place
                grad = grad.scatter_add_(1, ids[:, None], -torch.ones_like(normalizer))
                grad = grad.to(hidden.dtype)
                chunk_grad.copy_(grad @ narrow)

                if not ctx.needs_input_grad[1]:
                    pass  # the weight is frozen
                elif weight_grad is None:
                    weight_grad = (grad.T @ chunk).to(dtype)
                elif hidden.dtype == dtype:
                    weight_grad.addmm_(grad.T, chunk)
                else:
                    weight_grad += grad.T @ chunk
                del logits, grad
        if weight_grad is None:
            ctx.save_for_backward(hidden_grad)
        else:
            ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [saved * grad.to(saved.dtype) for saved in ctx.saved_tensors]
        return (*gradients, *[None] * (4 - len(gradients)))


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability, differentiable, and each row's entropy, (N,) each."""
    return _LinearLogProbs.apply(hidden, weight, targets, rows, temperature)  # type: ignore[no-any-return, no-untyped-call]


class _LinearLogProbs(torch.autograd.Function):
    """The backward pass computes the logits again.

    The factors of the gradient are known only after the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            transposed = weight.to(hidden.dtype).T
            parts = []
            chunks = (torch.split(tensor, rows) for tensor in (hidden, targets))
            for chunk, ids in zip(*chunks, strict=True):
                logits = widened(chunk @ transposed).div_(temperature)  # (n, V)
                losses, normalizer = row_losses(logits, ids)
                mean = logits.sub(normalizer).exp_().mul_(logits).sum(-1)
                parts.append((-losses, normalizer.squeeze(1) - mean, normalizer))
                del logits
        log_probs, entropies, normalizers = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, normalizers)
        ctx.rows = rows
        ctx.temperature = temperature
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
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None
