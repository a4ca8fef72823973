"""GRPO: what must hold exactly, whatever is learned."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.config.grpo import GrpoSettings
from sweep.data.synthetic import synthetic_identity
from sweep.errors import SweepError
from sweep.models.generation import Sampling, completion_uniforms, generate
from sweep.orchestration.planning import make_plan, save_plan
from sweep.plan.retry import begin_attempt
from sweep.training.progress import Progress
from sweep.training.step import TrainingStep
from sweep.training.steps import Steps, Sums
from sweep.training.worker import as_attempted, run_attempt
from sweep.trial.folder import SweepFolder, TrialStatus
from sweep.workloads.grpo import Grpo
from sweep.workloads.grpo_loss import (
    advantages,
    completion_mask,
    denominator,
    surrogate,
    token_weights,
)
from tests.plans import build_plan

CPU = torch.device("cpu")
GRPO = {"task": "words", "group_size": 4, "prompt_tokens": 40, "new_tokens": 12}


def trial_config(batch=8, microbatch=None, execution=None, precision="fp32", **grpo):
    fields = {
        "batches": [batch],
        "precision": precision,
        "budget": 100 * batch * 52,
        "model": "quick",
    }
    fields |= {"data": "synthetic", "grpo": {**GRPO, **grpo}}
    threads = Execution(device="cpu", threads=2, **(execution or {}))
    experiment = load_experiment("grpo-words", fields)
    plan = build_plan(experiment, threads, data=synthetic_identity(), microbatch=microbatch)
    row = plan.trials[0].model_copy(update={"learning_rate": 1e-3, "id": "x"})
    return plan.trial_config(row, "sweep")


def watched(workload):
    sums = workload.meter.state()
    return {name: total / count for name, (total, count) in sums.items() if count}


def watched_at_the_start(config, microbatch):
    """What the first update sees of weights that sampled, and that are the reference."""
    step = TrainingStep(config, CPU, microbatch)
    batch = step.rolled_out(step.workload.build_batch(0, 8))
    step.workload.meter.clear()
    step.backward(batch)
    return watched(step.workload)


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("microbatch", [8, 2])
def test_at_the_start_the_ratio_is_exactly_1_and_the_divergence_exactly_0(iterations, microbatch):
    config = trial_config(microbatch=microbatch, num_iterations=iterations)
    found = watched_at_the_start(config, microbatch)
    assert found["grpo/ratio"] == 1.0 and found["grpo/kl"] == 0.0
    assert found["grpo/clip_fraction"] == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "bf16-pure"},
        {"execution": {"shares_prompts": True}},
        {"execution": {"activation_checkpointing": True}},
        {"execution": {"loss_chunk_rows": 8}},
    ],
)
def test_at_the_start_they_are_exact_whatever_saves_memory(options):
    found = watched_at_the_start(trial_config(microbatch=4, num_iterations=2, **options), 4)
    assert found["grpo/ratio"] == 1.0 and found["grpo/kl"] == 0.0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_at_the_start_compiled_steps_are_off_by_rounding_only(precision):
    """What sampled and the reference are measured by eager passes, the policy by a compiled one."""
    options = {"precision": precision, "num_iterations": 2, "kl": 0.1}
    config = trial_config(microbatch=8, execution={"compile": True}, **options)
    found = watched_at_the_start(config, 8)
    ratio, divergence = (1e-5, 1e-6) if precision == "fp32" else (1e-2, 1e-3)
    assert abs(found["grpo/ratio"] - 1) < ratio and abs(found["grpo/kl"]) < divergence
    assert found["grpo/clip_fraction"] == 0


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_a_microbatch_changes_no_gradient(loss):
    """In float64, with completions of different lengths, two iterations and a divergence."""
    gradients = []
    for microbatch in (8, 4, 2, 1):
        config = trial_config(microbatch=microbatch, loss=loss, num_iterations=2, kl=0.1)
        step = TrainingStep(config, CPU, microbatch)
        step.model.double()
        torch.manual_seed(0)
        step.workload.reference.double()
        for weight in step.workload.reference.parameters():
            weight.data += 0.01 * torch.randn_like(weight)
        ids, mask, _, old, reference = step.rolled_out(step.workload.build_batch(0, 8))
        lengths = torch.arange(8) + 3
        mask = (torch.arange(12) < lengths[:, None]).to(mask.dtype)
        gain = torch.linspace(-1, 1, 8).double()
        value = step.backward((ids, mask, gain, old + 0.1, reference))
        gradients.append([value, *(p.grad.clone() for p in step.parameters)])
    for other in gradients[1:]:
        for first, second in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)


def test_how_many_are_sampled_at_once_changes_no_token():
    found = []
    for size in (None, 1, 3):
        config = trial_config(execution={"generation_batch_size": size})
        step = TrainingStep(config, CPU, 8)
        step.model.double()
        found.append(step.rolled_out(step.workload.build_batch(16, 8))[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("asked", "now", "rows"), [(None, None, 32), (None, 4, 16), (16, None, 16), (16, 4, 8)]
)
def test_where_the_microbatch_had_to_shrink_fewer_are_sampled_at_once(asked, now, rows):
    """Memory that runs out in sampling runs out no more in the next attempt, as a worker begins."""
    config = trial_config(batch=32, microbatch=8, execution={"generation_batch_size": asked})
    config = as_attempted(config, TrialStatus(microbatch_size=now))
    step, seen = TrainingStep(config, CPU, config.microbatch_size), set()
    step.workload.on_logits = lambda logits: seen.add(len(logits))
    step.rolled_out(step.workload.build_batch(0, 32))
    assert seen == {rows}


def test_peak_memory_is_noted_by_phase():
    config = trial_config()
    step = TrainingStep(config, CPU, 8)
    steps = Steps(config, step, Sums(Progress(), CPU, step.workload.meter))
    steps.take(1, None)
    largest, peaks = steps.peak_memory_bytes(), steps.phase_peaks()
    phases = ("generate", "score", "log_probs", "update")
    assert list(peaks) == [f"perf/{phase}_peak_bytes" for phase in phases]
    assert 0 < max(peaks.values()) <= largest
    assert steps.phase_peaks() == {}
    assert all(watched(step.workload)[f"perf/{phase}_seconds"] > 0 for phase in phases)


@pytest.mark.parametrize(
    ("microbatch", "checkpoints"), [(8, False), (4, False), (2, False), (1, False), (4, True)]
)
def test_a_prompt_seen_once_for_its_completions_changes_nothing(microbatch, checkpoints):
    """In float64: the same tokens, loss and gradient, with whole groups and parts of one."""
    found = []
    shared = {"shares_prompts": True, "activation_checkpointing": checkpoints}
    for execution in ({}, shared):
        config = trial_config(microbatch=microbatch, execution=execution, kl=0.1, num_iterations=2)
        step = TrainingStep(config, CPU, microbatch)
        step.model.double()
        step.workload.reference.double()
        seen = []
        hook = step.model.embedding.register_forward_pre_hook(lambda _, a, s=seen: s.append(a[0]))
        batch = step.rolled_out(step.workload.build_batch(0, 8))
        hook.remove()
        batch = (*batch[:2], torch.linspace(-1, 1, 8).double(), *batch[3:])
        loss = step.backward(batch)
        found.append([*batch, loss, *(p.grad for p in step.parameters)])
        at_once = min(8, 4 * microbatch)
        assert seen[0].shape == (at_once // 4 if execution else at_once, 40)
    assert torch.equal(found[0][0], found[1][0])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-8)  # rotary tables are float32


def test_a_completion_is_the_same_in_every_batch():
    step = TrainingStep(trial_config(), CPU, 8)
    step.model.double()
    whole = step.rolled_out(step.workload.build_batch(0, 16))[0]
    parts = [step.rolled_out(step.workload.build_batch(first, 8))[0] for first in (0, 8)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_and_without_the_cache_the_same_tokens_are_chosen(temperature):
    step = TrainingStep(trial_config(), CPU, 8)
    model = step.model.double()
    prompts = torch.randint(1, 512, (6, 10), generator=torch.Generator().manual_seed(0))
    uniforms = completion_uniforms(3, np.arange(6), 30)
    sampling = Sampling(temperature, 0.95, end=0)
    cached = generate(model, prompts, uniforms, sampling)
    assert torch.equal(cached, generate(model, prompts, uniforms, sampling, is_cached=False))


def names_in_llama(blocks):
    """Return, by the name of each of our weights, which of Llama's are stacked in it."""
    names = {"embedding": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"]}
    for index in range(blocks):
        own, theirs = f"blocks.{index}.", f"model.layers.{index}."
        names |= {
            own + "query_key_value": [f"{theirs}self_attn.{name}_proj" for name in "qkv"],
            own + "attention_out": [theirs + "self_attn.o_proj"],
            own + "gate_up": [f"{theirs}mlp.{name}_proj" for name in ("gate", "up")],
            own + "down": [theirs + "mlp.down_proj"],
            own + "attention_norm": [theirs + "input_layernorm"],
            own + "feed_forward_norm": [theirs + "post_attention_layernorm"],
        }
    return {f"{n}.weight": [f"{m}.weight" for m in parts] for n, parts in names.items()}


def llama_of(model, settings):
    """Return transformers' Llama with the weights of ours."""
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=settings.d_model,
            intermediate_size=settings.d_ff,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            max_position_embeddings=settings.context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    )
    weights = {}
    for name, parts in names_in_llama(settings.layers).items():
        weight = model.get_parameter(name)
        weights |= dict(zip(parts, weight.chunk(len(parts)), strict=True))
    llama.load_state_dict(weights)
    return llama


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_log_probabilities_are_those_of_transformers(temperature):
    step = TrainingStep(trial_config(temperature=temperature), CPU, 8)
    llama = llama_of(step.model, step.workload.model_settings)
    ids = step.rolled_out(step.workload.build_batch(0, 8))[0]
    own, entropies = step.workload.log_probs(step.model, ids)
    with torch.no_grad():
        every = torch.log_softmax(llama(ids).logits[:, 39:-1] / temperature, dim=-1)
    expected = every.gather(-1, ids[:, 40:, None]).squeeze(-1)
    torch.testing.assert_close(own.detach(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(every.exp() * every).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_rewards_has_no_advantage(scale):
    rewards = torch.tensor([0.1] * 4 + [0.0, 1.0, 0.0, 1.0])
    found = advantages(rewards, 4, scale)
    assert (found[:4] == 0).all() and torch.isfinite(found).all()
    high = found[5].item()
    assert found[4:].tolist() == pytest.approx([-high, high, -high, high])
    all_equal = advantages(torch.full((8,), 0.7), 4, scale)
    assert (all_equal == 0).all()


def test_advantages_are_those_of_the_paper():
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0])
    found = advantages(rewards, 4, "group")
    deviation = rewards.std().item()
    assert found.tolist() == pytest.approx([(r - 3) / (deviation + 1e-4) for r in (1, 2, 3, 6)])
    assert advantages(rewards, 4, "none").tolist() == pytest.approx([-2, -1, 0, 3])


