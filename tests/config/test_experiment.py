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
    [
        ("tinystories", {"workload": "grpo"}),
        ("tinystories", {"workload": "grpo", "batches": "1,8"}),
        ("grpo-words", {"group_size": 32}),
    ],
)
def test_batches_that_are_no_whole_groups_are_refused(name, flags):
    with pytest.raises(SweepError, match="batches must be multiples of group_size"):
        load_experiment(name, flags)


@pytest.mark.parametrize(
    ("name", "parameters"), [("tinystories", 22_696_448), ("small", 1_180_800)]
)
def test_presets_have_exactly_these_parameters(name, parameters):
    assert TransformerSettings(**model_preset(name)).parameters == parameters


def test_a_model_flag_brings_its_own_vocabulary_and_context():
    model = load_experiment("tinystories", {"model": "small"}).model
    assert (model.vocabulary, model.context) == (2048, 128)
    model = load_experiment(
        "tinystories", {"model": "small", "vocabulary": 512, "context": 32}
    ).model
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
        ("[optimizer]\nbeta3 = 1", "'optimizer.beta3' is not a known key"),
        ("[schedule]\nwarmup_fraction = 2", "schedule.warmup_fraction"),
        ("name = ", "must be TOML"),
        ("\x00", "must be TOML"),
        ("workload = 'x'", "workload"),
        ("model = 'huge'", "model must be one of"),
        ("[grpo]\ntask = 'words'", "need the workload grpo"),
        ("init = 'x'", "init applies only to the workload grpo"),
        ("target = 3.0\n[schedule]\nname = 'cosine'", "schedule.name must be constant"),
        ("target = 3.0\n[tuning]\nbudget = 1", "tuning.budget does not apply"),
    ],
)
def test_bad_files_get_one_sentence(tmp_path, text, says):
    path = tmp_path / "bad.toml"
    path.write_text(f"budget = 1\nbatches = [1]\n{text}")
    with pytest.raises(SweepError) as caught:
        load_experiment(str(path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_settings_without_a_default_are_required(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("budget = 1")
    with pytest.raises(SweepError, match="batches: Field required"):
        load_experiment(str(path))


def test_unknown_experiments_are_refused_with_the_known_names():
    for name in ("nope", "nope.toml"):
        with pytest.raises(SweepError, match="quadratic, quick, tinystories"):
            load_experiment(name)
