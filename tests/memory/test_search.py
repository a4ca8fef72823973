"""The search for the largest size: correct for any monotone memory, fast on a line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.memory.search import LINEAR_POINTS, find_largest, fit_line


def search(peak, limit, unit=1, cap=None, is_known_above=True):
    asked = []

    def measure(size):
        assert size % unit == 0 and size not in asked
        asked.append(size)
        return round(peak(size)) if peak(size) <= limit or is_known_above else None

    return find_largest(measure, limit, unit, cap), asked


def assert_proved(result, asked, peak, limit, unit, cap):
    if result.largest:
        assert result.largest in asked and peak(result.largest) <= limit
    if not result.is_capped:
        assert result.largest + unit in asked and peak(result.largest + unit) > limit
    else:
        assert result.largest + unit > cap


@given(
    fixed=st.integers(0, 10**6),
    slope=st.integers(100, 10**4),
    limit=st.integers(1, 3 * 10**6),
    unit=st.sampled_from([1, 2, 8]),
    is_known_above=st.booleans(),
)
def test_on_a_line_at_most_five_points_are_measured(fixed, slope, limit, unit, is_known_above):
    """Up to 30,000 units; beyond, one more for each factor of 64."""

    def peak(size):
        return fixed + slope * size

    result, asked = search(peak, limit, unit, is_known_above=is_known_above)
    assert_proved(result, asked, peak, limit, unit, None)
    assert len(asked) <= LINEAR_POINTS and not result.is_bisected


@given(
    steps=st.lists(st.integers(0, 1000), min_size=1, max_size=300),
    limit=st.integers(0, 50_000),
    cap=st.one_of(st.none(), st.integers(1, 200)),
    is_known_above=st.booleans(),
)
def test_on_any_memory_that_grows_the_maximum_is_found(steps, limit, cap, is_known_above):
    heights = [sum(steps[: i + 1]) for i in range(len(steps))]

    def peak(size):
        return heights[size - 1] if size <= len(heights) else 10**6 + size

    result, asked = search(peak, limit, cap=cap, is_known_above=is_known_above)
    truth = max((n for n in range(1, (cap or 400) + 1) if peak(n) <= limit), default=0)
    assert result.largest == truth
    assert_proved(result, asked, peak, limit, 1, cap)


def test_a_cap_below_the_unit_leaves_no_size_to_measure():
    assert search(lambda size: 1, 100, unit=8, cap=4)[1] == []


@pytest.mark.parametrize("is_known_above", [True, False])
def test_memory_that_is_not_linear_is_bisected(is_known_above):
    result, asked = search(lambda size: size**3, 10**6, is_known_above=is_known_above)
    assert result.largest == 100 and result.is_bisected and len(asked) <= 16
    assert search(lambda size: 10, 5)[0].largest == 0


@given(offset=st.integers(-40, 40), limit=st.integers(10**5, 10**6))
def test_a_jump_on_the_line_costs_few_points_more(offset, limit):
    """For example the segments of an allocator, which small points do not show."""

    def peak(size):
        return 1000 + 100 * size + (100 * offset if size > 50 else 0)

    result, asked = search(peak, limit)
    assert_proved(result, asked, peak, limit, 1, None)
    assert len(asked) <= 10


def test_small_points_with_another_peak_cost_few_points_more():
    """The optimizer's step sets the peak of small batches, activations that of larger ones."""

    def peak(size):
        return max(1000 + size, 30 * size)

    result, asked = search(peak, 30 * 36)
    assert result.largest == 36 and max(asked) <= 8 * 64
    assert len(asked) <= 16


def test_a_line_is_fitted_exactly():
    line = fit_line({size: 100.0 + 7.0 * size for size in (1, 4, 9)})
    assert line.fixed_bytes == pytest.approx(100) and line.bytes_per_sequence == pytest.approx(7)
    assert line.r_squared == pytest.approx(1) and line.largest_residual_bytes < 1e-9
    assert [line.largest(limit) for limit in (99, 107.5, 113.5, 240.5)] == [0, 1, 1, 20]

    curved = fit_line({1: 10.0, 2: 40.0, 3: 90.0})
    assert curved.largest_residual_bytes > 5 and 0.9 < curved.r_squared < 1
    assert fit_line({4: 100.0}) is None  # one point is not a line
    flat = fit_line({1: 50.0, 2: 50.0})  # memory fits at every size or at none
    assert flat.largest(49) == 0 and flat.largest(51) > 10**9
