"""Models of transformers behind the same interface; without the extra, a sentence."""

import sys

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.models import HuggingFaceSettings
from sweep.errors import SweepError
from sweep.models import build_model, count_parameters

SETTINGS = {"vocabulary": 300, "context": 16}


def test_without_the_extra_one_sentence_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SweepError, match=r"pip install -e '\.\[hf\]'"):
        build_model(load_experiment("gpt2").model, 0)


def test_gpt2_has_its_published_size():
    pytest.importorskip("transformers")
    assert count_parameters(load_experiment("gpt2").model) == 124_439_808


def test_a_seed_says_everything_and_the_loss_can_be_chunked():
    transformers = pytest.importorskip("transformers")
    settings = load_experiment("gpt2", SETTINGS).model
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2}
    original = transformers.AutoConfig.for_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers.AutoConfig,
            "for_model",
            lambda name, **sizes: original(name, **sizes, **small),
        )
        one, other = (build_model(settings, 7) for _ in range(2))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    ids = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    one.train()
    assert torch.equal(one(ids), one(ids))  # no dropout
    torch.testing.assert_close(one(ids), one.hidden(ids) @ one.output_weight().T)


OPT = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
       "max_position_embeddings": 16, "word_embed_proj_dim": 16, "pad_token_id": 1}  # fmt: skip
BIOGPT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 2, "max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("opt", {**OPT, "dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}),
        ("biogpt", {**BIOGPT, "hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5,
                    "activation_dropout": 0.5, "layerdrop": 0.5}),
    ],
)  # fmt: skip
def test_nothing_is_dropped_whatever_the_architecture_calls_it(architecture, sizes):
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