# By hand: ratio, gain, clip_high; the loss, its slope with the log of the ratio, is it clipped
SURROGATES = [
    (0.5, 1, None, -0.5, -0.5, 0),
    (0.5, -1, None, 0.8, 0, 1),
    (1.0, 1, None, -1.0, -1.0, 0),
    (1.0, -1, None, 1.0, 1.0, 0),
    (1.5, 1, None, -1.2, 0, 1),
    (1.5, -1, None, 1.5, 1.5, 0),
    (3.0, 1, None, -1.2, 0, 1),
    (3.0, -1, None, 3.0, 3.0, 0),
    (0.5, -1, 0.6, 0.8, 0, 1),  # below, the other bound holds
    (1.5, 1, 0.6, -1.5, -1.5, 0),  # within 1.6
    (3.0, 1, 0.6, -1.6, 0, 1),
    (3.0, -1, 0.6, 3.0, 3.0, 0),
]


@pytest.mark.parametrize(("ratio", "gain", "high", "loss", "slope", "is_clipped"), SURROGATES)
def test_the_ratio_is_clipped_where_it_would_gain(ratio, gain, high, loss, slope, is_clipped):
    old = torch.tensor([[-2.0, -0.7]], dtype=torch.float64)
    log_probs = (old + math.log(ratio)).requires_grad_(True)
    settings = GrpoSettings(clip=0.2, clip_high=high, kl=0.0)
    found = surrogate(log_probs, old, None, torch.tensor([gain], dtype=torch.float64), settings)
    found.losses.sum().backward()
    assert found.losses.tolist() == [[pytest.approx(loss)] * 2]
    assert log_probs.grad.tolist() == [[pytest.approx(slope)] * 2]
    assert found.is_clipped.tolist() == [[is_clipped] * 2] and found.divergences is None
    assert found.ratios.tolist() == [[pytest.approx(ratio)] * 2]


