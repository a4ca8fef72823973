"""The search for the largest size that fits: right on any monotone truth, quick on a line."""

from hypothesis import given
from hypothesis import strategies as st

from sweep.memory.search import GUIDED_POINTS, Look, find_largest


def search(peak, limit, unit=1, cap=None):
    asked = []

    def look(size):
        assert size % unit == 0 and size not in asked
        asked.append(size)
        return Look(peak(size) <= limit, round(peak(size)))

    return find_largest(look, limit, unit, cap), asked


def assert_proved(found, asked, peak, limit, unit, cap):
    if found.largest:
        assert found.largest in asked and peak(found.largest) <= limit
    if not found.is_capped:
        assert found.largest + unit in asked and peak(found.largest + unit) > limit
    else:
        assert found.largest + unit > cap


@given(
    fixed=st.integers(0, 10**6),
    slope=st.integers(100, 10**4),
    limit=st.integers(1, 3 * 10**6),
    unit=st.sampled_from([1, 2, 8]),
)
def test_on_a_line_at_most_five_points_are_looked_at(fixed, slope, limit, unit):
    """Up to 30,000 units; beyond, one more for each factor of 64."""

    def peak(size):
        return fixed + slope * size

    found, asked = search(peak, limit, unit)
    assert_proved(found, asked, peak, limit, unit, None)
    assert len(asked) <= GUIDED_POINTS and not found.is_bisected


@given(
    steps=st.lists(st.integers(0, 1000), min_size=1, max_size=300),
    limit=st.integers(0, 50_000),
    cap=st.one_of(st.none(), st.integers(1, 200)),
)
def test_on_any_memory_that_grows_the_maximum_is_found(steps, limit, cap):
    heights = [sum(steps[: i + 1]) for i in range(len(steps))]

    def peak(size):
        return heights[size - 1] if size <= len(heights) else 10**6 + size

    found, asked = search(peak, limit, cap=cap)
    truth = max((n for n in range(1, (cap or 400) + 1) if peak(n) <= limit), default=0)
    assert found.largest == truth
    assert_proved(found, asked, peak, limit, 1, cap)


def test_what_is_no_line_is_bisected_and_said_so():
    found, _ = search(lambda size: size**3, 10**6)
    assert found.largest == 100 and found.is_bisected


def test_nothing_fits():
    found, asked = search(lambda size: 10, 5)
    assert found.largest == 0 and 1 in asked


@given(offset=st.integers(-40, 40), limit=st.integers(10**5, 10**6))
def test_a_line_that_is_a_little_off_costs_few_points_more(offset, limit):
    """As where an allocator's segments, which no small point shows, count against the limit."""

    def peak(size):
        return 1000 + 100 * size + (100 * offset if size > 50 else 0)

    found, asked = search(peak, limit)
    assert_proved(found, asked, peak, limit, 1, None)
    assert len(asked) <= 10


def test_small_points_that_are_not_yet_on_the_line_cost_few_points_more():
    """The optimizer's step holds the peak of small batches, activations that of larger ones."""

    def peak(size):
        return max(1000 + size, 30 * size)

    found, asked = search(peak, 30 * 36)
    assert found.largest == 36 and max(asked) <= 8 * 64
    assert len(asked) <= 16
