"""Models of the transformers library."""

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.models import HuggingFaceSettings
from sweep.models import build_model, count_parameters

pytest.importorskip("transformers")

OPT = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
       "max_position_embeddings": 16, "word_embed_proj_dim": 16, "pad_token_id": 1}  # fmt: skip
BIOGPT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 2, "max_position_embeddings": 16}  # fmt: skip


def test_gpt2_has_its_published_size():
    assert count_parameters(load_experiment("gpt2").model) == 124_439_808


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("opt", {**OPT, "dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}),
        ("biogpt", {**BIOGPT, "hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5,
                    "activation_dropout": 0.5, "layerdrop": 0.5}),
    ],
)  # fmt: skip
def test_dropout_is_off_whatever_the_architecture_calls_it(architecture, sizes):
    settings = HuggingFaceSettings(
        name=architecture, architecture=architecture, vocabulary=300, context=16, sizes=sizes
    )
    model = build_model(settings, 0).train()
    ids = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(0))
    first = model(ids)
    assert all(torch.equal(model(ids), first) for _ in range(4))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids), first)
