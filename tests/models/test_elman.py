"""The E1 model: its size and its cell."""

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.models import count_parameters
from sweep.models.elman import Elman, FusedCell, spectral_scale
from tests.memory.plain_elman import plain_cell


def test_it_has_the_published_number_of_parameters():
    settings = load_experiment("elman").model
    with torch.device("meta"):
        model = Elman(settings, 0)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built == count_parameters(settings) == 386_340_864
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
