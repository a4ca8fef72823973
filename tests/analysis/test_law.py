"""The law of the best batch size, on trainings whose losses are known."""

import math

import numpy as np
import pytest

from sweep.analysis.law import Optimum, fit_law
from sweep.analysis.recommend import WIDEST_EXPONENT
from sweep.decision.budgets import batch_size_points
from sweep.decision.curves import Points, possible_curves

# L = E + A·(D/B)^−α + C·B^−γ, D in sequences
A, ALPHA, C, GAMMA, LEAST = 8.0, 0.45, 0.6, 0.35, 2.0
EXPONENT = ALPHA / (ALPHA + GAMMA)


def loss_at(tokens, sizes):
    return LEAST + A * (tokens / sizes) ** -ALPHA + C * sizes**-GAMMA


def best_at(tokens):
    scale = (GAMMA * C / (ALPHA * A)) ** (1 / (ALPHA + GAMMA))
    return scale * tokens**EXPONENT


def optima_on_a_line(exponent, budgets, noise=0.0, scale=2.0, of_model=0.0, models=(None,)):
    rng = np.random.default_rng(1)
    optima = []
    for model in models:
        for tokens in budgets:
            log_size = math.log(scale) + exponent * math.log(tokens) + noise * rng.normal()
            if model is not None:
                log_size += of_model * math.log(model)
            size = math.exp(log_size)
            optima.append(Optimum(tokens, size, size / 1.5, size * 1.5, model))
    return optima


@pytest.mark.parametrize(
    ("tokens", "best"), [(1e4, 5.0980), (1e5, 18.6164), (1e6, 67.9823), (1e7, 248.2539)]
)
def test_the_synthetic_training_is_that_of_the_table(tokens, best):
    assert best_at(tokens) == pytest.approx(best, rel=1e-4)


def test_points_on_a_line_give_its_exponent_and_extrapolate_on_it():
    law = fit_law(optima_on_a_line(0.5, [1e4, 4e4, 16e4, 64e4]))
    assert law.exponent.value == pytest.approx(0.5)
    assert law.exponent.low == pytest.approx(0.5) and law.exponent.high == pytest.approx(0.5)
    assert law.exponent_of_parameters is None
    assert law.at(1e8).value == pytest.approx(2e4)


def test_a_term_in_the_model_size_needs_three_sizes():
    budgets = [1e4, 4e4, 16e4]
    two = fit_law(optima_on_a_line(0.5, budgets, of_model=-0.25, models=(1e6, 4e6)))
    assert two.exponent_of_parameters is None
    three = fit_law(optima_on_a_line(0.5, budgets, of_model=-0.25, models=(1e6, 4e6, 16e6)))
    assert three.exponent.value == pytest.approx(0.5)
    assert three.exponent_of_parameters.value == pytest.approx(-0.25)
    assert three.at(1e6, 1e6).value == pytest.approx(2 * 1e6**0.25)


def test_points_off_the_line_widen_the_intervals_also_of_the_prediction():
    budgets = [1e4, 4e4, 16e4, 64e4, 256e4]
    near, far = (fit_law(optima_on_a_line(0.5, budgets, noise)) for noise in (0.05, 0.5))
    assert near.spread < far.spread
    for law in (near, far):
        inside, beyond = law.at(16e4), law.at(1e9)
        assert inside.low < inside.value < inside.high
        assert beyond.high / beyond.low > inside.high / inside.low
    assert far.exponent.high - far.exponent.low > near.exponent.high - near.exponent.low


def study(sigma, budgets, seeds, rng):
    """Return the best batch sizes of one study: five powers of two around each predicted best."""
    optima = []
    for tokens in budgets:
        centre = round(math.log2(best_at(tokens)) + 0.2 * rng.normal())
        sizes = 2.0 ** (centre + np.arange(-2, 3))
        noise = sigma / math.sqrt(seeds) * rng.normal(size=len(sizes))
        losses = loss_at(tokens, sizes) + noise
        points = batch_size_points(sizes, losses.tolist(), seeds)
        if np.isnan(points.ends).any():
            return None
        degrees = len(sizes) * (seeds - 1)
        variance = sigma**2 * rng.chisquare(degrees) / degrees
        optima.append((tokens, points, variance))
    curves = possible_curves(
        Points(
            positions=np.stack([points.positions[0] for _, points, _ in optima]),
            losses=np.stack([points.losses[0] for _, points, _ in optima]),
            ends=np.stack([points.ends[0] for _, points, _ in optima]),
            seeds=np.full(len(optima), float(seeds)),
        ),
        np.array([variance for *_, variance in optima]),
    )
    ends = zip(curves.optimum, curves.optimum_low, curves.optimum_high, strict=True)
    return [
        Optimum(tokens, *np.exp(best_and_ends))
        for (tokens, *_), best_and_ends in zip(optima, ends, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("budgets", [3, 4, 5])
@pytest.mark.parametrize("sigma", [0.003, 0.006, 0.012])
@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_of_the_exponent_covers_the_true_one(sigma, budgets, seeds):
    rng = np.random.default_rng([budgets, seeds, round(1000 * sigma)])
    covered = []
    while len(covered) < 3000:
        optima = study(sigma, [1e4 * 4**k for k in range(budgets)], seeds, rng)
        if optima is not None:
            exponent = fit_law(optima).exponent
            covered.append(exponent.low <= EXPONENT <= exponent.high)
    assert 0.93 <= np.mean(covered) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("budgets", [3, 4, 5])
@pytest.mark.parametrize("sigma", [0.003, 0.006, 0.012])
def test_a_prediction_covers_the_best_batch_size_where_it_is_shown(sigma, budgets):
    rng = np.random.default_rng([budgets, round(1000 * sigma)])
    covered = []
    for _ in range(600):
        optima = study(sigma, [1e4 * 4**k for k in range(budgets)], 3, rng)
        law = None if optima is None else fit_law(optima)
        if law is not None and law.width <= WIDEST_EXPONENT:
            best = law.at(1e4 * 4**budgets)
            covered.append(best.low <= best_at(1e4 * 4**budgets) <= best.high)
    print(f"{budgets} budgets, σ {sigma}: {len(covered)} of 600 shown, {sum(covered)} cover")
    assert sum(covered) >= 0.97 * len(covered)


def test_three_budgets_on_a_line_by_luck_are_not_known_better_than_their_points():
    law = fit_law(optima_on_a_line(0.5, [1e4, 4e4, 16e4]))
    assert law.exponent.high - law.exponent.low < 0.01 and law.width > WIDEST_EXPONENT
    best = law.at(64e4)
    assert best.high / best.low > 10
