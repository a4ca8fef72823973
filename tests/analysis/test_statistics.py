"""Paired comparisons on cases with a known answer, by hand and by simulation.

The measured rates of docs/statistics.md: python -m pytest -m slow -s tests/analysis/
"""

import math

import numpy as np
import pytest
import scipy.stats

from sweep.analysis.statistics import (
    compare_pairs,
    holm,
    minimal_detectable_difference,
    seeds_to_detect,
)

HAND_WORKED = [[1.0, 2.0, 3.0], [2.0, 4.0, 3.0], [6.0, 6.0, 9.0]]  # residual mean square 4/4
SHARED_SD = 2.0  # of the seed effect, over the noise: pairing must remove it


def losses_of(table):
    rows = np.asarray(table, dtype=float).tolist()
    return {8 * 2**place: dict(enumerate(row)) for place, row in enumerate(rows)}


def simulated(rng, means, sds, seeds):
    noise = rng.normal(size=(len(sds), seeds)) * np.array(sds)[:, None]
    shared = rng.normal(size=seeds) * SHARED_SD * min(sds)
    return losses_of(noise + shared + np.array(means)[:, None])


def rate_of(event, count, *sweep, seed=0):
    rng = np.random.default_rng(seed)
    return sum(event(compare_pairs(simulated(rng, *sweep))) for _ in range(count)) / count


def most(rate, count):
    """The bound that a true rate passes by chance once in 740 times: three standard errors."""
    return rate + 3 * math.sqrt(rate * (1 - rate) / count)


def spread(shape, count, ratio):
    """Standard deviations with this ratio: one louder cell, one quieter, halves, or a ladder."""
    return {
        "loud": [1.0] * (count - 1) + [ratio],
        "quiet": [1.0] + [ratio] * (count - 1),
        "halves": [1.0] * (count // 2) + [ratio] * (count - count // 2),
        "ladder": np.geomspace(1, ratio, count).tolist(),
    }[shape]


def any_different(comparison):
    return any(pair.is_different for pair in comparison.pairs)


def test_the_standard_error_is_the_larger_of_the_pooled_and_the_pairs_own():
    comparison = compare_pairs(losses_of(HAND_WORKED))
    assert comparison.variance_ratio == pytest.approx(3.0)
    pairs = {pair.batch_sizes: pair for pair in comparison.pairs}
    assert list(pairs) == [(8, 16), (8, 32), (16, 32)]
    assert comparison.degrees_of_freedom == 4
    assert [pair.difference.value for pair in pairs.values()] == [1.0, 5.0, 4.0]
    pooled = math.sqrt(2 / 3)
    assert pairs[8, 16].standard_error == pytest.approx(pooled)  # own: 1/√3
    assert pairs[8, 32].standard_error == pytest.approx(pooled)
    assert pairs[16, 32].standard_error == pytest.approx(2 / math.sqrt(3))  # differences 4, 2, 6
    ends = [5 - 2.7764451 * pooled, 5 + 2.7764451 * pooled]
    assert pairs[8, 32].difference[1:] == pytest.approx(ends)
    # Squares of 4 over the quantiles of chi-square with 4 degrees of freedom.
    sigma = [1.0, math.sqrt(4 / 11.143287), math.sqrt(4 / 0.48441856)]
    assert comparison.sigma == pytest.approx(sigma)


@pytest.mark.parametrize("seeds", [2, 3, 5, 30])
def test_two_batch_sizes_give_the_paired_t_test_of_scipy(seeds):
    table = np.random.default_rng(seeds).normal(size=(2, seeds))
    (pair,) = compare_pairs(losses_of(table)).pairs
    known = scipy.stats.ttest_rel(table[1], table[0])
    interval = known.confidence_interval()
    assert pair.p_different == pytest.approx(known.pvalue, rel=1e-9)
    assert pair.p_different_holm == pair.p_different
    assert pair.difference[1:] == pytest.approx((interval.low, interval.high))
    sides = [
        scipy.stats.ttest_rel(table[1] - edge, table[0], alternative=side).pvalue
        for edge, side in ((-0.01, "greater"), (0.01, "less"))
    ]
    assert pair.p_equivalent == pytest.approx(max(sides), rel=1e-9)


def test_holm_multiplies_by_the_number_left_and_never_falls():
    assert holm(np.array([0.01, 0.04, 0.03])).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm(np.array([0.6, 0.001, 0.5, 0.02])).tolist() == pytest.approx([1, 0.004, 1, 0.06])


def test_p_values_are_adjusted_over_all_pairs():
    pairs = compare_pairs(losses_of(HAND_WORKED)).pairs
    for name in ("p_different", "p_equivalent"):
        raw = np.array([getattr(pair, name) for pair in pairs])
        adjusted = [getattr(pair, f"{name}_holm") for pair in pairs]
        assert adjusted == pytest.approx(holm(raw).tolist())
        assert len(set(raw)) == 3


def test_seeds_that_a_batch_size_lacks_are_left_out_and_named():
    losses = losses_of(HAND_WORKED)
    losses[8][7], losses[32][9], losses[32][8] = 100.0, 50.0, 70.0
    comparison = compare_pairs(losses)
    assert comparison.seeds == (0, 1, 2)
    assert comparison.left_out == {8: (7,), 32: (8, 9)}
    assert comparison.pairs == compare_pairs(losses_of(HAND_WORKED)).pairs


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ({8: {0: 1.0}, 16: {0: 2.0}}, "2 seeds at all batch sizes; there are 1"),
        ({8: {0: 1.0, 1: 2.0}, 16: {2: 2.0, 3: 1.0}}, "there are 0"),
        ({}, "2 batch sizes; this sweep has 0"),
        ({8: {0: 1.0, 1: 2.0}, 16: {0: 1.0, 1: math.inf}}, "batch size 16 has a loss that is not"),
        ({8: {0: 1.0, 1: 2.0, 2: math.nan}, 16: {0: 1.0, 1: 2.0}}, "batch size 8 has a loss"),
    ],
)
def test_what_cannot_be_paired_is_not_applicable(losses, reason):
    comparison = compare_pairs(losses)
    assert reason in comparison.not_applicable
    assert comparison.pairs == ()
    assert comparison.sigma is None