@pytest.mark.parametrize(("share", "value", "slope"), [(2.0, 1 - math.log(2), -1), (1.0, 0, 0),
                                                       (0.5, math.log(2) - 0.5, 0.5)])  # fmt: skip
def test_the_divergence_is_schulman_s_k3(share, value, slope):
    """Of the reference's probability over the policy's, r: r - ln r - 1, and 1 - r its slope."""
    log_probs = torch.tensor([[-2.0, -0.7]], dtype=torch.float64, requires_grad=True)
    reference, gain = log_probs.detach() + math.log(share), torch.zeros(1, dtype=torch.float64)
    found = surrogate(log_probs, None, reference, gain, GrpoSettings(kl=0.1))
    found.losses.sum().backward()
    assert found.divergences.tolist() == [[pytest.approx(value)] * 2]
    assert found.losses.tolist() == [[pytest.approx(0.1 * value)] * 2]
    assert log_probs.grad.tolist() == [[pytest.approx(0.1 * slope)] * 2]


def test_the_end_counts_and_nothing_behind_it():
    ids = torch.tensor([[5, 0, 0, 0], [5, 6, 7, 8], [0, 5, 0, 6]])
    mask = completion_mask(ids, 0)
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert denominator(mask, "grpo") == 3 and denominator(mask, "dr_grpo") == 12
    assert denominator(mask, "dapo") == 7
    assert token_weights(mask, "grpo").sum(dim=1).tolist() == pytest.approx([1, 1, 1])


