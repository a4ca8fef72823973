"""The loss of group relative policy optimization, as pure functions of tensors.

Shao et al. 2024 (grpo), Liu et al. 2025 (dr_grpo), Yu et al. 2025 (dapo).
B completions of N tokens.
"""

import torch
from torch import Tensor

from sweep.config.workload import GrpoSettings

SCALE_EPS = 1e-4  # added to the standard deviation of rewards


def advantages(rewards: Tensor, group_size: int, scale: str) -> Tensor:
    """Return the advantage of each completion over its group, (B,) from rewards (B,).

    The completions of a prompt are adjacent. `scale` chooses the standard deviation by which the
    differences are divided: of the group, of the batch, or none.
    """
    groups = rewards.view(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    is_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    centered = centered.masked_fill(is_equal, 0.0)  # exactly 0 even if the mean was rounded
    if scale == "group":
        centered = centered / (groups.std(dim=1, keepdim=True) + SCALE_EPS)
    elif scale == "batch":
        centered = centered / (rewards.std() + SCALE_EPS)
    return centered.reshape(-1)


def completion_mask(completions: Tensor, end: int) -> Tensor:
    """Return 1 up to and including the first end id, then 0, (B, N) in float32."""
    is_end = (completions == end).to(torch.int64)
    return (is_end.cumsum(dim=1) - is_end == 0).float()


def token_weights(mask: Tensor, loss: str) -> Tensor:
    """Return the weight of each token in the sum that `denominator` divides, (B, N)."""
    return mask / mask.sum(dim=1, keepdim=True) if loss == "grpo" else mask


def denominator(mask: Tensor, loss: str) -> Tensor | int:
    """Return the divisor of the sum over a whole batch."""
    if loss == "grpo":
        return mask.shape[0]
    return mask.numel() if loss == "dr_grpo" else mask.sum()


def surrogate(
    log_probs: Tensor,
    old: Tensor | None,
    reference: Tensor | None,
    advantage: Tensor,
    settings: GrpoSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate loss of each token, (B, N), and the metrics of each token.

    Args:
        log_probs: of the policy, (B, N), with gradient.
        old: of the policy that sampled, (B, N); None if it is the current policy.
        reference: of the initial policy, (B, N); None without a divergence term.
        advantage: of each completion, (B,).
        settings: clip, clip_high and kl. The divergence is Schulman's k3 estimate.
    """
    ratios = torch.exp(log_probs - (log_probs.detach() if old is None else old))
    low, high = 1 - settings.clip, 1 + (settings.clip_high or settings.clip)
    gain = advantage[:, None]
    losses = -torch.minimum(ratios * gain, ratios.clamp(low, high) * gain)
    is_clipped = ((ratios < low) & (gain < 0)) | ((ratios > high) & (gain > 0))
    metrics = {"grpo/ratio": ratios, "grpo/clip_fraction": is_clipped.float()}
    if reference is not None:
        difference = reference - log_probs
        metrics["grpo/kl"] = torch.exp(difference) - difference - 1
        losses = losses + settings.kl * metrics["grpo/kl"]
    return losses, metrics
