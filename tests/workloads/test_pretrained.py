"""Training from a pretrained model of transformers: small models with a tokenizer, on disk."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from tokenizers import Tokenizer

from sweep.api import run_sweep
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.config.pretrained import fields_of_model
from sweep.errors import SweepError
from sweep.models.build import build_model
from sweep.orchestration.estimates import estimate
from sweep.orchestration.inputs import identify_inputs
from sweep.orchestration.memory import forecast_memory
from sweep.orchestration.planning import make_plan
from sweep.orchestration.request import Request
from sweep.plan.growth import grow_plan
from sweep.plan.plan import build_plan
from sweep.resources import sha256_of_file
from sweep.training.step import TrainingStep
from sweep.trial.folder import SweepFolder
from sweep.workloads.grpo import Grpo
from tests.hugging_face import STORIES, save_model
from tests.workloads.trials import CPU, metrics

transformers = pytest.importorskip("transformers")
LOGISTICS, NEW = Execution(device="cpu"), SweepFolder(Path("nowhere"))
BOTH = pytest.mark.parametrize(
    "pretrained", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(scope="module", params=["gpt2"])
def pretrained(tmp_path_factory, request):
    return save_model(request.param, tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(STORIES * 20))
    return path


def fields(pretrained, text, **more):
    grpo = {"kind": "grpo", "group_size": 4, "prompt_tokens": 28, "new_tokens": 8}
    return {"init": str(pretrained), "data": str(text), "batches": [8], "budget": 8 * 36 * 2,
            "lr": "1e-3", "workload": grpo, "precision": "fp32"} | more  # fmt: skip


def trial_of(pretrained, text, folder):
    """Return a trial as `make_plan` plans it, without building anything."""
    experiment = load_experiment("grpo-words", fields(pretrained, text))
    execution = Execution(device="cpu", threads=2)
    request, inputs = identify_inputs(Request(experiment, execution, SweepFolder(folder)))
    plan = build_plan(request.experiment, execution, inputs)
    return SweepFolder(folder).located(plan.trial_config(plan.trials[0], "x"))


def test_the_start_decides_model_and_tokenizer(pretrained, text, tmp_path):
    config = trial_of(pretrained, text, tmp_path / "s")
    model = config.science.model
    kind = json.loads((pretrained / "config.json").read_text())["model_type"]
    assert (model.architecture, model.context, model.name) == (kind, 64, kind)
    assert config.science.tokenizer.kind == "pretrained"
    workload = TrainingStep(config, CPU).workload
    theirs = Tokenizer.from_file(str(pretrained / "tokenizer.json"))
    assert theirs.truncation and theirs.padding
    theirs.no_truncation()
    theirs.no_padding()
    own = workload.tokenizer.encode_batch(["a red cat liked the wind!"])[0].tolist()
    assert own == theirs.encode("a red cat liked the wind!").ids and 0 in own
    assert workload.tokenizer.decode(own) == "a red cat liked the wind!"
    documents = (workload.text.train == model.end).sum()
    assert documents == workload.text.train_documents


@BOTH
def test_log_probabilities_are_those_of_the_pretrained_model(pretrained, text, tmp_path):
    config = trial_of(pretrained, text, tmp_path / "s")
    step = TrainingStep(config, CPU)
    llm = transformers.AutoModelForCausalLM.from_pretrained(pretrained).eval()
    assert step.model.model.get_input_embeddings().padding_idx is None
    batch = step.rolled_out(step.workload.build_batch(0, 8))
    step.backward(batch)
    first, ids = metrics(step.workload), batch[0]
    assert (first["grpo/ratio"], first["grpo/kl"]) == (1, 0)
    assert (ids == config.science.model.end).any()  # the padding of prompts
    own, _ = step.workload.log_probs(step.model, ids)
    with torch.no_grad():
        every = torch.log_softmax(llm(ids).logits[:, 27:-1], dim=-1)
    expected = every.gather(-1, ids[:, 28:, None]).squeeze(-1)
    torch.testing.assert_close(own.detach(), expected, rtol=1e-5, atol=1e-5)


@BOTH
def test_activation_checkpointing_changes_no_gradient(pretrained, text, tmp_path):
    """In float64."""
    config, results = trial_of(pretrained, text, tmp_path / "s"), []
    for checkpoints in (False, True):
        step = TrainingStep(config.with_microbatch(4, activation_checkpointing=checkpoints), CPU)
        step.model.double()
        batch = step.rolled_out(step.workload.build_batch(0, 8))
        batch = (*batch[:2], torch.linspace(-1, 1, 8).double(), *batch[3:])
        loss = step.backward(batch)
        results.append([*batch, loss, *(p.grad for p in step.parameters)])
    assert torch.equal(results[0][0], results[1][0])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@BOTH
def test_a_sweep_starts_from_a_pretrained_model_and_another_from_its_trial(
    pretrained, text, tmp_path
):
    out = tmp_path / "sweep"
    run = run_sweep("grpo-words", out=out, device="cpu", **fields(pretrained, text))
    (trial,) = SweepFolder(run.path).trials()
    result = trial.read_result()
    assert result.state == "COMPLETE" and result.steps == 2
    first, second = (build_model(trial.read_config().science.model, seed) for seed in (0, 1))
    for model in (first, second):
        load_model(model, trial.weights_path)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    other_text = tmp_path / "other.txt"
    other_text.write_text("\n<|endoftext|>\n".join(STORIES[::-1] * 30))
    again = tmp_path / "again"
    run = run_sweep("grpo-words", out=again, device="cpu", **fields(trial.path, other_text))
    (second,) = SweepFolder(run.path).trials()
    config = second.read_config()
    assert second.read_result().state == "COMPLETE"
    assert config.science.tokenizer == trial.read_config().science.tokenizer
    assert config.science.start["weights"] == sha256_of_file(trial.weights_path)
    started = Grpo(config, CPU)
    assert all(map(torch.equal, started.build_model().parameters(), first.parameters()))
    tokenizers = started.tokenizer, Grpo(trial.read_config(), CPU).tokenizer
    ids, same = (tokenizer.encode_batch(["a red cat"])[0].tolist() for tokenizer in tokenizers)
    assert ids == same
    shutil.rmtree(out)  # the second trial is a start without the first
    assert fields_of_model(str(second.path), is_start=True) == config.science.model.model_dump(
        mode="json"
    )
    trial_of(second.path, text, tmp_path / "third")
    second.tokenizer_path.unlink()
    with pytest.raises(SweepError, match=r"tokenizer\.json"):
        trial_of(second.path, text, tmp_path / "fourth")


@pytest.mark.slow
def test_a_relative_path_works_from_every_process(pretrained, text, tmp_path, monkeypatch):
    monkeypatch.chdir(pretrained.parent)
    experiment = load_experiment("grpo-words", fields(pretrained.name, text))
    folder = SweepFolder(tmp_path / "deep" / "sweep")
    planned = make_plan(Request(experiment, Execution(device="cpu"), folder))
    plan = estimate(planned.plan, folder)
    assert plan.trials[0].forecast_seconds > 0
    assert plan.trials[0].forecast_bytes > 0
    forecast = forecast_memory("grpo-words", **fields(pretrained.name, text))
    assert forecast["points"][0]["peak_bytes"] > 0


@pytest.mark.slow
def test_other_weights_than_planned_are_refused(pretrained, text, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(pretrained, moved)
    config = trial_of(moved, text, tmp_path / "s")
    Grpo(config, CPU).build_model()
    plan = make_plan(
        Request(load_experiment("grpo-words", fields(moved, text)), LOGISTICS, NEW)
    ).plan
    file = sorted(moved.glob("*.safetensors"))[0]
    weights = load_file(file)
    save_file({name: weight + 1 for name, weight in weights.items()}, file, {"format": "pt"})
    with pytest.raises(SweepError, match=r"weights in .* have changed"):
        Grpo(config, CPU).build_model()
    other = make_plan(
        Request(load_experiment("grpo-words", fields(moved, text)), LOGISTICS, NEW)
    ).plan
    with pytest.raises(SweepError, match="start"):
        grow_plan(plan, other)


@pytest.mark.parametrize(
    "flag", [{"model": "small"}, {"vocabulary": "512"}, {"tokenizer": "bytes"}]
)
def test_settings_that_follow_from_the_start_are_refused(pretrained, text, flag):
    with pytest.raises(SweepError, match=f"{next(iter(flag))} must be left out"):
        load_experiment("grpo-words", fields(pretrained, text, **flag))


def test_missing_weights_are_refused_instead_of_random(pretrained, text, tmp_path):
    lacking = tmp_path / "lacking"
    shutil.copytree(pretrained, lacking)
    (file,) = lacking.glob("*.safetensors")
    weights = load_file(file)
    del weights["transformer.ln_f.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(SweepError, match=r"do not load \(transformer\.ln_f\.weight is missing\)"):
        Grpo(trial_of(lacking, text, tmp_path / "s"), CPU).build_model()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(pretrained, text, tmp_path):
    small = tmp_path / "small"
    shutil.copytree(pretrained, small)
    config = json.loads((small / "config.json").read_text())
    config |= {"vocab_size": 280, "eos_token_id": 279}
    (small / "config.json").write_text(json.dumps(config))
    with pytest.raises(SweepError, match="the model must know all ids"):
        _ = Grpo(trial_of(small, text, tmp_path / "s"), CPU).text


def test_a_start_without_tokenizer_weights_or_end_is_refused(pretrained, text, tmp_path):
    lacking = tmp_path / "model"
    lacking.mkdir()
    config = json.loads((pretrained / "config.json").read_text())
    (lacking / "config.json").write_text(json.dumps(config))
    with pytest.raises(SweepError, match=r"tokenizer\.json"):
        load_experiment("grpo-words", fields(lacking, text))
    (lacking / "tokenizer.json").write_bytes((pretrained / "tokenizer.json").read_bytes())
    experiment = load_experiment("grpo-words", fields(lacking, text))
    with pytest.raises(SweepError, match="weights in safetensors"):
        make_plan(Request(experiment, Execution(device="cpu"), SweepFolder(tmp_path / "s")))
    (lacking / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    with pytest.raises(SweepError, match="eos_token_id"):
        load_experiment("grpo-words", fields(lacking, text))


def test_another_tokenizer_than_planned_is_refused(pretrained, text, tmp_path):
    config = trial_of(pretrained, text, tmp_path / "s")
    without_text = {"science": config.science.model_copy(update={"data": None})}
    workload = Grpo(config.model_copy(update=without_text), CPU)
    assert workload.tokenizer.vocabulary_used == config.science.model.vocabulary
    (tmp_path / "tokenizer.json").write_text("{}")
    other = {**without_text, "init_path": str(tmp_path)}
    with pytest.raises(SweepError, match="is missing or has changed"):
        _ = Grpo(config.model_copy(update=other), CPU).tokenizer