def test_equal_rewards_train_nothing_and_cost_no_nan(monkeypatch):
    config = trial_config(kl=0.0)
    step = TrainingStep(config, CPU, 8)
    monkeypatch.setattr(type(step.workload.task), "reward", lambda *_: {"all": 1.0})
    before = [p.detach().clone() for p in step.parameters]
    output = step(step.workload.build_batch(0, 8), 0.0)
    assert output.loss == 0 and output.grad_norm == 0
    assert all(map(torch.equal, before, step.parameters))


def test_no_reference_is_kept_where_nothing_refers_to_it():
    assert TrainingStep(trial_config(kl=0.0), CPU, 8).workload.reference is None
    reference = TrainingStep(trial_config(kl=0.1), CPU, 8).workload.reference
    assert not any(p.requires_grad for p in reference.parameters())


def test_several_iterations_move_away_from_what_sampled():
    config = trial_config(num_iterations=3)
    step = TrainingStep(config, CPU, 8)
    step.workload.task.reward = lambda _, completion: {"length": float(len(completion.text))}
    step(step.workload.build_batch(0, 8), 1e-2)
    assert watched(step.workload)["grpo/ratio"] != 1.0


def test_what_is_watched_goes_on_after_a_checkpoint():
    config = trial_config()
    means = []
    for is_interrupted in (False, True):
        step, progress = TrainingStep(config, CPU, 8), Progress()
        sums = Sums(progress, CPU, step.workload.meter)
        steps = Steps(config, step, sums)
        for t in (1, 2, 3, 4):
            steps.take(t, None)
            progress.step = t
            if is_interrupted and t == 2:
                sums.store(progress)
                step.workload.meter.clear()
                sums = Sums(progress, CPU, step.workload.meter)
                steps = Steps(config, step, sums)
        sums.store(progress)
        found = progress.interval_metrics()
        means.append({name: found[name] for name in found if not name.startswith("perf/")})
    assert means[0] == means[1] and means[0]["reward/mean"] >= 0


