"""Precisions: fp32, bf16 (autocast over float32 weights), bf16-pure (bfloat16 throughout)."""

import contextlib
from contextlib import AbstractContextManager

import torch


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context manager for a forward pass."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def weight_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights, gradients and optimizer states."""
    return torch.bfloat16 if precision == "bf16-pure" else torch.float32
