"""LoRA: what is trained, what is kept, and the same gradient for every split."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sweep.api import run_sweep
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.config.pretrained import fields_of_model
from sweep.errors import SweepError
from sweep.models.loss import linear_cross_entropy, linear_log_probs
from sweep.orchestration.inputs import identify_inputs
from sweep.orchestration.inspection import inspect_plan
from sweep.orchestration.request import Request
from sweep.plan.plan import build_plan
from sweep.training.step import TrainingStep
from sweep.trial.folder import SweepFolder
from tests.hugging_face import STORIES, save_model
from tests.workloads.trials import CPU

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
RANK = 4


@pytest.fixture(scope="module", params=[pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def pretrained(tmp_path_factory, request):
    return save_model(request.param, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(STORIES * 40))
    return path


def fields(pretrained, text, **more):
    return {"init": str(pretrained), "data": str(text), "batches": [8], "budget": 8 * 64 * 4,
            "lr": "1e-2", "lora": RANK, "precision": "fp32"} | more  # fmt: skip


def build(pretrained, text, folder, **more):
    experiment = load_experiment("quick", fields(pretrained, text, **more))
    request = Request(experiment, Execution(device="cpu", loss_chunk_rows=100), SweepFolder(folder))
    plan = build_plan(experiment, request.execution, identify_inputs(request)[1])
    return plan, TrainingStep(plan.trial_config(plan.trials[0]), CPU)


def base_weights(step):
    """Return the frozen weights by their names in the pretrained model."""
    named = step.model.model.named_parameters()
    return {name.replace(".base_layer", ""): p for name, p in named if not p.requires_grad}


def test_only_adapters_are_trained_and_the_plan_counts_both(pretrained, text, tmp_path):
    plan, step = build(pretrained, text, tmp_path / "s")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
    total, trained = sum(p.numel() for p in theirs.parameters()), step.parameters
    count = sum(p.numel() for p in trained)
    inspected = inspect_plan(plan, SweepFolder(tmp_path))
    assert inspected.trained_parameters == count > 0
    assert inspected.parameters == total + count == step.parameter_count
    before = {name: weight.clone() for name, weight in base_weights(step).items()}
    expected = dict(theirs.named_parameters())
    assert before.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in before.items())
    step(step.workload.build_batch(0, 8), 1e-2)
    assert all(torch.equal(weight, before[name]) for name, weight in base_weights(step).items())
    moved = [weight.abs().max() > 0 for name, weight in step.model.named_parameters()
             if ".lora_B." in name]  # fmt: skip
    assert moved and all(moved)  # they begin at 0


def test_adapters_begin_at_the_pretrained_model_and_follow_from_the_seed(
    pretrained, text, tmp_path
):
    (_, first), (_, same) = (build(pretrained, text, tmp_path / "s") for _ in range(2))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(pretrained).eval()
    ids = first.workload.build_batch(0, 2)[0][:, :-1]
    with torch.no_grad():
        torch.testing.assert_close(first.model(ids), theirs(ids).logits)
    states = first.model.state_dict(), same.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all("lora_" in name and torch.equal(states[1][name], w) for name, w in states[0].items())
    config = first.workload.config
    science = config.science.model_copy(update={"seed": 1})
    other = TrainingStep(config.model_copy(update={"science": science}), CPU).model.state_dict()
    assert not all(torch.equal(other[name], weight) for name, weight in states[0].items())


@pytest.mark.parametrize("microbatch", [1, 3])
@pytest.mark.parametrize("rank", [None, RANK])
def test_the_gradient_does_not_depend_on_the_split(pretrained, text, tmp_path, microbatch, rank):
    _, whole = build(pretrained, text, tmp_path / "s", lora=rank)
    config = whole.workload.config.with_microbatch(microbatch)
    split = TrainingStep(config, CPU)
    batch = whole.workload.build_batch(0, 8)
    with torch.no_grad():
        for a, b in zip(whole.parameters, split.parameters, strict=True):
            noise = 0.02 * torch.randn(a.shape, generator=torch.Generator().manual_seed(0))
            a += noise  # adapters that begin at 0 give the others no gradient
            b += noise
    torch.testing.assert_close(whole.backward(batch), split.backward(batch), rtol=1e-6, atol=1e-6)
    for a, b in zip(whole.parameters, split.parameters, strict=True):
        assert a.grad.abs().max() > 0
        assert ((a.grad - b.grad).abs().max() / a.grad.abs().max()).item() < 2e-6


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft's use
def test_kept_adapters_give_the_trained_model_and_cannot_be_a_start(pretrained, text, tmp_path):
    """As docs/hugging-face.md says."""
    out = tmp_path / "sweep"
    run = run_sweep("quick", out=out, device="cpu", **fields(pretrained, text))
    (trial,) = SweepFolder(run.path).trials()
    result = trial.read_result()
    assert result.state == "COMPLETE"
    assert result.final_valid_loss < result.initial_valid_loss
    config = trial.read_config()
    step = TrainingStep(config, CPU)
    stored = load_file(trial.weights_path)
    assert stored.keys() == step.model.state_dict().keys()
    step.model.load_state_dict(stored, strict=False)
    ids = step.workload.build_batch(0, 2)[0][:, :-1]

    model = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
    targets = ["c_attn"] if "gpt2" in type(model).__name__.lower() else ["q_proj", "v_proj"]
    is_gpt2 = targets == ["c_attn"]
    adapters = {"base_model.model." + name.removeprefix("model.").replace(".default", ""): weight
                for name, weight in stored.items()}  # fmt: skip
    folder = tmp_path / "adapter"
    folder.mkdir()
    peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, fan_in_fan_out=is_gpt2,
                    task_type="CAUSAL_LM").save_pretrained(folder)  # fmt: skip
    save_file(adapters, folder / "adapter_model.safetensors")
    theirs = peft.PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        own = step.model.eval()(ids)
        torch.testing.assert_close(own, theirs(ids).logits)
        merged = theirs.merge_and_unload()
        torch.testing.assert_close(own, merged(ids).logits, rtol=1e-4, atol=1e-4)
    if not is_gpt2:  # the code of the page is about a Llama
        page = (Path(__file__).parents[2] / "docs/hugging-face.md").read_text()
        code = page.partition("```python\n")[2].partition("```")[0]
        for theirs, ours in {
            '"model"': repr(str(pretrained)),
            '"results/lora/trials/ID/weights.safetensors"': repr(str(trial.weights_path)),
            "r=8, lora_alpha=16": f"r={RANK}, lora_alpha={2 * RANK}",
        }.items():
            assert theirs in code
            code = code.replace(theirs, ours)
        names = {}
        exec(code, names)
        with torch.no_grad():
            shown = names["model"].eval()(ids).logits
        torch.testing.assert_close(own, shown, rtol=1e-4, atol=1e-4)
    with pytest.raises(SweepError, match="init must hold all weights, got adapters"):
        fields_of_model(str(trial.path), is_start=True)


@pytest.mark.parametrize("rows", [7, 100])
def test_a_frozen_projection_changes_no_other_gradient(rows):
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(n, 8, generator=generator) for n in (20, 50))
    targets = torch.randint(50, (20,), generator=generator)
    for loss in (
        lambda s, w: linear_cross_entropy(s, w, targets, rows),
        lambda s, w: linear_log_probs(s, w, targets, rows)[0].sum(),
    ):
        gradients = []
        for is_trained in (True, False):
            own, matrix = states.clone().requires_grad_(), weight.clone().requires_grad_(is_trained)
            loss(own, matrix).backward()
            gradients.append(own.grad)
            assert (matrix.grad is not None) == is_trained
        assert torch.equal(*gradients)
