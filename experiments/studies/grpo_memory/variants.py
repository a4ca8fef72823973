"""Variants of GRPO that each lack one memory saving, for measurements only.

An experiment names one as `experiments.studies.grpo_memory.variants:PlainLogits`.
"""

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sweep.models.build import autocast
from sweep.workloads.grpo import Grpo


class PlainLogits(Grpo):
    """Compute the logits of all positions at once and keep them until the next step."""

    deletes = False

    def log_probs(self, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        first = self.settings.prompt_tokens - 1
        with autocast(self.device, self.config.science.precision):
            logits = model(ids)[:, first:-1].float() / self.settings.temperature
        every = torch.log_softmax(logits, dim=-1)
        chosen = every.gather(-1, ids[:, first + 1 :, None]).squeeze(-1)
        if self.deletes:
            del logits, every
        else:
            self.kept = logits, every
        return chosen, torch.zeros_like(chosen)


class DeletedLogits(PlainLogits):
    """Delete the variables that hold these logits after their last use."""

    deletes = True


class Uncached(nn.Module):
    """Hide the key-value cache of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)  # type: ignore[no-any-return]

    def hidden(self, ids: Tensor) -> Tensor:
        return self.model.hidden(ids)  # type: ignore[no-any-return]

    def output_weight(self) -> Tensor:
        return self.model.output_weight()  # type: ignore[no-any-return]


class KeepingLogits(Uncached):
    """Use the cache, and keep the logits of every sampled token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.kept: list[Tensor] = []

    def extend(self, ids: Tensor, past: Any) -> tuple[Tensor, Any]:
        hidden, past = self.model.extend(ids, past)
        self.kept.append(hidden[:, -1] @ self.output_weight().T.to(hidden.dtype))
        return hidden, past


class WithoutCache(Grpo):
    """Compute all earlier tokens again for every sampled token."""

    def generate(self, model: nn.Module, *arguments: Any, **options: Any) -> Tensor:
        return super().generate(Uncached(model), *arguments, **options)


class SamplingLogits(Grpo):
    """Keep the logits of every sampled token until the next step."""

    def generate(self, model: nn.Module, *arguments: Any, **options: Any) -> Tensor:
        self.kept: list[Tensor] = []  # frees the previous step's logits
        keeping = KeepingLogits(model)
        completions = super().generate(keeping, *arguments, **options)
        self.kept = keeping.kept
        return completions


class ReferenceWithGraph(Grpo):
    """Keep the activations of the reference's pass, as without `torch.no_grad`."""

    def start(self, model: nn.Module) -> None:
        super().start(model)
        self.kept: list[tuple[Tensor, Tensor]] = []
        assert self.reference is not None
        self.reference.requires_grad_(True)

    def roll_out(self, model: nn.Module, *arguments: Any) -> tuple[Tensor, ...]:
        self.kept = []
        ids, mask, gain, old, reference = super().roll_out(model, *arguments)
        return ids, mask, gain, old, reference.detach()

    def log_probs(self, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        if model is not self.reference:
            return super().log_probs(model, ids)
        with torch.enable_grad():
            self.kept.append(super().log_probs(model, ids))
        return self.kept[-1]


class OldLogProbs(Grpo):
    """Compute the old log-probabilities although they equal the current ones."""

    def roll_out(self, model: nn.Module, batch: Any, size: int) -> tuple[Tensor, ...]:
        ids, mask, gain, _, reference = super().roll_out(model, batch, size)
        with torch.no_grad():
            old = torch.cat([self.log_probs(model, part)[0] for part in ids.split(size)])  # type: ignore[no-untyped-call]
        return ids, mask, gain, old, reference


class KeptTensors(Grpo):
    """Keep ids, masks, advantages and log-probabilities until the next step."""

    def roll_out(self, model: nn.Module, batch: Any, size: int) -> tuple[Tensor, ...]:
        self.kept = batch, super().roll_out(model, batch, size)
        return self.kept[1]


class WithoutCollector(Grpo):
    """Switch Python's garbage collector off in the measuring process."""

    def roll_out(self, model: nn.Module, *arguments: Any) -> tuple[Tensor, ...]:
        if not self.is_rehearsal:
            gc.disable()
        return super().roll_out(model, *arguments)


class PlainAttention(Grpo):
    """Compute attention by matrix products, which keep the scores (B, H, T, T)."""

    def roll_out(self, model: nn.Module, *arguments: Any) -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.MATH):
            return super().roll_out(model, *arguments)

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().loss_sum(model, batch)
