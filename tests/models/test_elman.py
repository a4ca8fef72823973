"""The E1 model: its size and its cell."""

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.models import ElmanSettings
from sweep.models import count_parameters
from sweep.models.elman import Elman, FusedCell, spectral_scale
from tests.memory.plain_elman import plain_cell

SMALL = ElmanSettings(name="elman", vocabulary=11, context=6, d_model=8, layers=2)


def test_it_has_the_published_number_of_parameters():
    settings = load_experiment("elman").model
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in Elman(settings, 0).parameters())
    assert built == count_parameters(settings) == 386_340_864


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


def test_the_model_with_a_plain_cell_is_the_same_and_shares_its_embeddings():
    ids = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1))
    fused, plain = (Elman(SMALL, 3).double() for _ in range(2))
    for layer in plain.layers:
        layer.cell = plain_cell
    torch.testing.assert_close(fused(ids), plain(ids))
    for model in (fused, plain):
        model(ids).square().sum().backward()
    for first, second in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad)
    assert fused.output_weight() is fused.embedding.weight


def test_the_spectral_norm_of_the_recurrent_matrix_is_limited():
    weight = torch.randn(40, 40, generator=torch.Generator().manual_seed(2))
    largest = torch.linalg.matrix_norm(weight * spectral_scale(weight), 2).item()
    assert largest == pytest.approx(0.99, rel=0.25)  # three iterations are an estimate
