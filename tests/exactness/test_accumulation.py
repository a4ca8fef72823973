"""Two splits of one batch give the same gradient."""

import pytest
import torch

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.training.step import TrainingStep
from tests.plans import build_plan

CPU = torch.device("cpu")
SYNTHETIC = {"name": "synthetic"}


def build_step(microbatch, model="quick", workload="pretrain", batch=12):
    name = "quick" if workload == "pretrain" else "quadratic"
    overrides = {"precision": "fp32", "batches": [batch], "budget": 10**6, "model": model}
    plan = build_plan(
        load_experiment(name, overrides),
        Execution(device="cpu", threads=2),
        data=SYNTHETIC if workload == "pretrain" else None,
    )
    return TrainingStep(plan.trial_config(plan.trials[0], "test"), CPU, microbatch)


@pytest.mark.parametrize("workload", ["pretrain", "quadratic"])
@pytest.mark.parametrize("microbatch", [1, 3, 4, 5, 6])
def test_the_gradient_does_not_depend_on_the_split(microbatch, workload):
    model = "quick" if workload == "pretrain" else "quadratic"
    whole, split = (build_step(size, model, workload) for size in (12, microbatch))
    torch.manual_seed(0)
    batch = whole.workload.random_batch(12)
    loss, other = whole.backward(batch), split.backward(batch)
    torch.testing.assert_close(loss, other, rtol=1e-6, atol=1e-6)
    for a, b in zip(whole.parameters, split.parameters, strict=True):
        scale = a.grad.abs().max()
        assert ((a.grad - b.grad).abs().max() / scale).item() < 1e-6


def test_the_loss_is_divided_by_all_tokens_of_unequal_microbatches():
    whole, split = build_step(12), build_step(5)  # 5 + 5 + 2: a mean of means would differ
    torch.manual_seed(1)
    batch = whole.workload.random_batch(12)
    whole.backward(batch)
    split.backward(batch)
    a = torch.cat([p.grad.flatten() for p in whole.parameters])
    b = torch.cat([p.grad.flatten() for p in split.parameters])
    assert ((a - b).norm() / a.norm()).item() < 1e-6


def test_warming_up_changes_no_state():
    step, untouched = build_step(4), build_step(4)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    step.warm_up()
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(step.parameters, untouched.parameters, strict=True):
        assert a.grad is None and torch.equal(a, b)
    assert not step.optimizer.state
