"""Steps one by one and steps fed in blocks, as a graph takes them."""

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.data.synthetic import synthetic_identity
from sweep.plan.plan import build_plan
from sweep.training import steps as steps_module
from sweep.training.noise import GradientSums
from sweep.training.progress import Progress
from sweep.training.step import TrainingStep
from sweep.training.steps import GraphedSteps, Steps, Sums, build_steps

CPU = torch.device("cpu")
BATCH, COUNT = 4, 14


def trial_config(device="cpu", batch=BATCH, precision="fp32", compile=False):
    fields = {"batches": [batch], "precision": precision, "budget": 200 * batch * 64}
    execution = Execution(device=device, threads=2, compile=compile)
    plan = build_plan(load_experiment("quick", fields), execution, data=synthetic_identity())
    row = plan.trials[0].model_copy(update={"learning_rate": 1e-3, "id": "x"})
    return plan.trial_config(row, "sweep")


def losses_of(kind, config, device, count=COUNT, noise_at=()):
    """Take steps; return their losses, the weights and the sums."""
    step, progress = TrainingStep(config, device, config.microbatch_size), Progress()
    sums = Sums(progress, device)
    steps, losses = kind(config, step, sums), []
    for t in range(1, count + 1):
        output = steps.take(t, GradientSums() if t in noise_at else None)
        losses.append(float(output.loss))
    sums.store(progress)
    return losses, [p.detach().cpu() for p in step.parameters], progress


@pytest.mark.parametrize("noise_at", [(), (6, 11)])
def test_steps_fed_in_blocks_are_those_taken_one_by_one(noise_at, monkeypatch):
    """The same operations on the same sequences at the same rates, over several blocks."""
    monkeypatch.setattr(steps_module, "FED_STEPS", 4)
    config = trial_config()
    one_by_one, weights, progress = losses_of(Steps, config, CPU, noise_at=noise_at)
    fed, same, summed = losses_of(GraphedSteps, config, CPU, noise_at=noise_at)
    assert fed == pytest.approx(one_by_one, rel=1e-6)
    for first, second in zip(weights, same, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)
    assert summed.loss_sum == pytest.approx(progress.loss_sum, rel=1e-6)
    assert summed.norm_sum == pytest.approx(progress.norm_sum, rel=1e-5)


def test_feeding_ends_with_the_last_step(monkeypatch):
    config = trial_config()
    step = TrainingStep(config, CPU, BATCH)
    steps = GraphedSteps(config, step, Sums(Progress(), CPU))
    for t in range(config.steps - 5, config.steps + 1):  # as after a resume
        steps.take(t, None)


def test_on_a_cpu_steps_are_taken_one_by_one():
    config = trial_config()
    step = TrainingStep(config, CPU, BATCH)
    assert type(build_steps(config, step, Sums(Progress(), CPU))) is Steps


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_graph_takes_the_steps_that_are_taken_one_by_one(compile, precision, monkeypatch):
    device = torch.device("cuda")
    config = trial_config("cuda", precision=precision, compile=compile)
    fed, weights, progress = losses_of(build_steps, config, device, 60, noise_at=(20, 41))
    monkeypatch.setenv(steps_module.SWITCH, "0")
    one_by_one, same, summed = losses_of(build_steps, config, device, 60, noise_at=(20, 41))
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert fed == pytest.approx(one_by_one, rel=tolerance)
    assert progress.loss_sum == pytest.approx(summed.loss_sum, rel=tolerance)
    if precision == "fp32":
        for first, second in zip(weights, same, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_small_step_on_a_gpu_is_a_graph():
    config, device = trial_config("cuda"), torch.device("cuda")
    step = TrainingStep(config, device, BATCH)
    steps = build_steps(config, step, Sums(Progress(), device))
    assert isinstance(steps, GraphedSteps)
    for t in range(1, 10):
        steps.take(t, None)
    assert steps.peak_memory_bytes() > 0
