"""Sampling: the right distribution, random numbers of each completion's own, the end."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sweep.config.models import TransformerSettings
from sweep.models import build_model
from sweep.models.generation import Sampling, completion_uniforms, generate, next_tokens
from sweep.training.storages import LiveStorages

CONFIG = TransformerSettings(
    name="tiny", vocabulary=16, context=64, layers=8, d_model=16, heads=2, d_ff=32
)

LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.0, -30.0])
DRAWS = 20_000


def frequencies(sampling, draws=DRAWS):
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws  # every part equally often
    found = next_tokens(LOGITS.expand(draws, -1), uniforms, sampling)
    return torch.bincount(found, minlength=len(LOGITS)).double() / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    expected = torch.softmax(LOGITS.double() / temperature, 0)
    torch.testing.assert_close(frequencies(Sampling(temperature)), expected, rtol=0, atol=2 / DRAWS)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [0]), (0.7, [0, 3]), (0.9, [0, 3, 1])])
def test_top_p_keeps_the_smallest_set_that_holds_so_much(top_p, kept):
    shares = torch.softmax(LOGITS.double(), 0)
    expected = torch.zeros(len(LOGITS), dtype=torch.float64)
    expected[kept] = shares[kept] / shares[kept].sum()
    found = frequencies(Sampling(top_p=top_p))
    torch.testing.assert_close(found, expected, rtol=0, atol=2 / DRAWS)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("top_p", [0.6, 1.0])
def test_the_ends_of_the_range_choose_tokens_that_can_come(uniform, top_p):
    logits = torch.tensor([[-200.0, 1.0, 2.0, -200.0]])
    drawn = torch.tensor([uniform], dtype=torch.float64)
    assert next_tokens(logits, drawn, Sampling(top_p=top_p)).item() in (1, 2)


def test_at_temperature_0_the_likeliest_is_chosen():
    assert next_tokens(LOGITS[None], torch.zeros(1), Sampling(0.0)).item() == 0


def test_each_completion_draws_numbers_of_its_own():
    whole = completion_uniforms(7, np.arange(6), 5)
    assert torch.equal(whole[2:4], completion_uniforms(7, np.array([2, 3]), 5))
    assert torch.equal(whole[:, :3], completion_uniforms(7, np.arange(6), 3))
    assert whole.unique().numel() == 30
    assert not torch.equal(whole, completion_uniforms(8, np.arange(6), 5))


class Counts(nn.Module):
    """A model without a cache, of which the token after t is t + 1."""

    def forward(self, ids):
        return 100.0 * torch.nn.functional.one_hot((ids + 1) % 6, 6).float()


def test_behind_its_end_a_completion_repeats_the_end():
    prompts = torch.tensor([[1, 2], [3, 4]])
    found = generate(Counts(), prompts, torch.full((2, 6), 0.5), Sampling(end=5))
    assert found.tolist() == [[3, 4, 5, 5, 5, 5], [5, 5, 5, 5, 5, 5]]


def test_it_stops_when_all_have_ended():
    model, calls = Counts(), []
    model.register_forward_hook(lambda *_: calls.append(None))
    generate(model, torch.tensor([[4]]), torch.full((1, 50), 0.5), Sampling(end=5))
    assert len(calls) < 20
    generate(
        model, torch.tensor([[4]]), torch.full((1, 50), 0.5), Sampling(end=5), looks_for_end=False
    )
    assert len(calls) >= 50


def test_old_and_new_keys_are_never_held_side_by_side():
    model = build_model(CONFIG, 0)
    with torch.no_grad(), LiveStorages() as storages:
        _, past = model.extend(torch.zeros(8, CONFIG.context - 1, dtype=torch.long), None)
        held = sum(tensor.nbytes for layer in past for tensor in layer)
        storages.forget_peak()
        before = storages.live_bytes
        _, past = model.extend(torch.zeros(8, 1, dtype=torch.long), past)
    assert before >= held and len(past) == CONFIG.layers
    assert storages.peak_bytes - before < 1.5 * held / CONFIG.layers


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_a_rehearsal_holds_as_much_as_all_the_tokens(tokens):
    model, prompts = build_model(CONFIG, 0), torch.zeros(4, 3, dtype=torch.long)
    peaks, extend, calls = [], model.extend, []
    model.extend = lambda *given: calls.append(1) or extend(*given)
    for is_rehearsal in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=True), LiveStorages() as storages:
            drawn = torch.zeros(4, tokens)
            generate(model, prompts, drawn, Sampling(), copies=2, is_rehearsal=is_rehearsal)
            peaks.append(storages.peak_bytes)
    assert peaks[0] == peaks[1] > 0
    assert len(calls) == tokens + min(tokens, 3)
