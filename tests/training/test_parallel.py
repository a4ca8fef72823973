"""A trial on several devices equals the trial on one; optimizers, and the average of weights."""

from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from sweep.config.optimizers import OptimizerSettings
from sweep.memory.forecast import forecast_stages
from sweep.models.build import build_model
from sweep.plan.retry import status_after
from sweep.training.optimizer import WeightAverage, build_optimizer, power_of
from sweep.training.parallel import Parallel
from sweep.trial.files import read_metrics
from sweep.trial.folder import TrialFolder
from tests.exactness.attempts import continued_from
from tests.training.several_devices import (
    MIDDLE,
    assert_same_trial,
    attempt,
    complete,
    curves,
    on,
    pause,
    planned,
)
from tests.workloads.trials import trial_config


def cases(default, slow):
    return [*default, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]


SEVERAL = cases([(2, 3)], [(2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2), (4, 3)])
GPT2 = {
    "kind": "hugging_face",
    "name": "small-gpt2",
    "architecture": "gpt2",
    "vocabulary": 512,
    "context": 64,
    "sizes": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64},
}
TARGET = {"budget": 8 * 64 * 100, "target": 3.9}
AVERAGED = {"schedule": {"name": "constant", "average": 0.1}}
TIED = {"kind": "object", "name": "custom:Tied", "vocabulary": 512, "context": 64}


