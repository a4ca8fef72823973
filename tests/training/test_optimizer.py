"""Optimizers, the norm that clipping uses, and the average of the weights (Karras et al. 2024)."""

import numpy as np
import pytest
import torch
from torch import nn

from sweep.config.experiment import OptimizerSettings
from sweep.training.parallel import Parallel, WeightAverage, build_optimizer, power_of


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def take_step(model, optimizer, clip):
    """Return the norm that the step measured, and the exact one."""
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    exact = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5
    parallel = Parallel()
    parallel.optimizer, parallel.parameters = optimizer, list(model.parameters())
    return float(parallel.update(1e-2, clip)), exact


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_only_matrices_decay(name, kind):
    model = build_model()
    optimizer = build_optimizer(OptimizerSettings(name=name, weight_decay=0.1), model, 1e-2)
    assert type(optimizer) is kind
    decays = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert all(decays[p] == (0.1 if p.ndim >= 2 else 0.0) for p in model.parameters())


def test_without_an_optimizer_nothing_is_updated():
    assert build_optimizer(OptimizerSettings(name="none"), build_model(), 1e-2) is None


def test_gradients_above_the_bound_are_scaled_to_it():
    settings = OptimizerSettings(name="sgd", weight_decay=0.0)
    start = torch.cat([p.detach().flatten() for p in build_model().parameters()])
    moves = []
    for clip in (float("inf"), 0.1):
        model = build_model()
        norm, exact = take_step(model, build_optimizer(settings, model, 1e-2), clip)
        assert norm == pytest.approx(exact, rel=1e-5) and norm > 0.1
        assert all(p.grad is None for p in model.parameters())
        moves.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - start)
    torch.testing.assert_close(moves[1], moves[0] * 0.1 / norm, rtol=1e-3, atol=1e-7)


def averaged(values, width):
    weight = nn.Parameter(torch.zeros(2, 3))
    average = WeightAverage([weight], width)
    for value in values:
        weight.data.fill_(value)
        average.update()
    return weight, average


@pytest.mark.parametrize("width", [0.01, 0.1, 0.25])
def test_steps_have_power_function_weights_of_the_requested_width(width):
    power, steps = power_of(width), 400
    weights = np.diff((np.arange(steps + 1) / steps) ** (power + 1))  # by step, in closed form
    values = np.random.default_rng(0).normal(size=steps)
    _, average = averaged(values, width)
    assert average.values[0][1, 2].item() == pytest.approx(float(weights @ values), abs=1e-5)
    share = np.diff((np.arange(100_001) / 100_000) ** (power + 1))
    at = (np.arange(100_000) + 0.5) / 100_000
    assert np.sqrt(share @ at**2 - (share @ at) ** 2) == pytest.approx(width, rel=1e-3)


def test_the_average_replaces_the_weights_only_within_the_context():
    weight, average = averaged([1.0, 2.0], 0.25)
    with average.in_place():
        replaced = weight.detach().clone()
    assert 1 < replaced[0, 0].item() < 2
    assert (weight == 2).all()


def test_bfloat16_weights_are_averaged_in_float32():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    average = WeightAverage([weight], 0.05)
    for _ in range(1000):
        average.update()
    weight.data.fill_(1.0078125)  # the next number
    average.update()
    assert average.values[0].dtype == torch.float32
    assert 1 < average.values[0][0].item() < 1.0078125
    with average.in_place():
        assert weight.dtype == torch.bfloat16
