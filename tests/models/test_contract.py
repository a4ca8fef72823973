"""The contract of all models."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sweep.config.models import (
    HuggingFaceSettings,
    ObjectSettings,
    TransformerSettings,
    model_preset,
)
from sweep.errors import SweepError
from sweep.models.build import HasHidden, build_model, build_without_weights
from sweep.models.generation import generate

SIZES = {"vocabulary": 64, "context": 24}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 24,
        "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "max_position_embeddings": 24}  # fmt: skip
MODELS = {
    "transformer": TransformerSettings(**{**model_preset("quick"), **SIZES}),
    "elman": ObjectSettings(
        name="experiments.elman:Elman", options={"d_model": 16, "layers": 2}, **SIZES
    ),
    "gpt2": HuggingFaceSettings(name="gpt2", architecture="gpt2", sizes=GPT2, **SIZES),
    "llama": HuggingFaceSettings(name="llama", architecture="llama", sizes=LLAMA, **SIZES),
    "object": ObjectSettings(name="own_model:Own", options={"width": 16}, **SIZES),
}
MODULE = """
import torch
from torch import nn

class Own(nn.Module):
    activation_checkpointing = False

    def __init__(self, vocabulary, context, width):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.embedding(ids))

def empty(vocabulary, context): return nn.Module()

def broken(vocabulary, context): raise ValueError("a mistake")

def without_checkpointing(vocabulary, context): return nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)


def settings_of(name):
    if name in ("gpt2", "llama"):
        pytest.importorskip("transformers")
    return MODELS[name]


@pytest.fixture(params=MODELS)
def settings(request):
    return settings_of(request.param)


@pytest.fixture
def ids():
    return torch.randint(64, (3, 24), generator=torch.Generator().manual_seed(0))


def test_equal_seeds_give_equal_weights_whatever_was_drawn_before(settings):
    first = build_model(settings, 5)
    torch.rand(100)
    second, other = build_model(settings, 5), build_model(settings, 6)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not all(map(torch.equal, first.parameters(), other.parameters()))
    assert {p.dtype for p in first.parameters()} == {torch.float32}


def test_the_parameters_are_counted_without_weights(settings):
    expected = sum(p.numel() for p in build_model(settings, 0).parameters())
    empty = build_without_weights(lambda: build_model(settings, 0))
    assert sum(p.numel() for p in empty.parameters()) == expected
    assert all(p.is_meta for p in empty.parameters())


@torch.no_grad()
def test_logits_do_not_depend_on_later_tokens_and_nothing_is_random(settings, ids):
    model = build_model(settings, 0).train()
    changed = ids.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 64
    before, after = model(ids), model(changed)
    assert before.shape == (3, 24, 64) and torch.equal(before, model(ids))
    torch.testing.assert_close(before[:, :15], after[:, :15])
    assert not torch.allclose(before[:, 15:], after[:, 15:])
    if isinstance(model, HasHidden):
        torch.testing.assert_close(before, model.hidden(ids) @ model.output_weight().T)


def test_activation_checkpointing_changes_no_gradient(settings, ids):
    gradients = []
    for is_checkpointing in (False, True):
        model = build_model(settings, 0, is_checkpointing).train()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_forward_and_backward_pass_runs_under_autocast(settings, ids, precision):
    model = build_model(settings, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        loss = model(ids).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


class WithoutCache(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.hidden, self.output_weight = model.hidden, model.output_weight


@pytest.mark.parametrize("name", ["transformer", "gpt2", "llama"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.01}, {"top_p": 0.95, "end": 0}])
def test_the_cache_changes_no_token(name, sampling):
    """In float64."""
    model = build_model(settings_of(name), 0).double().eval()
    assert hasattr(model, "extend") and not hasattr(WithoutCache(model), "extend")
    prompts = torch.randint(64, (6, 9), generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = generate(WithoutCache(model), prompts, uniforms, **sampling)
    assert torch.equal(generate(model, prompts, uniforms, **sampling), expected)
    assert len(expected.unique(dim=0)) > 1


@pytest.mark.parametrize(
    ("name", "is_checkpointing", "message"),
    [
        ("empty", False, "with trainable weights"),
        ("broken", False, "raised ValueError: a mistake"),
        ("without_checkpointing", True, "attribute activation_checkpointing"),
    ],
)
def test_a_user_model_that_cannot_be_trained_is_refused(name, is_checkpointing, message):
    settings = ObjectSettings(name=f"own_model:{name}", **SIZES)
    with pytest.raises(SweepError, match=message):
        build_model(settings, 0, is_checkpointing)


def test_an_error_without_the_extra_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SweepError, match=r"batch-size-sweep\[hf\]"):
        build_model(MODELS["gpt2"], 0)
