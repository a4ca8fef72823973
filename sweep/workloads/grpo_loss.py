"""What group relative policy optimisation computes from rewards and log-probabilities.

Shao et al. 2024 (grpo), Liu et al. 2025 (dr_grpo), Yu et al. 2025 (dapo); the estimate of the
divergence is Schulman's k3. Pure functions of tensors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sweep.config.grpo import GrpoSettings

SCALE_EPS = 1e-4  # beside a deviation of rewards


def advantages(rewards: Tensor, group_size: int, scale: str) -> Tensor:
    """Return how much better each completion is than its group, (B) from rewards (B).

    Args:
        rewards: the completions of a prompt side by side.
        group_size: completions of a prompt.
        scale: group, batch or none: whose deviation they are divided by.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    is_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    centred = centred.masked_fill(is_equal, 0.0)  # exactly, whatever the mean's rounding
    if scale == "group":
        centred = centred / (groups.std(dim=1, keepdim=True) + SCALE_EPS)
    elif scale == "batch":
        centred = centred / (rewards.std() + SCALE_EPS)
    return centred.reshape(-1)


def completion_mask(completions: Tensor, end: int) -> Tensor:
    """Return 1 up to and with the first end, then 0, (B, N) in float32."""
    is_end = (completions == end).to(torch.int64)
    return (is_end.cumsum(dim=1) - is_end == 0).float()


def token_weights(mask: Tensor, loss: str) -> Tensor:
    """Return what each token's loss counts in the sum that `denominator` divides, (B, N)."""
    return mask / mask.sum(dim=1, keepdim=True) if loss == "grpo" else mask


def denominator(mask: Tensor, loss: str) -> Tensor | int:
    """Return what the sum over a whole batch is divided by."""
    if loss == "grpo":
        return mask.shape[0]
    return mask.numel() if loss == "dr_grpo" else mask.sum()


@dataclass(frozen=True)
class Surrogate:
    """The loss of every token, and what is watched of it, (B, N) each."""

    losses: Tensor
    ratios: Tensor  # of the policy to that which sampled
    is_clipped: Tensor  # whether the gradient is cut off there
    divergences: Tensor | None  # from the reference, k3; None without one


def surrogate(
    log_probs: Tensor,
    old: Tensor | None,
    reference: Tensor | None,
    advantage: Tensor,
    settings: GrpoSettings,
) -> Surrogate:
    """Return the clipped surrogate, with the divergence from the reference.

    Args:
        log_probs: of the policy, (B, N), with gradient.
        old: of the policy that sampled, (B, N); None: it is this one.
        reference: of the start, (B, N); None where the divergence has no weight.
        advantage: of each completion, (B).
        settings: clip, clip_high and kl.
    """
    ratios = torch.exp(log_probs - (log_probs.detach() if old is None else old))
    low, high = 1 - settings.clip, 1 + (settings.clip_high or settings.clip)
    gain = advantage[:, None]
    losses = -torch.minimum(ratios * gain, ratios.clamp(low, high) * gain)
    is_clipped = ((ratios < low) & (gain < 0)) | ((ratios > high) & (gain > 0))
    divergences = None
    if reference is not None:
        difference = reference - log_probs
        divergences = torch.exp(difference) - difference - 1
        losses = losses + settings.kl * divergences
    return Surrogate(losses, ratios, is_clipped.float(), divergences)
