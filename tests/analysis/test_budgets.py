"""Several budgets together, on trainings whose losses are known."""

import math

import numpy as np
import pytest

from sweep.analysis.budgets import find_best_batch_size
from sweep.decision.decision import decide
from tests.analysis.test_law import best_at, loss_at

SIZES = [2, 4, 8, 16, 32, 64, 128]


def decision_at(losses, noise=0.002, seeds=5):
    rng = np.random.default_rng(0)
    means = np.array(losses)[:, None]
    return decide(
        means + noise * rng.normal(size=(len(losses), seeds)), None, np.zeros(len(losses))
    )


def best_of(sizes, losses, margin=0.005, noise=0.002):
    decision = decision_at(losses, noise)
    best, least, _ = find_best_batch_size(sizes, decision, [5] * len(sizes), margin)
    return best, least


@pytest.mark.parametrize(("tokens", "within"), [(1e4, (3.6798, 7.0380)), (1e5, (12.3633, 27.8785))])
def test_the_find_best_batch_size_lies_between_those_tried_and_has_a_range(tokens, within):
    centre = round(math.log2(best_at(tokens)))
    sizes = [2**exponent for exponent in range(centre - 2, centre + 3)]
    best, least = best_of(sizes, loss_at(tokens, np.array(sizes, float)))
    low, high = best.interval
    assert low < best_at(tokens) < high
    assert best.value == pytest.approx(best_at(tokens), rel=0.15)
    assert best.range_within_tolerance == pytest.approx(within, rel=0.2)
    assert best.is_range_open == (False, False) and best.edge == ""
    assert least == pytest.approx(loss_at(tokens, best_at(tokens)), abs=0.003)


def test_a_find_best_batch_size_at_an_edge_is_a_bound():
    sizes = [16, 32, 64]
    smallest, _ = best_of(sizes, [1.0, 1.01, 1.1], noise=1e-4)
    assert (smallest.value, smallest.edge) == (None, "smallest")
    assert smallest.interval == (None, 32.0)
    assert best_of(sizes, [1.0, 1.01, 1.1], noise=0.02)[0].interval == (None, 64.0)
    assert best_of(sizes, [1.0, 1.01, 1.1], noise=1.0)[0].interval == (None, None)
    assert smallest.range_within_tolerance == pytest.approx((16, 16 * math.sqrt(2)), rel=0.05)
    assert smallest.is_range_open == (True, False)
    largest, _ = best_of(sizes, [1.1, 1.01, 1.0], noise=1e-4)
    assert (largest.value, largest.edge) == (None, "largest")
    assert largest.interval == (32.0, None) and largest.is_range_open == (False, True)


def test_noise_leaves_the_find_best_batch_size_unbounded():
    best, _ = best_of(SIZES, loss_at(1e4, np.array(SIZES, float)), noise=1.0)
    assert best.interval == (None, None)
