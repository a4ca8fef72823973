"""Cross-entropies of a linear layer, without materializing its logits.

The forward pass of the summed loss also computes its gradient. Shapes: hidden (N, D) in the dtype
of the products, weight (V, D), targets (N,).
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

# The fused kernel of the extra `cuda`; imported here because a compiled step cannot import.
if torch.version.cuda is not None and importlib.util.find_spec("liger_kernel") is not None:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger
else:
    liger = None
LIGER_ABOVE = 32_768  # rows; the kernel waits for the host, which slows down small steps


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """Return the summed cross-entropy in nats, at least float32, with `rows` logits at a time."""
    if hidden.is_cuda and len(hidden) > LIGER_ABOVE and liger is not None:
        options = {"reduction": "sum", "accum_dtype": wide_dtype(weight)}
        fused: Tensor = liger(hidden, weight.to(hidden.dtype), targets, **options)
        return fused.float()
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
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            narrow, dtype = weight.to(hidden.dtype), wide_dtype(weight)
            hidden_grad, weight_grad = torch.empty_like(hidden), None  # (N, D), (V, D)
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
        parts = () if weight_grad is None else (weight_grad.to(weight.dtype),)
        ctx.save_for_backward(hidden_grad, *parts)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [saved * grad.to(saved.dtype) for saved in ctx.saved_tensors]
        return (*gradients, *[None] * (4 - len(gradients)))
