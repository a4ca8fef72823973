"""Lines through peaks."""

import pytest

from sweep.memory.line import fit_line


def test_a_line_is_found_exactly():
    line = fit_line({size: 100.0 + 7.0 * size for size in (1, 4, 9)})
    assert line.fixed_bytes == pytest.approx(100) and line.bytes_per_sequence == pytest.approx(7)
    assert line.r_squared == pytest.approx(1) and line.largest_residual_bytes < 1e-9
    assert line.at(20) == pytest.approx(240)
    assert [line.largest(limit) for limit in (99, 107.5, 113.5, 240.5)] == [0, 1, 1, 20]


def test_what_is_no_line_has_residuals():
    line = fit_line({1: 10.0, 2: 40.0, 3: 90.0})
    assert line.largest_residual_bytes > 5 and 0.9 < line.r_squared < 1


def test_one_point_is_no_line():
    assert fit_line({4: 100.0}) is None


def test_memory_that_does_not_grow_always_fits_or_never():
    line = fit_line({1: 50.0, 2: 50.0})
    assert line.largest(49) == 0 and line.largest(51) > 10**9
