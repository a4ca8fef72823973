"""Intervals of gaps to the best: by hand, against t quantiles, and by simulation."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from experiments.studies.answer.error_rates import (
    EDGE,
    EQUAL,
    Case,
    cases,
    random_cases,
    simulate,
)
from sweep.analysis.results import load_sweep
from sweep.decision.decision import ALPHA, LOOKS, critical_values, decide
from sweep.decision.rates import RatePoints

RATES = np.log([1e-3] * 3)
# Seed effects cancel: batch size 2 is worse by 0.1, 3 by 1.
LOSSES = np.array([[1.0, 2.0, 3.0], [1.1, 2.08, 3.12], [2.02, 2.99, 3.99]])


def of_two(differences):
    """Losses of two batch sizes with given differences over seeds."""
    return np.array([np.zeros(len(differences)), differences])


def test_the_interval_of_two_batch_sizes_is_the_paired_t_interval():
    differences = np.array([0.1, 0.3, 0.2, 0.25])
    made = decide(of_two(differences), None, RATES[:2])
    half = student.ppf(1 - ALPHA / 2, 3) * differences.std(ddof=1) / 2
    assert made.difference[1, 0] == pytest.approx(differences.mean())
    assert made.half_width[1, 0] == pytest.approx(half, rel=0.02)
    assert made.gap_low[1] == pytest.approx(differences.mean() - made.half_width[1, 0])
    assert made.gap_high[0] == pytest.approx(-differences.mean() + made.half_width[1, 0])


def test_gaps_are_to_the_best_of_the_others():
    made = decide(LOSSES, None, RATES)
    assert made.difference[1, 0] == pytest.approx(0.1) and made.mean[2] == pytest.approx(3.0)
    assert made.gap_low[2] == pytest.approx(
        max(1.0 - made.half_width[2, 0], 0.9 - made.half_width[2, 1])
    )
    assert made.gap_high[0] == pytest.approx(
        max(-0.1 + made.half_width[0, 1], -1.0 + made.half_width[0, 2])
    )
    assert list(made.may_be_best) == [True, False, False] or made.gap_low[1] <= 0
    assert not made.is_within(0.01)[2] and made.is_outside(0.01)[2]


def test_a_part_of_a_decision_keeps_the_intervals_of_the_whole():
    points = RatePoints(
        log_rates=np.tile(np.log([0.5, 1.0, 2.0, np.nan, np.nan]), (3, 1)),
        losses=np.tile([1.2, 1.0, 1.2, np.nan, np.nan], (3, 1)),
        ends=np.tile(np.log([0.5, 2.0]), (3, 1)),
        seeds=np.ones(3),
        spread=np.zeros(3),
    )
    for tuned in (None, points):
        whole = decide(LOSSES, tuned, np.log([1.1] * 3))
        part = whole.of(slice(1, 3))
        for end, own in zip(whole.differences, part.differences, strict=True):
            assert np.array_equal(own, end[1:, 1:])
        assert part.gap_low[1] == whole.differences[0][2, 1]
        assert part.gap_high[0] == whole.differences[1][1, 2]
        assert (part.gap_high <= whole.gap_high[1:]).all()
        assert np.array_equal(part.best_estimate, whole.best_estimate[1:])


def test_equal_cells_of_two_optimizers_are_rarely_told_apart():
    losses = np.random.default_rng(1).normal(size=(2000, 6, 3))
    made = decide(losses, None, np.zeros((2000, 6)))
    low, _ = made.differences
    is_wrong = ((low > 0) & ~np.eye(6, dtype=bool)).any((-2, -1))
    assert is_wrong.mean() < ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 2000)


def test_one_noisy_batch_size_does_not_hide_a_difference_of_two_quiet_ones():
    rng = np.random.default_rng(0)
    losses = rng.normal(size=(5, 8)) * np.array([1, 1, 1, 1, 30])[:, None]
    losses[1] += 6
    made = decide(losses, None, np.zeros(5))
    assert made.difference[1, 0] - made.half_width[1, 0] > 0
    quiet = decide(losses[:4], None, np.zeros(4))
    assert made.half_width[1, 0] < 1.3 * quiet.half_width[1, 0]


def test_missing_seeds_are_left_out_of_pairs_only():
    losses = np.array([[1.0, 2.0, 3.0, 4.0], [1.1, 2.1, 3.2, math.nan]])
    made = decide(losses, None, RATES[:2])
    assert made.difference[1, 0] == pytest.approx(np.mean([0.1, 0.1, 0.2]))
    assert made.mean == pytest.approx([2.5, 6.4 / 3])


def test_a_diverged_batch_size_is_not_compared_and_the_others_are():
    losses = np.vstack([LOSSES, [1.0, math.inf, 3.0]])
    made = decide(losses, None, np.zeros(4))
    assert math.isnan(made.mean[3]) and math.isnan(made.gap_low[3])
    assert np.isfinite(made.gap_high[:3]).all()


@pytest.mark.parametrize("seeds", [[1.0], [1.0, 1.0, 1.0]])
def test_without_spread_over_seeds_nothing_is_decided(seeds):
    made = decide(np.array([seeds, [2.0] * len(seeds)]), None, RATES[:2])
    assert np.isinf(made.half_width[0, 1])
    assert not (made.is_within(1.0) | made.is_outside(0.0)).any()


def test_batch_sizes_without_common_seeds_are_not_known_to_be_within():
    losses = np.full((3, 10), np.nan)
    losses[:2, :5] = [1.0, 1.1, 1.2, 1.3, 1.4], [1.01, 1.1, 1.21, 1.3, 1.41]
    losses[2, 5:] = [0.5, 0.51, 0.52, 0.5, 0.51]
    made = decide(losses, None, RATES)
    assert np.isinf(made.gap_high).all() and made.may_be_best[:2].any()
    assert not made.is_within(0.1).any()


def test_a_batch_size_of_which_a_seed_diverged_is_not_counted():
    losses = np.vstack([LOSSES, [[1.0, np.inf, 1.0]]])
    with_diverged, without = (decide(rows, None, np.zeros(len(rows))) for rows in (losses, LOSSES))
    assert np.isnan(with_diverged.gap_low[3]) and not with_diverged.may_be_best[3]
    np.testing.assert_array_equal(with_diverged.half_width[:3, :3], without.half_width)


def test_some_batch_size_may_be_the_best_even_if_pairs_contradict_each_other():
    rng, losses = np.random.default_rng(0), np.full((3, 60), np.nan)
    for first, (i, j) in enumerate([(0, 1), (1, 2), (2, 0)]):  # i is better than j by 1
        own = slice(20 * first, 20 * first + 20)
        losses[[i, j], own] = rng.normal([[0], [1]], 0.1, (2, 20))
    made = decide(losses, None, RATES)
    assert (made.gap_low > 0).all() and made.may_be_best.sum() == 1


def test_unequal_numbers_of_seeds_have_the_critical_values_of_their_numbers():
    losses = np.random.default_rng(3).normal(size=(5, 8))
    losses[4, 5:] = np.nan
    made = decide(losses, None, np.zeros(5))
    complete = decide(losses[:, :5], None, np.zeros(5))
    of_eight = decide(losses[:4], None, np.zeros(4))
    for half_width, other in (
        (made.half_width[0, 4], complete.half_width[0, 4]),
        (made.half_width[0, 1], of_eight.half_width[0, 1]),
    ):
        assert half_width == pytest.approx(other, rel=0.25)

    with_looks = decide(losses, None, np.zeros(5), LOOKS)
    finite = np.isfinite(made.half_width)
    assert (with_looks.half_width[finite] > 1.1 * made.half_width[finite]).all()


def test_the_seeds_of_others_hardly_widen_the_pair_of_a_published_sweep():
    """The half-width is at most 1.15 times that of the pair's own variance."""
    decision = load_sweep("results/published/tinystories-tuned").leading.decision
    finals = pd.read_csv("results/published/tinystories-tuned/trials.csv")
    finals = finals[(finals["stage"] == "report") & (finals["policy"] == "tuned")]
    losses = finals.pivot(index="seed", columns="batch_size", values="final_valid_loss")
    pair = (losses[2] - losses[1]).dropna()
    critical = critical_values(len(losses.columns), (*LOOKS,))[len(pair)]
    own = critical * pair.std() / math.sqrt(len(pair))
    assert len(pair) == 20 and own <= decision.half_width[1, 0] <= 1.15 * own


