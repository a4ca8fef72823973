"""The first rates of a search, from the batch sizes that were tuned before."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.decision.first_rates import first_rates
from sweep.plan.rate_search import FINEST, GRID, RateTrial, best_of, neighbours, next_rates

TOLERANCE = 0.01
USUAL = 0.2  # curvature, in nats per squared log rate


def bowl(best, curvature=USUAL, spacing=FINEST, count=2):
    """Return values at rates around the best one."""
    rates = [best * spacing**step for step in range(-count, count + 1)]
    return {rate: 2 + curvature * math.log(rate / best) ** 2 for rate in rates}


def first(batch_size, earlier, tried=None):
    return first_rates(
        batch_size,
        tried or {},
        earlier,
        tolerance=TOLERANCE,
        centre=0.5,
        rule=lambda size: size**0.5,
    )


def test_without_an_earlier_batch_size_the_grid_is_around_the_centre():
    assert first(4, {}).rates == tuple(0.5 * factor for factor in GRID)
    diverged = {0.1: math.inf, 0.2: math.inf}
    assert first(4, {1: diverged}).rates == first(4, {}).rates


def test_one_earlier_batch_size_is_extrapolated_with_the_rule():
    rates = first(4, {1: bowl(1e-3)}).rates
    assert rates == pytest.approx((2e-3, 2e-3 / FINEST, 2e-3 * FINEST))


@given(exponent=st.floats(-1, 1), scale=st.floats(1e-4, 1.0), sizes=st.permutations([1, 4, 64]))
def test_several_predict_the_rate_on_their_line(exponent, scale, sizes):
    earlier = {size: bowl(scale * size**exponent) for size in sizes}
    assert first(16, earlier).rates[0] == pytest.approx(scale * 16**exponent, rel=0.01)


@pytest.mark.parametrize(
    ("curvature", "spacing", "finest"),
    [(0.05, 2.0, 2.0), (USUAL, FINEST, FINEST), (0.8, FINEST, FINEST**0.5)],
)
def test_the_flatter_the_curves_the_farther_apart_are_the_rates(curvature, spacing, finest):
    near = first(4, {1: bowl(1e-3, curvature)})
    middle, low, high = near.rates
    assert (middle / low, high / middle) == pytest.approx((spacing, spacing))
    assert near.finest == pytest.approx(finest)


def test_two_more_follow_where_the_curve_is_unlike_the_others():
    earlier = {1: bowl(1e-3)}
    usual = first(4, earlier).rates
    values = dict(zip(usual, (2.0, 2.024, 2.024), strict=True))
    assert first(4, earlier, values).rates == usual
    for rise in (0.002, 0.1):
        values = dict(zip(usual, (2.0, 2 + rise, 2 + rise), strict=True))
        more = first(4, earlier, values).rates
        assert more[:3] == usual and more[3:] == pytest.approx((1e-3, 4e-3))
    at_an_edge = dict(zip(usual, (2.0, 1.9, 2.1), strict=True))
    assert first(4, earlier, at_an_edge).rates == usual
    pruned = dict(zip(usual, (2.0, 2.1, math.nan), strict=True))
    assert first(4, earlier, pruned).rates == usual


def test_a_search_that_began_with_the_grid_goes_on_with_it():
    tried = {0.5 * factor: math.nan for factor in GRID}
    assert first(4, {1: bowl(1e-3)}, tried).rates == first(4, {}).rates


@given(
    st.floats(-0.5, 0.8),
    st.lists(st.floats(-0.4, 0.4), min_size=5, max_size=5),
    st.sampled_from([0.05, USUAL, 0.8]),
)
def test_the_best_rate_is_bracketed_wherever_it_lies(exponent, off_line, curvature):
    earlier = {}
    for index, off in enumerate(off_line):
        size = 4**index
        best = 1e-3 * size**exponent * math.exp(off)
        tried = []
        rates = (1.0,)
        while rates:
            values = {trial.rate: trial.loss for trial in tried}
            start = first_rates(size, values, earlier, TOLERANCE, 1e-3, lambda size: size**0.3)
            rates = next_rates(tried, start.rates, start.finest)
            losses = curvature * np.square(np.log(np.asarray(rates) / best))
            tried += map(RateTrial, rates, losses.tolist())
        below, above = neighbours(tried)
        found = best_of(tried).rate
        assert max(found / below.rate, above.rate / found) <= start.finest * (1 + 1e-6)
        assert len(tried) <= 13
        earlier[size] = values