def test_a_component_that_is_paid_now_and_then_is_averaged_over_all_completions():
    """Before it was paid first, after it, and in an interval in which it is not paid at all."""
    step = TrainingStep(trial_config(), CPU, 8)
    workload, paid = step.workload, iter([False, True, False, False])
    for is_interrupted in (False, False, True, False):
        if is_interrupted:
            known = workload.meter.state()
            workload.meter.clear()
            workload.meter.restore(known)
        parts = {"base": 1.0} | ({"bonus": 3.0} if next(paid) else {})
        workload.task.reward = lambda *_, parts=parts: parts
        step.rolled_out(workload.build_batch(0, 8))
    found = watched(workload)
    assert found["reward/bonus"] == 3 / 4 and found["reward/base"] == 1
    assert found["reward/mean"] == found["reward/base"] + found["reward/bonus"]
    workload.meter.clear()
    step.rolled_out(workload.build_batch(0, 8))
    assert watched(workload)["reward/bonus"] == 0


@pytest.mark.parametrize("taken", [0, 1])
def test_a_warm_up_is_not_watched(taken):
    """Not at the start, and not in an interval that a checkpoint interrupted."""
    step = TrainingStep(trial_config(kl=0.1, num_iterations=2), CPU, 8)
    for _ in range(taken):
        step(step.workload.build_batch(0, 8), 1e-3)
    before = step.workload.meter.state()
    step.warm_up()
    assert step.workload.meter.state() == before and bool(before) == bool(taken)


def test_a_reward_can_be_learned():
    """A reward for short completions shortens them."""
    config = trial_config(batch=32, kl=0.0, scale_rewards="none")
    step = TrainingStep(config, CPU, 32)
    task = step.workload.task
    task.reward = lambda prompt, completion: {"end": float(completion.has_ended)}
    rewards = []
    for t in range(12):
        step.workload.meter.clear()
        step(step.workload.build_batch(32 * t, 32), 3e-3)
        rewards.append(watched(step.workload)["reward/mean"])
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3


def planned_trial(path, **fields):
    """Plan one trial of eight completions a step, and return its folder."""
    folder = SweepFolder(path)
    settings = {"batches": [8], "model": "quick", "data": "synthetic", **fields}
    logistics = Execution(device="cpu", asks_memory=True)
    plan = make_plan(load_experiment("grpo-words", settings), logistics, folder).plan
    save_plan(plan, folder)
    (trial,) = folder.trials()
    trial.write_status(begin_attempt(trial.read_status()))
    return trial


