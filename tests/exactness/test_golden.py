"""Losses that a refactor must not move; a numerical change moves them and says why."""

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.plan.steps import learning_rate_at
from sweep.training.step import TrainingStep
from tests.plans import build_plan

# Mean losses of steps 1, 10 and 20; nats per token, and ½ Σ h w² with its noise, which NumPy draws.
GOLDEN = {
    "quick": (6.3709455, 4.6979247, 4.0912495),
    "quadratic": (3.7861729, 2.9391940, 3.7934055),
}


@pytest.mark.parametrize(("name", "rows"), [("quick", 0), ("quick", 100), ("quadratic", 0)])
def test_the_first_twenty_steps_have_the_golden_losses(name, rows):
    data = {"quick": {"name": "synthetic"}, "quadratic": None}[name]
    experiment = load_experiment(name, {"precision": "fp32", "batches": "8", "budget": 8 * 64 * 20})
    execution = Execution(device="cpu", threads=1, loss_chunk_rows=rows)
    plan = build_plan(experiment, execution, data=data)
    config = plan.trial_config(plan.trials[0], "golden")
    step = TrainingStep(config, torch.device("cpu"), 8)
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
        losses.append(step(batch, rate).loss.item())
    assert (losses[0], losses[9], losses[19]) == pytest.approx(GOLDEN[name], rel=2e-5)
