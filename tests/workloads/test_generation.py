"""Sampling: the distribution, the random numbers of each completion, the end."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sweep.config.models import TransformerSettings
from sweep.models.build import build_model
from sweep.models.generation import completion_uniforms, generate, next_tokens
from sweep.training.storages import LiveStorages

CONFIG = TransformerSettings(
    name="tiny", vocabulary=16, context=64, layers=8, d_model=16, heads=2, d_ff=32
)

LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.0, -30.0])
DRAWS = 20_000


def frequencies(draws=DRAWS, **sampling):
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws  # evenly spread
    tokens = next_tokens(LOGITS.expand(draws, -1), uniforms, **sampling)
    return torch.bincount(tokens, minlength=len(LOGITS)).double() / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    expected = torch.softmax(LOGITS.double() / temperature, 0)
    shares = frequencies(temperature=temperature)
    torch.testing.assert_close(shares, expected, rtol=0, atol=2 / DRAWS)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [0]), (0.7, [0, 3]), (0.9, [0, 3, 1])])
def test_top_p_keeps_the_smallest_set_with_that_probability(top_p, kept):
    shares = torch.softmax(LOGITS.double(), 0)
    expected = torch.zeros(len(LOGITS), dtype=torch.float64)
    expected[kept] = shares[kept] / shares[kept].sum()
    shares = frequencies(top_p=top_p)
    torch.testing.assert_close(shares, expected, rtol=0, atol=2 / DRAWS)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("top_p", [0.6, 1.0])
def test_the_ends_of_the_range_choose_possible_tokens(uniform, top_p):
    logits = torch.tensor([[-200.0, 1.0, 2.0, -200.0]])
    drawn = torch.tensor([uniform], dtype=torch.float64)
    assert next_tokens(logits, drawn, top_p=top_p).item() in (1, 2)


def test_each_completion_has_its_own_random_numbers():
    whole = completion_uniforms(7, np.arange(6), 5)
    assert torch.equal(whole[2:4], completion_uniforms(7, np.array([2, 3]), 5))
    assert torch.equal(whole[:, :3], completion_uniforms(7, np.arange(6), 3))
    assert whole.unique().numel() == 30
    assert not torch.equal(whole, completion_uniforms(8, np.arange(6), 5))


class Counts(nn.Module):
    def forward(self, ids):
        return 100.0 * torch.nn.functional.one_hot((ids + 1) % 6, 6).float()


def test_after_its_end_a_completion_repeats_the_end():
    prompts = torch.tensor([[1, 2], [3, 4]])
    completions = generate(Counts(), prompts, torch.full((2, 6), 0.5), end=5)
    assert completions.tolist() == [[3, 4, 5, 5, 5, 5], [5, 5, 5, 5, 5, 5]]


def test_sampling_stops_when_all_completions_have_ended():
    model, calls = Counts(), []
    model.register_forward_hook(lambda *_: calls.append(None))
    generate(model, torch.tensor([[4]]), torch.full((1, 50), 0.5), end=5)
    assert len(calls) < 20
    calls.clear()
    generate(model, torch.tensor([[4]]), torch.full((1, 50), 0.5))
    assert len(calls) == 50


def test_the_cache_is_extended_one_layer_at_a_time():
    model = build_model(CONFIG, 0)
    with torch.no_grad(), LiveStorages() as storages:
        _, past = model.extend(torch.zeros(8, CONFIG.context - 1, dtype=torch.long), None)
        cached = sum(tensor.nbytes for layer in past for tensor in layer)
        storages.forget_peak()
        before = storages.live_bytes
        _, past = model.extend(torch.zeros(8, 1, dtype=torch.long), past)
    assert before >= cached and len(past) == CONFIG.layers
    assert storages.peak_bytes - before < 1.5 * cached / CONFIG.layers


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_a_rehearsal_has_the_peak_memory_of_all_tokens(tokens):
    model, prompts = build_model(CONFIG, 0), torch.zeros(4, 3, dtype=torch.long)
    peaks, extend, calls = [], model.extend, []
    model.extend = lambda *arguments: calls.append(1) or extend(*arguments)
    for is_rehearsal in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=True), LiveStorages() as storages:
            drawn = torch.zeros(4, tokens)
            generate(model, prompts, drawn, is_rehearsal=is_rehearsal)
            peaks.append(storages.peak_bytes)
    assert peaks[0] == peaks[1] > 0
    assert len(calls) == tokens + min(tokens, 3)
