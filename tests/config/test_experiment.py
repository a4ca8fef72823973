"""Experiments from TOML and flags, and one sentence for what cannot be one."""

import pytest

from sweep.config.experiment import load_experiment
from sweep.config.models import TransformerSettings, model_preset
from sweep.errors import SweepError


def test_the_reference_is_the_default():
    experiment = load_experiment()
    assert experiment.name == "tinystories"
    assert experiment.batches == (1, 8, 32, 64, 128, 256)
    assert experiment.budget == 327_680_000
    assert experiment.model.parameters == 22_696_448


@pytest.mark.parametrize(
    ("name", "flags"),
    [("tinystories", {"workload": "grpo", "batches": "1,8"}), ("grpo-words", {"group_size": 32})],
)
def test_batches_that_are_no_whole_groups_are_refused(name, flags):
    with pytest.raises(SweepError, match="batches must be multiples of group_size"):
        load_experiment(name, flags)


def test_the_preset_small_has_exactly_these_parameters():
    assert TransformerSettings(**model_preset("small")).parameters == 1_180_800


def test_a_model_flag_brings_its_own_vocabulary_and_context():
    model = load_experiment("tinystories", {"model": "small"}).model
    assert (model.vocabulary, model.context) == (2048, 128)
    sizes = {"vocabulary": 512, "context": 32}
    model = load_experiment("tinystories", {"model": "small", **sizes}).model
    assert (model.vocabulary, model.context) == (512, 32)


def test_a_file_may_spell_the_model_out(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        'budget = "1M"\nbatches = [4]\ndata = "synthetic"\n'
        '[model]\nkind = "transformer"\nname = "mine"\nvocabulary = 300\ncontext = 16\n'
        "d_model = 32\nlayers = 1\nheads = 2\nd_ff = 64\n"
    )
    experiment = load_experiment(str(path))
    assert experiment.name == "own" and experiment.model.name == "mine"


def test_workload_quadratic_brings_its_model_and_needs_no_data():
    experiment = load_experiment("tinystories", {"workload": "quadratic", "batches": "4"})
    assert experiment.model.kind == "quadratic" and experiment.data is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bugdet = 2", "'bugdet' is not a known key. Did you mean 'budget'"),
        ("name = ", "must be TOML"),
        ("\x00", "must be TOML"),
        ("workload = 'x'", "workload"),
        ("init = 'x'", "init applies only to the workload grpo"),
        ("target = 3.0\n[schedule]\nname = 'cosine'", "schedule.name must be constant"),
        ("target = 3.0\n[tuning]\nbudget = 1", "tuning.budget does not apply"),
        ("workload = 'grpo'\n[grpo]\ntask = 'text'\ngroup_size = 2", "grpo.reward must be"),
    ],
)
def test_bad_files_get_one_sentence(tmp_path, text, says):
    path = tmp_path / "bad.toml"
    path.write_text(f"budget = 1\nbatches = [2]\n{text}")
    with pytest.raises(SweepError) as caught:
        load_experiment(str(path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_settings_without_a_default_are_required(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("budget = 1")
    with pytest.raises(SweepError, match="batches: Field required"):
        load_experiment(str(path))


SETTINGS = {"model": "'quick'", "data": "'synthetic'", "budget": "196_608", "batches": "[4]"}
HUGE = "1" + 20 * "0"
WRONG_SETTINGS = {  # by key: a part of the message, and values that are refused
    "name": ("a valid string", "{}", "true", "5", "1979-05-27"),
    "workload": ("a valid string", "{}", "['pretrain']", "1.5"),
    "data": ("a valid string", "{}", "[]", "true", "nan"),
    "model": ("must be", "['quick']", "true", "nan", "''", "5"),
    "budget": ("budget must be", "{}", "['1M']", "true", "-1", "0", "nan", "inf", "1.5", "'x'"),
    "batches": ("batch", "{}", "[]", "1.5", "true", "nan", "[1.5]", "[[4]]", "['x']", "[true]"),
    "seeds": ("seeds", "{}", "[1]", "true", "-1", "1.5", "nan", "1001"),
    "vocabulary": ("vocabulary", "{}", "[512]", "-1", "'many'"),
    "grpo": ("grpo", "'words'", "3", "{}"),
    "model.d_ff": ("model.d_ff", "1e20", HUGE),
    "model.heads": ("heads", "{}", "5", "0"),
    "model.depth": ("'model.depth' is not a known key", "3"),
    "optimizer.beta1": ("optimizer.beta1", "{}", "[0.9]", "-0.1", "1.0", "nan", "'high'", "true"),
    "optimizer.beta3": ("Did you mean 'optimizer.beta", "0.9"),
    "schedule.warmup_fraction": ("schedule.warmup_fraction", "-0.1", "1.1", "nan", "'1 %'"),
    "schedule.warmup_min_steps": ("schedule.warmup_min_steps", "[]", "-1", "1.5", "inf"),
    "evaluation.points": ("evaluation.points", "{}", "true", "'1'", HUGE, "0", "2.5"),
    "evaluation.sequence": ("Did you mean 'evaluation.sequences'", "64"),
}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [(key, value, says) for key, (says, *values) in WRONG_SETTINGS.items() for value in values],
)
def test_settings_of_the_wrong_type_or_size(tmp_path, key, value, says):
    table, _, nested = key.partition(".")
    settings = {**SETTINGS, table: f"{{{nested} = {value}}}" if nested else value}
    path = tmp_path / "mine.toml"
    path.write_text("".join(f"{name} = {given}\n" for name, given in settings.items()))
    with pytest.raises(SweepError) as caught:
        load_experiment(str(path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_experiments_are_refused_with_the_known_names():
    for name in ("nope", "nope.toml"):
        with pytest.raises(SweepError, match="quadratic, quick, tinystories"):
            load_experiment(name)
