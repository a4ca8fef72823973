"""Optimizers by name and as module:object: weights, options, mistakes, and what they remember."""

import re

import pytest
import torch
from torch import nn

from sweep.config.models import HuggingFaceSettings, TransformerSettings, model_preset
from sweep.config.optimizers import OptimizerSettings
from sweep.config.schedule import ScheduleSettings
from sweep.errors import SweepError, UnusableCheckpoint
from sweep.memory.forecast import forecast_step
from sweep.models.build import build_model, outer_weights
from sweep.plan.learning_rate import learning_rate_at
from sweep.training.optimizer import build_optimizer
from sweep.training.step import TrainingStep
from tests.training.test_checkpoint import Trial
from tests.workloads.trials import CPU, trial_config

RATE, DECAY = 1e-2, 0.1


class Language(nn.Module):
    """Token ids (B, T) to logits (B, T, V), with an output projection that it names."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)

    def hidden(self, ids):
        return self.norm(self.layer(self.embedding(ids)).relu())

    def output_weight(self):
        return self.head.weight

    def forward(self, ids):
        return self.head(self.hidden(ids))


def build(name, model, rate=RATE, **options):
    settings = OptimizerSettings(name=name, weight_decay=DECAY, options={name: options})
    return build_optimizer(settings, model, rate)


def train(model, optimizers, steps=5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 11, (4, 8), generator=generator)
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def seeded():
    torch.manual_seed(0)
    return Language()


def test_muon_trains_the_hidden_matrices_and_adamw_the_rest_as_torch_does():
    model, other = seeded(), seeded()
    joint = build("muon", model)
    hidden = [other.layer.weight]
    decaying = [other.embedding.weight, other.head.weight]
    plain = [other.layer.bias, other.norm.weight, other.norm.bias]
    groups = [{"params": decaying}, {"params": plain, "weight_decay": 0.0}]
    muon = {"weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    apart = [
        torch.optim.Muon(hidden, RATE, **muon),
        torch.optim.AdamW(groups, RATE, (0.9, 0.999), weight_decay=DECAY, fused=True),
    ]
    assert all(map(torch.equal, train(model, [joint]), train(other, apart)))
    kinds = {name: {*joint.state[p]} for name, p in model.named_parameters()}
    assert kinds.pop("layer.weight") == {"momentum_buffer"}
    assert all(kind == {"step", "exp_avg", "exp_avg_sq"} for kind in kinds.values())
    assert all(group["lr"] == RATE for group in joint.param_groups)


SIZES = {"vocabulary": 64, "context": 24}
LAYERS = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 24}
STACKING = {  # models, with the width and the dimension of the projections in their weights
    "transformer": (
        TransformerSettings(**{**model_preset("quick"), **SIZES}),
        {"query_key_value.weight": (64, 0), "gate_up.weight": (176, 0)},
        3 * (3 + 1 + 2 + 1),
    ),
    "gpt2": (
        HuggingFaceSettings(name="gpt2", architecture="gpt2", sizes=LAYERS, **SIZES),
        {"attn.c_attn.weight": (32, 1)},
        2 * (3 + 1 + 1 + 1),
    ),
}


def projections_of(name, tensor, widths):
    """Return the projections in a weight, or the weight itself if it stacks none."""
    for ending, (width, dim) in widths.items():
        if name.endswith(ending):
            return tensor.split(width, dim)
    return (tensor,)


@pytest.mark.parametrize("kind", STACKING)
def test_muon_updates_stacked_projections_as_torch_does_separate_ones(kind):
    if kind == "gpt2":
        pytest.importorskip("transformers")
    settings, widths, count = STACKING[kind]
    model = build_model(settings, 0)
    muon = build("muon", model, split_projections=True)

    outer = {id(weight) for weight in outer_weights(model)}
    hidden = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and id(weight) not in outer
    }
    copies = {
        name: [nn.Parameter(part.clone()) for part in projections_of(name, weight.data, widths)]
        for name, weight in hidden.items()
    }
    separate = [copy for parts in copies.values() for copy in parts]
    assert len(separate) == count
    options = {"weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    expected = torch.optim.Muon(separate, RATE, **options)

    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        ids = torch.randint(0, 64, (4, 24), generator=generator)
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for name, weight in hidden.items():
            gradients = projections_of(name, weight.grad, widths)
            for copy, gradient in zip(copies[name], gradients, strict=True):
                copy.grad = gradient.clone()
        muon.step()
        expected.step()
        muon.zero_grad()

    for name, weight in hidden.items():
        assert all(map(torch.equal, projections_of(name, weight, widths), copies[name])), name
        momentum = muon.state[weight]["momentum_buffer"]
        momenta = [expected.state[copy]["momentum_buffer"] for copy in copies[name]]
        assert all(map(torch.equal, projections_of(name, momentum, widths), momenta)), name
    assert muon.state.keys() == {*model.parameters()}
    assert all(weight.grad is None for weight in model.parameters())


class Stacked(nn.Module):
    """Two weights, of which the first stacks projections with the given numbers of rows."""

    def __init__(self, *rows):
        super().__init__()
        self.first = nn.Linear(128, 384, bias=False)
        self.last = nn.Linear(128, 128, bias=False)
        self.rows = [*rows]

    def stacked_weights(self):
        return [(self.first.weight, self.rows, 0)]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"split_projections": True}, [0.177, 0.177, 0.177]),
        ({}, [0.287, 0.079, 0.078]),  # earlier trials, which still have their updates
    ],
)
def test_the_projection_with_the_largest_gradient_does_not_starve_the_others(options, sizes):
    torch.manual_seed(0)
    model = Stacked(128, 128, 128)
    muon = build("muon", model, rate=1.0, **options)
    muon.param_groups[0]["weight_decay"] = 0.0
    before = model.first.weight.detach().clone()
    gradients = [scale * torch.randn(128, 128) for scale in (1, 0.1, 0.1)]
    model.first.weight.grad = torch.cat(gradients)
    muon.step()
    updates = (model.first.weight.detach() - before).chunk(3)
    assert [u.square().mean().sqrt().item() for u in updates] == pytest.approx(sizes, abs=0.004)


def test_a_weight_without_a_gradient_gets_no_update_and_no_state():
    model = Stacked(128, 128, 128)
    muon = build("muon", model, split_projections=True)
    model.last.weight.grad = torch.ones(128, 128)
    before = model.first.weight.detach().clone()
    muon.step()
    assert torch.equal(model.first.weight, before)
    assert {*muon.state} == {model.last.weight}


def test_sizes_of_projections_that_do_not_fit_their_weight_are_refused():
    with pytest.raises(SweepError, match="sum exactly to 384"):
        build("muon", Stacked(128, 128), split_projections=True)


@pytest.mark.parametrize("chosen", [{}, {"split_projections": False}, {"ns_steps": 4}])
def test_trials_of_muon_say_whether_it_splits_projections(chosen):
    fields = {"optimizers": "sgd,muon", "optimizer": {"options": {"muon": chosen}}}
    muon = trial_config("quick", **fields).science.optimizer
    assert muon.options == {"muon": {"split_projections": True, **chosen}}


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adafactor", torch.optim.Adafactor, {"beta2_decay": -0.7}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("adamw", torch.optim.AdamW, {"amsgrad": True}),
    ],
)
def test_options_of_an_optimizer_reach_it(name, kind, options):
    optimizer = build(name, seeded(), **options)
    assert type(optimizer) is kind
    assert all(options.items() <= group.items() for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, 0.0]


def test_a_trial_has_only_the_options_of_its_own_optimizer():
    options = {"sgd": {"momentum": 0.9}, "muon": {"ns_steps": 4}}
    fields = {"optimizer": {"options": options}, "optimizers": "sgd,adafactor"}
    adafactor = trial_config("quick", **fields).science.optimizer
    assert (adafactor.name, adafactor.options) == ("adafactor", {})
    assert trial_config("quick", optimizer={"options": options}).science.optimizer.options == {}
    alone = trial_config("quick", optimizers="sgd", optimizer={"options": options})
    assert alone.science.optimizer.options == {"sgd": {"momentum": 0.9}}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"momentun": 0.9}, "unexpected keyword argument 'momentun'"),
        ("adamw", {"betas": [0.9, 0.95]}, "multiple values for keyword argument 'betas'"),
        ("own_optimizers:no_optimizer", {}, "float is not a torch.optim.Optimizer"),
        ("own_optimizers:Counting", {"nesterov": True}, "unexpected keyword argument 'nesterov'"),
        ("own_optimizers:absent", {}, "has no attribute 'absent'"),
    ],
)
def test_an_optimizer_that_cannot_be_built_is_refused(faults, name, options, message):
    with pytest.raises(SweepError, match=re.escape(message)):
        build(name, seeded(), **options)


def test_muon_needs_matrices_between_embeddings_and_output():
    with pytest.raises(SweepError, match="no matrices between"):
        build("muon", nn.Embedding(3, 4))


def test_the_states_of_muon_are_counted_as_the_optimizer_s():
    config = trial_config("quick", optimizers="muon")
    model = TrainingStep(config, CPU).model
    outer = {id(model.embedding.weight), id(model.head.weight)}
    hidden = sum(p.nbytes for p in model.parameters() if p.ndim == 2 and id(p) not in outer)
    rest = sum(p.nbytes for p in model.parameters()) - hidden
    counted = forecast_step(config).by_category["optimizer"]
    assert counted == pytest.approx(hidden + 2 * rest, rel=0.05)


OWN = {"optimizer": {"name": "own_optimizers:Counting", "clip": 0.0}}


def test_an_own_optimizer_continues_exactly_with_its_numbers_and_tensors(faults, tmp_path):
    whole, parts = Trial(tmp_path / "whole", **OWN), Trial(tmp_path / "parts", **OWN)
    whole.train(7)
    parts.train(3)
    parts.save()
    parts.train(2)  # lost
    parts.restart()
    assert parts.progress.step == 3
    parts.train(4)
    assert all(map(torch.equal, whole.weights(), parts.weights()))
    assert parts.step.optimizer.param_groups[0]["calls"] == 7


def test_a_checkpoint_with_a_state_that_no_first_step_creates_is_not_used(faults, tmp_path):
    trial = Trial(tmp_path / "x", optimizer={"name": "own_optimizers:Late"})
    trial.train(4)
    trial.save()
    with pytest.raises(UnusableCheckpoint, match="create optimizer"):
        trial.restart()


def test_a_state_that_checkpoints_cannot_hold_is_refused(faults, tmp_path):
    trial = Trial(tmp_path / "x", optimizer={"name": "own_optimizers:Listing"})
    trial.train()
    with pytest.raises(SweepError, match="'history' of an optimizer must keep tensors and numbers"):
        trial.save()


def rates(name, steps=20, warmup=4):
    schedule = ScheduleSettings(name=name)
    return [learning_rate_at(t, 0.5, steps, warmup, schedule) for t in range(1, steps + 1)]


def test_an_own_schedule_gives_factors_of_the_peak_with_its_own_warmup(faults):
    expected = [0.5 * min(t / 4, (21 - t) / 20) for t in range(1, 21)]
    assert rates("own_optimizers:triangle") == pytest.approx(expected)


@pytest.mark.parametrize(("name", "value"), [("negative", "-0.05 at step 11"), ("unknown", "nan")])
def test_a_factor_that_is_no_rate_is_refused_with_its_step(faults, name, value):
    with pytest.raises(SweepError, match=f"finite share .* it returned {value}"):
        rates(f"own_optimizers:{name}")
