"""The loss of GRPO against values computed by hand."""

import math

import pytest
import torch

from sweep.config.experiment import GrpoSettings
from sweep.workloads import build_workload
from sweep.workloads.grpo import advantages, completion_mask, surrogate
from tests.workloads.trials import CPU, grpo_config


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_rewards_has_no_advantage(scale):
    rewards = torch.tensor([0.1] * 4 + [0.0, 1.0, 0.0, 1.0])
    gain = advantages(rewards, 4, scale)
    assert (gain[:4] == 0).all() and torch.isfinite(gain).all()
    high = gain[5].item()
    assert gain[4:].tolist() == pytest.approx([-high, high, -high, high])
    assert (advantages(torch.full((8,), 0.7), 4, scale) == 0).all()


def test_advantages_are_those_of_the_paper():
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0])
    deviation = rewards.std().item()
    expected = [(r - 3) / (deviation + 1e-4) for r in (1, 2, 3, 6)]
    assert advantages(rewards, 4, "group").tolist() == pytest.approx(expected)
    assert advantages(rewards, 4, "none").tolist() == pytest.approx([-2, -1, 0, 3])


# By hand: ratio, advantage, clip_high; the loss, its derivative by the log ratio, is it clipped
SURROGATES = [
    (0.5, 1, None, -0.5, -0.5, 0),
    (0.5, -1, None, 0.8, 0, 1),
    (1.0, 1, None, -1.0, -1.0, 0),
    (1.0, -1, None, 1.0, 1.0, 0),
    (1.5, 1, None, -1.2, 0, 1),
    (1.5, -1, None, 1.5, 1.5, 0),
    (3.0, 1, None, -1.2, 0, 1),
    (3.0, -1, None, 3.0, 3.0, 0),
    (0.5, -1, 0.6, 0.8, 0, 1),  # clip_high does not apply below 1
    (1.5, 1, 0.6, -1.5, -1.5, 0),  # within 1.6
    (3.0, 1, 0.6, -1.6, 0, 1),
    (3.0, -1, 0.6, 3.0, 3.0, 0),
]


@pytest.mark.parametrize(("ratio", "gain", "high", "loss", "slope", "is_clipped"), SURROGATES)
def test_the_ratio_is_clipped_only_against_further_gain(ratio, gain, high, loss, slope, is_clipped):
    old = torch.tensor([[-2.0, -0.7]], dtype=torch.float64)
    log_probs = (old + math.log(ratio)).requires_grad_(True)
    settings = GrpoSettings(clip=0.2, clip_high=high, kl=0.0)
    advantage = torch.tensor([gain], dtype=torch.float64)
    losses, metrics = surrogate(log_probs, old, None, advantage, settings)
    losses.sum().backward()
    assert losses.tolist() == [[pytest.approx(loss)] * 2]
    assert log_probs.grad.tolist() == [[pytest.approx(slope)] * 2]
    assert metrics["grpo/clip_fraction"].tolist() == [[is_clipped] * 2]
    assert metrics["grpo/ratio"].tolist() == [[pytest.approx(ratio)] * 2]
    assert "grpo/kl" not in metrics


@pytest.mark.parametrize(
    ("share", "value", "slope"),
    [(2.0, 1 - math.log(2), -1), (1.0, 0, 0), (0.5, math.log(2) - 0.5, 0.5)],
)
def test_the_divergence_is_schulmans_k3(share, value, slope):
    """With r, the reference's probability over the policy's: r - ln r - 1, with slope 1 - r."""
    log_probs = torch.tensor([[-2.0, -0.7]], dtype=torch.float64, requires_grad=True)
    reference, gain = log_probs.detach() + math.log(share), torch.zeros(1, dtype=torch.float64)
    losses, metrics = surrogate(log_probs, None, reference, gain, GrpoSettings(kl=0.1))
    losses.sum().backward()
    assert metrics["grpo/kl"].tolist() == [[pytest.approx(value)] * 2]
    assert losses.tolist() == [[pytest.approx(0.1 * value)] * 2]
    assert log_probs.grad.tolist() == [[pytest.approx(0.1 * slope)] * 2]


def test_the_mask_includes_the_end_and_nothing_after_it():
    ids = torch.tensor([[5, 0, 0, 0], [5, 6, 7, 8], [0, 5, 0, 6]])
    mask = completion_mask(ids, 0)
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    for loss, divisor in (("grpo", 3), ("dr_grpo", 12), ("dapo", 7)):
        workload = build_workload(grpo_config(loss=loss), CPU)
        assert int(workload.loss_tokens((ids, mask))) == divisor
