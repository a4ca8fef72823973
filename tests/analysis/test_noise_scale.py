"""The gradient noise scale: the estimator's exactness, and models whose truth is known."""

import math

import numpy as np
import pytest
import torch

from sweep.analysis.noise_scale import noise_scale
from sweep.training.noise import noise_estimates


def estimate(gradients, microbatch_size):
    sum_of_squares = float((gradients**2).sum())
    mean = gradients.mean(0)
    return noise_estimates(sum_of_squares, float(mean @ mean), len(gradients), microbatch_size)


def test_sharding_and_order_do_not_change_the_value():
    """Eight microbatches, on one device or on four in another order."""
    gradients = np.random.default_rng(0).normal(0.1, 1, (8, 1000))
    shards = np.split(gradients[np.random.default_rng(1).permutation(8)], 4)
    sum_of_squares = sum(float((shard**2).sum()) for shard in shards)
    mean = np.mean([shard.mean(0) for shard in shards], axis=0)
    sharded = noise_estimates(sum_of_squares, float(mean @ mean), 8, 5)
    assert sharded == pytest.approx(estimate(gradients, 5), rel=1e-10)


def test_both_estimates_are_unbiased_however_the_batch_is_split():
    """z-tests over 20,000 batches of 32 sequences, as 32 · 1, 8 · 4 and 2 · 16."""
    rng = np.random.default_rng(0)
    scales, mean = np.linspace(0.5, 1.5, 6), np.array([0.1, -0.1, 0.05, 0, 0, 0.02])
    gradients = mean + scales * rng.standard_normal((20_000, 32, 6))
    truth = np.array([(scales**2).sum(), mean @ mean])
    for microbatches in (32, 8, 2):
        split = gradients.reshape(20_000, microbatches, 32 // microbatches, 6).mean(2)
        estimates = np.array([estimate(step, 32 // microbatches) for step in split])
        z = (estimates.mean(0) - truth) / (estimates.std(0) / math.sqrt(len(estimates)))
        assert np.abs(z).max() < 3.5, microbatches
        assert 0.2 < (estimates[:, 1] < 0).mean() < 0.8  # single steps are not clamped


def test_the_estimates_are_averaged_apart_then_divided():
    scale = noise_scale([1.0, 3.0, 2.0, 2.0], [1.0, -0.1, 1.0, 2.1])
    assert (scale.trace.value, scale.square.value) == (2.0, 1.0)
    scale = noise_scale([1.0, 3.0] * 50, [1.0, -0.5] * 50)
    assert scale.value.value == pytest.approx(2.0 / 0.25)
    assert scale.records == 100


def test_a_square_whose_interval_holds_0_leaves_the_noise_scale_unresolved():
    rng = np.random.default_rng(0)
    traces = rng.normal(5, 0.1, 100)
    for centre in (0.0, -0.01, -5.0):
        scale = noise_scale(traces, rng.normal(centre, 1, 100))
        assert scale.value is None
        assert scale.square.low <= 0
        assert scale.trace.low < 5 < scale.trace.high
    assert noise_scale(traces, rng.normal(1, 1, 100)).value is not None


def test_the_bootstrap_is_seeded_and_its_blocks_see_slow_changes():
    rng = np.random.default_rng(0)
    slow = np.repeat(rng.normal(2, 1, 40), 10)
    narrow, wide = noise_scale(rng.permutation(slow), slow), noise_scale(slow, slow)
    assert noise_scale(slow, slow) == wide
    assert wide.trace.high - wide.trace.low > 2 * (narrow.trace.high - narrow.trace.low)


@pytest.mark.parametrize("records", [20, 100])
def test_intervals_hold_the_truth_in_about_95_percent_of_simulations(records):
    rng = np.random.default_rng(0)
    mean, hits, simulations = np.full(10, 0.3), np.zeros(3), 300
    truth = (10.0, float(mean @ mean), 10 / float(mean @ mean))
    for _ in range(simulations):
        gradients = mean + rng.standard_normal((records, 4, 10)) / math.sqrt(8)
        pairs = [estimate(step, 8) for step in gradients]
        scale = noise_scale(*zip(*pairs, strict=True))
        numbers = (scale.trace, scale.square, scale.value)
        hits += [x.low <= true <= x.high for x, true in zip(numbers, truth, strict=True)]
    assert (hits >= 0.91 * simulations).all(), hits
    assert (hits <= 0.995 * simulations).all(), hits


def measured(loss_of, weights, steps, microbatches, size):
    weights.requires_grad_()
    pairs = []
    for _ in range(steps):
        losses = (loss_of(weights, size) for _ in range(microbatches))
        gradients = torch.stack([torch.autograd.grad(loss, weights)[0] for loss in losses])
        squares = float(gradients.square().sum()), float(gradients.mean(0).square().sum())
        pairs.append(noise_estimates(*squares, microbatches, size))
    return noise_scale(*zip(*pairs, strict=True))


def assert_known(loss_of, weights, trace, square):
    """Measure 20 times in small batches, where intervals must hold the truth, then in large."""
    truth = (trace / square, trace, square)
    hits = np.zeros(3)
    for _ in range(20):
        scale = measured(loss_of, weights, 50, 4, 8)
        numbers = (scale.value, scale.trace, scale.square)
        hits += [x.low <= true <= x.high for x, true in zip(numbers, truth, strict=True)]
    assert hits.min() >= 16  # fewer come with a probability of 0.0003 each, at 95 %
    scale = measured(loss_of, weights, 50, 32, 512)
    numbers = (scale.value.value, scale.trace.value, scale.square.value)
    assert numbers == pytest.approx(truth, rel=0.03)


def test_the_unigram_softmax_model_has_its_known_noise_scale():
    """Logits θ, p = softmax θ, data q: B_simple = (1 − |q|²)/|p − q|²."""
    torch.manual_seed(0)
    data = torch.softmax(torch.randn(30), 0)
    logits = torch.randn(30)

    def loss_of(weights, count):
        tokens = torch.multinomial(data, count, replacement=True)
        return torch.nn.functional.cross_entropy(weights.expand(count, -1), tokens)

    square = float((torch.softmax(logits, 0) - data).square().sum())
    assert_known(loss_of, logits, float(1 - data.square().sum()), square)


def test_isotropic_linear_regression_has_its_known_noise_scale():
    """y = w*·x + σz, δ = w − w*: B_simple = d + 1 + dσ²/|δ|², 65.497 here."""
    torch.manual_seed(0)
    dimensions, length, sigma = 50, 1.3, 0.7
    truth = torch.randn(dimensions)
    direction = torch.randn(dimensions)
    weights = truth + length * direction / direction.norm()

    def loss_of(weights, count):
        inputs = torch.randn(count, dimensions)
        targets = inputs @ truth + sigma * torch.randn(count)
        return 0.5 * (inputs @ weights - targets).square().mean()

    known = dimensions + 1 + dimensions * sigma**2 / length**2
    assert known == pytest.approx(65.497, abs=5e-4)
    assert_known(loss_of, weights, known * length**2, length**2)
