"""Settings that other settings leave without effect."""

import pytest

from sweep.config.load import load_experiment
from sweep.errors import SweepError
from sweep.plan.needs import refuse_without_effect, settings_without_effect


def load(name, flags=None):
    """Load an experiment as a command does, which refuses settings without effect."""
    experiment = load_experiment(name, flags)
    refuse_without_effect(experiment, flags or {})
    return experiment


@pytest.mark.parametrize("name", ["tune_budget", "tune_centre", "tune"])
def test_flags_of_tuning_are_refused_at_a_fixed_rate(name):
    value = {"tune_budget": "1k", "tune_centre": "0.01", "tune": "lr,beta2"}[name]
    assert load("quick", {name: value, "lr": "tuned"})
    with pytest.raises(SweepError, match=f"{name} needs lr tuned"):
        load("quick", {name: value})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"schedule": {"name": "constant", "final_fraction": 0.2}}, "final_fraction needs"),
        ({"target": 3.0, "schedule": {"final_fraction": 0.2}}, "final_fraction needs"),
        ({"evaluation": {"window": 4}}, "window needs a target"),
        ({"lr": "tuned", "tuning": {"centres": {"adam": 1e-3}}}, "centres.*adam"),
        ({"optimizer": {"options": {"adamW": {"amsgrad": True}}}}, "options.*adamW"),
    ],
)
def test_a_setting_without_effect_is_refused(fields, says):
    with pytest.raises(SweepError, match=says):
        load("quick", fields)


def test_the_noise_scale_of_a_workload_that_samples_is_refused():
    assert load("quick", {"noise": True}).noise_scale.measure
    with pytest.raises(SweepError, match="noise needs a workload that does not sample, got grpo"):
        load("grpo-words", {"noise": True})


AT_ONE_RATE = 'lr = "3e-4"'
AT_A_TUNED_RATE = 'lr = "tuned"'
WITHOUT_EFFECT = [
    (AT_ONE_RATE, "[tuning]\nbudget = 50000", "tuning.budget needs lr tuned"),
    (AT_ONE_RATE, "[tuning]\ntrials = 7", "tuning.trials needs lr tuned"),
    (AT_ONE_RATE, "[tuning]\ncentre = 1e-3", "tuning.centre needs lr tuned"),
    (AT_ONE_RATE, "[tuning]\nprune = false", "tuning.prune needs lr tuned"),
    (AT_ONE_RATE, "[tuning]\ncentres = {adamw = 1e-3}", "tuning.centres needs lr tuned"),
    (AT_ONE_RATE, '[tuning]\ndimensions = ["lr", "beta2"]', "tuning.dimensions needs lr tuned"),
    (AT_A_TUNED_RATE, "[tuning]\ntrials = 7", "tuning.trials needs several dimensions"),
    ("seeds = 3", "[answer]\nmax_seeds = 4", "answer.max_seeds needs seeds auto"),
    ("seeds = 3", "[answer]\nmax_hours = 1", "answer.max_hours needs seeds auto"),
    ("", '[optimizer]\nname = "sgd"\nbeta1 = 0.8', "optimizer.beta1 needs the optimizer adamw"),
    ("", '[optimizer]\nname = "sgd"\nbeta2 = 0.8', "optimizer.beta2 needs the optimizer adamw"),
    (
        'optimizers = "sgd,adafactor"',
        "[optimizer]\neps = 1e-6",
        "optimizer.eps needs the",
    ),
    (
        'lr = "tuned"\noptimizers = "sgd"',
        '[tuning]\ndimensions = ["lr", "beta2"]',
        "tuning.dimensions needs the optimizer adamw",
    ),
    ("", '[schedule]\nname = "my:rate"\nfinal_fraction = 0.2', "needs the schedule cosine"),
    ("", "[noise_scale]\npoints = 20", "noise_scale.points needs measurements"),
    ("", "[noise_scale]\nshare = 0.1", "noise_scale.share needs measurements"),
]


@pytest.mark.parametrize(("top", "table", "says"), WITHOUT_EFFECT)
def test_a_setting_of_a_file_without_effect_is_refused(top, table, says, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(["budget = 100000", "batches = [4]", "model = 'quick'", top, table]))
    with pytest.raises(SweepError, match=says):
        load(str(path))


@pytest.mark.parametrize(
    "table",
    [
        {"optimizer": {"beta1": 0.8}},
        {"optimizer": {"clip": 0.5}},
        {"optimizer": {"beta2": 0.9}},
        {"optimizer": {"weight_decay": 0.2}},
        {"schedule": {"name": "constant"}},
        {"schedule": {"average": 0.1}},
        {"schedule": {"warmup_fraction": 0.05}},
    ],
)
def test_a_setting_that_a_command_does_not_receive_is_refused(table):
    words = "true {batch_size} {learning_rate} {seed} {steps}"
    fields = {"command": words, "budget": 100, "batches": "2", **table}
    with pytest.raises(SweepError, match=r"needs (a training|\{\w+\} in the command)"):
        load(None, fields)
    needed = {**fields, "command": f"{words} {{beta2}} {{weight_decay}} {{warmup_steps}}"}
    if {"beta2", "weight_decay", "warmup_fraction"} & {key for t in table.values() for key in t}:
        assert load(None, needed)


@pytest.mark.parametrize(
    ("top", "table", "flags", "unused"),
    [
        (AT_A_TUNED_RATE, "[tuning]\nbudget = 50000", {"lr": "3e-4"}, ["tuning.budget"]),
        (AT_A_TUNED_RATE, "[tuning]\nprune = false", {"lr": "tuned"}, []),
        (AT_ONE_RATE, "[tuning]\nprune = false", {"lr": "tuned"}, []),
        ('seeds = "auto"', "[answer]\nmax_seeds = 4", {"seeds": 3}, ["answer.max_seeds"]),
        ("", "[optimizer]\nbeta1 = 0.8", {"optimizers": "sgd"}, ["optimizer.beta1"]),
        ("", "[optimizer]\nbeta1 = 0.8", {"optimizers": "sgd,muon"}, []),
        ("", "[schedule]\nfinal_fraction = 0.2", {"target": 3.0}, ["schedule.final_fraction"]),
    ],
)
def test_a_flag_may_leave_a_setting_of_a_file_without_effect(top, table, flags, unused, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(["budget = 100000", "batches = [4]", "model = 'quick'", top, table]))
    experiment = load(str(path), flags)
    assert [need.key for need in settings_without_effect(experiment)] == unused
