"""Several budgets together, on trainings whose losses are known."""

import math

import numpy as np
import pytest

from sweep.analysis.budget_laws import _loss_between
from sweep.analysis.budgets import find_best_batch_size
from sweep.decision.decision import decide
from tests.analysis.noisy_quadratic import best_quadratic_loss
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
def test_the_best_batch_size_lies_between_those_tried_and_has_a_range(tokens, within):
    centre = round(math.log2(best_at(tokens)))
    sizes = [2**exponent for exponent in range(centre - 2, centre + 3)]
    best, least = best_of(sizes, loss_at(tokens, np.array(sizes, float)))
    low, high = best.interval
    assert low < best_at(tokens) < high
    assert best.value == pytest.approx(best_at(tokens), rel=0.15)
    assert best.range_within_tolerance == pytest.approx(within, rel=0.2)
    assert best.is_range_open == (False, False) and best.edge == ""
    assert least == pytest.approx(loss_at(tokens, best_at(tokens)), abs=0.003)


def test_a_best_batch_size_at_an_edge_is_a_bound():
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


def test_noise_leaves_the_best_batch_size_unbounded():
    best, _ = best_of(SIZES, loss_at(1e4, np.array(SIZES, float)), noise=1.0)
    assert best.interval == (None, None)


@pytest.mark.parametrize(
    ("sequences", "losses"),
    [
        (2**14, [0.133918, 0.135595, 0.144192, 0.224052, 0.576949, 1.156435]),
        (2**20, [0.005011, 0.005015, 0.005028, 0.005081, 0.005348, 0.009249]),
    ],
)
def test_the_losses_of_the_quadratic_are_those_of_the_table(sequences, losses):
    found = [best_quadratic_loss(sequences, size) for size in (1, 4, 16, 64, 256, 1024)]
    assert found == pytest.approx(losses, abs=2e-6)


@pytest.mark.parametrize("position", [-1.2, -0.1, 0.4, 1.3])
def test_losses_between_budgets_are_those_of_a_power_of_the_tokens(position):
    at = np.array([-1.2, 0.1, 1.4])

    def power(log_tokens):
        return 2.0 + 0.7 * np.exp(-0.6 * log_tokens)

    assert _loss_between(at, power(at), position) == pytest.approx(power(position), rel=1e-6)
    rising = np.array([2.0, 2.1, 2.0])
    assert _loss_between(at, rising, position) == pytest.approx(np.interp(position, at, rising))
    sudden = np.array([9.0, 2.0, 2.0 - 1e-12])
    assert 1.999 < _loss_between(at, sudden, position) <= 9.0
