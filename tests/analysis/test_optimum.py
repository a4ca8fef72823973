"""The best learning rate on curves whose optimum is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.analysis.optimum import learning_rate_optimum

GRID = [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]
REFINED = [2.5e-4, 5e-4, 7.07e-4, 1e-3, 1.414e-3, 2e-3, 4e-3]


def parabola(rates, best, curvature=0.05):
    return [1.5 + curvature * math.log(rate / best) ** 2 for rate in rates]


@settings(max_examples=100, deadline=None)
@given(
    st.floats(-0.9, 0.9),
    st.floats(0.01, 10),
    st.sampled_from([GRID, GRID[1:4], REFINED, REFINED[::-1]]),
)
def test_the_vertex_of_an_exact_parabola_is_found(offset, curvature, rates):
    best = 1e-3 * 2**offset
    optimum = learning_rate_optimum(rates, parabola(rates, best, curvature), sigma=0.0)
    assert optimum.rate == pytest.approx(best, rel=1e-9)
    # Without noise the interval is a point; the root of a rounding error is its width.
    assert optimum.interval == pytest.approx((best, best), rel=1e-5)


def test_only_points_near_the_best_are_fitted():
    rates = [1e-3 * 2**place for place in range(-5, 6)]
    losses = parabola(rates, 1.2e-3)
    losses[0], losses[1], losses[-2], losses[-1] = 9.0, 8.0, 30.0, 70.0
    assert learning_rate_optimum(rates, losses).rate == pytest.approx(1.2e-3)


def test_diverged_points_are_not_fitted_but_bound_the_grid():
    losses = [*parabola(GRID[:4], 1.3e-3), math.inf]
    optimum = learning_rate_optimum(GRID, losses)
    assert optimum.rate == pytest.approx(1.3e-3)
    assert (optimum.best, optimum.is_inside) == (1e-3, True)
    edge = learning_rate_optimum(GRID[:3], parabola(GRID[:3], 1.2e-3))
    assert (edge.best, edge.is_inside) == (1e-3, False)


@pytest.mark.parametrize(
    ("losses", "inside"),
    [
        ([3.0, 1.0, 2.0], True),
        ([1.0, 2.0, 3.0], False),
        ([3.0, 2.0, 1.0], False),
        ([3.0, 1.0, math.inf], True),
        ([math.nan, 1.0, math.inf], True),
        ([3.0, 1.0, 1.0], False),
        ([math.inf] * 3, False),
        ([2.0, 1.0], False),
    ],
)
def test_the_best_is_inside_where_both_sides_are_worse(losses, inside):
    rates = GRID[: len(losses)]
    assert learning_rate_optimum(rates, losses).is_inside is inside
    assert learning_rate_optimum(rates[::-1], losses[::-1]).is_inside is inside


@pytest.mark.parametrize(
    "losses",
    [[2.0, 1.0, math.inf], [math.inf] * 3, [1.0, 1.0, 1.0], [1.0, 2.0, 2.5], [1.0, 1.5, 2.1]],
    ids=["two points", "none", "flat", "concave", "vertex outside"],
)
def test_there_is_no_vertex_unless_it_lies_among_three_rates(losses):
    optimum = learning_rate_optimum(GRID[:3], losses, sigma=0.01)
    assert optimum.rate is None and optimum.interval is None


def test_the_interval_is_that_of_fieller():
    """Three points at x = -1, 0, 1: b = 0.1, a = 1, Var b = σ²/2, Var a = 3σ²/2, no covariance."""
    rates = [math.exp(x) for x in (-1, 0, 1)]
    losses = [0.9, 0.0, 1.1]
    optimum = learning_rate_optimum(rates, losses, sigma=0.1)
    assert optimum.rate == pytest.approx(math.exp(-0.05))
    reach = (1.959964 * 0.1) ** 2
    for end in optimum.interval:
        x = math.log(end)
        assert (0.1 + 2 * x) ** 2 == pytest.approx(reach * (0.5 + 4 * 1.5 * x**2), rel=1e-5)
    assert optimum.interval[0] < optimum.rate < optimum.interval[1]


def test_noise_that_could_hide_the_curvature_leaves_no_interval():
    optimum = learning_rate_optimum(GRID, parabola(GRID, 1.2e-3), sigma=0.2)
    assert optimum.rate == pytest.approx(1.2e-3)
    assert optimum.interval is None
    assert learning_rate_optimum(GRID, parabola(GRID, 1.2e-3)).interval is None


def test_an_estimated_sigma_widens_the_interval():
    known, estimated = (
        learning_rate_optimum(GRID, parabola(GRID, 1.2e-3), sigma=0.005, degrees=degrees).interval
        for degrees in (math.inf, 4)
    )
    assert estimated[0] < known[0] < known[1] < estimated[1]


def test_the_plateau_ends_where_a_neighbour_is_more_than_sigma_worse():
    losses = [1.004, 1.2, 1.003, 1.0, 1.005, 1.006, 1.001]  # the rates far away do not join
    optimum = learning_rate_optimum(REFINED, losses, sigma=0.005)
    assert optimum.plateau == (7.07e-4, 1.414e-3)
    assert learning_rate_optimum(REFINED, losses, sigma=1.0).plateau == (2.5e-4, 4e-3)
    assert learning_rate_optimum(REFINED, losses, sigma=0.001).plateau == (1e-3, 1e-3)
    assert learning_rate_optimum(REFINED, losses).plateau is None


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("degrees", [math.inf, 4])
@pytest.mark.parametrize("rates", [GRID, REFINED])
def test_intervals_hold_the_best_rate_in_95_percent(rates, degrees, count):
    rng, sigma, hits, bounded = np.random.default_rng(4), 0.005, 0, 0
    for _ in range(count):
        best = 1e-3 * 2 ** rng.uniform(-0.5, 0.5)
        losses = parabola(rates, best) + rng.normal(0, sigma, size=len(rates))
        scale = math.sqrt(rng.chisquare(degrees) / degrees) if degrees < math.inf else 1.0
        optimum = learning_rate_optimum(rates, losses.tolist(), sigma * scale, degrees)
        if optimum.interval:
            bounded += 1
            hits += optimum.interval[0] <= best <= optimum.interval[1]
    print(
        f"\nbest rate: {len(rates)} rates, df {degrees}: {bounded / count:.3f} {hits / bounded:.4f}"
    )
    assert bounded / count > 0.9
    assert hits / bounded == pytest.approx(0.95, abs=3 * math.sqrt(0.05 * 0.95 / count) + 0.01)
