"""The noisy quadratic model against its closed recursion (SCIENCE.md §6C)."""

import numpy as np
import pytest
import torch

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.training.step import TrainingStep
from sweep.workloads.protocol import build_workload
from sweep.workloads.random_walk import noise_sum
from tests.plans import build_plan

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


def gradients(batch, steps, seed=0, microbatch=None):
    """Each step's gradient at the first weights times its batch size, (steps, dimensions)."""
    step = TrainingStep(trial_config(batch, seed), CPU, microbatch or batch)
    found = []
    for t in range(steps):
        step.model.zero_grad()
        step.backward(step.workload.build_batch(t * batch, batch))
        found.append(step.model.weights.grad.double() * batch)
    return torch.stack(found)


def test_a_batch_is_its_sequences_numbers_and_parts_of_it_are_batches():
    workload = build_workload(trial_config(), CPU)
    (indices,) = workload.build_batch(1 << 40, 3)
    assert indices.tolist() == [1 << 40, (1 << 40) + 1, (1 << 40) + 2]
    assert indices.dtype == torch.int64
    assert workload.loss_tokens(workload.random_batch(5)) == 5


def test_the_loss_of_a_batch_is_the_sum_of_its_sequences_losses():
    workload = build_workload(trial_config(), CPU)
    model = workload.build_model()
    h = 1 / torch.arange(1.0, 1001.0)
    each = []
    for i in range(40, 52):
        noise = noise_sum(torch.tensor([i]), 0, 1000)
        each.append(0.5 * (h * model.weights**2).sum() + (h.sqrt() * noise) @ model.weights)
    (wanted,) = torch.autograd.grad(sum(each), model.weights)
    loss = workload.loss_sum(model, workload.build_batch(40, 12))
    (gradient,) = torch.autograd.grad(loss, model.weights)
    torch.testing.assert_close(loss, sum(each), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


def test_every_batch_size_and_split_sees_the_same_noise_in_the_same_order():
    single = gradients(4, 48)
    for batch, microbatch in ((12, 12), (64, 64), (64, 16), (64, 5)):
        other = gradients(batch, 192 // batch, microbatch=microbatch)
        same = single.reshape(192 // batch, batch // 4, -1).sum(1)
        torch.testing.assert_close(other, same, rtol=1e-5, atol=1e-4)


def test_seeds_have_streams_of_their_own():
    workloads = [build_workload(trial_config(seed=seed), CPU) for seed in (0, 1)]
    model = workloads[0].build_model()
    losses = [w.loss_sum(model, w.build_batch(0, 4)).item() for w in workloads]
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own use
def test_a_compiled_step_is_the_eager_one_in_a_single_graph():
    eager, compiled = (TrainingStep(trial_config(), CPU, 8) for _ in range(2))
    compiled._loss_sum = torch.compile(compiled.workload.loss_sum, fullgraph=True, dynamic=False)
    for t in range(3):
        batch = eager.workload.build_batch(t * 16, 16)
        assert compiled(batch, 0.1).loss.item() == pytest.approx(eager(batch, 0.1).loss.item())
    torch.testing.assert_close(compiled.model.weights, eager.model.weights)


@pytest.mark.parametrize(
    ("batch", "rate", "steps"), [(4, 0.5, 300), (64, 1.0, 200), (8192, 1.0, 100)]
)
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
