"""One step: golden losses, which a refactor must not move, and any split of a batch is the same."""

import pytest
import torch

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.plan.learning_rate import learning_rate_at
from sweep.training.step import TrainingStep
from tests.plans import build_plan

# Mean losses of steps 1, 10 and 20; nats per token, and ½ Σ h w² with its noise, which NumPy draws.
GOLDEN = {
    "quick": {  # by version of torch, which draws the initial weights
        "2.11": (6.3161082, 4.6889525, 4.0504742),
        "2.13": (6.3709455, 4.6979247, 4.0912495),
    },
    "quadratic": dict.fromkeys(("2.11", "2.13"), (3.7861729, 2.9391940, 3.7934055)),
}


def build_step(microbatch, experiment="quick", batch=12, budget=10**6, **execution):
    settings = {"precision": "fp32", "batches": [batch], "budget": budget}
    data = {"name": "synthetic"} if experiment == "quick" else None
    chosen = Execution(device="cpu", **{"threads": 2, **execution})
    plan = build_plan(load_experiment(experiment, settings), chosen, data=data)
    config = plan.trial_config(plan.trials[0], "test").with_microbatch(microbatch)
    return TrainingStep(config, torch.device("cpu")), config


@pytest.mark.parametrize(("name", "rows"), [("quick", 0), ("quick", 100), ("quadratic", 0)])
def test_the_first_twenty_steps_have_the_golden_losses(name, rows):
    step, config = build_step(8, name, 8, 8 * 64 * 20, threads=1, loss_chunk_rows=rows)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for t in range(1, 21):
        rate = learning_rate_at(
            t, config.science.learning_rate, 20, config.warmup_steps, config.science.schedule
        )
        if name == "quick":  # a cyclic text with some noise, whatever the tokenizer does
            ids = (torch.arange(65) * 3 + torch.randint(4, (8, 65), generator=generator)) % 512
            batch = (ids,)
        else:
            batch = step.workload.build_batch((t - 1) * 8, 8)
        losses.append(step(batch, rate).item())
    assert (losses[0], losses[9], losses[19]) == pytest.approx(
        GOLDEN[name][torch.__version__[:4]], rel=2e-5
    )


@pytest.mark.parametrize("experiment", ["quick", "quadratic"])
@pytest.mark.parametrize("microbatch", [1, 4, 5])  # 5 + 5 + 2: a mean of means would differ
def test_the_gradient_does_not_depend_on_the_split(microbatch, experiment):
    (whole, _), (split, _) = build_step(12, experiment), build_step(microbatch, experiment)
    torch.manual_seed(0)
    batch = whole.workload.random_batch(12)
    loss, other = whole.backward(batch), split.backward(batch)
    torch.testing.assert_close(loss, other, rtol=1e-6, atol=1e-6)
    for a, b in zip(whole.parameters, split.parameters, strict=True):
        scale = a.grad.abs().max()
        assert ((a.grad - b.grad).abs().max() / scale).item() < 1e-6


def test_warming_up_changes_no_state():
    (step, _), (untouched, _) = build_step(4), build_step(4)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    step.warm_up()
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(step.parameters, untouched.parameters, strict=True):
        assert a.grad is None and torch.equal(a, b)
    assert not step.optimizer.state
