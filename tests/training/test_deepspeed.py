"""The same trial on DeepSpeed's engine."""

import importlib.util
import shutil

import pytest

from tests.training.several_devices import (
    MIDDLE,
    assert_same_trial,
    complete,
    continued_from,
    curves,
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


@pytest.mark.parametrize(
    ("zero", "before", "after", "devices"),
    [
        *[(zero, "deepspeed", "deepspeed", 4) for zero in (1, 2, 3)],
        *[(zero, "deepspeed", "torch", 1) for zero in (1, 2, 3)],
        (3, "torch", "deepspeed", 2),
    ],
)
def test_it_continues_with_either_strategy(tmp_path, alone, zero, before, after, devices):
    trial = planned(tmp_path, 2, zero, before)
    pause(trial)
    complete(on(trial, devices, after))
    assert continued_from(trial) == [MIDDLE]
    assert len(curves(trial)["train/loss"]) == len(curves(alone)["train/loss"])
    assert_same_trial(trial, alone)