def test_few_seeds_of_others_hardly_widen_a_pair_with_many():
    rng = np.random.default_rng(4)
    losses = rng.normal(size=(5, 20)) * np.array([1, 1, 3, 3, 3])[:, None]
    losses[2:, 3:] = np.nan
    made = decide(losses, None, np.zeros(5))
    pair = losses[1] - losses[0]
    own = critical_values(5, (20,))[20] * pair.std(ddof=1) / math.sqrt(20)
    assert own <= made.half_width[1, 0] <= 1.3 * own


def test_errors_of_seeds_and_of_clear_rates_are_combined_by_their_squares():
    logs = np.log([2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3])
    points = RatePoints(
        log_rates=np.tile(logs, (2, 1)),
        losses=np.tile(1 + 0.1 * (logs - logs[2]) ** 2, (2, 1)),
        ends=np.tile(logs[[0, -1]], (2, 1)),
        seeds=np.ones(2),
        spread=np.zeros(2),
    )
    differences = np.array([0.19, 0.2, 0.21, 0.2])
    losses = of_two(differences) + np.array([0.0, 0.01, -0.01, 0.003])
    made = decide(losses, points, RATES[:2])
    assert made.rates is not None and made.rates.is_clear.all()
    below = made.rates.regret - made.rates.regret_low
    above = made.rates.regret_high - made.rates.regret
    estimate = made.difference[1, 0] - made.rates.regret[1] + made.rates.regret[0]
    error = math.hypot(made.half_width[1, 0], above[1], below[0])
    assert made.gap_low[1] == pytest.approx(estimate - error)

    unclear = RatePoints(
        **{**vars(points), "losses": points.losses + np.array([0, 0.3, 0, 0.3, 0])}
    )
    made = decide(losses, unclear, RATES[:2])
    assert made.rates is not None and not made.rates.is_clear.any()
    below = made.rates.regret - made.rates.regret_low
    above = made.rates.regret_high - made.rates.regret
    estimate = made.difference[1, 0] - made.rates.regret[1] + made.rates.regret[0]
    error = made.half_width[1, 0] + above[1] + below[0]
    assert made.gap_low[1] == pytest.approx(estimate - error)