@pytest.mark.parametrize(("devices", "zero"), SEVERAL)
def test_on_several_devices_a_trial_has_the_same_curve(undisturbed, alone, devices, zero):
    trial = undisturbed(devices, zero)
    assert_same_trial(trial, alone)
    assert trial.read_result().devices == devices
    lines = read_metrics(trial.metrics_path)
    allocated = next(line["memory/allocated_bytes"] for line in lines if "train/loss" in line)
    forecast = forecast_stages(trial.read_config().on_one_device(8 // devices, 1), devices)[zero]
    assert allocated == pytest.approx(forecast.rest_bytes, rel=0.02 if zero != 1 else 0.05)
    model = build_model(trial.read_config().science.model, seed=5)
    load_model(model, str(trial.weights_path), strict=True)


def noise_of(trial: TrialFolder) -> list[tuple[float, float]]:
    lines = [line for line in read_metrics(trial.metrics_path) if "noise/trace" in line]
    return [(line["noise/trace"], line["noise/square"]) for line in lines]


@pytest.mark.parametrize(("devices", "zero"), SEVERAL)
def test_the_gradients_noise_is_the_same_at_every_stage(undisturbed, alone, devices, zero):
    noise, reference = noise_of(undisturbed(devices, zero)), noise_of(undisturbed(devices, 0))
    for (trace, square), expected in zip(noise, reference, strict=True):
        assert trace == pytest.approx(expected[0], rel=1e-4)
        assert square == pytest.approx(expected[1], abs=1e-4 * trace)
    if devices == 2:  # parts have other sizes than on one device, the whole gradient has not
        gradients = [square + trace / 8 for trace, square in noise]
        on_one = [square + trace / 8 for trace, square in noise_of(alone)]
        assert len(gradients) > 3 and gradients == pytest.approx(on_one, rel=1e-4)


@pytest.mark.parametrize(
    ("model", "zero", "pauses"),
    cases([(TIED, 3, [])], [(TIED, 0, [MIDDLE]), (GPT2, 0, [MIDDLE]), (GPT2, 3, [MIDDLE])]),
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_weights_that_are_tied_stay_tied(tmp_path, faults, model, zero, pauses):
    if model is GPT2:
        pytest.importorskip("transformers")
    whole = complete(planned(tmp_path / "one", model=model))
    trial = planned(tmp_path / "several", 2, zero, model=model)
    for step in pauses:
        pause(trial, step)
    complete(trial)
    assert continued_from(trial) == pauses
    assert_same_trial(trial, whole)
    loaded = build_model(trial.read_config().science.model, seed=5)
    load_model(loaded, str(trial.weights_path), strict=True)
    assert len(load_file(trial.weights_path)) == len(dict(loaded.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "zero"),
    [*[(TARGET, zero) for zero in (0, 3)], *[(AVERAGED, zero) for zero in (1, 2, 3)]],
)
def test_a_trial_to_a_target_or_with_averaged_weights_is_the_same(tmp_path, settings, zero):
    whole = complete(planned(tmp_path / "one", **settings))
    trial = planned(tmp_path / "several", 2, zero, **settings)
    pause(trial)
    complete(trial)
    assert continued_from(trial) == [MIDDLE]
    assert_same_trial(trial, whole)
    result = trial.read_result()
    assert result.steps == whole.read_result().steps
    if settings is TARGET:
        assert MIDDLE < result.steps < 100
        assert MIDDLE * 8 * 64 < result.tokens_to_target < result.tokens


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_memory_limit_is_that_of_each_process(tmp_path, alone, zero):
    trials = []
    for share in (1.1, 0.9):  # of the forecast
        trial = planned(tmp_path / str(share), 2, zero)
        config = trial.read_config()
        forecast = forecast_stages(config.on_one_device(4, 4), 2)[zero].peak_bytes
        update = {"device_memory_bytes": int(share * forecast), "evaluation_batch_size": 4}
        execution = config.execution.model_copy(update=update)
        config = config.model_copy(update={"execution": execution, "microbatch_size": 4})
        trial.write_config(config)
        trials.append(trial)
    enough, lacking = trials
    assert_same_trial(complete(enough), alone)
    outcome = attempt(lacking)
    assert outcome.kind == "out_of_memory" and "are in use" in outcome.message
    status, is_again = status_after(lacking.read_status(), outcome, config, Counter())
    lacking.write_status(status)
    assert_same_trial(complete(lacking), alone)
    assert is_again and lacking.read_result().microbatch_size == 2


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_compiled_trial_has_the_same_curve(tmp_path, alone, zero):
    assert_same_trial(complete(planned(tmp_path, 2, zero, execution={"compile": True})), alone)


def assert_same_bits(trial: TrialFolder, other: TrialFolder) -> None:
    weights, others = load_file(trial.weights_path), load_file(other.weights_path)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert trial.losses_path.read_bytes() == other.losses_path.read_bytes()


@pytest.mark.parametrize(
    ("zero", "before", "after"),
    cases(
        [(1, 2, 1)],
        [(0, 1, 2), (0, 4, 2), (1, 2, 4), (2, 4, 2), (3, 2, 4), (3, 4, 1)]
        + [(zero, 2, 2) for zero in (0, 1, 2, 3)],
    ),
)
def test_a_trial_continues_with_any_number_of_processes(
    tmp_path, undisturbed, alone, zero, before, after
):
    trial = planned(tmp_path, before, zero)
    pause(trial)
    checkpoint = trial.checkpoints()[0]
    assert {path.suffix for path in checkpoint.path.iterdir()} == {".safetensors", ".json"}
    complete(on(trial, after))
    assert continued_from(trial) == [MIDDLE]
    assert len(curves(trial)["train/loss"]) == len(curves(alone)["train/loss"])
    assert_same_trial(trial, alone)
    assert not trial.checkpoints()
    if before == after:  # to the same bits
        assert_same_bits(trial, undisturbed(after, zero))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_process_continues_its_own_random_numbers(tmp_path, faults, devices):
    whole = complete(planned(tmp_path / "whole", devices, workload="custom:Drawing"))
    trial = planned(tmp_path / "paused", devices, workload="custom:Drawing")
    pause(trial)
    complete(trial)
    assert continued_from(trial) == [MIDDLE]
    assert_same_bits(trial, whole)


def test_no_process_uses_a_checkpoint_that_one_cannot_read(tmp_path, faults, alone):
    trial = planned(tmp_path, 2, workload="custom:CannotReadNotes")
    pause(trial)
    complete(trial)
    assert continued_from(trial) == []
    assert_same_trial(trial, alone)


@pytest.mark.slow
def test_tensors_that_one_process_can_never_read_end_the_attempt_in_all(tmp_path, faults):
    trial = planned(tmp_path, 2, workload="custom:CannotReadTensors")
    pause(trial)
    outcome = attempt(trial)
    assert outcome.kind == "error" and "OSError" in outcome.message


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_only_matrices_decay_and_none_is_no_optimizer(name, kind):
    model = small_model()
    optimizer = build_optimizer(OptimizerSettings(name=name, weight_decay=0.1), model, 1e-2)
    assert type(optimizer) is kind
    assert build_optimizer(OptimizerSettings(name="none"), model, 1e-2) is None
    decays = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert all(decays[p] == (0.1 if p.ndim >= 2 else 0.0) for p in model.parameters())


def test_gradients_above_the_bound_are_scaled_to_it():
    settings, moves = OptimizerSettings(name="sgd", weight_decay=0.0), []
    for clip in (float("inf"), 0.1):
        parallel = Parallel(trial_config("quadratic"))
        parallel.prepare_model(small_model(), torch.device("cpu"))
        parallel.build_optimizer(settings, 1e-2)
        weights = parallel.parameters = list(parallel.model.parameters())
        start = torch.cat([p.detach().flatten() for p in weights])
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
        parallel.model(x).square().mean().backward()
        exact = sum(float(p.grad.double().square().sum()) for p in weights) ** 0.5
        norm = float(parallel.update(1e-2, clip))
        assert norm == pytest.approx(exact, rel=1e-5) and norm > 0.1
        assert all(p.grad is None for p in weights)
        moves.append(torch.cat([p.detach().flatten() for p in weights]) - start)
    torch.testing.assert_close(moves[1], moves[0] * 0.1 / norm, rtol=1e-3, atol=1e-7)


def averaged(values, width):
    weight = nn.Parameter(torch.zeros(2, 3))
    average = WeightAverage([weight], width)
    for value in values:
        weight.data.fill_(value)
        average.update(average.count_step())
    return weight, average


@pytest.mark.parametrize("width", [0.01, 0.1, 0.25])
def test_steps_have_power_function_weights_of_the_requested_width(width):
    power, steps = power_of(width), 400
    weights = np.diff((np.arange(steps + 1) / steps) ** (power + 1))  # by step, in closed form
    values = np.random.default_rng(0).normal(size=steps)
    _, average = averaged(values, width)
    assert average.values[0][1, 2].item() == pytest.approx(float(weights @ values), abs=1e-5)
    share = np.diff((np.arange(100_001) / 100_000) ** (power + 1))
    at = (np.arange(100_000) + 0.5) / 100_000
    assert np.sqrt(share @ at**2 - (share @ at) ** 2) == pytest.approx(width, rel=1e-3)


def test_the_average_replaces_the_weights_only_within_the_context():
    weight, average = averaged([1.0, 2.0], 0.25)
    with average.in_place():
        replaced = weight.detach().clone()
    assert 1 < replaced[0, 0].item() < 2
    assert (weight == 2).all()


def test_bfloat16_weights_are_averaged_in_float32():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    average = WeightAverage([weight], 0.05)
    for _ in range(1000):
        average.update(average.count_step())
    weight.data.fill_(1.0078125)  # the next number
    average.update(average.count_step())
    assert average.values[0].dtype == torch.float32
    assert 1 < average.values[0][0].item() < 1.0078125
    with average.in_place():
        assert weight.dtype == torch.bfloat16
