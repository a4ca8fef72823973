"""Decisions from one training at each of several rates, by simulated losses of known truth."""

import functools

import numpy as np
import pytest

from sweep.analysis import grids
from sweep.decision.rates import rate_points, stack_points


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    cached = functools.cache(grids._critical_value)
    monkeypatch.setattr(grids, "_critical_value", cached)


def decide(tried):
    """Decide from losses by rate, of each batch size."""
    points = stack_points([rate_points({rate: {0: y} for rate, y in of.items()}) for of in tried])
    rates = [min(of, key=of.get) for of in tried]
    losses = np.array([of[rate] for of, rate in zip(tried, rates, strict=True)])
    return grids.decide_grids(losses, points, np.log(rates))


def simulate(rng, levels, rates, ratio, deviations, curvature, steepness):
    tried = []
    for level, deviation in zip(levels, deviations, strict=True):
        places = np.arange(rates) - (rates - 1) / 2 + rng.uniform(-0.5, 0.5)
        x = places * np.log(ratio)
        curve = curvature * np.where(x > 0, steepness, 1.0) * x**2
        losses = level + curve + deviation * rng.normal(size=rates)
        tried.append(dict(zip(np.exp(x).tolist(), losses.tolist(), strict=True)))
    return decide(tried)


@pytest.mark.parametrize(
    "case",
    [
        {"rates": 5},
        {"rates": 7, "steepness": 2.5},
        {"rates": 9, "ratio": 2**0.5},
        {"rates": 7, "curvature": 0.05, "k": 3},
        {"rates": 7, "noise": 3.0},
        {"rates": 5, "k": 2},
        {"rates": 7, "gap": 0.01},
    ],
)
def test_the_gaps_of_grids_without_seeds_are_covered(case):
    """In at most 5 % of 400 simulated tables the interval of some gap does not hold the truth."""
    settings = {"k": 5, "ratio": 2.0, "curvature": 0.2, "steepness": 1.0, "noise": 1.0, "gap": 0.0}
    settings |= case
    k = settings.pop("k")
    levels = 2 + settings.pop("gap") * np.arange(k)
    deviations = 0.006 * np.r_[settings.pop("noise"), np.ones(k - 1)]
    truth = np.array([level - np.delete(levels, i).min() for i, level in enumerate(levels)])

    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(400):
        decision, _ = simulate(rng, levels, deviations=deviations, **settings)
        low, high = decision.gaps
        wrong += bool(((low > truth) | (high < truth)).any())
    assert wrong <= 0.05 * 400


def test_a_gap_far_above_the_noise_is_decided():
    rng = np.random.default_rng(1)
    decision, noise = simulate(rng, [2.0, 2.1, 2.2], 7, 2.0, [0.002] * 3, 0.2, 1.0)
    assert decision.may_be_best.tolist() == [True, False, False]
    assert 0.0005 < noise.deviation < 0.005 and noise.degrees == 3
    assert decision.mean == pytest.approx([2.0, 2.1, 2.2], abs=0.01)


def test_without_residuals_nothing_is_decided():
    rng = np.random.default_rng(1)
    decision, noise = simulate(rng, [2.0, 3.0], 3, 2.0, [0.0] * 2, 0.2, 1.0)
    assert decision.may_be_best.all() and not decision.is_within(1e9).any()
    assert np.isnan(noise.deviation) and noise.degrees == 0


def test_a_batch_size_whose_best_rate_is_at_an_edge_is_undecided():
    bowl = {rate: 2 + 0.2 * np.log(rate / 1e-3) ** 2 for rate in 1e-3 * 2.0 ** np.arange(-3, 4)}
    noisy = {rate: y + 0.001 * (-1) ** i for i, (rate, y) in enumerate(bowl.items())}
    falling = {rate: y + 1 for rate, y in noisy.items() if rate <= 1e-3}
    decision, _ = decide([noisy, falling])
    assert decision.may_be_best.all() and not decision.is_within(0.01).any()


def test_a_batch_size_that_only_diverged_is_not_compared():
    rng = np.random.default_rng(1)
    decision, _ = simulate(rng, [2.0, 2.1, np.inf], 7, 2.0, [0.002] * 3, 0.2, 1.0)
    assert np.isfinite(decision.mean).tolist() == [True, True, False]
    assert decision.may_be_best.tolist() == [True, False, False]
