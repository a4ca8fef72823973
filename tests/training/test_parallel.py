"""A trial on several devices is the trial that it is on one: real processes, exchanging by gloo."""

from collections import Counter

import pytest
from safetensors.torch import load_file, load_model

from sweep.memory.forecast import forecast_stages
from sweep.models import build_model
from sweep.plan.retry import status_after
from sweep.trial.files import read_metrics
from sweep.trial.folder import TrialFolder
from tests.training.several_devices import (
    MIDDLE,
    assert_same_trial,
    attempt,
    complete,
    gone_on_from,
    pause,
    planned,
)

SEVERAL = [
    (2, 0),
    (2, 3),
    *(pytest.param(devices, zero, marks=pytest.mark.slow) for devices, zero in
      [(2, 1), (2, 2), (4, 0), (4, 1), (4, 2), (4, 3)]),
]  # fmt: skip
GPT2 = {
    "kind": "hugging_face",
    "name": "small-gpt2",
    "architecture": "gpt2",
    "vocabulary": 512,
    "context": 64,
    "sizes": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64},
}
TIED = {"kind": "object", "name": "tied:Tied", "vocabulary": 512, "context": 64}


@pytest.mark.parametrize(("devices", "zero"), SEVERAL)
def test_on_several_devices_a_trial_has_the_same_curve(undisturbed, alone, devices, zero):
    trial = undisturbed(devices, zero)
    assert_same_trial(trial, alone)
    assert trial.read_result()["devices"] == devices
    lines = read_metrics(trial.metrics_path)
    held = next(line["memory/allocated_bytes"] for line in lines if "train/loss" in line)
    forecast = forecast_stages(trial.read_config().sized(8 // devices, 1), devices)[zero]
    assert held == pytest.approx(forecast.rest_bytes, rel=0.02 if zero != 1 else 0.05)
    model = build_model(trial.read_config().science.model, seed=5)
    load_model(model, str(trial.weights_path), strict=True)


def noise_of(trial: TrialFolder, prefix: str) -> list[tuple[float, float]]:
    """Return trΣ̂ and Ĝ² of each measurement."""
    names = (f"noise/{prefix}trace", f"noise/{prefix}square")
    lines = read_metrics(trial.metrics_path)
    return [tuple(line[name] for name in names) for line in lines if names[0] in line]


@pytest.mark.parametrize("prefix", ["", "train_"])
@pytest.mark.parametrize(("devices", "zero"), SEVERAL)
def test_the_gradients_noise_is_the_same_at_every_stage(undisturbed, alone, devices, zero, prefix):
    found = noise_of(undisturbed(devices, zero), prefix)
    if devices == 4:  # of the step's four microbatches each device has one, and sees no noise
        assert bool(found) == (prefix == "")
    first = noise_of(undisturbed(devices, 0), prefix)
    assert len(found) == len(first)
    for (trace, square), (trace_of_first, square_of_first) in zip(found, first, strict=True):
        assert trace == pytest.approx(trace_of_first, rel=1e-4)
        assert square == pytest.approx(square_of_first, abs=1e-4 * trace)
    if (
        devices == 2
    ):  # where the microbatches are of other sizes, but the whole gradient is the same
        gradients, own = (
            [square + trace / 8 for trace, square in noise_of(trial, prefix)]
            for trial in (alone, undisturbed(devices, zero))
        )
        assert len(own) > 3 and own == pytest.approx(gradients, rel=1e-4)


@pytest.mark.parametrize(
    ("model", "zero", "pauses"),
    [
        (TIED, 3, []),
        pytest.param(TIED, 0, [MIDDLE], marks=pytest.mark.slow),
        pytest.param(GPT2, 0, [MIDDLE], marks=pytest.mark.slow),
        pytest.param(GPT2, 3, [MIDDLE], marks=pytest.mark.slow),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_weights_that_are_tied_stay_tied(tmp_path, meddling, model, zero, pauses):
    if model is GPT2:
        pytest.importorskip("transformers")
    one = complete(planned(tmp_path / "one", model=model))
    trial = planned(tmp_path / "several", 2, zero, model=model)
    for step in pauses:
        pause(trial, step)
    complete(trial)
    assert gone_on_from(trial) == pauses
    assert_same_trial(trial, one)
    found = build_model(trial.read_config().science.model, seed=5)
    load_model(found, str(trial.weights_path), strict=True)
    assert len(load_file(trial.weights_path)) == len(dict(found.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_trial_to_a_target_ends_where_it_does_on_one_device(tmp_path, zero):
    settings = {"budget": 8 * 64 * 100, "target": 3.9}
    one = complete(planned(tmp_path / "one", **settings))
    trial = planned(tmp_path / "several", 2, zero, **settings)
    pause(trial)
    complete(trial)
    assert gone_on_from(trial) == [MIDDLE]
    assert_same_trial(trial, one)
    result = trial.read_result()
    assert MIDDLE < result["steps"] == one.read_result()["steps"] < 100
    assert MIDDLE * 8 * 64 < result["tokens_to_target"] < result["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_memory_limit_is_that_of_each_process(tmp_path, alone, zero):
    """What is forecast at a microbatch of four is enough for it, and a tenth less is not."""
    trials = []
    for share in (1.1, 0.9):
        trial = planned(tmp_path / str(share), 2, zero)
        config = trial.read_config()
        forecast = forecast_stages(config.sized(4, 4), 2)[zero].peak_bytes
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
    assert is_again and lacking.read_result()["microbatch_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_compiled_trial_has_the_same_curve(tmp_path, alone, zero):
    assert_same_trial(complete(planned(tmp_path, 2, zero, execution={"compile": True})), alone)
