"""ZeRO's formulas: the published example, and what holds of all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.memory.line import Line
from sweep.memory.points import Forecast
from sweep.memory.zero import (
    MIXED_ADAM,
    STAGES,
    Gathered,
    ModelStates,
    on_devices,
    states_per_device,
)

PARAMETERS, DEVICES = st.integers(1, 10**12), st.integers(1, 4096)
FLOAT32_ADAM = ModelStates(4, 4, 8)
KINDS = [MIXED_ADAM, FLOAT32_ADAM, ModelStates(2, 2, 0)]


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_published_example_of_7_5_billion_parameters_on_64_devices(stage, gigabytes):
    found = states_per_device(7_500_000_000, 64, stage, MIXED_ADAM).total / 1e9
    assert found == pytest.approx(gigabytes, abs=0.05)


@given(st.integers(1, 10**6), DEVICES)
def test_the_formulas_of_mixed_precision_adam(shard, devices):
    parameters = shard * devices
    totals = [states_per_device(parameters, devices, stage, MIXED_ADAM).total for stage in STAGES]
    assert totals == [
        16 * parameters,
        4 * parameters + 12 * shard,
        2 * parameters + 14 * shard,
        16 * shard,
    ]


@given(PARAMETERS, st.sampled_from(KINDS))
def test_on_one_device_all_stages_are_the_same(parameters, kind):
    assert len({states_per_device(parameters, 1, stage, kind) for stage in STAGES}) == 1


@given(PARAMETERS, DEVICES, st.sampled_from(KINDS))
def test_a_larger_stage_never_takes_more_and_so_never_asks_for_a_smaller_microbatch(
    parameters, devices, kind
):
    totals = [states_per_device(parameters, devices, stage, kind).total for stage in STAGES]
    assert totals == sorted(totals, reverse=True)
    limit, per_sequence = 2 * totals[0], totals[0] / 16
    fits = [Line(total, per_sequence, 1.0, 0.0).largest(limit) for total in totals]
    assert fits == sorted(fits) and fits[0] == 16


def whole_step(weights, gradients, states, rest):
    held = {"weights": weights, "gradients": gradients, "optimizer": states, "activations": rest}
    at_rest = weights + states
    return Forecast(8, 8, sum(held.values()), held, at_rest, at_rest + rest // 3)


@given(st.integers(10**3, 10**9), st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**9), DEVICES)
def test_what_a_step_gathers_is_never_more_than_all_of_it(weights, share, layer, rest, devices):
    outside = int(share * weights)
    gathered = Gathered(int(layer * (weights - outside)), outside)
    whole = whole_step(weights, weights, 2 * weights, rest)
    found = [on_devices(whole, devices, stage, gathered) for stage in STAGES]
    assert found[0].peak_bytes == whole.peak_bytes  # of which all gradients are a part
    assert found[0].rest_bytes == whole.rest_bytes + (weights if devices > 1 else 0)  # buckets
    for stage, one in enumerate(found):
        assert sum(one.by_category.values()) == one.peak_bytes
        assert one.by_category["activations"] == rest  # of these nothing is split
        states = states_per_device(weights // 4, devices, stage, FLOAT32_ADAM)
        assert one.by_category["optimizer"] == pytest.approx(states.optimizer, abs=16)
        shard = -(-weights // devices) if stage >= 2 else 0
        assert one.by_category["weights"] <= weights + shard
        assert one.by_category["gradients"] <= weights + shard
    if devices > 1:
        assert found[1].peak_bytes < whole.peak_bytes
        assert found[3].peak_bytes <= found[2].peak_bytes
        assert found[3].rest_bytes == found[2].rest_bytes < found[1].rest_bytes


def test_a_stage_of_many_layers_holds_two_of_them_at_a_time():
    layers, size = 50, 10**6
    whole = whole_step(layers * size, layers * size, 2 * layers * size, 0)
    found = on_devices(whole, 10, 3, Gathered(size, 0))
    assert found.by_category == {
        "weights": 5 * size + 2 * size,
        "gradients": 5 * size + size,
        "optimizer": 10 * size,
        "activations": 0,
    }