def test_a_large_reward_is_no_divergence(tmp_path, monkeypatch):
    """An evaluation is minus the mean reward; a surrogate, about 0, is not held against it."""
    (tmp_path / "large.py").write_text("def reward(_, text): return 200 + len(text) % 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "large", raising=False)
    fields = {"grpo": {**GRPO, "reward": "large:reward"}, "budget": 8 * 52 * 8}
    trial = planned_trial(tmp_path / "sweep", **fields)
    assert run_attempt(trial.path, lambda: None).kind == "complete"
    result = trial.read_result()
    assert result["steps"] == 8 and -207 < result["final_valid_loss"] <= -200


def test_chess_is_sampled_scored_and_trained_on():
    """With a completion that names a move, one from a square to itself, and what is sampled."""
    pytest.importorskip("chess")
    fields = {"batches": [8], "precision": "fp32", "budget": 8 * 96, "model": "quick"}
    fields |= {"context": 96, "vocabulary": 256}
    execution = Execution(device="cpu", threads=2)
    plan = build_plan(load_experiment("grpo-chess", fields), execution, data=synthetic_identity())
    config = plan.trial_config(plan.trials[0], "sweep")
    step = TrainingStep(config, CPU, 8)
    workload, sampled = step.workload, []

    def generate_some(*arguments, **options):
        ids = Grpo.generate(workload, *arguments, **options)
        for row, move in zip(ids, (" e4e4 ", " e2e4 "), strict=False):
            row[: len(move)] = torch.tensor(workload.tokenizer.encode_batch([move])[0])
        sampled.append(ids)
        return ids

    workload.generate = generate_some
    output = step(workload.build_batch(0, 8), 1e-3)
    assert output.grad_norm > 0 and sampled[0].shape == (8, 6)
    assert watched(workload)["reward/format"] >= 2 * 0.2 / 8
    assert -1 <= step.evaluated(workload.evaluate) <= 0


@pytest.mark.parametrize(
    ("batches", "nearest"), [([12, 18], "16 or 20"), ([3], "3: 4"), ([8, 9], "8 or 12")]
)
def test_batches_are_whole_groups(batches, nearest):
    with pytest.raises(SweepError, match=f"whole groups of 4 .*{nearest}"):
        load_experiment("grpo-words", {"batches": batches, "grpo": GRPO})


@pytest.mark.parametrize("given", [{"shares_prompts": True}, {"generation_batch_size": 4}])
def test_what_is_said_of_sampling_is_refused_where_nothing_is_sampled(given):
    logistics = Execution(device="cpu", **given)
    with pytest.raises(SweepError, match="means nothing but to the workload grpo"):
        make_plan(load_experiment("quick"), logistics, SweepFolder(Path("nowhere")))


def test_microbatches_are_whole_groups_or_equal_parts_of_one():
    assert trial_config(batch=24, microbatch=12).microbatch_size == 12
    assert trial_config(batch=24, microbatch=2).microbatch_size == 2
    with pytest.raises(SweepError, match=r"equal parts of one, got 6\. Use 4 or 8"):
        trial_config(batch=24, microbatch=6)
    with pytest.raises(SweepError, match=r"got 3\. Use 2 or 4"):
        trial_config(batch=24, microbatch=3)


def test_rewards_are_losses_with_the_sign_changed():
    workload = Grpo(trial_config(), CPU)
    model = workload.build_model()
    found = workload.evaluate_finally(model)
    assert -1.1 <= found.valid_loss <= 0 and found.valid_losses.shape == (256, 2)
    assert not math.isnan(workload.evaluate(model))


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_losses_and_gradients_are_those_of_trl(loss, scale, tmp_path):
    """The same weights, prompts, completions, rewards and settings; a reference that differs."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config = trial_config(loss=loss, scale_rewards=scale, kl=0.1, temperature=1.0)
    step = TrainingStep(config, CPU, 8)
    workload, model = step.workload, step.model.double()  # in float32 they are 1e-3 apart
    workload.reference.double()
    llama = llama_of(model, workload.model_settings).double()
    torch.manual_seed(0)
    for weight in workload.reference.parameters():
        weight.data += 0.01 * torch.randn_like(weight)
    values = [0.0, 1.0, 0.3, 0.1, 0.5, 0.5, 0.5, 0.9]
    score = workload.score
    workload.score = lambda prompts, ids: (np.array(values), score(prompts, ids)[1])
    sampled = workload.generate
    ends = torch.arange(12) > torch.arange(8)[:, None] + 2  # so that the kinds of loss differ
    workload.generate = lambda *a, **k: sampled(*a, **k).masked_fill(ends, 0)
    batch = step.rolled_out(workload.build_batch(0, 8))
    ids, lengths = batch[0], batch[1].sum(dim=1).long().tolist()
    assert len(set(lengths)) > 4
    own = step.backward(batch)

    reference = tmp_path / "reference"
    llama_of(workload.reference, workload.model_settings).double().save_pretrained(reference)
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
