"""The noisy quadratic model against its closed recursion, and its white noise."""

import numpy as np
import pytest
import torch

from sweep.training.step import TrainingStep
from sweep.workloads.build import build_workload
from sweep.workloads.quadratic import SEQUENCES, Quadratic, noise_sum, random_walk
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


def test_the_weights_start_at_signs_of_the_seed():
    first, same, other = (Quadratic(seed).weights for seed in (0, 0, 1))
    assert set(first.tolist()) == {-1.0, 1.0} and len(first) == 1000
    assert torch.equal(first, same) and not torch.equal(first, other)


def gradients(batch, steps, microbatch=None):
    """Return each step's gradient at the first weights times its batch size, (steps, 1000)."""
    step = TrainingStep(config_of(batch).with_microbatch(microbatch or batch), CPU)
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
        step = TrainingStep(config_of(batch, seed), CPU)
        for t in range(steps):
            step(step.workload.build_batch(t * batch, batch), rate)
        losses.append(step.run_evaluation(step.workload.evaluate))
    expected = closed_loss(steps, rate, batch)
    error = np.std(losses, ddof=1) / 2
    assert abs(np.mean(losses) - expected) < max(5 * error, 0.02 * expected)


def values(first, count, stride=1, seed=0):
    """Return W at `count` positions, (count, dimensions)."""
    return np.stack([random_walk(first + k * stride, seed, 1000) for k in range(count)])


def test_the_walk_starts_at_zero_and_has_an_end():
    assert not random_walk(0, 0, 3).any()
    assert abs(random_walk(SEQUENCES, 0, 3)).max() < 5 * SEQUENCES**0.5
    for t in (-1, SEQUENCES + 1):
        with pytest.raises(AssertionError):
            random_walk(t, 0, 3)


def test_a_value_does_not_depend_on_what_was_read_before():
    generator = np.random.default_rng(0)
    near = generator.integers(0, 300, 150).tolist()
    far = generator.integers(0, SEQUENCES, 50).tolist()
    positions = [*near, *far, *reversed(near), 0, SEQUENCES, SEQUENCES // 2]
    kept = [random_walk(t, 7, 5) for t in positions]
    for t, value in zip(positions, kept, strict=True):
        random_walk.cache_clear()
        assert np.array_equal(value, random_walk(t, 7, 5))


@pytest.mark.parametrize("first", [0, 1 << 20, (1 << 40) + 12_345, SEQUENCES - 1001])
def test_increments_are_standard_normal_and_independent(first):
    noise = np.diff(values(first, 1001), axis=0)
    count = noise.size
    assert abs(noise.mean()) < 5 / count**0.5
    assert noise.var() == pytest.approx(1, abs=5 * (2 / count) ** 0.5)
    assert (noise**3).mean() == pytest.approx(0, abs=5 * (15 / count) ** 0.5)
    assert (noise**4).mean() == pytest.approx(3, abs=5 * (96 / count) ** 0.5)
    for lag in (1, 2, 3, 16, 500):
        assert abs((noise[lag:] * noise[:-lag]).mean()) < 5 / noise[lag:].size ** 0.5
    assert abs((noise[:, 1:] * noise[:, :-1]).mean()) < 5 / count**0.5


@pytest.mark.parametrize("length", [3, 1000, 8192, 1 << 30])
def test_sums_have_their_length_as_variance_and_disjoint_sums_are_independent(length):
    sums = np.diff(values(5 * length, 101, length), axis=0) / length**0.5
    assert abs(sums.mean()) < 5 / sums.size**0.5
    assert sums.var() == pytest.approx(1, abs=5 * (2 / sums.size) ** 0.5)
    for lag in (1, 2, 7):
        assert abs((sums[lag:] * sums[:-lag]).mean()) < 5 / sums[lag:].size ** 0.5


def test_seeds_have_independent_walks():
    noise = [np.diff(values(0, 201, seed=seed), axis=0) for seed in range(4)]
    for seed in range(1, 4):
        assert abs((noise[0] * noise[seed]).mean()) < 5 / noise[0].size ** 0.5


@pytest.mark.parametrize("batch_size", [1, 16, 1 << 13, 1 << 20, 3, 1000, 3 << 10, 8191])
def test_a_step_needs_few_draws_at_every_batch_size(batch_size):
    steps = 1024
    random_walk.cache_clear()
    for t in range(steps + 1):
        random_walk(t * batch_size, 0, 4)
    odd_part = batch_size // (batch_size & -batch_size)
    assert random_walk.cache_info().misses < 2 * steps * odd_part.bit_length()


def test_the_operator_is_registered_correctly():
    torch.library.opcheck(noise_sum, (torch.arange(8, 16), 0, 30))
    compiled = torch.compile(noise_sum, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.arange(8, 16), 0, 30), noise_sum(torch.arange(8, 16), 0, 30))


def test_sequences_that_are_not_consecutive_are_refused():
    with pytest.raises(AssertionError, match="consecutive"):
        noise_sum(torch.tensor([3, 5]), 0, 30)
