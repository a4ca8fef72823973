"""The noisy quadratic model against its closed recursion (SCIENCE.md §6C)."""

import numpy as np
import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.plan.plan import build_plan
from sweep.training.step import TrainingStep
from sweep.workloads.protocol import build_workload

CPU = torch.device("cpu")


def trial_config(batch=16, seed=0, **overrides):
    settings = {"precision": "fp32", "batches": [batch], "seeds": seed + 1, **overrides}
    plan = build_plan(
        load_experiment("quadratic", settings), Execution(device="cpu", threads=2), data=None
    )
    return plan.trial_config(plan.trials[-1], "test")


def closed_loss(steps, rate, batch):
    """½ Σ h w², in expectation, after some steps from w² = 1."""
    h = 1 / np.arange(1, 1001)
    start, stationary = h / 2, rate * h / (2 * batch * (2 - rate * h))
    shrink = (1 - rate * h) ** (2 * steps)
    return float((shrink * start + (1 - shrink) * stationary).sum())


def test_the_loss_starts_at_half_the_sum_of_curvatures():
    workload = build_workload(trial_config(), CPU)
    assert workload.evaluate(workload.build_model()) == pytest.approx(3.743, abs=5e-4)
    assert closed_loss(0, 0.1, 1) == pytest.approx(3.7427, abs=1e-4)


def test_the_stream_is_random_access_and_standard_normal():
    workload = build_workload(trial_config(), CPU)
    (whole,) = workload.build_batch(0, 64)
    for first, count in ((0, 1), (17, 5), (63, 1)):
        assert torch.equal(workload.build_batch(first, count)[0], whole[first : first + count])
    (many,) = workload.build_batch(1000, 1000)
    assert many.mean().item() == pytest.approx(0, abs=0.005)
    assert many.std().item() == pytest.approx(1, abs=0.005)
    kurtosis = (many**4).mean().item()
    assert kurtosis == pytest.approx(3, abs=0.05)


def test_seeds_have_streams_of_their_own():
    first = build_workload(trial_config(seed=0), CPU).build_batch(0, 4)[0]
    second = build_workload(trial_config(seed=1), CPU).build_batch(0, 4)[0]
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("batch", "rate", "steps"), [(4, 0.5, 300), (64, 1.0, 200)])
def test_trained_loss_follows_the_closed_recursion(batch, rate, steps):
    losses = []
    for seed in range(4):
        config = trial_config(batch, seed)
        step = TrainingStep(config, CPU, batch)
        for t in range(steps):
            step(step.workload.build_batch(t * batch, batch), rate)
        losses.append(step.workload.evaluate(step.model))
    expected = closed_loss(steps, rate, batch)
    error = np.std(losses, ddof=1) / 2
    assert abs(np.mean(losses) - expected) < max(5 * error, 0.02 * expected)
