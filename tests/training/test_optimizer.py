"""The fused AdamW that is called directly, bit for bit beside torch's own."""

import copy

import pytest
import torch
from torch import nn

from sweep.config.experiment import OptimizerSettings
from sweep.training.optimizer import (
    FusedAdamW,
    PlainSGD,
    build_optimizer,
    clip_in_step,
    norms_of,
    set_learning_rate,
    total_norm,
)

SETTINGS = OptimizerSettings(name="adamw", weight_decay=0.1, beta2=0.99)


def two_models():
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    return own, copy.deepcopy(own)


def torchs(model):
    ours = build_optimizer(SETTINGS, model, 1e-2)
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in ours.param_groups]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), eps=SETTINGS.eps, fused=True)


def take_step(model, optimizer, t, frozen=()):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(t))
    model(x).square().mean().backward()
    for index in frozen:
        list(model.parameters())[index].grad = None
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    set_learning_rate(optimizer, 1e-2 / t)
    clip_in_step(optimizer, parameters, norm, 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def assert_same(first, second):
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_it_is_what_a_cpu_gets():
    assert type(build_optimizer(SETTINGS, two_models()[0], 1e-2)) is FusedAdamW
    with torch.device("meta"):
        assert type(build_optimizer(SETTINGS, nn.Linear(2, 2), 1e-2)) is torch.optim.AdamW


@pytest.mark.parametrize("indices", [(2,), (1, 2, 3, 5)])
@pytest.mark.parametrize("missing", [(), (1,), (4,), (1, 2, 3, 4, 5, 6)])
def test_it_takes_the_steps_of_torchs(missing, indices):
    """Also where a parameter, or a whole group, has no gradient: at first, later, never."""
    own, other = two_models()
    ours, theirs = build_optimizer(SETTINGS, own, 1e-2), torchs(other)
    for t in range(1, 9):
        frozen = indices if t in missing else ()
        take_step(own, ours, t, frozen)
        take_step(other, theirs, t, frozen)
        assert_same(own, other)


@pytest.mark.parametrize("to_torchs", [False, True])
def test_its_state_is_torchs(to_torchs):
    own, other = two_models()
    ours = build_optimizer(SETTINGS, own, 1e-2)
    for t in range(1, 5):
        take_step(own, ours, t)
    theirs = torchs(other) if to_torchs else build_optimizer(SETTINGS, other, 1e-2)
    other.load_state_dict(own.state_dict())
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for t in range(5, 9):
        take_step(own, ours, t)
        take_step(other, theirs, t)
        assert_same(own, other)
    assert [float(s["step"]) for s in ours.state.values()] == [8.0] * 6


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float64), ()])
def test_the_total_norm_is_torchs(dtypes):
    gradients = [torch.randn(7, 3, dtype=dtype) for dtype in dtypes for _ in range(3)]
    assert torch.equal(total_norm(gradients), nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_large_matrix_has_the_digits_of_its_numbers(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(10_000, 512, dtype=dtype), torch.randn(300, dtype=dtype)]
    wide = torch.float32
    for found, tensor in zip(norms_of(tensors, wide), tensors, strict=True):
        assert found.dtype == wide
        assert float(found) == pytest.approx(float(tensor.double().norm()), rel=5e-7)


@pytest.mark.parametrize("shape", [(1_000_000, 3), (512, 64, 3, 3), (70_000,), (0, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_of_tensors_of_any_shape_are_theirs(shape, dtype):
    tensors = [torch.rand(shape, dtype=dtype), torch.rand(4, 4, dtype=dtype)]
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-4
    for found, tensor in zip(norms_of(tensors), tensors, strict=True):
        assert found.dtype == dtype and found.ndim == 0
        assert float(found) == pytest.approx(float(tensor.double().norm()), rel=tolerance)
    assert total_norm(tensors).dtype == dtype


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_takes_the_steps_of_torchs(decay):
    own, other = two_models()
    settings = OptimizerSettings(name="sgd", weight_decay=decay)
    optimizer = build_optimizer(settings, own, 1e-2)
    assert type(optimizer) is PlainSGD
    groups = [
        {"params": [p for p in other.parameters() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in other.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    for t in range(1, 5):
        take_step(own, optimizer, t, frozen=(2,) if t == 2 else ())
        take_step(other, theirs := torch.optim.SGD(groups, lr=1e-2), t, (2,) if t == 2 else ())
        assert_same(own, other)
    assert not theirs.state