def test_without_noise_a_difference_is_certain_and_none_is_none():
    (same,) = compare_pairs(losses_of([[1.0, 2.0], [1.0, 2.0]])).pairs
    (other,) = compare_pairs(losses_of([[1.0, 2.0], [1.5, 2.5]])).pairs
    assert (same.p_different, same.is_different, same.is_equivalent) == (1.0, False, True)
    assert (other.p_different, other.is_different, other.is_equivalent) == (0.0, True, False)


def test_equivalence_is_tested_separately_from_difference():
    (pair,) = compare_pairs(losses_of([[1, 1.1, 1.2], [1.0050, 1.1051, 1.2049]])).pairs
    assert (pair.is_different, pair.is_equivalent) == (True, True)
    losses = losses_of([[1.00, 1.02, 0.98], [0.99, 1.00, 1.01]])
    (pair,) = compare_pairs(losses).pairs
    assert (pair.is_different, pair.is_equivalent) == (False, False)
    assert compare_pairs(losses, margin=0.2).pairs[0].is_equivalent


# ---- by simulation; the slow cases, with -s, print the numbers of docs/statistics.md -----------

SLOW = pytest.mark.slow
NULL_CASES = [("loud", 1.0, 3), ("loud", 1.0, 6), ("loud", 2.0, 3), ("ladder", 2.0, 6)]
SHAPES = [
    *[("loud", 1.0), ("loud", 2.0), ("quiet", 2.0), ("halves", 2.0), ("ladder", 2.0)],
    *[("loud", 3.0), ("ladder", 3.0)],
]


def any_equivalent_to_first(comparison):
    return any(pair.is_equivalent for pair in comparison.pairs if pair.batch_sizes[0] == 8)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize(
    ("shape", "ratio", "batch_sizes", "count"),
    [(*case, 1000) for case in NULL_CASES]
    + [pytest.param(*shape, size, 20_000, marks=SLOW) for shape in SHAPES for size in (3, 6)],
)
def test_null_sweeps_show_a_difference_in_five_percent_at_most(
    shape, ratio, batch_sizes, count, seeds
):
    sds = spread(shape, batch_sizes, ratio)
    rate = rate_of(any_different, count, [0.0] * batch_sizes, sds, seeds, seed=7)
    print(f"\nnull {shape} {ratio:g}: k={batch_sizes} n={seeds} {rate:.4f}")
    assert rate <= most(0.05 if ratio <= 2 else 0.06, count)


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=SLOW)])
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("sds", [[0.002] * 2, [0.002] * 3, [0.002] * 6, [0.002, 0.002, 0.004]])
def test_a_difference_as_large_as_the_margin_passes_as_none_in_five_percent_at_most(
    sds, seeds, count
):
    means = [0.0, *[0.01] * (len(sds) - 1)]
    rate = rate_of(any_equivalent_to_first, count, means, sds, seeds, seed=7)
    print(f"\nequivalence at the margin: sds {sds} n={seeds} {rate:.4f}")
    assert rate <= most(0.05, count)
    assert rate_of(any_equivalent_to_first, 300, [0.0] * len(sds), sds, seeds) > 0.3  # has power


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize(("batch_sizes", "measured"), [(3, 0.065), (6, 0.09)])
def test_one_null_pair_among_clear_differences(batch_sizes, measured, seeds):
    """Holm reaches the last pair with α itself; with a loud cell in it, its error is too small."""
    count, sds = 10_000, spread("loud", batch_sizes, 2.0)
    means = [*(100.0 * place for place in range(1, batch_sizes)), 100.0]

    def first_and_last_differ(comparison):
        return comparison.pairs[len(comparison.batch_sizes) - 2].is_different

    rate = rate_of(first_and_last_differ, count, means, sds, seeds, seed=7)
    print(f"\none null pair, loud 2: k={batch_sizes} n={seeds} {rate:.4f}")
    assert rate <= most(measured, count)


