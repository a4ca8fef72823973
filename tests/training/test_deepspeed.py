"""The same trial on DeepSpeed's engine."""

import importlib.util
import shutil

import pytest

from tests.training.several_devices import (
    MIDDLE,
    assert_same_trial,
    complete,
    curves,
    gone_on_from,
    on,
    pause,
    planned,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (importlib.util.find_spec("deepspeed") and shutil.which("g++")),
        reason="needs the extra deepspeed, and a compiler",
    ),
]


@pytest.mark.parametrize(("devices", "zero"), [(2, 1), (2, 2), (2, 3), (4, 2)])
def test_it_has_the_same_curve(tmp_path, alone, devices, zero):
    trial = complete(planned(tmp_path, devices, zero, "deepspeed"))
    assert_same_trial(trial, alone)
    assert trial.read_result()["execution"]["strategy"] == "deepspeed"


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("after", ["deepspeed", "torch"])
def test_it_goes_on_with_either_strategy_and_any_number_of_processes(tmp_path, alone, zero, after):
    trial = planned(tmp_path, 2, zero, "deepspeed")
    pause(trial)
    complete(on(trial, 4 if after == "deepspeed" else 1, after))
    assert gone_on_from(trial) == [MIDDLE]
    assert len(curves(trial)["train/loss"]) == len(curves(alone)["train/loss"])
    assert_same_trial(trial, alone)


def test_it_goes_on_from_torchs_own_sharding(tmp_path, alone):
    trial = planned(tmp_path, 2, 3)
    pause(trial)
    complete(on(trial, 2, "deepspeed"))
    assert gone_on_from(trial) == [MIDDLE]
    assert_same_trial(trial, alone)
