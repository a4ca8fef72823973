"""The contract of all workloads, the checks of a user's own, and the exchange between ranks."""

import math
import re
import sys

import pytest
import torch
import torch.distributed as dist

from sweep.data.synthetic_stories import synthetic_identity
from sweep.data.tokens import prepare_data
from sweep.errors import SweepError
from sweep.training.process import FreshProcess
from sweep.training.step import TrainingStep
from sweep.workloads import ranks
from sweep.workloads.build import build_workload, inspect_workload
from sweep.workloads.language import share_out
from sweep.workloads.workload import Workload
from tests.workloads.trials import CPU, GRPO, grpo_config, trial_config

MODULE = """
from sweep.workloads.pretrain import Pretrain

class Own(Pretrain): pass

class Half:
    tokens_per_sequence = 1
    build_model = build_batch = loss_tokens = loss_sum = evaluate = evaluate_finally = None
    def __init__(self, config, device): pass

class Short(Pretrain):
    tokens_per_sequence = property(lambda self: 7, lambda self, value: None)

class Raising:
    def __init__(self, config, device): raise ValueError("no weights")

number = 5

def reward(prompt, text): return {"length": len(text), "first": ord(text[0])}
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "own_workload.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_workload", raising=False)


@pytest.fixture(params=["pretrain", "grpo", "chess", "quadratic", "own_workload:Own"])
def config(request, user_module):
    if request.param == "grpo":
        return grpo_config()
    if request.param == "chess":
        pytest.importorskip("chess")
        return trial_config("grpo-chess", model="quick", context=96, vocabulary=256)
    if request.param == "quadratic":
        return trial_config("quadratic")
    return trial_config("quick", workload=request.param)


def test_equal_trials_build_equal_models(config):
    models = [build_workload(config, CPU).build_model() for _ in range(2)]
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    assert all(p.dtype == torch.float32 and p.device == CPU for p in models[0].parameters())


def test_a_batch_consists_of_the_same_sequences_however_the_stream_is_read(config):
    workload = build_workload(config, CPU)
    whole = workload.build_batch(8, 12)
    parts = [workload.build_batch(first, 4) for first in (8, 12, 16)]
    for tensor, *pieces in zip(whole, *parts, strict=True):
        assert tensor.shape[0] == 12 and torch.equal(tensor, torch.cat(pieces))


@pytest.mark.parametrize("batch", ["stream", "random"])
def test_the_loss_of_a_batch_is_the_sum_of_the_losses_of_its_parts(config, batch):
    step = TrainingStep(config, CPU)
    workload, model = step.workload, step.model
    torch.manual_seed(0)
    drawn = workload.build_batch(0, 8) if batch == "stream" else workload.random_batch(8)
    whole = step.rolled_out(drawn)
    loss = workload.loss_sum(model, whole)
    parts = [workload.loss_sum(model, tuple(t[i : i + 4] for t in whole)) for i in (0, 4)]
    assert loss.requires_grad and loss.ndim == 0 and loss.dtype == torch.float32
    torch.testing.assert_close(loss, parts[0] + parts[1], rtol=1e-5, atol=1e-5)
    assert workload.loss_tokens(whole) > 0


def test_evaluations_are_finite_and_repeatable_and_leave_the_model_as_it_was(config):
    step = TrainingStep(config, CPU)
    workload, model = step.workload, step.model
    before = [p.detach().clone() for p in model.parameters()]
    first = step.run_evaluation(workload.evaluate)
    assert step.run_evaluation(workload.evaluate) == first
    final = step.run_evaluation(workload.evaluate_finally)
    if config.science.workload.samples:
        values = (first["reward"], final.metrics["reward"], final.train_reward)
    else:
        values = (first, final.metrics["loss"], final.train_loss)
        assert final.valid_losses.dtype == "float64" and final.valid_losses.shape[1] == 2
    assert all(map(math.isfinite, values))
    assert model.training and all(map(torch.equal, before, model.parameters()))
    epochs = workload.epochs()
    assert epochs is None or epochs > 0


def test_only_workloads_that_sample_change_their_batches(config):
    workload = build_workload(config, CPU)
    assert (type(workload).roll_out != Workload.roll_out) == config.science.workload.samples
    assert workload.tokens_per_sequence == config.tokens_per_sequence


def test_a_workload_that_can_start_passes_the_check(config):
    science, text = config.science, None
    if science.data:
        text = prepare_data(science.data, None, science.tokenizer)
    inspect_workload(config, text, with_weights=False)
    inspect_workload(config, None, with_weights=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Half", "it builds a Half."),
        ("Short", "tokens_per_sequence 7 instead of the experiment's 64"),
        ("number", "TypeError"),
        ("Raising", "but raised ValueError: no weights (own_workload.py, line 15). Correct it."),
    ],
)
def test_a_user_workload_that_cannot_start_is_refused(user_module, name, message):
    config = trial_config("quick", workload=f"own_workload:{name}")
    with pytest.raises(SweepError, match=re.escape(message)):
        inspect_workload(config, None, with_weights=False)


def test_a_text_that_does_not_fill_a_window_is_refused():
    config = trial_config("quick")
    text = prepare_data(config.science.data, None, config.science.tokenizer)
    longer = config.model_copy(update={"tokens_per_sequence": len(text.valid)})
    with pytest.raises(SweepError, match="at least one window"):
        inspect_workload(longer, text, with_weights=False)


@pytest.mark.parametrize(
    ("grpo", "is_prepared", "message"),
    [
        ({"prompt_tokens": 2}, True, "prompt_tokens must hold the longest prompt"),
        ({"reward": "own_workload:number"}, True, "not callable"),
        ({"reward": "own_workload:reward"}, True, "raised IndexError"),  # for an empty completion
        ({"reward": "own_workload:absent"}, False, "has no attribute 'absent'"),
        ({"task": "chess"}, False, "extra chess"),
    ],
)
def test_prompts_and_rewards_of_grpo_are_tried_before_a_sweep_starts(
    user_module, monkeypatch, grpo, is_prepared, message
):
    """A missing reward or extra even before the text is prepared."""
    monkeypatch.setitem(sys.modules, "chess", None)
    config, text = grpo_config(**grpo), None
    if is_prepared:
        text = prepare_data(synthetic_identity(), None, config.science.tokenizer)
    with pytest.raises(SweepError, match=message):
        inspect_workload(config, text, with_weights=False)


def test_random_batches_of_grpo_have_completions_of_the_maximum_length():
    step = TrainingStep(grpo_config(microbatch=4, kl=0.1, num_iterations=2), CPU)
    for count in (8, 2):  # an evaluation may be smaller than a group
        ids, mask, gain, old, reference = step.rolled_out(step.workload.random_batch(count))
        assert ids.shape == (count, 40 + GRPO["new_tokens"]) and mask.shape == (count, 12)
        assert not gain.any() and old.all() and reference.all()
    assert torch.isfinite(step(step.workload.random_batch(8), 1e-3))


NAME = "checkpoint-" + "9" * 200  # longer than any fixed buffer
WORLD = 3


def exchange(rank, store, should_stop):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        assert (ranks.is_distributed(), ranks.rank(), ranks.count()) == (True, rank, WORLD)
        for value in (NAME, "ünïcode", "", None, 0.1, -3):
            assert ranks.broadcast(value if rank == 0 else "another") == value
        assert ranks.all_gather(rank * 7) == [0, 7, 14]
        assert ranks.all_reduce_(torch.tensor([1.0, rank])).tolist() == [WORLD, 3.0]
        calls = []
        squares = share_out([1, 2, 3, 4], lambda n: calls.append(n) or torch.full((n,), n**2))
        assert [part.tolist() for part in squares] == [[n**2] * n for n in (1, 2, 3, 4)]
        return len(calls)
    finally:
        dist.destroy_process_group()


def test_processes_agree_on_the_value_of_the_first_and_share_work(tmp_path):
    processes = [FreshProcess(exchange, rank, tmp_path / "store") for rank in range(WORLD)]
    assert [process.result() for process in processes] == [2] * WORLD


def test_one_process_sends_nothing():
    assert (ranks.is_distributed(), ranks.rank(), ranks.count()) == (False, 0, 1)
    assert ranks.broadcast(NAME) == NAME and ranks.broadcast(None) is None
    assert ranks.all_gather(3) == [3] and ranks.all_reduce_(torch.ones(1)).item() == 1
    assert share_out([1, 2], lambda n: torch.tensor([n])) == [1, 2]
