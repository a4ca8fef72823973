"""The architectures: sizes, initial weights, positions, dropout, the cell of E1."""

import math

import pytest
import torch
import torch.nn.functional as F

from experiments.elman import FusedCell, spectral_scale
from sweep.config.load import load_experiment
from sweep.config.models import HuggingFaceSettings, TransformerSettings, model_preset
from sweep.models.build import build_model, build_without_weights
from sweep.models.transformer import rotary_tables, rotate
from tests.memory.odd import plain_cell

OPT = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
       "max_position_embeddings": 16, "word_embed_proj_dim": 16, "pad_token_id": 1}  # fmt: skip
BIOGPT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 2, "max_position_embeddings": 16}  # fmt: skip


def preset(name, **changes):
    return TransformerSettings(**{**model_preset(name), **changes})


@pytest.mark.parametrize(
    ("name", "parameters"), [("tinystories", 22_696_448), ("small", 1_180_800), ("quick", 216_512)]
)
def test_presets_have_exactly_these_parameters(name, parameters):
    model = build_model(preset(name), seed=0)
    assert sum(p.numel() for p in model.parameters()) == parameters


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


def test_gpt2_has_its_published_size():
    pytest.importorskip("transformers")
    model = build_without_weights(lambda: build_model(load_experiment("gpt2").model, 0))
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("opt", {**OPT, "dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}),
        ("biogpt", {**BIOGPT, "hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5,
                    "activation_dropout": 0.5, "layerdrop": 0.5}),
    ],
)  # fmt: skip
def test_dropout_is_off_whatever_the_architecture_calls_it(architecture, sizes):
    pytest.importorskip("transformers")
    settings = HuggingFaceSettings(
        name=architecture, architecture=architecture, vocabulary=300, context=16, sizes=sizes
    )
    model = build_model(settings, 0).train()
    ids = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(0))
    first = model(ids)
    assert all(torch.equal(model(ids), first) for _ in range(4))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids), first)


def test_e1_has_its_published_number_of_parameters():
    settings = load_experiment("elman").model.model_copy(update={"name": "experiments.elman:Elman"})
    model = build_without_weights(lambda: build_model(settings, 0))
    assert sum(parameter.numel() for parameter in model.parameters()) == 386_340_864
    assert model.output_weight() is model.embedding.weight


def test_the_fused_cell_equals_the_plain_loop():
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 3, 5), (7, 3, 5), (5, 5), (5, 5), (5,))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    fused, plain = ([part.clone().requires_grad_() for part in inputs] for _ in range(2))
    outputs = [FusedCell.apply(*fused), plain_cell(*plain)]
    torch.testing.assert_close(*outputs)
    upstream = torch.randn(7, 3, 5, generator=generator, dtype=torch.float64)
    for output in outputs:
        output.backward(upstream)
    for first, second in zip(fused, plain, strict=True):
        torch.testing.assert_close(first.grad, second.grad)


def test_the_spectral_norm_of_the_recurrent_matrix_is_limited():
    weight = torch.randn(40, 40, generator=torch.Generator().manual_seed(2))
    largest = torch.linalg.matrix_norm(weight * spectral_scale(weight), 2).item()
    assert largest == pytest.approx(0.99, rel=0.25)  # three iterations are an estimate
