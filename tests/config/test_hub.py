"""Models of the Hugging Face hub, from a server of this machine, and folders of models."""

import json

import pytest

from sweep.config.load import load_experiment
from sweep.errors import SweepError
from sweep.orchestration.memory import forecast_memory
from tests.data.conftest import COMMIT
from tests.hugging_face import save_model

pytest.importorskip("transformers")
PLAN = """
from sweep.config.load import load_experiment
from sweep.config.execution import Execution
from sweep.orchestration.inputs import identify_inputs
from sweep.orchestration.planning import first_plan
from sweep.orchestration.request import Request
from sweep.trial.folder import SweepFolder
from pathlib import Path
settings = {"data": "synthetic", FIELDS}
try:
    experiment = load_experiment("quick", settings)
    request = Request(experiment, Execution(device="cpu"), SweepFolder(Path("/nowhere")))
    (request, inputs), model = identify_inputs(request), experiment.model
    print(json.dumps([experiment.init, experiment.tokenizer, model.model_dump(), inputs.start,
                      inputs.init_path]))
except SweepError as error:
    print(json.dumps([str(error)]))
"""
LOAD = f"""
import torch
from sweep.config.hub import weights_folder
try:
    folder = weights_folder("hf:someone/tiny@{COMMIT}")
    print(json.dumps(sorted(path.name for path in folder.rglob("*"))))
except SweepError as error:
    print(json.dumps([str(error)]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_model("gpt2", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tiny_hub(hub, tiny):
    hub.files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    others = (
        "pytorch_model.bin",
        "modeling.py",
        "onnx/model.safetensors",
        "consolidated.safetensors",
    )
    hub.files |= dict.fromkeys(others, b"never downloaded")
    return hub


def downloads(hub):
    """Return the names of the files whose content was asked for."""
    names = (line.partition("/resolve/")[2].partition("/")[2] for line in hub.requests)
    return {name for name in names if name}


def test_a_plan_pins_the_commit_and_downloads_config_and_tokenizer_only(tiny_hub, tiny):
    script = PLAN.replace("FIELDS", '"init": "hf:someone/tiny"')
    init, tokenizer, model, start, init_path = tiny_hub.run(script)
    pinned = f"hf:someone/tiny@{COMMIT}"
    assert (init, start, init_path) == (pinned, {"weights": pinned}, pinned)
    local = load_experiment("quick", {"init": str(tiny)}).model.model_dump()
    assert tokenizer == "pretrained" and model == local | {"name": "someone/tiny"}
    assert downloads(tiny_hub) == {"config.json", "tokenizer.json"}
    tiny_hub.environment["HF_HUB_OFFLINE"] = "1"  # what was downloaded needs no network
    assert tiny_hub.run(script)[2] == model


def test_weights_are_safetensors_and_nothing_else_is_downloaded(tiny_hub):
    names = tiny_hub.run(LOAD)
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert downloads(tiny_hub) == {*names}
    count = len(tiny_hub.requests)
    assert tiny_hub.run(LOAD) == names and len(tiny_hub.requests) == count


def test_a_model_that_cannot_be_downloaded_is_one_sentence(tiny_hub):
    tiny_hub.run(PLAN.replace("FIELDS", '"model": "hf:someone/tiny"'))
    messages = tiny_hub.run(PLAN.replace("FIELDS", '"model": "hf:someone/else"'))
    tiny_hub.environment["HF_HUB_OFFLINE"] = "1"
    messages += tiny_hub.run(PLAN.replace("FIELDS", '"init": "hf:someone/third"'))
    messages += tiny_hub.run(LOAD)  # its config is here, but not its weights
    for message, name in zip(messages, ("else", "third", "tiny"), strict=True):
        assert "\n" not in message
        assert f"model 'hf:someone/{name}" in message and "cannot be read" in message


def test_weights_that_are_pickles_are_refused(tiny_hub):
    del tiny_hub.files["model.safetensors"]
    [message] = tiny_hub.run(LOAD)
    assert "must hold weights in safetensors" in message
    assert "pytorch_model.bin" not in downloads(tiny_hub)


def test_a_model_by_its_configuration_keeps_context_and_vocabulary_of_the_experiment(tiny):
    experiment = load_experiment("quick", {"model": str(tiny)})
    model = experiment.model
    assert (model.architecture, model.vocabulary, model.context) == ("gpt2", 512, 64)
    assert (experiment.tokenizer, model.end, model.tokenizer_sha256) == ("bpe", 0, None)
    assert experiment.init is None and model.sizes["n_embd"] == 32
    model = load_experiment("tinystories", {"model": str(tiny)}).model
    assert (model.vocabulary, model.context) == (10_000, 64)  # the model's most
    sizes = {"vocabulary": 300, "context": "32"}
    model = load_experiment("tinystories", {"model": str(tiny), **sizes}).model
    assert (model.vocabulary, model.context) == (300, 32)
    with pytest.raises(SweepError, match=r"at most the model's 64, got 128\. Lower it"):
        load_experiment("quick", {"model": str(tiny), "context": 128})


def test_sizes_that_are_not_used_are_listed(tiny):
    def replaced(name, **settings):
        sizes = load_experiment(name, settings).replaced_sizes
        return [(size.owner, size.name, size.size, size.used) for size in sizes]

    ids = json.loads((tiny / "config.json").read_text())["vocab_size"]
    vocabulary = ("model", "vocabulary", ids, 10_000)
    context = ("experiment", "context", 256, 64)
    assert replaced("tinystories", model=str(tiny)) == [vocabulary, context]
    assert replaced("tinystories", init=str(tiny)) == [context]
    shorter = ("model", "context", 64, 32)
    assert replaced("tinystories", init=str(tiny), context=32) == [shorter]
    assert replaced("quick", init=str(tiny)) == replaced("quick") == []


@pytest.mark.parametrize("name", ["quick", "tinystories", "gpt2"])
def test_a_model_keeps_its_own_sizes_if_asked_to(tiny, name):
    ids = json.loads((tiny / "config.json").read_text())["vocab_size"]

    def sizes(**settings):
        experiment = load_experiment(name, settings, keeps_model_sizes=True)
        return experiment.model.vocabulary, experiment.model.context

    assert sizes(model=str(tiny)) == sizes(init=str(tiny)) == (ids, 64)
    assert sizes(model=str(tiny), vocabulary=500, context=16) == (500, 16)
    preset = load_experiment(name).model  # which has the sizes of its file
    assert sizes() == (preset.vocabulary, preset.context)


def test_sizes_that_a_file_states_for_its_own_model_are_kept(tiny, tmp_path):
    path = tmp_path / "mine.toml"
    lines = [f"model = '{tiny}'", "vocabulary = 500", "budget = 10000", "batches = [4]"]
    path.write_text("\n".join(lines))
    for keeps_sizes in (False, True):
        model = load_experiment(str(path), {}, keeps_sizes).model
        assert (model.vocabulary, model.context) == (500, 64)
    path.write_text("\n".join([*lines, "context = 128"]))
    with pytest.raises(SweepError, match=r"at most the model's 64, got 128"):
        load_experiment(str(path))


def test_a_pretrained_tokenizer_without_weights_decides_the_vocabulary(tiny, tmp_path):
    fields = {"model": str(tiny), "tokenizer": "pretrained"}
    experiment = load_experiment("quick", fields)
    ids = json.loads((tiny / "config.json").read_text())["vocab_size"]
    assert (experiment.model.vocabulary, experiment.model.end) == (ids, ids - 1)
    assert experiment.model_source == str(tiny) and experiment.init is None
    with pytest.raises(SweepError, match="vocabulary must be left out"):
        load_experiment("quick", {**fields, "vocabulary": 300})
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(SweepError, match=r"needs a model with eos_token_id and tokenizer\.json"):
        load_experiment("quick", {**fields, "model": str(tmp_path)})


def test_lora_is_a_setting_of_the_model_that_needs_weights(tiny):
    model = load_experiment("quick", {"init": str(tiny), "lora": "4"}).model
    assert model.lora == 4 and model.context == 64
    with pytest.raises(SweepError, match="lora needs pretrained weights"):
        load_experiment("quick", {"model": str(tiny), "lora": "4"})
    with pytest.raises(SweepError, match=r"lora' does not apply"):
        load_experiment("quick", {"lora": "4"})


def test_the_usual_warmup_belongs_to_the_reference_only(tiny):
    for flag in ("init", "model"):
        experiment = load_experiment("tinystories", {flag: str(tiny)})
        assert experiment.schedule.warmup_min_steps == 0
    assert load_experiment("tinystories").schedule.warmup_min_steps == 100


def test_an_initial_loss_is_expected_of_random_weights_only(tiny):
    assert load_experiment("quick", {"init": str(tiny)}).expected_initial_loss is None
    assert load_experiment("quick", {"model": str(tiny)}).expected_initial_loss > 6


def test_memory_needs_only_the_config_json_of_a_model(tiny, tmp_path):
    config = tmp_path / "config.json"
    config.write_bytes((tiny / "config.json").read_bytes())
    whole = forecast_memory("quick", init=str(tiny), lora="4", batches=[8])
    for fields in ({"init": str(tmp_path)}, {"model": str(config)}):
        document = forecast_memory("quick", **fields, lora="4", batches=[8])
        assert document["points"] == whole["points"]
    with pytest.raises(SweepError, match=r"for --init also eos_token_id and tokenizer\.json"):
        load_experiment("quick", {"init": str(tmp_path)})
