"""The average of the weights, against its closed form (Karras et al. 2024)."""

import numpy as np
import pytest
import torch
from torch import nn

from sweep.training.optimizer import WeightAverage, power_of


def averaged(values, width):
    weight = nn.Parameter(torch.zeros(2, 3))
    average = WeightAverage([weight], width)
    for value in values:
        weight.data.fill_(value)
        average.update()
    return weight, average


@pytest.mark.parametrize("width", [0.01, 0.1, 0.25])
def test_steps_have_power_function_weights_of_the_requested_width(width):
    power, steps = power_of(width), 400
    ends = (np.arange(steps + 1) / steps) ** (power + 1)
    counts = np.diff(ends)  # of each step, in closed form
    values = np.random.default_rng(0).normal(size=steps)
    _, average = averaged(values, width)
    assert average.values[0][1, 2].item() == pytest.approx(float(counts @ values), abs=1e-5)
    fine = (np.arange(100_001) / 100_000) ** (power + 1)
    at, share = (np.arange(100_000) + 0.5) / 100_000, np.diff(fine)
    assert np.sqrt(share @ at**2 - (share @ at) ** 2) == pytest.approx(width, rel=1e-3)


def test_the_average_replaces_the_weights_only_within_the_context():
    weight, average = averaged([1.0, 2.0], 0.25)
    with average.in_place():
        held = weight.detach().clone()
    assert 1 < held[0, 0].item() < 2
    assert (weight == 2).all()


def test_bfloat16_weights_are_averaged_in_float32():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    average = WeightAverage([weight], 0.05)
    for _ in range(1000):
        average.update()
    weight.data.fill_(1.0078125)  # the next number
    average.update()
    assert average.values[0].dtype == torch.float32
    assert 1 < average.values[0][0].item() < 1.0078125
    with average.in_place():
        assert weight.dtype == torch.bfloat16
