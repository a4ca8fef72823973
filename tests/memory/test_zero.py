"""Memory per device and ZeRO stage: arithmetic on the forecast of one device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.memory.forecast import STAGES, on_devices
from sweep.memory.search import Forecast

GB = 10**9


def whole_step(weights, gradients, states, activations):
    held = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": states,
        "activations": activations,
    }
    at_rest = weights + states
    return Forecast(8, 8, sum(held.values()), held, at_rest, at_rest + activations // 3)


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_published_example_of_7_5_billion_parameters_on_64_devices(stage, gigabytes):
    """Rajbhandari et al. 2019 count what each device keeps, nothing that is gathered."""
    weights, gradients, states = 15 * GB, 15 * GB, 90 * GB
    kept = on_devices(whole_step(weights, gradients, states, 0), 64, stage, 0, 0).by_category
    if stage == 2:  # of the weights this count shards what the paper does not
        kept["weights"] = weights
    assert sum(kept.values()) / GB == pytest.approx(gigabytes, abs=0.05)


@given(
    st.integers(10**3, 10**9),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 10**9),
    st.integers(1, 4096),
)
def test_a_step_never_gathers_more_than_the_whole_state(weights, share, layer, rest, devices):
    outside = int(share * weights)
    gathered = int(layer * (weights - outside)), outside
    whole = whole_step(weights, weights, 2 * weights, rest)
    forecasts = [on_devices(whole, devices, stage, *gathered) for stage in STAGES]
    assert forecasts[0].peak_bytes == whole.peak_bytes  # it includes all gradients
    assert forecasts[0].rest_bytes == whole.rest_bytes + (weights if devices > 1 else 0)  # buckets
    for stage, forecast in enumerate(forecasts):
        assert sum(forecast.by_category.values()) == forecast.peak_bytes
        assert forecast.by_category["activations"] == rest  # never split
        states = -(-2 * weights // devices) if stage >= 1 else 2 * weights
        assert forecast.by_category["optimizer"] == states
        shard = -(-weights // devices) if stage >= 2 else 0
        assert forecast.by_category["weights"] <= weights + shard
        assert forecast.by_category["gradients"] <= weights + shard
    if devices > 1:
        assert forecasts[1].peak_bytes < whole.peak_bytes
        assert forecasts[3].peak_bytes <= forecasts[2].peak_bytes
        assert forecasts[3].rest_bytes == forecasts[2].rest_bytes < forecasts[1].rest_bytes
    else:
        assert forecasts == [whole] * len(STAGES)


def test_stage_3_gathers_two_layers_at_a_time():
    layers, size = 50, 10**6
    whole = whole_step(layers * size, layers * size, 2 * layers * size, 0)
    forecast = on_devices(whole, 10, 3, size, 0)
    assert forecast.by_category == {
        "weights": 5 * size + 2 * size,
        "gradients": 5 * size + size,
        "optimizer": 10 * size,
        "activations": 0,
    }
