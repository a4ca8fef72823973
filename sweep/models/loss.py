"""Cross-entropies and log-probabilities of a linear layer without its logits.

They exist for a few rows at a time, and no (rows, V) tensor is kept for the backward pass. The
gradient of a summed loss is formed in the same pass, so that nothing is computed twice; that of
log-probabilities, whose weights are known later, computes the logits again.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _liger_kernel() -> Callable[..., Any] | None:
    """Return Liger's kernel (extra cuda) where it is installed; it chunks by its own rule."""
    if torch.version.cuda is None:
        return None
    try:
        module = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None
    return module.liger_fused_linear_cross_entropy  # type: ignore[no-any-return]


LIGER = _liger_kernel()  # looked up here, because a compiled step cannot import
LIGER_ABOVE = 32_768  # rows; it waits for the host, as no CUDA graph may and no small step should


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """Return the summed cross-entropy in nats, a float32 or wider scalar.

    Args:
        hidden: (N, D), in the dtype of the matrix products.
        weight: (V, D).
        targets: (N), ids below V.
        rows: of `hidden` whose logits exist at a time.
    """
    if hidden.is_cuda and len(hidden) > LIGER_ABOVE and LIGER is not None:
        narrow = weight.to(hidden.dtype)
        fused: Tensor = LIGER(
            hidden, narrow, targets, reduction="sum", accum_dtype=_accumulator(weight.dtype)
        )
        return fused.float()
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, rows)  # type: ignore[no-untyped-call]
    return total


@torch.no_grad()
def linear_cross_entropies(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """Return each row's cross-entropy, (N), without gradients; arguments as above."""
    turned, parts = weight.to(hidden.dtype).T, []
    for chunk, ids in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
        parts.append(_losses(_widened(chunk @ turned), ids)[0])
    return torch.cat(parts)


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return each row's log-probability of its target, and its entropy, in nats, (N) each.

    The entropy has no gradient.

    Args:
        hidden: (N, D), in the dtype of the matrix products.
        weight: (V, D).
        targets: (N), ids below V.
        rows: of `hidden` whose logits exist at a time.
        temperature: the logits are divided by it.
    """
    found: tuple[Tensor, Tensor] = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, rows, temperature
    )
    return found


def _widened(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss (n) and the log of its normaliser (n, 1) from (n, V)."""
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    return (normaliser - logits.gather(1, targets[:, None])).squeeze(1), normaliser


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int
    ):
        with torch.autocast(hidden.device.type, enabled=False):
            narrow = weight.to(hidden.dtype)
            dtype = _accumulator(weight.dtype)
            sums: Tensor | None = None  # (V, D)
            slopes = torch.empty_like(hidden)  # (N, D)
            total = torch.zeros((), dtype=dtype, device=hidden.device)
            chunks = (torch.split(tensor, rows) for tensor in (hidden, targets, slopes))
            for chunk, ids, slope in zip(*chunks, strict=True):
                logits = _widened(chunk @ narrow.T)  # (n, V)
                losses, normaliser = _losses(logits, ids)
                total += losses.sum()
                share = logits.sub_(normaliser).exp_()  # softmax, in place
                share.scatter_add_(1, ids[:, None], share.new_full((len(ids), 1), -1.0))
                share = share.to(hidden.dtype)
                slope.copy_(share @ narrow)
                if sums is None:
                    sums = (share.T @ chunk).to(dtype)
                elif hidden.dtype == dtype:
                    sums.addmm_(share.T, chunk)
                else:
                    sums += share.T @ chunk
                del logits, share
        assert sums is not None
        ctx.save_for_backward(slopes, sums.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[no-untyped-def]
        slopes, sums = ctx.saved_tensors
        return slopes * grad.to(slopes.dtype), sums * grad.to(sums.dtype), None, None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, temperature: float
    ):
        with torch.autocast(hidden.device.type, enabled=False):
            turned, parts = weight.to(hidden.dtype).T, []
            for chunk, ids in zip(
                torch.split(hidden, rows), torch.split(targets, rows), strict=True
            ):
                logits = _widened(chunk @ turned).div_(temperature)  # (n, V)
                losses, normaliser = _losses(logits, ids)
                mean = logits.sub(normaliser).exp_().mul_(logits).sum(-1)
                parts.append((-losses, normaliser.squeeze(1) - mean, normaliser))
                del logits
        log_probs, entropies, normalisers = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, normalisers)
        ctx.rows, ctx.temperature = rows, temperature
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
        hidden, weight, targets, normalisers = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            narrow = weight.to(hidden.dtype)
            sums = torch.zeros_like(weight, dtype=_accumulator(weight.dtype))  # (V, D)
            slopes = torch.empty_like(hidden)
            tensors = (hidden, targets, normalisers, grad / ctx.temperature, slopes)
            chunks = (torch.split(tensor, ctx.rows) for tensor in tensors)
            for chunk, ids, normaliser, factors, slope in zip(*chunks, strict=True):
                logits = _widened(chunk @ narrow.T).div_(ctx.temperature)
                share = logits.sub_(normaliser).exp_().mul_(-factors[:, None])  # -g·softmax
                share.scatter_add_(1, ids[:, None], factors[:, None].to(share.dtype))
                share = share.to(hidden.dtype)
                slope.copy_(share @ narrow)
                sums += share.T @ chunk
                del logits, share
        return slopes, sums.to(weight.dtype), None, None, None


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
