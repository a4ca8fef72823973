"""What smaller budgets predict for the next one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.decision.budgets import (
    TunedArm,
    estimate_best_batch_size,
    predict_batch_sizes,
    predict_rate,
)


def flat(_):
    return 1e-3


def test_one_budget_keeps_its_rates_and_shifts_its_batch_sizes_as_is_usual():
    tuned = [TunedArm(1_000_000, size, 2e-3) for size in (4, 16, 64)]
    assert predict_rate(tuned, 4_000_000, 16, flat) == pytest.approx(2e-3)
    assert predict_batch_sizes({1_000_000: 16.0}, 4_000_000) == (8, 16, 32, 64, 128)
    assert predict_batch_sizes({1_000_000: 16.0}, 1_000_000 // 4) == (2, 4, 8, 16, 32)


@given(of_tokens=st.floats(-0.5, 0.5), of_size=st.floats(-0.3, 0.7))
def test_several_budgets_predict_on_their_plane(of_tokens, of_size):
    tuned = [
        TunedArm(tokens, size, 1e-3 * (tokens / 1e6) ** of_tokens * size**of_size)
        for tokens in (1_000_000, 4_000_000, 16_000_000)
        for size in (4, 16, 64)
    ]
    predicted = predict_rate(tuned, 64_000_000, 16, flat)
    assert predicted == pytest.approx(1e-3 * 64**of_tokens * 16**of_size, rel=0.25)


def test_batch_sizes_follow_those_of_the_budgets_and_are_at_least_one():
    assert predict_batch_sizes({1000: 4.0, 16_000: 64.0}, 64_000)[2] >= 128
    assert predict_batch_sizes({1000: 1.0}, 1000) == (1, 2, 4, 8, 16)


def test_the_best_batch_size_is_the_lowest_point_or_the_edge():
    losses = {2**k: (k - 3.4) ** 2 for k in range(1, 7)}
    assert estimate_best_batch_size(losses) == pytest.approx(2**3.4)
    assert estimate_best_batch_size({4: 1.0, 8: 2.0, 16: 3.0}) == 4
    assert estimate_best_batch_size({4: 3.0, 8: 2.0, 16: 1.0}) == 16
    assert math.isfinite(estimate_best_batch_size({4: 1.0, 8: 2.0}))
