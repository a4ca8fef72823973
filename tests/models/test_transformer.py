"""The reference transformer: its sizes, its initial weights and its positions."""

import math

import pytest
import torch
import torch.nn.functional as F

from sweep.config.models import TransformerSettings, model_preset
from sweep.models import build_model, count_parameters
from sweep.models.transformer import rotary_tables, rotate


def preset(name, **changes):
    return TransformerSettings(**{**model_preset(name), **changes})


@pytest.mark.parametrize(
    ("name", "parameters"), [("tinystories", 22_696_448), ("small", 1_180_800), ("quick", 216_512)]
)
def test_built_models_have_the_parameters_of_the_closed_form(name, parameters):
    model = build_model(preset(name), seed=0)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert count_parameters(preset(name)) == parameters


@torch.no_grad()
def test_reference_loss_before_training_is_near_ln_v():
    ids = torch.randint(10_000, (4, 257), generator=torch.Generator().manual_seed(0))
    logits = build_model(preset("tinystories"), 0)(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    assert 9.20 < loss < 9.32


@torch.no_grad()
def test_initial_weights_are_truncated_normals_of_the_documented_deviation():
    model = build_model(preset("tinystories"), seed=3)
    shrink = 0.9866  # standard deviation of a normal truncated at 3σ
    expected = {
        "embedding.weight": 1.0,
        "head.weight": math.sqrt(2 / (512 + 10_000)),
        "blocks.0.query_key_value.weight": math.sqrt(2 / (512 + 512)),
        "blocks.0.gate_up.weight": math.sqrt(2 / (512 + 1344)),
        "blocks.3.down.weight": math.sqrt(2 / (512 + 1344)),
    }
    weights = dict(model.named_parameters())
    for name, std in expected.items():
        assert weights[name].std().item() == pytest.approx(std * shrink, rel=0.01)
        assert weights[name].abs().max().item() <= 3 * std
    assert all((p == 1).all() for name, p in weights.items() if "norm" in name)


def test_rotation_depends_on_relative_positions_only():
    cos, sin = rotary_tables(32, 16)
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    rotated_query = rotate(query.expand(1, 1, 32, 16), cos, sin)[0, 0]
    rotated_key = rotate(key.expand(1, 1, 32, 16), cos, sin)[0, 0]
    scores = rotated_query @ rotated_key.T
    for shift in (-5, 0, 7):
        diagonal = scores.diagonal(shift)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4, rtol=1e-4)
