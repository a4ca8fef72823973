"""GRPO as it would be without what saves its memory: only measured, never trained with.

Each class undoes one thing, for `sweep probe --ablate`.
"""

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sweep.models.precision import autocast
from sweep.workloads.grpo import Grpo
from sweep.workloads.protocol import Batch


class PlainLogits(Grpo):
    """The logits of all positions at once, as autograd keeps them, names and all."""

    deletes = False

    def log_probs(self, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the completions, (B, N) each."""
        first = self.settings.prompt_tokens - 1
        with autocast(self.device, self.config.science.precision):
            logits = model(ids)[:, first:-1].float() / self.settings.temperature
        every = torch.log_softmax(logits, dim=-1)
        found = every.gather(-1, ids[:, first + 1 :, None]).squeeze(-1)
        if self.deletes:
            del logits, every
        else:
            self.kept = logits, every
        return found, torch.zeros_like(found)


class DeletedLogits(PlainLogits):
    """The same, with `del` behind their last use."""

    deletes = True


class SamplingLogits(Grpo):
    """Sampling returns the logits of every position, kept until the next step."""

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return what the loss needs."""
        self.kept: list[Tensor] = []
        self.on_logits = self.kept.append
        return super().roll_out(model, batch, microbatch_size)


class ReferenceWithGraph(Grpo):
    """The reference's pass keeps its activations, as without `no_grad`."""

    def start(self, model: nn.Module) -> None:
        """Keep a copy of the weights that asks for gradients."""
        super().start(model)
        if self.reference is not None:
            self.reference.requires_grad_(True)

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return what the loss needs."""
        self.kept: list[Tensor] = []
        return super().roll_out(model, batch, microbatch_size)

    def _log_probs_of(self, model: nn.Module, ids: Tensor, size: int) -> Tensor:
        found = [self.log_probs(model, part)[0] for part in torch.split(ids, size)]
        self.kept += found
        return torch.cat([part.detach() for part in found])


class KeptTensors(Grpo):
    """Ids, masks, advantages and log-probabilities keep their names until the next step."""

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return what the loss needs."""
        self.kept = batch, super().roll_out(model, batch, microbatch_size)
        return self.kept[1]


class WithoutCollector(Grpo):
    """Python's garbage collector is switched off, which only a process of its own may do."""

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return what the loss needs."""
        if not self.is_rehearsal:
            gc.disable()
        return super().roll_out(model, batch, microbatch_size)


class PlainAttention(Grpo):
    """Attention by matrix products, which keep their scores (B, H, T, T); no fused kernel."""

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return what the loss needs."""
        with sdpa_kernel(SDPBackend.MATH):
            return super().roll_out(model, batch, microbatch_size)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed surrogate."""
        with sdpa_kernel(SDPBackend.MATH):
            return super().loss_sum(model, batch)


class OldLogProbs(Grpo):
    """The old log-probabilities are computed although they are the current ones."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.needs_old = True


class WithoutCache(Grpo):
    """Every token is sampled from all before it again."""

    is_cached = False


class EmptiedCache(Grpo):
    """`torch.cuda.empty_cache()` before every step."""

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return what the loss needs."""
        torch.cuda.empty_cache()
        return super().roll_out(model, batch, microbatch_size)
