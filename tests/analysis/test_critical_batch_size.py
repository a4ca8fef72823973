"""Steps to a target: crossings, the fitted curve and its intervals, on cases with known truth."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from sweep.analysis.critical_batch_size import fit_steps
from sweep.errors import SweepError
from tests.analysis.noisy_quadratic import best_quadratic_steps

SIZES = 64 * 2.0 ** np.arange(9)
PUBLISHED = {  # Zhang et al. 2025: steps to target at SIZES; S_min, E_min, B* with B_opt 256
    "85M": ([46000, 23000, 13282, 7000, 3840, 2528, 1917, 1600, 1600], 1293.83, 2834258, 745.32),
    "151M": ([96000, 49000, 24000, 12000, 7128, 4350, 2940, 2400, 2300], 1752.42, 5677479, 955.16),
}
QUADRATIC_STEPS = (  # the noisy quadratic model of Zhang et al. 2019, at its best rates
    *(461033, 230629, 115427, 57827, 29029, 14633, 7441, 3860, 2105, 1304, 982, 845, 776, 737),
    *(713, 698, 688),
)


def hyperbola(s_min, e_min, sizes=SIZES):
    return s_min + e_min / sizes


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_published_fits_are_reproduced_from_all_nine_rows(model):
    steps, s_min, e_min, b_star = PUBLISHED[model]
    fit = fit_steps(SIZES, steps)
    assert [round(fit.s_min.value, 2), round(fit.e_min.value)] == [s_min, e_min]
    assert fit.b_opt == 256
    assert round(fit.b_star.value, 2) == b_star
    assert fit.b_crit.value == pytest.approx(e_min / s_min, rel=1e-5)
    assert fit.b_overhead.value == pytest.approx(0.2 * e_min / s_min, rel=1e-5)


@given(
    log_s_min=st.floats(0, 12),
    log_b_crit=st.floats(math.log(SIZES[0] / 4), math.log(SIZES[-1] * 4)),
    crossed=st.integers(3, 9),
    slack=st.floats(0.01, 1),
)
def test_an_exact_hyperbola_is_recovered_with_bounds_below_it(
    log_s_min, log_b_crit, crossed, slack
):
    s_min, b_crit = math.exp(log_s_min), math.exp(log_b_crit)
    steps = hyperbola(s_min, s_min * b_crit)
    censored = np.arange(9) >= crossed
    fit = fit_steps(SIZES, np.where(censored, slack * steps, steps), censored)
    numbers = [fit.s_min.value, fit.e_min.value, fit.b_crit.value]
    assert numbers == pytest.approx([s_min, s_min * b_crit, b_crit], rel=1e-6)
    assert np.abs(fit.residuals).max() < 1e-6


def test_a_bound_above_the_curve_pulls_it_up_and_shows_as_a_residual():
    steps = hyperbola(1300, 2.8e6)
    censored = np.arange(9) == 8
    fit = fit_steps(SIZES, np.where(censored, 1.2 * steps, steps), censored)
    assert fit.s_min.value > 1350
    assert 0 < fit.residuals[0, -1] < math.log(1.2)
    assert (fit.residuals[0, :-1].min(), fit.spread) < (0, 0.1)


def test_slow_seeds_that_are_censored_do_not_bias_the_fit():
    """A cap at the true curve censors the slower half of the trials at five batch sizes."""
    rng = np.random.default_rng(0)
    curve = hyperbola(1300, 2.8e6)
    steps = curve * np.exp(0.2 * rng.standard_normal((20, 9)))
    bounds = np.where(np.arange(9) >= 4, curve, np.inf)
    censored = steps > bounds
    fit = fit_steps(SIZES, np.minimum(steps, bounds), censored)
    assert fit.s_min.value == pytest.approx(1300, rel=0.08)
    assert fit.e_min.value == pytest.approx(2.8e6, rel=0.04)
    assert fit.spread == pytest.approx(0.2, rel=0.15)


def test_local_slopes_and_residuals_are_those_of_the_data():
    steps = np.array([[800, 400, 250, 200], [800, 400, 160, 200]])
    fit = fit_steps([1, 2, 4, 8], steps)
    assert fit.slopes.tolist() == pytest.approx([-1, -1, 0])
    log_curve = np.log(hyperbola(fit.s_min.value, fit.e_min.value, np.array([1, 2, 4, 8])))
    assert fit.residuals == pytest.approx(np.log(steps) - log_curve)
    assert np.isnan(fit_steps([1, 2, 4, 8], [8, 4, 2, 1], [False, False, False, True]).slopes[-1])


def test_what_the_batch_sizes_do_not_show_is_unbounded():
    rng = np.random.default_rng(0)
    noise = np.exp(0.05 * rng.standard_normal((3, 9)))
    linear = fit_steps(SIZES, 1e9 / SIZES * noise)
    assert (linear.s_min.low, linear.b_crit.high) == (0, math.inf)
    assert linear.e_min.low < 1e9 < linear.e_min.high
    flat = fit_steps(SIZES, np.full((3, 9), 1000.0))
    assert (flat.e_min.value, flat.b_crit.value) == (0, 0)
    assert flat.s_min.value == pytest.approx(1000)


def test_one_seed_has_no_intervals_and_several_give_the_same_again():
    steps = hyperbola(1300, 2.8e6) * np.exp(np.random.default_rng(0).normal(0, 0.1, (4, 9)))
    assert math.isnan(fit_steps(SIZES, steps[0]).s_min.low)
    first, again = fit_steps(SIZES, steps), fit_steps(SIZES, steps)
    assert first.b_crit == again.b_crit
    assert first.b_crit.low < first.b_crit.value < first.b_crit.high


def test_the_interval_of_an_uncensored_fit_is_the_t_interval_of_its_seeds():
    """To first order the fit is the mean of the fits of single seeds."""
    steps = hyperbola(1300, 2.8e6) * np.exp(np.random.default_rng(0).normal(0, 0.01, (5, 9)))
    logs = np.log([fit_steps(SIZES, row).b_crit.value for row in steps])
    half = 2.776 * logs.std(ddof=1) / math.sqrt(5)
    b_crit = fit_steps(SIZES, steps).b_crit
    assert math.log(b_crit.high / b_crit.value) == pytest.approx(half, rel=0.1)


@pytest.mark.parametrize("sizes", [[1, 2, 4], [1, 2]])
def test_a_fit_needs_three_batch_sizes_that_reached_the_target(sizes):
    with pytest.raises(SweepError, match="3 batch sizes"):
        fit_steps(sizes, [4 / size for size in sizes], [size == 4 for size in sizes])


def covered(simulations, seeds, sigma, shared, cap, pruned=False):
    """Count the sweeps whose intervals hold S_min, E_min and B_crit; return the censored share.

    log S has the standard deviation sigma, and `shared` for what a seed adds at all batch sizes.
    Trials end at the cap, in sequences, and if pruned at twice the best of their batch size so far.
    """
    rng = np.random.default_rng(0)
    truth = [1300, 2.8e6, 2.8e6 / 1300]
    hits, censored_share = np.zeros(3), 0.0
    for _ in range(simulations):
        noise = sigma * rng.standard_normal((seeds, 9)) + shared * rng.standard_normal((seeds, 1))
        steps = hyperbola(1300, 2.8e6) * np.exp(noise)
        bounds = np.broadcast_to(cap / SIZES, steps.shape)
        if pruned:
            bounds = np.minimum(bounds, 2 * np.minimum.accumulate(steps, axis=0))
        censored = steps > bounds
        fit = fit_steps(SIZES, np.minimum(steps, bounds), censored)
        numbers = (fit.s_min, fit.e_min, fit.b_crit)
        hits += [x.low <= true <= x.high for x, true in zip(numbers, truth, strict=True)]
        censored_share += censored.mean() / simulations
    return hits, censored_share


@pytest.mark.parametrize(
    ("shared", "cap", "expected_share"),
    [(0.0, math.inf, 0.0), (0.1, math.inf, 0.0), (0.0, 8e6, 0.28)],
    ids=["independent", "shared by a seed", "censored"],
)
def test_intervals_of_three_seeds_cover_as_often_as_they_say(shared, cap, expected_share):
    simulations = 100
    hits, censored = covered(simulations, 3, 0.1, shared, cap)
    assert censored == pytest.approx(expected_share, abs=0.01)
    assert binom.ppf(1e-3, simulations, 0.93) <= hits.min()
    assert hits.max() <= binom.ppf(1 - 1e-3, simulations, 0.97)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulations", "seeds", "sigma", "shared", "cap", "pruned"),
    [
        (2000, 3, 0.1, 0.0, math.inf, False),
        (2000, 3, 0.05, 0.05, math.inf, False),
        (2000, 3, 0.1, 0.0, 8e6, False),
        (2000, 3, 0.3, 0.0, 2e7, True),
        (500, 5, 0.1, 0.0, 8e6, False),
    ],
)
@pytest.mark.timeout(1200)
def test_intervals_cover_in_93_to_97_percent_of_simulations(
    simulations, seeds, sigma, shared, cap, pruned
):
    hits, _ = covered(simulations, seeds, sigma, shared, cap, pruned)
    assert (hits >= 0.93 * simulations).all(), hits
    assert (hits <= 0.97 * simulations).all(), hits


def test_the_quadratic_model_takes_the_published_steps_at_its_best_rates():
    best = [best_quadratic_steps(2**k)[0] for k in range(17)]
    assert tuple(best) == QUADRATIC_STEPS


def test_the_quadratic_model_has_the_known_critical_batch_size():
    sizes = 2.0 ** np.arange(17)
    whole, part = [654.6, 437165, 667.9], [681.3, 342_920, 503.3]
    for some, truth in ((slice(None), whole), (slice(8, 14), part)):
        fit = fit_steps(sizes[some], QUADRATIC_STEPS[some])
        numbers = [fit.s_min.value, fit.e_min.value, fit.b_crit.value]
        assert numbers == pytest.approx(truth, rel=1e-4)