def test_the_regret_of_the_rates_widens_and_shifts_the_gaps():
    logs = np.log([5e-4, 1e-3, 2e-3])
    points = RatePoints(
        log_rates=np.tile(logs, (2, 1)),
        losses=np.array([[1.1, 1.0, 1.1], [1.1, 1.0, 1.1]]),
        ends=np.tile(logs[[0, 2]], (2, 1)),
        seeds=np.ones(2),
        spread=np.zeros(2),
    )
    losses = of_two(np.array([0.19, 0.2, 0.21]))
    known = decide(losses, None, RATES[:2])
    made = decide(losses, points, RATES[:2])
    assert made.rates is not None
    widening = made.rates.regret_high.sum()
    assert made.gap_low[1] == pytest.approx(known.gap_low[1] - widening, abs=widening)
    off = decide(losses, points, np.log([1e-3, 2e-3]))
    assert off.rates is not None and off.rates.regret[1] == pytest.approx(0.1, abs=0.01)
    assert off.best_estimate[1] == pytest.approx(0.2 - 0.1, abs=0.01)


def test_two_batch_sizes_have_the_critical_values_of_the_paired_t_test():
    for seeds in LOOKS:
        exact = student.ppf(1 - ALPHA / 2, seeds - 1)
        assert critical_values(2, (seeds,))[seeds] == pytest.approx(exact, rel=0.005)


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_critical_values_fall_with_seeds_and_rise_with_looks(k):
    values = critical_values(k, LOOKS)
    assert list(values) == list(LOOKS)
    assert sorted(values.values(), reverse=True) == list(values.values())
    single = critical_values(k, (5,))[5]
    assert single < values[5] < 2 * single
    # A t quantile bounds it from below, Bonferroni's for all pairs and looks from above.
    assert single > student.ppf(1 - ALPHA / 2, 4) * 0.97
    pairs = k * (k - 1) / 2
    assert values[5] < student.ppf(1 - ALPHA / 2 / pairs / len(LOOKS), 4) * 1.03


SIMULATED = {
    "steep above the best rate and quiet": Case(20, curvature=0.8, ratio=2.5, sigma=0.002),
    "looks": Case(0),
    "three batch sizes": Case(5, EQUAL[:3]),
    "a noisy batch size": Case(5, noisy=10.0),
    "others at the tolerance": Case(0, best=EDGE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_wrong_answers_are_rare(name):
    """At most 5 % of sweeps, with a margin of 3 standard errors for 2,000 sweeps."""
    assert SIMULATED[name] in [case for _, case in cases()]  # of docs/log/2026-11-error-rates.md
    result = simulate(SIMULATED[name], 2000)
    most = ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 2000)
    assert result.not_covered <= most and result.wrong <= most


@pytest.mark.slow
def test_wrong_answers_are_rare_in_cases_drawn_at_random():
    """At most 5 % of sweeps in each of 200 cases, up to the error of 200 sweeps."""
    results = [simulate(case, 200, seed=number) for number, case in enumerate(random_cases(200, 0))]
    not_covered = np.array([result.not_covered for result in results])
    assert not_covered.mean() <= ALPHA / 2
    assert not_covered.max() <= ALPHA + 4 * math.sqrt(ALPHA * (1 - ALPHA) / 200)


@pytest.mark.slow
def test_a_missing_loss_hardly_costs_a_verdict():
    complete = simulate(Case(5, sigma=0.002), 1000)
    one_missing = simulate(Case(5, sigma=0.002, missing=1), 1000)
    assert complete.within > 0.9 and one_missing.within > 0.75


@pytest.mark.slow
def test_five_equal_batch_sizes_are_often_decided_with_20_seeds():
    assert simulate(Case(20), 1000).decided >= 0.4


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.003, 0.006])
def test_seeds_with_their_own_best_rates_rarely_make_an_answer_wrong(sigma):
    most = ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 2000)
    assert simulate(Case(20, sigma=sigma, shift=0.05), 2000).wrong <= most


@pytest.mark.slow
def test_a_difference_of_four_sigma_is_usually_seen_beside_a_noisy_batch_size():
    assert simulate(Case(5, (0.0, 0.024, 0.0, 0.0, 0.0), noisy=10.0), 1000).power >= 0.6
