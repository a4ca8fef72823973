"""The noisy quadratic model against its closed recursion (SCIENCE.md §6C)."""

import numpy as np
import pytest
import torch

from sweep.training.step import TrainingStep
from sweep.workloads import build_workload
from sweep.workloads.quadratic import noise_sum
from tests.workloads.trials import CPU, trial_config


def config_of(batch=16, seed=0):
    return trial_config("quadratic", batch, seeds=seed + 1)


def closed_loss(steps, rate, batch):
    """Return the expected ½ Σ h w² after some steps from w² = 1."""
    h = 1 / np.arange(1, 1001)
    start, stationary = h / 2, rate * h / (2 * batch * (2 - rate * h))
    shrink = (1 - rate * h) ** (2 * steps)
    return float((shrink * start + (1 - shrink) * stationary).sum())


def test_the_loss_starts_at_half_the_sum_of_curvatures():
    workload = build_workload(config_of(), CPU)
    assert workload.evaluate(workload.build_model()) == pytest.approx(3.743, abs=5e-4)
    assert closed_loss(0, 0.1, 1) == pytest.approx(3.7427, abs=1e-4)


def gradients(batch, steps, microbatch=None):
    """Return each step's gradient at the first weights times its batch size, (steps, 1000)."""
    step = TrainingStep(config_of(batch), CPU, microbatch or batch)
    rows = []
    for t in range(steps):
        step.model.zero_grad()
        step.backward(step.workload.build_batch(t * batch, batch))
        rows.append(step.model.weights.grad.double() * batch)
    return torch.stack(rows)


def test_the_loss_of_a_batch_is_the_sum_of_the_losses_of_its_sequences():
    workload = build_workload(config_of(), CPU)
    model = workload.build_model()
    h = 1 / torch.arange(1.0, 1001.0)
    each = []
    for i in range(40, 52):
        noise = noise_sum(torch.tensor([i]), 0, 1000)
        each.append(0.5 * (h * model.weights**2).sum() + (h.sqrt() * noise) @ model.weights)
    (expected,) = torch.autograd.grad(sum(each), model.weights)
    loss = workload.loss_sum(model, workload.build_batch(40, 12))
    (gradient,) = torch.autograd.grad(loss, model.weights)
    torch.testing.assert_close(loss, sum(each), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_every_batch_size_and_split_sees_the_same_noise_in_the_same_order():
    single = gradients(4, 48)
    for batch, microbatch in ((12, 12), (64, 64), (64, 16), (64, 5)):
        other = gradients(batch, 192 // batch, microbatch)
        same = single.reshape(192 // batch, batch // 4, -1).sum(1)
        torch.testing.assert_close(other, same, rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own use
def test_the_loss_compiles_to_a_single_graph():
    workload = build_workload(config_of(), CPU)
    model, batch = workload.build_model(), workload.build_batch(32, 8)
    compiled = torch.compile(workload.loss_sum, fullgraph=True, dynamic=False)
    losses = [loss(model, batch) for loss in (workload.loss_sum, compiled)]
    torch.testing.assert_close(*losses)
    slopes = [torch.autograd.grad(loss, model.weights)[0] for loss in losses]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize(
    ("batch", "rate", "steps"), [(4, 0.5, 300), (64, 1.0, 200), (8192, 1.0, 100)]
)
def test_the_trained_loss_follows_the_closed_recursion(batch, rate, steps):
    losses = []
    for seed in range(4):
        step = TrainingStep(config_of(batch, seed), CPU, batch)
        for t in range(steps):
            step(step.workload.build_batch(t * batch, batch), rate)
        losses.append(step.workload.evaluate(step.model))
    expected = closed_loss(steps, rate, batch)
    error = np.std(losses, ddof=1) / 2
    assert abs(np.mean(losses) - expected) < max(5 * error, 0.02 * expected)
