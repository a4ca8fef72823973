"""The gradient's noise as training records it."""

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.orchestration.local import InlineExecutor
from sweep.orchestration.planning import Logistics, make_plan
from sweep.orchestration.runner import run_plan
from sweep.plan.plan import build_plan
from sweep.plan.steps import probe_sizes
from sweep.training.noise import GradientSums, noise_estimates
from sweep.training.step import TrainingStep
from sweep.trial.folder import SweepFolder
from sweep.trial.metrics import read_metrics


def step_of(microbatch, experiment="quick", batch=16, **execution):
    fields = {"batches": [batch], "precision": "fp32", "budget": 10**6}
    plan = build_plan(
        load_experiment(experiment, fields),
        Execution(device="cpu", threads=2, **execution),
        data={"name": "synthetic"} if experiment == "quick" else None,
        microbatch=microbatch,
    )
    config = plan.trial_config(plan.trials[0], "s")
    return TrainingStep(config, torch.device("cpu"), microbatch)


def gradients(step):
    return [parameter.grad.clone() for parameter in step.parameters]


@pytest.mark.parametrize("experiment", ["quick", "quadratic"])
def test_measuring_does_not_change_a_bit_of_the_gradient(experiment):
    step = step_of(4, experiment)
    batch = step.workload.random_batch(16)
    step.backward(batch)
    plain = gradients(step)
    step.model.zero_grad(set_to_none=True)
    step.backward(batch, GradientSums())
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(step), strict=True))


def test_estimates_are_those_of_the_definition():
    step = step_of(4)
    batch = step.workload.random_batch(16)
    each = []
    for start in range(0, 16, 4):
        step.model.zero_grad(set_to_none=True)
        step.backward((batch[0][start : start + 4],))
        each.append(torch.cat([g.flatten() for g in gradients(step)]).double())
    step.model.zero_grad(set_to_none=True)
    stacked = torch.stack(each)
    mean = stacked.mean(0)
    trace = 4 / 3 * float(((stacked - mean) ** 2).sum())
    square = float((mean**2).sum()) - trace / 16
    found = step.measure_noise(batch, 4)
    assert found[0] == pytest.approx(trace, rel=1e-4)
    assert found[1] == pytest.approx(square, abs=1e-5 * trace)  # a difference of like numbers
    assert all(parameter.grad is None for parameter in step.parameters)


def test_equal_gradients_have_no_noise():
    assert noise_estimates(squares=12.0, square=3.0, count=4, size=2) == (0.0, 3.0)


def test_a_probe_is_a_small_part_of_training_and_its_parts_fit_the_microbatch():
    assert probe_sizes(1_280_000, 10, 0.01, 256) == (512, 32)
    assert probe_sizes(20_000, 10, 0.01, 1) == (16, 1)
    assert probe_sizes(40_000, 10, 0.01, 2) == (32, 2)
    assert probe_sizes(1000, 10, 0.01, 8) == (0, 0)
    for sequences in range(0, 5000, 37):
        count, part = probe_sizes(sequences, 10, 0.01, 8)
        assert count * 10 <= 0.01 * sequences and (not count or count % part == 0)


def test_probes_see_the_same_sequences_at_every_batch_size_and_training_ends_the_same(tmp_path):
    """At a rate of nearly nothing the weights stay, so that equal probes give equal numbers."""
    found = {}
    for points in (0, 10):
        folder = SweepFolder(tmp_path / str(points))
        fields = {"batches": "4,16", "budget": "16k", "lr": "1e-12",
                  "evaluation": {"noise_points": points}}  # fmt: skip
        planned = make_plan(
            load_experiment("quadratic", fields), Logistics("cpu", microbatch=4), folder
        )
        run_plan(planned, folder, executor=InlineExecutor())
        for trial in folder.trials():
            result = trial.read_result()
            lines = [x for x in read_metrics(trial.metrics_path) if "noise/trace" in x]
            found[points, result["batch_size"]] = (result["final_valid_loss"], lines)
    assert found[0, 4][0] == found[10, 4][0] and found[0, 16][0] == found[10, 16][0]
    assert not found[0, 4][1] and len(found[10, 4][1]) == 10
    for small, large in zip(found[10, 4][1], found[10, 16][1], strict=True):
        assert small["tokens"] == large["tokens"]
        for name in ("noise/trace", "noise/square"):
            assert small[name] == pytest.approx(large[name], rel=1e-4)
        assert "noise/train_trace" in large and "noise/train_trace" not in small
