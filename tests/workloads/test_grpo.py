"""GRPO: exact identities, the loss against values computed by hand, training end to end."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.config.workloads import GrpoSettings
from sweep.errors import SweepError
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.request import Request
from sweep.plan.retry import begin_attempt
from sweep.training.checkpoint import Progress
from sweep.training.loop import Steps
from sweep.training.step import TrainingStep
from sweep.trial.folder import SweepFolder
from sweep.workloads.build import build_workload
from sweep.workloads.grpo import advantages, completion_mask, surrogate
from tests.fakes.executors import InlineExecutor
from tests.workloads.trials import (
    CPU,
    GRPO,
    grpo_config,
    llama_with_weights_of,
    metrics,
    names_in_llama,
)


def first_update(config):
    """Return the metrics of the first update, of weights that sampled and are the reference."""
    step = TrainingStep(config, CPU)
    batch = step.rolled_out(step.workload.build_batch(0, 8))
    step.workload.meter.clear()
    step.backward(batch)
    return metrics(step.workload)


@pytest.mark.parametrize(
    "options",
    [
        {"microbatch": 8, "num_iterations": 1},
        {"microbatch": 8},
        {"microbatch": 2},
        {"precision": "bf16"},
        {"precision": "bf16-pure"},
        {"execution": {"activation_checkpointing": True}},
        {"execution": {"loss_chunk_rows": 8}},
    ],
)
def test_at_step_0_the_ratio_is_exactly_1_and_the_divergence_exactly_0(options):
    first = first_update(grpo_config(**{"microbatch": 4, "num_iterations": 2, **options}))
    assert first["grpo/ratio"] == 1.0 and first["grpo/kl"] == 0.0
    assert first["grpo/clip_fraction"] == 0.0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_at_step_0_compiled_steps_differ_by_rounding_only(precision):
    """Eager passes measure the sampling policy and the reference, a compiled one the policy."""
    options = {"precision": precision, "num_iterations": 2, "kl": 0.1}
    first = first_update(grpo_config(microbatch=8, execution={"compile": True}, **options))
    ratio, divergence = (1e-5, 1e-6) if precision == "fp32" else (1e-2, 1e-3)
    assert abs(first["grpo/ratio"] - 1) < ratio and abs(first["grpo/kl"]) < divergence
    assert first["grpo/clip_fraction"] == 0


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_the_microbatch_changes_no_gradient(loss):
    """In float64, with completions of different lengths, two iterations and a divergence."""
    gradients = []
    for microbatch in (8, 4, 2, 1):
        config = grpo_config(microbatch=microbatch, loss=loss, num_iterations=2, kl=0.1)
        step = TrainingStep(config, CPU)
        step.model.double()
        torch.manual_seed(0)
        step.workload.reference.double()
        for weight in step.workload.reference.parameters():
            weight.data += 0.01 * torch.randn_like(weight)
        ids, mask, _, old, reference = step.rolled_out(step.workload.build_batch(0, 8))
        mask = (torch.arange(12) < torch.arange(3, 11)[:, None]).to(mask.dtype)
        gain = torch.linspace(-1, 1, 8).double()
        value = step.backward((ids, mask, gain, old + 0.1, reference))
        gradients.append([value, *(p.grad.clone() for p in step.parameters)])
    for other in gradients[1:]:
        for first, second in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)


def test_the_generation_batch_size_and_the_batch_change_no_token():
    """In float64."""
    tokens = []
    for size, batches in ((None, [(16, 16)]), (1, [(16, 8), (24, 8)]), (3, [(16, 8), (24, 8)])):
        step = TrainingStep(grpo_config(execution={"generation_batch_size": size}), CPU)
        step.model.double()
        parts = [step.rolled_out(step.workload.build_batch(*batch))[0] for batch in batches]
        tokens.append(torch.cat(parts))
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[2])


@pytest.mark.parametrize(
    ("generation_batch_size", "shrunk_to", "rows"),
    [(None, None, 32), (None, 4, 16), (16, None, 16), (16, 4, 8)],
)
def test_a_smaller_microbatch_samples_fewer_completions_at_once(
    generation_batch_size, shrunk_to, rows
):
    execution = {"generation_batch_size": generation_batch_size}
    config = grpo_config(batch=32, microbatch=8, execution=execution)
    config = config.for_attempt(shrunk_to or 8)
    step, seen = TrainingStep(config, CPU), set()
    extend = step.model.extend
    step.model.extend = lambda ids, past: seen.add(len(ids)) or extend(ids, past)
    step.rolled_out(step.workload.build_batch(0, 32))
    assert seen == {rows}


def test_seconds_are_recorded_by_phase_and_peak_memory_by_step():
    config = grpo_config()
    step = TrainingStep(config, CPU)
    steps = Steps(config, step, Progress())
    steps.take(1)
    steps.progress.step = 1
    steps.store()
    line = steps.end_interval()
    for phase in ("generate", "score", "log_probs", "update"):
        assert line[f"perf/{phase}_seconds"] > 0
    assert steps.progress.peak_memory_bytes >= line["memory/allocated_bytes"]


class LogitsOnly(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.forward = model.forward


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("seen", [lambda model: model, LogitsOnly])
def test_log_probabilities_are_those_of_transformers(temperature, seen):
    config = grpo_config(temperature=temperature)
    step = TrainingStep(config, CPU)
    llama = llama_with_weights_of(step.model, config.science.model)
    ids = step.rolled_out(step.workload.build_batch(0, 8))[0]
    own, entropies = step.workload.log_probs(seen(step.model), ids)
    with torch.no_grad():
        every = torch.log_softmax(llama(ids).logits[:, 39:-1] / temperature, dim=-1)
    expected = every.gather(-1, ids[:, 40:, None]).squeeze(-1)
    torch.testing.assert_close(own.detach(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(every.exp() * every).sum(-1), rtol=1e-5, atol=1e-5)


def test_equal_rewards_leave_the_weights_as_they_are():
    step = TrainingStep(grpo_config(kl=0.0), CPU)
    step.workload.reward = lambda *_: {"all": 1.0}
    before = [p.detach().clone() for p in step.parameters]
    assert step(step.workload.build_batch(0, 8), 0.0) == 0
    assert metrics(step.workload)["train/grad_norm"] == 0
    assert all(map(torch.equal, before, step.parameters))


def test_a_reference_is_kept_only_if_the_divergence_has_a_weight():
    assert TrainingStep(grpo_config(kl=0.0), CPU).workload.reference is None
    weights = [*TrainingStep(grpo_config(kl=0.1), CPU).workload.reference.parameters()]
    assert not any(weight.requires_grad for weight in weights)
    assert sum(weight.numel() for weight in weights) == 216_512


def test_several_iterations_move_away_from_the_sampling_policy():
    step = TrainingStep(grpo_config(num_iterations=3), CPU)
    step.workload.reward = lambda _, completion: {"length": float(len(completion.text))}
    step(step.workload.build_batch(0, 8), 1e-2)
    assert metrics(step.workload)["grpo/ratio"] != 1.0


def test_metrics_continue_after_a_checkpoint():
    config = grpo_config()
    means = []
    for is_interrupted in (False, True):
        step, progress = TrainingStep(config, CPU), Progress()
        steps = Steps(config, step, progress)
        for t in (1, 2, 3, 4):
            steps.take(t)
            progress.step = t
            if is_interrupted and t == 2:
                steps.store()
                step.warm_up()
                steps = Steps(config, step, progress)
        steps.store()
        line = steps.end_interval()
        means.append({name: line[name] for name in line if not name.startswith("perf/")})
    assert means[0] == means[1] and means[0]["reward/mean"] >= 0


def test_a_component_that_is_paid_now_and_then_is_averaged_over_all_completions():
    step = TrainingStep(grpo_config(), CPU)
    workload, paid = step.workload, iter([False, True, False, False])
    for is_interrupted in (False, False, True, False):
        if is_interrupted:
            state = workload.meter.state()
            workload.meter.clear()
            workload.meter.restore(state)
        components = {"base": 1.0} | ({"bonus": 3.0} if next(paid) else {})
        workload.reward = lambda *_, components=components: components
        step.rolled_out(workload.build_batch(0, 8))
    means = metrics(workload)
    assert means["reward/bonus"] == 3 / 4 and means["reward/base"] == 1
    assert means["reward/mean"] == means["reward/base"] + means["reward/bonus"]
    workload.meter.clear()
    step.rolled_out(workload.build_batch(0, 8))
    assert metrics(workload)["reward/bonus"] == 0


def test_a_reward_can_be_learned():
    step = TrainingStep(grpo_config(batch=32, kl=0.0, scale_rewards="none"), CPU)
    step.workload.reward = lambda _, completion: {"end": float(completion.has_ended)}
    rewards = []
    for t in range(12):
        step.workload.meter.clear()
        step(step.workload.build_batch(32 * t, 32), 3e-3)
        rewards.append(metrics(step.workload)["reward/mean"])
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3


def test_a_large_reward_is_not_a_divergence(tmp_path, monkeypatch):
    """An evaluation is a mean reward, far from the surrogate's loss of about 0."""
    (tmp_path / "large.py").write_text("def reward(_, text): return 200 + len(text) % 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "large", raising=False)
    settings = {"batches": [8], "model": "quick", "data": "synthetic", "budget": 8 * 52 * 8}
    settings["workload"] = {**GRPO, "reward": "large:reward"}
    folder, logistics = SweepFolder(tmp_path / "sweep"), Execution(device="cpu")
    save_plan(
        make_plan(Request(load_experiment("grpo-words", settings), logistics, folder)).plan, folder
    )
    (trial,) = folder.trials()
    trial.write_status(begin_attempt(trial.read_status()))
    assert InlineExecutor().submit(trial, {}).result().kind == "complete"
    result = trial.read_result()
    assert result.steps == 8 and result.final_valid_loss is result.best_valid_loss is None
    rewards = (result.initial_valid_reward, result.final_train_reward, result.final_valid["reward"])
    assert all(200 <= reward < 207 for reward in rewards)


@pytest.mark.parametrize(
    ("batches", "nearest"), [([12, 18], "16 or 20"), ([3], "Use 4"), ([8, 9], "8 or 12")]
)
def test_batches_are_whole_groups(batches, nearest):
    with pytest.raises(SweepError, match=f"group_size .4.*{nearest}"):
        load_experiment("grpo-words", {"batches": batches, "workload": GRPO})


def test_settings_of_sampling_are_refused_for_other_workloads():
    execution = Execution(device="cpu", generation_batch_size=4)
    with pytest.raises(SweepError, match="generation_batch_size"):
        make_plan(Request(load_experiment("quick"), execution, SweepFolder(Path("nowhere"))))


def test_microbatches_are_whole_groups_or_equal_parts_of_one():
    assert grpo_config(batch=24, microbatch=12).microbatch_size == 12
    assert grpo_config(batch=24, microbatch=2).microbatch_size == 2
    with pytest.raises(SweepError, match=r"got 6\. Use 4 or 8"):
        grpo_config(batch=24, microbatch=6)
    with pytest.raises(SweepError, match=r"got 3\. Use 2 or 4"):
        grpo_config(batch=24, microbatch=3)


def test_an_evaluation_is_a_mean_reward_and_no_loss():
    step = TrainingStep(grpo_config(), CPU)
    final = step.run_evaluation(step.workload.evaluate_finally)
    assert final.train_loss is final.valid_losses is None
    for evaluated in (final.metrics, step.run_evaluation(step.workload.evaluate)):
        assert [*evaluated] == ["reward"] and 0 <= evaluated["reward"] <= 1.1
    assert 0 <= final.train_reward <= 1.1


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_losses_and_gradients_are_those_of_trl(loss, scale, tmp_path):
    """The same weights, prompts, completions, rewards and settings; a reference that differs."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config = grpo_config(loss=loss, scale_rewards=scale, kl=0.1, temperature=1.0)
    step = TrainingStep(config, CPU)
    workload, model = step.workload, step.model.double()  # in float32 the difference is 1e-3
    settings = config.science.model
    workload.reference.double()
    llama = llama_with_weights_of(model, settings).double()
    torch.manual_seed(0)
    for weight in workload.reference.parameters():
        weight.data += 0.01 * torch.randn_like(weight)
    values = [0.0, 1.0, 0.3, 0.1, 0.5, 0.5, 0.5, 0.9]
    rewards = iter(values)
    workload.reward = lambda *_: {"given": next(rewards)}
    sampled = workload.generate
    ends = torch.arange(12) > torch.arange(8)[:, None] + 2  # so that the kinds of loss differ
    workload.generate = lambda *a, **k: sampled(*a, **k).masked_fill(ends, 0)
    batch = step.rolled_out(workload.build_batch(0, 8))
    ids, lengths = batch[0], batch[1].sum(dim=1).long().tolist()
    assert len(set(lengths)) > 4
    own = step.backward(batch)

    reference = tmp_path / "reference"
    llama_with_weights_of(workload.reference, settings).double().save_pretrained(reference)
    llama.config._name_or_path = str(reference)

    class Trainer(trl.GRPOTrainer):
        def _generate(self, prompts):
            completions = [row[40 : 40 + n].tolist() for row, n in zip(ids, lengths, strict=True)]
            texts = [str(number) for number in range(len(ids))]
            return ids[:, :40].tolist(), completions, None, texts, None, {}, None, None

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="a")),
        eos_token="<end>",
        pad_token="<end>",
    )
    trainer = Trainer(
        model=llama,
        reward_funcs=lambda completions, **_: values[: len(completions)],
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            loss_type=loss,
            scale_rewards=scale,
            beta=0.1,
            epsilon=0.2,
            use_bias_correction_kl=False,  # which multiplies the divergence by the ratio
            report_to="none",
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * 8)
    torch.testing.assert_close(batch[2], inputs["advantages"], rtol=1e-5, atol=1e-6)
    theirs = trainer._compute_loss(trainer.model, inputs)
    theirs.backward()
    assert own.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
    for name, parts in names_in_llama(len(model.blocks)).items():
        expected = torch.cat([llama.get_parameter(part).grad for part in parts])
        apart = (model.get_parameter(name).grad - expected).norm() / expected.norm()
        assert apart < 1e-4, (name, apart)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_rewards_has_no_advantage(scale):
    rewards = torch.tensor([0.1] * 4 + [0.0, 1.0, 0.0, 1.0])
    gain = advantages(rewards, 4, scale)
    assert (gain[:4] == 0).all() and torch.isfinite(gain).all()
    high = gain[5].item()
    assert gain[4:].tolist() == pytest.approx([-high, high, -high, high])
    assert (advantages(torch.full((8,), 0.7), 4, scale) == 0).all()


def test_advantages_are_those_of_the_paper():
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0])
    deviation = rewards.std().item()
    expected = [(r - 3) / (deviation + 1e-4) for r in (1, 2, 3, 6)]
    assert advantages(rewards, 4, "group").tolist() == pytest.approx(expected)
    assert advantages(rewards, 4, "none").tolist() == pytest.approx([-2, -1, 0, 3])


# By hand: ratio, advantage, clip_high; the loss, its derivative by the log ratio, is it clipped
SURROGATES = [
    (0.5, 1, None, -0.5, -0.5, 0),
    (0.5, -1, None, 0.8, 0, 1),
    (1.0, 1, None, -1.0, -1.0, 0),
    (1.0, -1, None, 1.0, 1.0, 0),
    (1.5, 1, None, -1.2, 0, 1),
    (1.5, -1, None, 1.5, 1.5, 0),
    (3.0, 1, None, -1.2, 0, 1),
    (3.0, -1, None, 3.0, 3.0, 0),
    (0.5, -1, 0.6, 0.8, 0, 1),  # clip_high does not apply below 1
    (1.5, 1, 0.6, -1.5, -1.5, 0),  # within 1.6
    (3.0, 1, 0.6, -1.6, 0, 1),
    (3.0, -1, 0.6, 3.0, 3.0, 0),
]


@pytest.mark.parametrize(("ratio", "gain", "high", "loss", "slope", "is_clipped"), SURROGATES)
def test_the_ratio_is_clipped_only_against_further_gain(ratio, gain, high, loss, slope, is_clipped):
    old = torch.tensor([[-2.0, -0.7]], dtype=torch.float64)
    log_probs = (old + math.log(ratio)).requires_grad_(True)
    settings = GrpoSettings(clip=0.2, clip_high=high, kl=0.0)
    advantage = torch.tensor([gain], dtype=torch.float64)
    losses, metrics = surrogate(log_probs, old, None, advantage, settings)
    losses.sum().backward()
    assert losses.tolist() == [[pytest.approx(loss)] * 2]
    assert log_probs.grad.tolist() == [[pytest.approx(slope)] * 2]
    assert metrics["grpo/clip_fraction"].tolist() == [[is_clipped] * 2]
    assert metrics["grpo/ratio"].tolist() == [[pytest.approx(ratio)] * 2]
    assert "grpo/kl" not in metrics


@pytest.mark.parametrize(
    ("share", "value", "slope"),
    [(2.0, 1 - math.log(2), -1), (1.0, 0, 0), (0.5, math.log(2) - 0.5, 0.5)],
)
def test_the_divergence_is_schulmans_k3(share, value, slope):
    """With r, the reference's probability over the policy's: r - ln r - 1, with slope 1 - r."""
    log_probs = torch.tensor([[-2.0, -0.7]], dtype=torch.float64, requires_grad=True)
    reference, gain = log_probs.detach() + math.log(share), torch.zeros(1, dtype=torch.float64)
    losses, metrics = surrogate(log_probs, None, reference, gain, GrpoSettings(kl=0.1))
    losses.sum().backward()
    assert metrics["grpo/kl"].tolist() == [[pytest.approx(value)] * 2]
    assert losses.tolist() == [[pytest.approx(0.1 * value)] * 2]
    assert log_probs.grad.tolist() == [[pytest.approx(0.1 * slope)] * 2]


def test_the_mask_includes_the_end_and_nothing_after_it():
    ids = torch.tensor([[5, 0, 0, 0], [5, 6, 7, 8], [0, 5, 0, 6]])
    mask = completion_mask(ids, 0)
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    for loss, divisor in (("grpo", 3), ("dr_grpo", 12), ("dapo", 7)):
        workload = build_workload(grpo_config(loss=loss), CPU)
        assert int(workload.loss_tokens((ids, mask))) == divisor
