"""The first rates of a search, from the batch sizes that were tuned before."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
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
    assert first(4, {}).may_prune and not first(4, {1: bowl(1e-3)}).may_prune
    diverged = {0.1: math.inf, 0.2: math.inf}
    assert first(4, {1: diverged}).rates == first(4, {}).rates


def test_one_earlier_batch_size_is_extrapolated_with_the_rule():
    rates = first(4, {1: bowl(1e-3)}).rates
    assert rates == pytest.approx((2e-3, 2e-3 / FINEST, 2e-3 * FINEST))


@settings(deadline=None)
@given(exponent=st.floats(-1, 1), scale=st.floats(1e-4, 1.0), sizes=st.permutations([1, 4, 64]))
def test_several_predict_the_rate_on_their_line(exponent, scale, sizes):
    earlier = {size: bowl(scale * size**exponent) for size in sizes}
    assert first(16, earlier).rates[0] == pytest.approx(scale * 16**exponent, rel=0.2)
    on_rule = {size: bowl(scale * size**0.5) for size in sizes}
    assert first(16, on_rule).rates[0] == pytest.approx(scale * 4, rel=0.01)


@pytest.mark.parametrize("sizes", [(4, 6, 512), (1, 2, 256)])
def test_batch_sizes_that_lie_close_together_hardly_tilt_the_line(sizes):
    near, nearer, far = sizes
    off_line = {near: bowl(1e-3), nearer: bowl(1e-3 * (nearer / near) ** 0.5 * math.exp(0.3))}
    predicted = first(far, off_line).rates[0]
    rule = 1e-3 * (far / near) ** 0.5
    assert 1 / 2 < predicted / rule < 4


@pytest.mark.parametrize("sizes", [(4, 6, 512), (1, 2, 256), (4, 16, 64)])
def test_searches_hardly_ever_end_at_an_edge_however_far_apart_the_batch_sizes_lie(sizes):
    rng = np.random.default_rng(1)
    at_edge = 0
    for _ in range(40):
        exponent = rng.uniform(0.1, 0.6)
        earlier = {}
        for size in sizes:
            log_best = math.log(1e-3 * size**exponent) + 0.2 * rng.normal()
            values = {}
            while True:
                start = first_rates(size, values, earlier, TOLERANCE, 1e-3, lambda size: size**0.5)
                tried = [RateTrial(rate, loss) for rate, loss in values.items()]
                rates = next_rates(tried, start.rates, start.finest)
                if not rates:
                    break
                for rate in rates:
                    distance = math.log(rate) - log_best
                    noise = 0.006 * rng.normal()
                    diverges = distance > math.log(4)
                    values[rate] = math.inf if diverges else USUAL * distance**2 + noise
            earlier[size] = values
            at_edge += len(neighbours(tried)) < 2
    assert at_edge <= 2


@pytest.mark.parametrize(("curvature", "spacing"), [(0.05, 2.0), (USUAL, FINEST), (0.8, FINEST)])
def test_the_rates_are_farther_apart_if_the_curves_before_are_flat(curvature, spacing):
    middle, low, high = first(4, {1: bowl(1e-3, curvature)}).rates
    assert (middle / low, high / middle) == pytest.approx((spacing, spacing))


@pytest.mark.parametrize(
    ("curvature", "finest"), [(0.05, 2.0), (USUAL, FINEST), (0.8, FINEST**0.5)]
)
def test_refinement_ends_the_earlier_the_flatter_its_own_curve_is(curvature, finest):
    start = first(4, {1: bowl(1e-3)}, bowl(2e-3, curvature))
    assert start.finest == pytest.approx(finest)
    assert first(4, {1: bowl(1e-3, curvature)}).finest == FINEST  # not known yet


def test_refinement_goes_on_below_a_cliff_where_the_curve_is_steep_but_straight():
    cliff = {1.0: 2.3, 1.4: 2.2, 2.0: 2.1, 2.8: math.inf}
    assert first(4, {1: bowl(1e-3)}, cliff).finest == pytest.approx(FINEST**0.5)
    gentle = {1.0: 2.03, 1.4: 2.02, 2.0: 2.01, 2.8: math.inf}
    assert first(4, {1: bowl(1e-3)}, gentle).finest > FINEST**0.6


def test_one_more_follows_on_each_side_if_the_best_rate_is_inside():
    earlier = {1: bowl(1e-3)}
    three = first(4, earlier).rates
    values = dict(zip(three, (2.0, 2.024, 2.03), strict=True))
    more = first(4, earlier, values).rates
    assert more[:3] == three and more[3:] == pytest.approx((1e-3, 4e-3))
    assert first(4, {1: bowl(5e-3), 64: bowl(5e-2)}, values).rates == more  # it has begun
    values |= dict.fromkeys(more[3:], math.nan)
    assert first(4, earlier, values).rates == more
    at_an_edge = dict(zip(three, (2.0, 1.9, 2.1), strict=True))
    assert first(4, earlier, at_an_edge).rates == three
    pruned = dict(zip(three, (2.0, 2.1, math.nan), strict=True))
    assert first(4, earlier, pruned).rates == three


def test_a_search_that_began_with_the_grid_goes_on_with_it():
    tried = {0.5 * factor: math.nan for factor in GRID}
    assert first(4, {1: bowl(1e-3)}, tried).rates == first(4, {}).rates


@settings(deadline=None)
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
