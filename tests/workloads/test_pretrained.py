"""GRPO from a pretrained model of transformers: a small GPT-2 with its own tokenizer, on disk."""

import json

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.data.tokenizer import SEPARATOR_ID
from sweep.errors import SweepError
from sweep.models import build_model
from sweep.orchestration.planning import Logistics, make_plan
from sweep.orchestration.runner import run_sweep
from sweep.training.step import TrainingStep
from sweep.trial.folder import SweepFolder
from sweep.workloads.start import load_start
from sweep.workloads.tasks import open_tokenizer

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
STORIES = [f"Once there was a {colour} cat. It liked the {thing}." for colour in
           ("red", "blue", "green") for thing in ("sun", "rain", "wind", "snow")]  # fmt: skip


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder as `save_pretrained` leaves it; the end of a text is its last id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("hub") / "tiny-gpt2"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=299, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(STORIES, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    end = tokenizer.token_to_id("<|endoftext|>")
    config = transformers.GPT2Config(
        vocab_size=end + 1, n_positions=64, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def text(tmp_path):
    """A text of stories."""
    path = tmp_path / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(STORIES * 20))
    return path


def fields(pretrained, text, **more):
    grpo = {"group_size": 4, "prompt_tokens": 28, "new_tokens": 8}
    return {"init": str(pretrained), "data": str(text), "batches": [8], "budget": 8 * 36 * 2,
            "lr": "1e-3", "grpo": grpo, "precision": "fp32"} | more  # fmt: skip


def trial_of(pretrained, text, folder):
    experiment = load_experiment("grpo-words", fields(pretrained, text))
    plan = make_plan(experiment, Logistics(device="cpu"), SweepFolder(folder)).plan
    config = plan.trial_config(plan.trials[0], "x")
    place = SweepFolder(folder)
    paths = {name: place.locate(getattr(config, name)) for name in ("data_path", "init_path")}
    return config.model_copy(update=paths)


def test_model_and_tokenizer_are_the_start_s(pretrained, text, tmp_path):
    config = trial_of(pretrained, text, tmp_path / "s")
    model = config.science.model
    assert (model.architecture, model.context, model.name) == ("gpt2", 64, "tiny-gpt2")
    assert config.science.tokenizer.kind == "pretrained"
    workload = TrainingStep(config, CPU, 8).workload
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(pretrained / "tokenizer.json"))
    own = workload.tokenizer.encode_batch(["a red cat!"])[0].tolist()
    end = model.end
    assert [{0: end, end: 0}.get(i, i) for i in own] == theirs.encode("a red cat!")
    assert workload.tokenizer.decode(own) == "a red cat!"
    documents = (workload.text.train == SEPARATOR_ID).sum()
    assert documents == workload.text.train_documents


def test_log_probabilities_are_those_of_the_pretrained_model(pretrained, text, tmp_path):
    """Its ids with the end of a text and 0 exchanged; its weights, not a seed's."""
    config = trial_of(pretrained, text, tmp_path / "s")
    step, end = TrainingStep(config, CPU, 8), config.science.model.end
    llm = transformers.AutoModelForCausalLM.from_pretrained(pretrained).eval()
    ids = step.rolled_out(step.workload.build_batch(0, 8))[0]
    own, _ = step.workload.log_probs(step.model, ids)
    theirs = torch.where(ids == 0, end, torch.where(ids == end, 0, ids))
    with torch.no_grad():
        every = torch.log_softmax(llm(theirs).logits[:, 27:-1], dim=-1)
    expected = every.gather(-1, theirs[:, 28:, None]).squeeze(-1)
    torch.testing.assert_close(own.detach(), expected, rtol=1e-5, atol=1e-5)


def test_a_sweep_starts_from_it(pretrained, text, tmp_path):
    out = tmp_path / "sweep"
    summary = run_sweep("grpo-words", out=out, device="cpu", **fields(pretrained, text))
    (trial,) = summary.folder.trials()
    result = trial.read_result()
    assert summary.exit_code == 0 and result["state"] == "COMPLETE" and result["steps"] == 2
    first, second = (build_model(trial.read_config().science.model, seed) for seed in (0, 1))
    for model in (first, second):  # whose input and output embeddings are one
        load_start(model, str(trial.path))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert first.output_weight() is first.model.get_input_embeddings().weight


@pytest.mark.parametrize("flag", [{"model": "small"}, {"context": "32"}, {"tokenizer": "bytes"}])
def test_what_follows_from_the_start_is_refused(pretrained, text, flag):
    with pytest.raises(SweepError, match=f"{next(iter(flag))} must be left out"):
        load_experiment("grpo-words", fields(pretrained, text, **flag))


def test_a_start_without_tokenizer_weights_or_end_is_refused(pretrained, text, tmp_path):
    lacking = tmp_path / "model"
    lacking.mkdir()
    config = json.loads((pretrained / "config.json").read_text())
    (lacking / "config.json").write_text(json.dumps(config))
    with pytest.raises(SweepError, match=r"without tokenizer\.json"):
        load_experiment("grpo-words", fields(lacking, text))
    (lacking / "tokenizer.json").write_bytes((pretrained / "tokenizer.json").read_bytes())
    experiment = load_experiment("grpo-words", fields(lacking, text))
    with pytest.raises(SweepError, match="weights in safetensors"):
        make_plan(experiment, Logistics(device="cpu"), SweepFolder(tmp_path / "s"))
    (lacking / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    with pytest.raises(SweepError, match="must name eos_token_id"):
        load_experiment("grpo-words", fields(lacking, text))


def test_another_tokenizer_than_planned_is_refused(pretrained, text, tmp_path):
    config = trial_of(pretrained, text, tmp_path / "s")
    assert open_tokenizer(config).vocabulary_used == config.science.model.vocabulary
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SweepError, match="the tokenizer that was planned with"):
        open_tokenizer(config.model_copy(update={"init_path": str(tmp_path)}))


def test_a_repository_that_cannot_be_reached_is_one_sentence(text, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SweepError, match="must be a repository that can be downloaded"):
        load_experiment("grpo-words", fields("hf:nobody/nothing-of-this-name", text))
