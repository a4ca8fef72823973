"""The chunked losses: the values and gradients of the plain form, in bounded memory."""

import pytest
import torch

from sweep.models.loss import linear_cross_entropy, linear_log_probs
from sweep.training.storages import LiveStorages

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def case(dtype, rows=50, width=16, vocabulary=37):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    master = torch.float32 if dtype == torch.bfloat16 else dtype
    weight = torch.randn(vocabulary, width, generator=generator).to(master).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (rows,), generator=generator)


def plain_log_probs(hidden, weight, targets, temperature):
    logits = hidden @ weight.to(hidden.dtype).T
    wide = logits if logits.dtype == torch.float64 else logits.float()
    every = torch.log_softmax(wide / temperature, dim=-1)
    return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


def plain(hidden, weight, targets):
    return -plain_log_probs(hidden, weight, targets, 1.0)[0].sum()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_loss_and_gradients_are_those_of_the_plain_form(dtype, chunk):
    results = []
    for form in (plain, lambda *parts: linear_cross_entropy(*parts, chunk)):
        hidden, weight, targets = case(dtype)
        loss = form(hidden, weight, targets) / 3
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_and_their_gradients_are_those_of_the_plain_form(
    dtype, chunk, temperature
):
    results = []
    for form in (plain_log_probs, lambda *p: linear_log_probs(*p[:3], chunk, p[3])):
        hidden, weight, targets = case(dtype)
        log_probs, entropies = form(hidden, weight, targets, temperature)
        factors = torch.linspace(-1, 2, len(targets), dtype=log_probs.dtype)
        (log_probs * factors).sum().backward()
        results.append((log_probs.detach(), entropies.detach(), hidden.grad, weight.grad))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_memory_is_bounded_by_the_chunk():
    hidden, weight, targets = case(torch.float32, rows=2000, width=8, vocabulary=1000)
    forms = {"loss": linear_cross_entropy, "log_probs": lambda *p: linear_log_probs(*p)[0].sum()}
    bytes_per_row, peaks = 1000 * 4, {}
    for name, form in forms.items():
        for chunk in (2000, 100):
            with LiveStorages(vocabulary=1000) as storages:
                form(hidden, weight, targets, chunk).backward()
            peaks[name, chunk] = storages.peak["logits"]
            hidden.grad = weight.grad = None
    assert peaks["loss", 2000] >= 2000 * bytes_per_row
    assert peaks["loss", 100] <= 3 * 100 * bytes_per_row
    assert peaks["log_probs", 100] <= 2.5 * 100 * bytes_per_row
