"""Any split of a batch into microbatches gives the same gradient."""

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.training.step import TrainingStep
from tests.plans import build_plan


def build_step(microbatch, experiment="quick"):
    settings = {"precision": "fp32", "batches": [12], "budget": 10**6}
    data = {"name": "synthetic"} if experiment == "quick" else None
    execution = Execution(device="cpu", threads=2)
    plan = build_plan(load_experiment(experiment, settings), execution, data=data)
    config = plan.trial_config(plan.trials[0], "test")
    return TrainingStep(config, torch.device("cpu"), microbatch)


@pytest.mark.parametrize("experiment", ["quick", "quadratic"])
@pytest.mark.parametrize("microbatch", [1, 4, 5])  # 5 + 5 + 2: a mean of means would differ
def test_the_gradient_does_not_depend_on_the_split(microbatch, experiment):
    whole, split = build_step(12, experiment), build_step(microbatch, experiment)
    torch.manual_seed(0)
    batch = whole.workload.random_batch(12)
    loss, other = whole.backward(batch), split.backward(batch)
    torch.testing.assert_close(loss, other, rtol=1e-6, atol=1e-6)
    for a, b in zip(whole.parameters, split.parameters, strict=True):
        scale = a.grad.abs().max()
        assert ((a.grad - b.grad).abs().max() / scale).item() < 1e-6


def test_warming_up_changes_no_state():
    step, untouched = build_step(4), build_step(4)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    step.warm_up()
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(step.parameters, untouched.parameters, strict=True):
        assert a.grad is None and torch.equal(a, b)
    assert not step.optimizer.state
