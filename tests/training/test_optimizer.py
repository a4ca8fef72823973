"""Optimizers as the settings describe them, and the norm that clipping uses."""

import copy

import pytest
import torch
from torch import nn

from sweep.config.experiment import OptimizerSettings
from sweep.training.optimizer import build_optimizer, clip_and_step


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def take_step(model, optimizer, clip):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    exact = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5
    return float(clip_and_step(optimizer, list(model.parameters()), 1e-2, clip)), exact


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
    model, clipped = build_model(), build_model()
    settings = OptimizerSettings(name="sgd", weight_decay=0.0)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    moves = []
    for one, clip in ((model, float("inf")), (clipped, 0.1)):
        norm, exact = take_step(one, build_optimizer(settings, one, 1e-2), clip)
        assert norm == pytest.approx(exact, rel=1e-5) and norm > 0.1
        assert all(p.grad is None for p in one.parameters())
        moves.append(torch.cat([p.detach().flatten() for p in one.parameters()]) - start)
    torch.testing.assert_close(moves[1], moves[0] * 0.1 / norm, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_loaded_state_continues_with_the_same_bits(name):
    settings = OptimizerSettings(name=name, weight_decay=0.1)
    model, other = build_model(), build_model()
    optimizer = build_optimizer(settings, model, 1e-2)
    for _ in range(3):
        take_step(model, optimizer, 0.5)
    other.load_state_dict(model.state_dict())
    resumed = build_optimizer(settings, other, 1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((model, optimizer), (other, resumed)):
        take_step(one, its, 0.5)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