@pytest.mark.parametrize(
    ("batch_sizes", "seeds", "count"),
    [(2, 3, 800), (3, 3, 800), (6, 5, 800)]
    + [pytest.param(size, seeds, 20_000, marks=SLOW) for size in (2, 3, 6) for seeds in (3, 5)],
)
def test_intervals_hold_the_truth_in_95_percent(batch_sizes, seeds, count):
    rng, hits, sd_hits = np.random.default_rng(1), 0.0, 0
    means = np.arange(batch_sizes) * 0.7
    truth = [means[j] - means[i] for i in range(batch_sizes) for j in range(i + 1, batch_sizes)]
    for _ in range(count):
        comparison = compare_pairs(simulated(rng, means, [1.0] * batch_sizes, seeds))
        differences = [pair.difference for pair in comparison.pairs]
        hits += np.mean([d.low <= t <= d.high for d, t in zip(differences, truth, strict=True)])
        sd_hits += comparison.sigma.low <= 1 <= comparison.sigma.high
    print(f"\ncoverage: k={batch_sizes} n={seeds} {hits / count:.4f}, σ {sd_hits / count:.4f}")
    slack = 3 * math.sqrt(0.05 * 0.95 / count)
    assert 0.93 - slack <= hits / count <= 0.97 + slack
    assert sd_hits / count == pytest.approx(0.95, abs=slack)


@pytest.mark.parametrize(
    ("batch_sizes", "pairs", "seeds", "count"),
    [(2, 1, 2, 2000), (2, 1, 5, 2000), (6, 1, 3, 2000), (6, 15, 3, 2000)]
    + [
        pytest.param(*case, seeds, 20_000, marks=SLOW)
        for case in [(2, 1), (3, 1), (6, 1), (3, 3), (6, 15)]
        for seeds in (3, 5)
    ],
)
def test_the_minimal_detectable_difference_is_found_with_power_080(
    batch_sizes, pairs, seeds, count
):
    sigma, rng = 0.005, np.random.default_rng(2)
    difference = minimal_detectable_difference(sigma, seeds, batch_sizes, pairs)
    means, sds = [*[0.0] * (batch_sizes - 1), difference], [sigma] * batch_sizes
    alpha = 0.05 / pairs
    critical = scipy.stats.t.ppf(1 - alpha / 2, (batch_sizes - 1) * (seeds - 1))
    pooled = larger = adjusted = 0  # pooled error, larger error, with Holm
    for _ in range(count):
        comparison = compare_pairs(simulated(rng, means, sds, seeds))
        pair = comparison.pairs[batch_sizes - 2]
        error = comparison.sigma.value * math.sqrt(2 / seeds)
        pooled += abs(pair.difference.value) > critical * error
        larger += pair.p_different <= alpha
        adjusted += pair.is_different
    name = f"k={batch_sizes} n={seeds} over {pairs}"
    print(f"\npower: {name}: {pooled / count:.3f} {larger / count:.3f} Holm {adjusted / count:.3f}")
    assert pooled / count == pytest.approx(0.8, abs=max(0.01, 3 * math.sqrt(0.16 / count)))
    assert larger == pooled if batch_sizes == 2 else larger < pooled
    # Holm is never stricter than α over the number of pairs.
    assert adjusted >= larger if pairs > 1 else adjusted <= larger


def test_enough_seeds_are_the_least_that_detect():
    for difference in (0.02, 0.01, 0.005):
        seeds = seeds_to_detect(difference, 0.005, 6)
        enough = minimal_detectable_difference(0.005, seeds, 6)
        fewer = minimal_detectable_difference(0.005, seeds - 1, 6)
        assert enough <= difference
        assert fewer is None or fewer > difference
        assert seeds_to_detect(-difference, 0.005, 6) == seeds
        more = seeds_to_detect(difference, 0.005, 6, pairs=15)
        assert more > seeds
    assert minimal_detectable_difference(0.005, 1, 6) is None
    assert minimal_detectable_difference(0.005, 5, 1) is None
    assert seeds_to_detect(1e-6, 0.005, 6) is None
