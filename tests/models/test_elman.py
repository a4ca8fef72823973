"""The E1 model: its size, its cell, its memory per token."""

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.models import ElmanSettings
from sweep.models.elman import Elman, FusedCell, plain_cell, spectrally_normalised

SMALL = ElmanSettings(name="elman", vocabulary=11, context=6, d_model=8, layers=2)


def test_it_has_the_published_number_of_parameters():
    settings = load_experiment("elman").model
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in Elman(settings, 0).parameters())
    assert counted == settings.parameters == 386_340_864


def test_the_fused_cell_is_the_plain_loop():
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 3, 5), (7, 3, 5), (5, 5), (5, 5), (5,))
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    fused, plain = ([part.clone().requires_grad_() for part in given] for _ in range(2))
    outputs = [FusedCell.apply(*fused), plain_cell(*plain)]
    torch.testing.assert_close(*outputs)
    upstream = torch.randn(7, 3, 5, generator=generator, dtype=torch.float64)
    for output in outputs:
        output.backward(upstream)
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_the_model_gives_the_same_either_way_and_shares_its_embeddings():
    ids = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1))
    models = [Elman(SMALL, 3, is_fused=is_fused).double() for is_fused in (True, False)]
    torch.testing.assert_close(models[0](ids), models[1](ids))
    for model in models:
        model(ids).square().sum().backward()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert models[0].output_weight() is models[0].embedding.weight


def test_the_recurrent_matrix_is_kept_from_growing():
    weight = torch.randn(40, 40, generator=torch.Generator().manual_seed(2))
    largest = torch.linalg.matrix_norm(spectrally_normalised(weight), 2).item()
    assert largest == pytest.approx(0.99, rel=0.25)  # three iterations are an estimate


def test_it_trains_under_autocast():
    model = Elman(SMALL, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randint(11, (2, 6))).float().square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
